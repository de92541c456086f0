"""Find the largest micro-batch that fits into memory (`train.micro_batch: auto`) by measuring one and two rows.

Guarantee: the global batch stays the same; gradients of its micro-batches are accumulated. The size is stored in the
run folder for each kind of device and number of ranks. A restart on the same ones takes the same size, and so repeats
the same sums bit for bit. Each rank measures for itself, and all ranks take the smallest of their results.

How: one and two full rows go forward and backward through a copy of the towers without an optimizer. Every further row
is assumed to take as much memory as the second one. On a GPU the measure is the allocator's peak, on a CPU the bytes
that autograd keeps. A tenth of the free memory is not used, and the training state that DeepSpeed allocates later
(`engine/state_layout.py`) is subtracted first.

Limits: communication buffers must fit into that tenth. The largest micro-batch is the fastest on a GPU; on a CPU it
mostly is not. Evaluation uses the same micro-batch and keeps less.
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
from electra_dist.store.atomic_files import replacing

_UNUSED_FRACTION = 0.1  # of the free memory, for communication buffers


def with_micro_batch(config: Config, module: Objective, device: torch.device) -> Config:
    """Return `config` with `train.micro_batch` set to the largest one that fits on every rank. Collective.

    If an earlier start of the run has found a size for this kind of device and number of ranks, it is read from the
    run folder. Otherwise it is measured, and rank 0 writes it there.

    Args:
        config: a config with `train.micro_batch: auto`; its run folder must exist.
        module: the objective on the host, not yet under an engine, with attention, recomputation and the other
            settings that change its memory. It is copied for the measurement and not changed.
        device: the device of this rank.

    Returns:
        A config whose micro-batch divides the rows per rank and step, and whose global batch is unchanged.

    Raises:
        UserError: not even one row fits on some rank.
    """
    key = f"{device.type}, {_device_name(device)}, {dist.get_world_size()} ranks"
    file = Path(config.run_dir) / MICRO_BATCH_FILE
    known_sizes: dict[str, int] = json.loads(file.read_text()) if file.exists() else {}
    size_on_this_rank = known_sizes.get(key, 0)
    if size_on_this_rank == 0:
        size_on_this_rank = _largest(config, module, device)
    smallest_size = torch.tensor(size_on_this_rank, device=device)
    dist.all_reduce(smallest_size, dist.ReduceOp.MIN)
    size = int(smallest_size)
    if size == 0:
        raise UserError(
            "train.micro_batch auto: not one row fits into the free memory beside the training state; set "
            "engine.activation_checkpointing: true, or set a higher engine.zero_stage and use more ranks"
        )
    if dist.get_rank() == 0 and known_sizes.get(key) != size:
        with replacing(file) as out:
            out.write(json.dumps(known_sizes | {key: size}, indent=1).encode() + b"\n")
    train = config.train.model_copy(update={"micro_batch": size, "largest_micro_batch": False})
    return config.model_copy(update={"train": train})


def _largest(config: Config, module: Objective, device: torch.device) -> int:
    """Return the largest micro-batch, in rows, that fits on this rank; 0 if not even one row does.

    Only divisors of the rows per rank and step (global batch / ranks) are considered. With the measured memory m(1) of
    one row and m(2) of two rows, n rows are assumed to take m(1) + (n - 1) * (m(2) - m(1)).

    Args:
        config: gives the batch, the precision and the ZeRO stage.
        module: the objective on the host.
        device: the device of this rank.
    """
    world_size = dist.get_world_size()
    layout = state_layout(config.train.precision, config.engine.zero_stage, config.engine.offload_optimizer)
    num_parameters = sum(parameter.numel() for parameter in module.parameters())
    # Weights, gradients, master copy and moments, which DeepSpeed allocates later.
    state_bytes = sum(layout.bytes_per_gpu(part, num_parameters, world_size) for part in PARTS)
    available_bytes = (1 - _UNUSED_FRACTION) * _free_bytes(device) - state_bytes
    one_row_bytes, two_rows_bytes = _measure(config, module, device)
    extra_row_bytes = two_rows_bytes - one_row_bytes
    rows_per_rank = config.train.global_batch // world_size
    largest = 0
    for size in range(1, rows_per_rank + 1):
        needed_bytes = one_row_bytes + (size - 1) * extra_row_bytes
        if rows_per_rank % size == 0 and needed_bytes <= available_bytes:
            largest = size
    return largest


def _measure(config: Config, module: Objective, device: torch.device) -> tuple[int, int]:
    """Return the bytes that a forward and backward pass of one row, and of two rows, add to the memory in use.

    A copy of the module runs on `device` in the dtype that its parameters have under the engine; the copy itself is
    not counted on a GPU.

    Args:
        config: gives the precision, the ZeRO stage, the row length and the seed.
        module: the objective on the host.
        device: where to measure.
    """
    has_bf16_weights = config.train.precision == "bf16" and config.engine.zero_stage > 0
    dtype = torch.bfloat16 if has_bf16_weights else torch.float32
    trial_module = copy.deepcopy(module).to(device, dtype).train()
    measure_pass = _peak_on_gpu if device.type == "cuda" else _kept_on_cpu

    one_row = _random_input(config, module, device, num_rows=1)
    one_row_bytes = measure_pass(trial_module, one_row)
    trial_module.zero_grad()

    two_rows = _random_input(config, module, device, num_rows=2)
    two_rows_bytes = measure_pass(trial_module, two_rows)
    trial_module.zero_grad()
    return one_row_bytes, two_rows_bytes


def _random_input(config: Config, module: Objective, device: torch.device, num_rows: int) -> StepInput:
    """Return an input of full rows, one example each: [CLS], random ordinary tokens, [SEP].

    Args:
        config: gives the row length, the vocabulary size and the seed.
        module: the objective; gives the ids of [CLS] and [SEP] and the number of tokens that each loss is a mean over.
        device: where the input is made.
        num_rows: rows of the input.

    Returns:
        The input of one forward pass. In the names of its tensors, B is the number of rows and S the tokens of a row.
    """
    special = module.special
    first_ordinary_id = max(special) + 1  # above all special tokens
    size_BS = (num_rows, config.data.seq_len)
    ids_BS = torch.randint(first_ordinary_id, config.model.vocab_size, size_BS, device=device)
    ids_BS[:, 0] = special.cls
    ids_BS[:, -1] = special.sep
    # Each of the two losses of an objective is a sum over tokens, multiplied by 1 / (number of its tokens).
    num_tokens_by_loss = loss_counts(ids_BS, special, module.objective).sum(0)
    first_scale, second_scale = 1.0 / num_tokens_by_loss
    return StepInput(
        ids_BS=ids_BS,
        row_B=torch.arange(num_rows, device=device),
        step=0,
        seed=config.seed,
        first_scale=first_scale,
        second_scale=second_scale,
    )


def _peak_on_gpu(module: Objective, given: StepInput) -> int:
    """Return the bytes by which the CUDA allocator's peak rises in one forward and backward pass.

    Gradients that the backward pass allocates are part of it. The allocator's cache is emptied and its peak is reset.

    Args:
        module: the objective on the current CUDA device.
        given: rows of one micro-batch on the same device.
    """
    torch.cuda.empty_cache()
    bytes_before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    module(given).loss.backward()
    return torch.cuda.max_memory_allocated() - bytes_before


def _kept_on_cpu(module: Objective, given: StepInput) -> int:
    """Return the bytes of all storages that autograd keeps between one forward and its backward pass.

    It replaces the allocator's peak, which a CPU does not report. A storage that several tensors share counts once.
    Parameters that the backward pass reads are counted, too.

    Args:
        module: the objective on the CPU.
        given: rows of one micro-batch.
    """
    bytes_by_address: dict[int, int] = {}

    def record_storage(tensor: torch.Tensor) -> torch.Tensor:
        """Record the storage of a tensor that autograd keeps, and return the tensor unchanged."""
        storage = tensor.untyped_storage()
        bytes_by_address[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record_storage, lambda tensor: tensor):
        loss = module(given).loss
    loss.backward()
    return sum(bytes_by_address.values())


def _free_bytes(device: torch.device) -> float:
    """Return the memory that this rank can still allocate, in bytes.

    On a GPU it is the free memory of the device; on a CPU it is an equal share of the host memory for each rank of
    the node (the environment variable LOCAL_WORLD_SIZE; one rank without it).
    """
    if device.type == "cuda":
        free_bytes, _total_bytes = torch.cuda.mem_get_info(device)
        return free_bytes
    ranks_on_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return psutil.virtual_memory().available / ranks_on_node


def _device_name(device: torch.device) -> str:
    """Return the name of a kind of device: the GPU's model or, for a CPU, the size of the host memory in GiB.

    A micro-batch that was found is stored under it, because it fits only on devices of the same kind.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{psutil.virtual_memory().total / 2**30:.0f} GiB"
