"""The largest micro-batch that fits (`train.micro_batch: auto`), found by measuring, never by running out of memory.

Guarantee: the global batch stays what it is, and the rest of it is accumulated. The answer is kept in the run's folder
for each kind of device and number of ranks, so that a restart on the same ones repeats the same sums bit for bit. All
ranks take the smallest of their answers.

How: one and two full rows go forward and backward through a copy of the towers without an optimizer; memory is taken
to be a constant and so much a row. On a GPU it is the allocator's peak, on a CPU what autograd keeps. Of what is free,
a tenth is left alone, and the training state (`engine/state_layout.py`) comes off first.

Where it stops: communication buffers must live in that tenth. The largest is the fastest on a GPU; on a CPU it mostly
is not. Evaluation uses the same micro-batch and keeps less.
"""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from electra_dist.config import Config
from electra_dist.engine.state_layout import PARTS, state_layout
from electra_dist.errors import UserError
from electra_dist.objectives.base import Objective, StepInput, loss_counts
from electra_dist.run.folder import MICRO_BATCH_FILE
from electra_dist.store.files import replacing

_LEFT_ALONE = 0.1  # of what is free


def with_micro_batch(config: Config, module: Objective, device: torch.device) -> Config:
    """`config` with `train.micro_batch` found. Collective.

    Args:
        module: on the host, not yet under an engine, with its ways of saving memory set.
        device: where it will run.

    Raises:
        UserError: not even one row fits.
    """
    key = f"{device.type}, {_kind(device)}, {dist.get_world_size()} ranks"
    file = Path(config.run_dir) / MICRO_BATCH_FILE
    known: dict[str, int] = json.loads(file.read_text()) if file.exists() else {}
    found = torch.tensor(known.get(key) or _largest(config, module, device), device=device)
    dist.all_reduce(found, dist.ReduceOp.MIN)
    size = int(found)
    if size == 0:
        raise UserError(
            "train.micro_batch auto: not one row fits into memory beside the training state; set "
            "engine.activation_checkpointing: true, or a higher engine.zero_stage with more ranks"
        )
    if dist.get_rank() == 0 and known.get(key) != size:
        with replacing(file) as out:
            out.write(json.dumps(known | {key: size}, indent=1).encode() + b"\n")
    train = config.train.model_copy(update={"micro_batch": size, "largest_micro_batch": False})
    return config.model_copy(update={"train": train})


def _largest(config: Config, module: Objective, device: torch.device) -> int:
    """The largest divisor of this rank's rows that fits; 0 if one row does not."""
    layout = state_layout(config.train.precision, config.engine.zero_stage, config.engine.offload_optimizer)
    count = sum(parameter.numel() for parameter in module.parameters())
    state = sum(layout.bytes_per_gpu(part, count, dist.get_world_size()) for part in PARTS)
    room = (1 - _LEFT_ALONE) * _free_bytes(device) - state
    one, two = _measure(config, module, device)
    rows = config.train.global_batch // dist.get_world_size()
    fitting = [size for size in range(1, rows + 1) if rows % size == 0 and one + (size - 1) * (two - one) <= room]
    return max(fitting, default=0)


def _measure(config: Config, module: Objective, device: torch.device) -> tuple[int, int]:
    """Bytes that a forward and backward of one row, and of two, add to what was there."""
    half = config.train.precision == "bf16" and config.engine.zero_stage > 0
    tried = copy.deepcopy(module).to(device, torch.bfloat16 if half else torch.float32).train()
    length, special = config.data.seq_len, module.special
    found = []
    for size in (1, 2):
        ids_BS = torch.randint(max(special) + 1, config.model.vocab_size, (size, length), device=device)
        ids_BS[:, 0], ids_BS[:, -1] = special.cls, special.sep
        first_scale, second_scale = 1.0 / loss_counts(ids_BS, special, module.objective).sum(0)
        given = StepInput(
            ids_BS=ids_BS,
            row_B=torch.arange(size, device=device),
            step=0,
            seed=config.seed,
            first_scale=first_scale,
            second_scale=second_scale,
        )
        found.append(_peak_on_gpu(tried, given) if device.type == "cuda" else _kept_on_cpu(tried, given))
        tried.zero_grad()
    return found[0], found[1]


def _peak_on_gpu(module: Objective, given: StepInput) -> int:
    """Return the bytes by which the allocator's peak rises in one forward and backward."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    module(given).loss.backward()
    return torch.cuda.max_memory_allocated() - before


def _kept_on_cpu(module: Objective, given: StepInput) -> int:
    """Return the bytes of all storages that autograd keeps for one backward."""
    storages: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = module(given).loss
    loss.backward()
    return sum(storages.values())


def _free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _kind(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{psutil.virtual_memory().total / 2**30:.0f} GiB"
