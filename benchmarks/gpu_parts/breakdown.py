"""Breakdown of a training step of the large model on a GPU, and the same step by Hugging Face: two parts of `gpu.py`.

    breakdown  64 rows: milliseconds of each part of the step
    rivals     64 rows: the step of Hugging Face's modules, in plain torch and under DeepSpeed, where installed

Both sides use bf16 throughout, the config's dropout, and the same weights, masks and distribution of samples.

Limits: DeepSpeed also keeps fp32 master weights, which the plain steps of both sides do not have.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from gpu_parts.recording import Case, Row, Rows
from gpu_parts.steps import SPECIAL, StepBench, step_input, train

from electra_dist.objectives.base import StepInput
from electra_dist.objectives.rtd import ReplacedTokenDetection


def breakdown_cases(bench: StepBench) -> Iterator[Case]:
    """Yield the breakdown of the step at the middle micro-batch."""
    yield Case("part", "ours", "step", functools.partial(_breakdown, bench))


def _breakdown(bench: StepBench) -> Rows:
    """Measure the milliseconds of a training step by part of the step.

    The parts are run one after another, with the generator's backward pass before the discriminator's forward pass.
    The rows are those of the last of three runs.
    """
    module = bench.module(bench.backend)
    given = step_input(module, bench.ids(bench.batches[1]))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5, fused=not bench.smoke)
    train(module, optimizer, given)  # Creates the optimizer's states and compiles kernels before anything is timed.
    rows: Rows = []
    for _ in range(1 if bench.smoke else 3):
        rows = [_part(bench, name, action) for name, action in _parts(module, optimizer, given)]
    return rows


def _parts(
    module: ReplacedTokenDetection, optimizer: torch.optim.Optimizer, given: StepInput
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the parts of one training step as (name, action).

    The caller must run each action before it asks for the next part, because a part uses the results of earlier ones.
    The masks are computed between two parts, outside of any time.
    """
    results: dict[str, Any] = {}

    def storing(name: str, compute: Callable[[], Any]) -> Callable[[], None]:
        """Return an action that stores the result of `compute` under a name."""

        def action() -> None:
            results[name] = compute()

        return action

    yield "positions and attention mask", storing("batch", lambda: module.batch(given))
    batch = results["batch"]
    masking = module.mask(batch)
    yield "generator, forward", storing("states", lambda: module.generator_states(batch, masking))
    yield "head, forward", storing("mlm", lambda: module.fill(batch, masking, results["states"]))
    yield "generator and head, backward", lambda: (given.first_scale * results["mlm"].loss_sum).backward()
    yield "replacing", storing("replaced", lambda: module.replace(batch, masking, results["mlm"].sampled_M))
    corrupted_BS, label_BS = results["replaced"]
    yield "discriminator, forward", storing("read", lambda: module.read(batch, corrupted_BS))
    tail = module.towers.discriminator_head
    real_BS = batch.layout.is_real_BS
    yield "tail, forward", storing("rtd", lambda: tail(results["read"], label_BS, real_BS, backend=module.backend))
    weight = module.objective.rtd_weight * given.second_scale
    yield "discriminator and tail, backward", lambda: (weight * results["rtd"].loss_sum).backward()
    yield "optimizer", lambda: (optimizer.step(), optimizer.zero_grad())


def _part(bench: StepBench, name: str, action: Callable[[], Any]) -> Row:
    """Run one part of a step once and return its row, with milliseconds by CUDA events and absolute peak memory.

    The smoke run only runs the part; its row has 0 ms and 0 bytes.
    """
    if bench.smoke:
        action()
        return {"operation": "part", "by": name, "ms": 0.0, "peak_bytes": 0}
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.reset_peak_memory_stats()
    begin.record()
    action()
    end.record()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    return {"operation": "part", "by": name, "ms": begin.elapsed_time(end), "peak_bytes": peak}


def rival_cases(bench: StepBench) -> Iterator[Case]:
    """Yield the joint step of Hugging Face's modules from the same weights, in plain torch and under DeepSpeed.

    In the cases named "gathered", the generator's head is computed at the masked positions only. What is not installed
    is a row with `skipped`.
    """
    batch = bench.batches[1]
    operation = f"step B={batch}"
    for gathered in (False, True):
        for engine in ("torch", "DeepSpeed ZeRO-1"):
            by = f"Hugging Face{', gathered' if gathered else ''} ({engine})"
            run = functools.partial(
                _time_rival, bench, operation, by, gathered=gathered, under_deepspeed=engine != "torch"
            )
            yield Case(operation, by, "engine step" if engine != "torch" else "step", run)


def _time_rival(bench: StepBench, operation: str, by: str, *, gathered: bool, under_deepspeed: bool) -> Rows:
    """Time one variant of Hugging Face's step."""
    row: Row = {"operation": operation, "by": by}
    if importlib.util.find_spec("transformers") is None:
        return [row | {"skipped": "transformers is not installed; install it to compare with Hugging Face"}]
    if under_deepspeed and (bench.smoke or importlib.util.find_spec("deepspeed") is None):
        return [row | {"skipped": "deepspeed is not installed, or this is a smoke run"}]
    batch = bench.batches[1]
    step = _rival(bench, bench.ids(batch), gathered=gathered, under_deepspeed=under_deepspeed)
    return [bench.time(operation, by, batch, step)]


class _Trainable(NamedTuple):
    """A Hugging Face model with the three calls of a training step, in plain torch or under DeepSpeed."""

    module: Any  # Its call returns `step_parts.rival.Losses`.
    backward: Callable[[torch.Tensor], Any]
    update: Callable[[], Any]
    zero_grad: Callable[[], Any]


def _rival(bench: StepBench, ids_BS: torch.Tensor, *, gathered: bool, under_deepspeed: bool) -> Callable[[], None]:
    """Return a function that takes a training step of Hugging Face's modules.

    Model and optimizer are built in its first call.

    Args:
        bench: Config, initial weights and device.
        ids_BS: [B, S] int64 token ids.
        gathered: Whether the generator's head is computed at the masked positions only.
        under_deepspeed: Whether DeepSpeed runs the step, with ZeRO stage 1 in a group of one rank.
    """
    objective = bench.config.objective

    @functools.cache
    def build() -> _Trainable:
        from step_parts.rival import HuggingFace

        module = HuggingFace(copy.deepcopy(bench.towers), objective, SPECIAL, gathered=gathered, packed=True)
        module = module.to(bench.device, bench.dtype).train()
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5, fused=not bench.smoke)
        if not under_deepspeed:
            return _Trainable(module, torch.Tensor.backward, optimizer.step, optimizer.zero_grad)
        import deepspeed

        for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}.items():
            os.environ.setdefault(name, str(value))
        os.environ.setdefault("MASTER_PORT", "29555")
        config = {
            "train_batch_size": len(ids_BS),
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
        }
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
        return _Trainable(engine, engine.backward, engine.step, lambda: None)  # DeepSpeed clears gradients in `step`.

    def step() -> None:
        trainable = build()
        losses = trainable.module(ids_BS, torch.arange(len(ids_BS), device=ids_BS.device), 0, 1)
        trainable.backward(objective.mlm_weight * losses.mlm + objective.rtd_weight * losses.rtd)
        trainable.update()
        trainable.zero_grad()

    return step
