"""Probe a frozen encoder for the part of speech and the syntactic head of each word in a treebank."""
