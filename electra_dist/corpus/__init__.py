"""Offline: text -> WordPiece rows -> WebDataset shards."""
