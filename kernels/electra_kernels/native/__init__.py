"""C and CUDA: the host library and the discriminator tail."""
