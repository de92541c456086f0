"""Checks of a node and of the network between nodes, made before a run starts."""
