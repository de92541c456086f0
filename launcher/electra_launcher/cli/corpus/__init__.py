"""The commands of `electra-dist corpus`: `group.py` has their list."""
