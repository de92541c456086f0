"""Offline corpus builder: it turns text files into rows of WordPiece ids, in WebDataset shards (tar files)."""
