"""Holds the Triton kernels, one file per operation, and their compilation without a GPU (`ahead_of_time.py`)."""
