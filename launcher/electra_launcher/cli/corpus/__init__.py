"""The commands of `electra-dist corpus`, which `cli/main.py` lists."""
