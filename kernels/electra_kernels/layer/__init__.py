"""Passes of a transformer layer's operations for autograd functions that cover a whole sub-layer."""
