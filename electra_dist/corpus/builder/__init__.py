"""The stages of a corpus build: read the inputs, shuffle the documents on disk, write the shards, join the parts."""
