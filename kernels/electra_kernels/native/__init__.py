"""Holds code in C and CUDA: the host library (`host.c`) and the discriminator tail (`discriminator_tail.cu`)."""
