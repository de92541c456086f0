"""Hold the version of electra-dist, which every run records beside the versions of its libraries."""

VERSION = "0.1.0"
DEEPSPEED = "0.19.8"  # The engine reads its inner state. Up to 0.19.7 some gradients are not exchanged on a CPU.
