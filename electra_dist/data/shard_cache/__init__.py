"""What a node's cache of shards keeps, and where it lies."""
