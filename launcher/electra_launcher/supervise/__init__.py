"""The supervisor of one node: it starts, watches and restarts the ranks of a run on this node."""
