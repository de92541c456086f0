"""Offline corpus builder: text files to WordPiece rows to WebDataset shards."""
