"""Triton kernels, one file per operation, device functions they share, and a program to compile them without a GPU."""
