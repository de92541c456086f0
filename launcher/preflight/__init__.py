"""Checks of a node and of its network before a run."""
