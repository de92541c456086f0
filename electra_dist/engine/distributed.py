"""The process group and this rank's device."""

from __future__ import annotations

import logging
import os
import warnings
from datetime import timedelta

import deepspeed
import torch

PROCESS_GROUP_TIMEOUT = timedelta(minutes=10)


def init_distributed() -> None:
    """Join the process group that the launcher described in the environment (or make one of a single rank)."""
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", "29500" if os.environ["WORLD_SIZE"] != "1" else "0")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)  # it warns of any optimizer but its own
    # DeepSpeed 0.19 calls collectives by names that torch 2.13 has renamed.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    if not torch.cuda.is_available():
        # Used only by inference; it needs a compiler and leaks 66 MiB of /dev/shm per rank and port.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_SIZE", "1"))))
    deepspeed.init_distributed(verbose=False, timeout=PROCESS_GROUP_TIMEOUT)


def local_device() -> torch.device:
    """This rank's device."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    return torch.device("cpu")
