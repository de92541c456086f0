"""Probes of a frozen encoder on a treebank: part of speech and head of each word."""
