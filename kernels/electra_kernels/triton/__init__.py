"""Holds the Triton kernels, one file per operation, and their compilation without a GPU (`compile_without_gpu.py`)."""
