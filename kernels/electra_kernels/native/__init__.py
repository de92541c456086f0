"""Holds code in C and CUDA: the CPU library (`cpu_library.c`) and the discriminator's tail (`.cu`)."""
