"""Times optimizer steps under DeepSpeed as training takes them, with its throughput timer on and off.

DeepSpeed's throughput timer waits for the device twice in every micro-batch from the third step on. A step has two
micro-batches here, so that gradients are accumulated once, as in training.

Limits: one rank; no data loading and no logging.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from gpu_parts.recording import Case, Rows
from gpu_parts.steps import StepBench, step_input

_MICRO_BATCHES = 2
_LEARNING_RATE = 1e-5


def engine_cases(bench: StepBench) -> Iterator[Case]:
    """Yield the step at the middle and the largest micro-batch, first as the engine sets the timer, then both ways."""
    for batch in bench.batches[1:]:
        operation = f"DeepSpeed step B={batch} x {_MICRO_BATCHES}"
        for by, timer in (("ours", None), ("ours, timer on", True), ("ours, timer off", False)):
            run = functools.partial(_time_engine, bench, operation, by, batch, timer)
            yield Case(operation, by, "engine step", run)


def _time_engine(bench: StepBench, operation: str, by: str, batch: int, timer: bool | None) -> Rows:
    """Time optimizer steps of this project's engine; without deepspeed this is a row with `skipped`."""
    if importlib.util.find_spec("deepspeed") is None:
        return [{"operation": operation, "by": by, "skipped": "deepspeed is not installed"}]
    from electra_dist.engine.engine import Engine
    from electra_dist.engine.process_group import init_distributed

    init_distributed()
    global_batch = batch * _MICRO_BATCHES
    train_config = bench.config.train.model_copy(
        update={
            "micro_batch": batch,
            "global_batch": global_batch,
            "precision": "fp32" if bench.smoke else bench.config.train.precision,
        }
    )
    # The engine casts the parameters itself, so the module is in fp32 here.
    module = bench.module(bench.backend, dtype=torch.float32)
    with _throughput_timer(timer):
        engine = Engine(module, train_config, bench.config.engine, bench.config.optimizer)
    given = step_input(module, bench.ids(batch))

    def step() -> None:
        for number in range(_MICRO_BATCHES):
            engine.backward(engine.forward(given).loss)
            if number < _MICRO_BATCHES - 1:
                engine.step_micro_batch()
        engine.step(_LEARNING_RATE)

    try:
        row = bench.time(operation, by, global_batch, step)
    finally:
        engine.close()
    return [row | {"optimizer": engine.optimizer_name}]


@contextlib.contextmanager
def _throughput_timer(enabled: bool | None) -> Iterator[None]:
    """Set DeepSpeed's throughput timer within the `with` block; None leaves the engine's own setting."""
    if enabled is None:
        yield
        return
    from electra_dist.engine import engine

    make_config = engine.deepspeed_config

    def with_timer(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return make_config(*args, **kwargs) | {"timers": {"throughput": {"enabled": enabled}}}

    with mock.patch.object(engine, "deepspeed_config", with_timer):
        yield
