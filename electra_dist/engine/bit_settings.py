"""List the settings that may change the last bits of a result without changing what is computed.

A run may continue with other values of these settings: on another number of ranks, on another type of machine, with
more threads. A checkpoint records them, and a start with other settings logs the differences (`changes`).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

import torch
import torch.distributed as dist
from electra_kernels.native import cpu_library

from electra_dist.config import Config
from electra_dist.engine.engine import Engine
from electra_dist.run.environment_record import cpu

# Environment variables by which the libraries of matrix products choose their kernels.
_LIBRARY_VARIABLES = ("ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")


def bit_settings(config: Config, engine: Engine) -> dict[str, str]:
    """Return what may change the last bits of a run's results, such as {"ranks": "8"}; hardware is this rank's."""
    guard = config.guard
    settings = {
        "ranks": str(dist.get_world_size()),
        "train.micro_batch": str(config.train.micro_batch),
        "engine.zero_stage": str(config.engine.zero_stage),
        "attention": engine.module.attention.name,
        "optimizer": engine.optimizer_name,  # an implementation may be missing where a compiler or a package is
        "guard.window": str(guard.window),
        "guard.spike_sigma": str(guard.spike_sigma),
        "guard.max_in_a_row": str(guard.max_in_a_row),
        "guard.skip_before": str(guard.skip_before),
        "torch": torch.__version__,
    }
    if config.engine.overlap_communication:  # absent without it, as in checkpoints of versions without the key
        settings["engine.overlap_communication"] = "true"
    if engine.device.type == "cuda":
        settings["GPU"] = torch.cuda.get_device_name(engine.device)
        return settings
    settings["processor"] = cpu()["model"]
    settings["threads"] = str(torch.get_num_threads())
    settings["CPU instructions"] = torch.backends.cpu.get_cpu_capability()
    settings["compiled CPU library"] = "no" if cpu_library.permute is None else "yes"
    return settings | {name: os.environ[name] for name in _LIBRARY_VARIABLES if name in os.environ}


def changed_draws(changed: Collection[str], attention_dropout: float, device_type: str) -> str:
    """Return a clause for the log on why attention dropout is drawn differently from now on, or "" if it is not.

    On a GPU, the draws of attention dropout depend on the micro-batch size and the attention backend. All other random
    draws, and all draws on a CPU, depend on the training row alone. `changed` has the names of changed settings.
    """
    causes = [name for name in ("train.micro_batch", "attention") if name in changed]
    if device_type != "cuda" or attention_dropout == 0 or not causes:
        return ""
    return f"dropout of attention is drawn differently from this step on, because {' and '.join(causes)} changed"


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    """Return the settings that differ, name -> "BEFORE to NOW"; {} if `before` is {}, as in an old checkpoint."""
    if not before:
        return {}
    differences = {}
    for name in sorted({*before, *now}):
        was = before.get(name, "unset")
        is_now = now.get(name, "unset")
        if was != is_now:
            differences[name] = f"{was} to {is_now}"
    return differences
