"""The cache of shards on a node's disk: its folder, which shards stay in it, and how nodes pass shards on."""
