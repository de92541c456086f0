"""Set up torch.distributed through DeepSpeed, the device of this rank, and torch's deterministic mode.

In deterministic mode (`engine.deterministic`) a repeated step gives the same bits. Nothing changes on a CPU, whose
results repeat without it. On a GPU torch takes deterministic kernels where it has them, for example for the gradients
of embedding tables, and warns once of each operation that has none. cuBLAS reads the environment variable
CUBLAS_WORKSPACE_CONFIG when its first handle is created; without the variable it may sum in another order in each run.
FlashAttention needs a stricter mode, which `model/flash_attention.py` sets for its backward pass.

Limits: docs/exactness.md lists what is expected to repeat on a GPU; no GPU has confirmed it.
"""

from __future__ import annotations

import logging
import os
import warnings
from datetime import timedelta

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from electra_dist.engine.rank_environment import PREFLIGHT_LIMIT_S, check_meeting, check_port, rank_place, whole_number
from electra_dist.errors import UserError
from electra_dist.run.this_node import MARK

CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
_CUBLAS_WORKSPACES = ":4096:8"  # eight buffers of 4 MiB, one of two settings that cuBLAS documents as deterministic

# All ranks wait for the node whose preflight takes longest; imports and the first collective then get ten minutes.
PROCESS_GROUP_TIMEOUT = timedelta(seconds=PREFLIGHT_LIMIT_S, minutes=10)

# Values of the environment variables that no launcher has set: those of a single rank on this machine.
_SINGLE_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
_ANY_FREE_PORT = "0"
_DEFAULT_PORT = "29500"  # torch's own default, for a launcher of several ranks that names none


def init_distributed() -> None:
    """Join the process group that the launcher's environment variables describe, or create one of a single rank.

    Missing variables are set to the values of a single rank. A second call changes nothing. Collective.
    """
    place = rank_place()
    check_meeting(os.environ.get("MASTER_ADDR", _SINGLE_RANK["MASTER_ADDR"]))
    for name, value in _SINGLE_RANK.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", _ANY_FREE_PORT if place.world_size == 1 else _DEFAULT_PORT)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)  # it warns about every optimizer that is not its own
    # DeepSpeed 0.19 calls collectives by names that torch 2.13 has renamed.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    if not torch.cuda.is_available():
        # DeepSpeed's collectives in shared memory serve inference only. Their extension needs a compiler and leaks
        # 66 MiB of /dev/shm per rank and port.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        share_cores(place.ranks_on_node)
    # The first collective of a run would otherwise run on GPU 0 for all ranks of a node, and hang.
    local_device()
    accelerator = get_accelerator()
    if accelerator.device_name() == "cuda":
        # DeepSpeed's own way to ask for free memory fails if CUDA_VISIBLE_DEVICES holds UUIDs.
        accelerator.available_memory = lambda device=None: torch.cuda.mem_get_info(device)[0]
    # A supervisor has chosen a free port. If that has been taken since, it starts the ranks again with another.
    is_chosen_by_supervisor = MARK in os.environ
    if place.rank == 0 and not dist.is_initialized() and not is_chosen_by_supervisor:
        check_port(whole_number("MASTER_PORT", 0))
    deepspeed.init_distributed(verbose=False, timeout=PROCESS_GROUP_TIMEOUT)


def share_cores(ranks_on_node: int) -> None:
    """Let torch use this rank's share of the cores of a node without GPUs, unless OMP_NUM_THREADS is set."""
    if "OMP_NUM_THREADS" in os.environ:
        return
    # Otherwise every rank would use as many threads as there are cores, and the ranks would slow one another.
    num_cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, num_cores // ranks_on_node))


def local_device() -> torch.device:
    """Return this rank's device: the CPU, or GPU LOCAL_RANK, which becomes the current one. UserError without it."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank = rank_place().local_rank
    try:
        torch.cuda.set_device(local_rank)
    except RuntimeError:
        num_gpus = torch.cuda.device_count()
        if local_rank < num_gpus:
            raise
        raise UserError(
            f"LOCAL_RANK is {local_rank}, but this process sees {num_gpus} GPUs; start one rank for each GPU "
            f"(deepspeed --num_gpus {num_gpus}), or correct CUDA_VISIBLE_DEVICES"
        ) from None
    return torch.device("cuda", local_rank)


def set_deterministic_mode(enabled: bool) -> None:
    """Switch torch to deterministic operations if `enabled` and there is a GPU; call it before the GPU is used."""
    if not enabled or not torch.cuda.is_available():
        return
    os.environ.setdefault(CUBLAS_VARIABLE, _CUBLAS_WORKSPACES)
    torch.use_deterministic_algorithms(True, warn_only=True)
    # By default the mode also fills each new tensor with NaN, to show reads of uninitialised memory. That costs a
    # kernel launch for each tensor.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
