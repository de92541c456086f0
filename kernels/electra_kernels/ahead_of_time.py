"""Entry point of `python -m electra_kernels.ahead_of_time`, which compiles all Triton kernels without a GPU."""

from electra_kernels.triton.compile_without_gpu import main

if __name__ == "__main__":
    main()
