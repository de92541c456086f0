"""Triton kernels, one file per operation, and a program to compile them without a GPU (`compile_without_gpu.py`)."""
