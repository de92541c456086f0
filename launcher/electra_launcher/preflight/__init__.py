"""Preflight: checks of a node and of the network between nodes before a run starts."""
