"""Find the largest micro-batch that fits into memory (`train.micro_batch: auto`) by measuring two sizes.

Guarantee: the global batch stays the same; gradients of its micro-batches are accumulated. The size is stored in the
run folder for each kind of device and number of ranks. A restart with the same devices and ranks takes the same size,
and so repeats the same sums bit for bit. Each rank measures for itself; all take the smallest of their results.

How: full rows go forward and backward through a copy of the networks without an optimizer, first n rows and then 2 n.
Every further row is assumed to take as much as the second n did on average. On a GPU the allocator's peak is measured.
There 2 n is the number of rows that the caller predicts to fit, but at least 16: with 1 or 2 rows the peak comes at
the end of the backward pass, where the gradients of all parameters hide what a row takes. If 2 n rows do not fit, n is
halved. On a CPU n is 1, and the bytes that autograd keeps for the backward pass are measured, without gradients. A
tenth of the free memory is not used, and the training state that DeepSpeed allocates later (`engine/state_layout.py`)
is subtracted first.

Limits: communication buffers must fit into that tenth. The largest micro-batch is the fastest on a GPU; on a CPU it
mostly is not. Evaluation uses the same micro-batch and keeps less.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from pydantic import Field, TypeAdapter

from electra_dist.config import Config, divisors
from electra_dist.engine.rank_environment import rank_place
from electra_dist.engine.state_layout import PARTS, state_layout
from electra_dist.errors import UserError
from electra_dist.objectives.base import Objective, StepInput
from electra_dist.run.folder import MICRO_BATCH_FILE
from electra_dist.store.atomic_files import replacing
from electra_dist.store.json_file import find_document

_UNUSED_FRACTION = 0.1  # of the free memory, for communication buffers
_LEAST_MEASURED_ROWS = 16  # on a GPU, for the larger of the two measurements, if they fit

# (config, free bytes of one GPU, number of ranks) -> number of rows that are predicted to fit on that GPU.
PredictRows = Callable[[Config, float, int], int]


_KNOWN_SIZES = TypeAdapter(dict[str, Annotated[int, Field(ge=0, lt=1 << 31)]])  # device and ranks -> rows


def with_micro_batch(
    config: Config, module: Objective, device: torch.device, predict_rows: PredictRows | None = None
) -> Config:
    """Return `config` with `train.micro_batch` set to the largest one that fits on every rank. Collective.

    A size that an earlier start of the run has stored in the run folder is taken. Otherwise the size is measured with
    a copy of `module`, the objective on the host with its final settings, and rank 0 stores it. `predict_rows`
    estimates how many rows fit on a GPU, which are tried first; None stands for 16. UserError if no row fits.
    """
    key = f"{device.type}, {_device_name(device)}, {dist.get_world_size()} ranks"
    file = Path(config.run_dir) / MICRO_BATCH_FILE
    known_sizes = read_known_sizes(file.parent)
    size_on_this_rank = known_sizes.get(key, 0)
    rows_per_rank = config.train.global_batch // dist.get_world_size()
    if size_on_this_rank == 0 or rows_per_rank % size_on_this_rank:
        size_on_this_rank = _largest(config, module, device, predict_rows)
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


def read_known_sizes(run_dir: Path) -> dict[str, int]:
    """Return the micro-batch sizes that earlier starts of a run have measured, "DEVICE, NAME, N ranks" -> rows."""
    file = run_dir / MICRO_BATCH_FILE
    return find_document(file, _KNOWN_SIZES, "delete it, and the next start measures again") or {}


def _largest(config: Config, module: Objective, device: torch.device, predict_rows: PredictRows | None) -> int:
    """Measure the largest micro-batch that fits in memory and divides this rank's rows of a step; 0 if none does."""
    world_size = dist.get_world_size()
    layout = state_layout(config.train.precision, config.engine.zero_stage, config.engine.offload_optimizer)
    num_parameters = sum(parameter.numel() for parameter in module.parameters())
    # Weights, gradients, master copy and moments, which DeepSpeed allocates later.
    state_bytes = sum(layout.bytes_per_gpu(part, num_parameters, world_size) for part in PARTS)
    free_bytes = _free_bytes(device)
    available_bytes = (1 - _UNUSED_FRACTION) * free_bytes - state_bytes
    rows_per_rank = config.train.global_batch // world_size
    measure = _rows_to_bytes(config, module, device)
    if device.type == "cpu":
        memory = _memory_of_rows(measure, 2, math.inf)
    else:
        predicted_rows = 0 if predict_rows is None else predict_rows(config, free_bytes, world_size)
        most_rows = min(max(_LEAST_MEASURED_ROWS, predicted_rows), rows_per_rank)
        memory = _memory_of_rows(measure, most_rows, available_bytes)
    fitting_sizes = [size for size in divisors(rows_per_rank) if memory.bytes_of(size) <= available_bytes]
    return max(fitting_sizes, default=0)


@dataclass(frozen=True)
class RowMemory:
    """Estimate of the memory that a training pass over n rows takes: a straight line through two measurements."""

    num_rows: int  # the smaller number of rows that was measured
    num_bytes: float  # bytes that this number of rows takes
    extra_row_bytes: float  # bytes of every further row; infinite if more rows did not fit

    def bytes_of(self, num_rows: int) -> float:
        """Estimate the bytes that a micro-batch takes, at least those of the smaller measured number of rows."""
        if num_rows <= self.num_rows:  # the gradients exist for any number of rows, so the line does not hold here
            return self.num_bytes
        return self.num_bytes + (num_rows - self.num_rows) * self.extra_row_bytes


def _memory_of_rows(measure: Callable[[int], int | None], most_rows: int, available_bytes: float) -> RowMemory:
    """Measure `most_rows` / 2 and `most_rows` rows, halving both until they fit, and return the line through both."""
    more_rows = most_rows
    while more_rows > 1:
        few_rows = more_rows // 2
        few_bytes = measure(few_rows)
        if few_bytes is not None and few_bytes <= available_bytes:
            more_bytes = measure(more_rows)
            if more_bytes is not None:
                extra_row_bytes = (more_bytes - few_bytes) / (more_rows - few_rows)
                return RowMemory(few_rows, few_bytes, extra_row_bytes)
        more_rows = few_rows
    one_row_bytes = measure(1)
    return RowMemory(1, math.inf if one_row_bytes is None else one_row_bytes, math.inf)


def _rows_to_bytes(config: Config, module: Objective, device: torch.device) -> Callable[[int], int | None]:
    """Return a function from a number of rows to the bytes that a training pass over them takes, by measurement.

    It returns None if memory runs out. It uses a copy of `module` on the device, in the precision of the run.
    """
    low_precision = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(config.train.precision)
    has_fp32_weights = low_precision is None or config.engine.zero_stage == 0
    dtype = torch.float32 if has_fp32_weights else low_precision
    trial_module = copy.deepcopy(module).to(device, dtype).train()
    measure_pass = _kept_on_cpu if device.type == "cpu" else _peak_on_gpu
    # The engine runs fp32 weights under autocast on any device. On a CPU the measurement leaves autocast out, and so
    # gives more bytes than the engine needs.
    under_autocast = device.type == "cuda" and has_fp32_weights and low_precision is not None

    def measure(num_rows: int) -> int | None:
        given = _random_input(config, module, device, num_rows)
        precision: AbstractContextManager[Any] = nullcontext()
        if under_autocast:
            precision = torch.autocast(device.type, low_precision)
        try:
            with precision:
                return measure_pass(trial_module, given)
        except torch.OutOfMemoryError:
            return None
        finally:
            trial_module.zero_grad()

    return measure


def _random_input(config: Config, module: Objective, device: torch.device, num_rows: int) -> StepInput:
    """Return an input of full rows, with one example each: [CLS], random tokens that are not special, [SEP]."""
    special = module.special
    first_ordinary_id = max(special) + 1  # above all special tokens
    size_BS = (num_rows, config.data.seq_len)
    ids_BS = torch.randint(first_ordinary_id, config.model.vocab_size, size_BS, device=device)
    ids_BS[:, 0] = special.cls
    ids_BS[:, -1] = special.sep
    # Each of the two losses of an objective is a sum over tokens, multiplied by 1 / (number of its tokens).
    scale_2 = 1.0 / module.loss_counts(ids_BS).sum(0)
    host_ids_BS = np.full(size_BS, first_ordinary_id)
    host_ids_BS[:, 0] = special.cls  # begins the only example of a row
    return module.step_input(ids_BS, host_ids_BS, 0, (config.seed, 0), scale_2)


def _peak_on_gpu(module: Objective, given: StepInput) -> int:
    """Return the bytes by which the CUDA allocator's peak rises in a forward and backward pass."""
    torch.cuda.empty_cache()
    bytes_before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    module(given).loss.backward()
    return torch.cuda.max_memory_allocated() - bytes_before


def _kept_on_cpu(module: Objective, given: StepInput) -> int:
    """Return the bytes of all storages that autograd keeps for the backward pass; a CPU reports no peak."""
    bytes_by_address: dict[int, int] = {}

    def record_storage(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        bytes_by_address[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record_storage, lambda tensor: tensor):
        loss = module(given).loss
    loss.backward()
    return sum(bytes_by_address.values())


def _free_bytes(device: torch.device) -> float:
    """Return the free bytes of the GPU or, on a CPU, the free host memory divided by the number of ranks on it."""
    if device.type == "cuda":
        free_bytes, _total_bytes = torch.cuda.mem_get_info(device)
        return free_bytes
    return psutil.virtual_memory().available / rank_place().ranks_on_node


def _device_name(device: torch.device) -> str:
    """Return for which device a measured micro-batch holds: the GPU's model or, on a CPU, the size of host memory."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{psutil.virtual_memory().total / 2**30:.0f} GiB"
