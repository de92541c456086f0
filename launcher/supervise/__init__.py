"""Starts, watches and restarts the ranks of one node."""
