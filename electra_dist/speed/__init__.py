"""Measures where the time of a training step goes on this machine, for `electra-dist speed`."""
