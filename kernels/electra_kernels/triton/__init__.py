"""Triton kernels, one file an operation, and their compilation ahead of time."""
