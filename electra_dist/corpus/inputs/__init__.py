"""The input files of a corpus build: how they are found, what is left out, and how each format is read."""
