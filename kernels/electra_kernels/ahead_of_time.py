"""Run `python -m electra_kernels.ahead_of_time` to compile all Triton kernels without a GPU and list their registers.

The code is in `triton/compile_without_gpu.py`; this file only gives the command a short name.
"""

from electra_kernels.triton.compile_without_gpu import main

if __name__ == "__main__":
    main()
