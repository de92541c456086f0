"""Code in C for CPUs (`cpu_library.c`) and in CUDA (`discriminator_tail.cu`), and the Python files that call it."""
