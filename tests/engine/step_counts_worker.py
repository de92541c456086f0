"""Train six steps as one of two ranks in several ways, and print the results and the cost of a step on the host.

    python step_counts_worker.py NUM_LAYERS

Rank 0 prints one line: "COUNTED" and a JSON object, case -> results (see `run`). A case is the precision and the ZeRO
stage. In the cases "... unpatched", DeepSpeed itself adds, measures and clips gradients; the results of the other
cases must equal theirs bit for bit. The third step is refused, and the gradients of the fourth are not finite.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch.distributed as dist
from support.real_runs import synthetic_rows, tiny_tree
from support.tiny_engine import SPECIAL, whole_state

from electra_dist.config import Config
from electra_dist.data.loader import RowBatch
from electra_dist.data.receipt import Receipt
from electra_dist.engine import engine as engine_module
from electra_dist.engine import gradient_sums
from electra_dist.engine.engine import Engine, deepspeed_config
from electra_dist.engine.gradient_sums import GradientSums
from electra_dist.engine.process_group import init_distributed
from electra_dist.objectives.base import Schedules
from electra_dist.objectives.build_objective import build_objective
from electra_dist.train.step import TrainStep
from electra_dist.train.step_operators import OperatorCounter

MICRO_BATCH = 2
NUM_ROWS = 8
REFUSED, NOT_FINITE, COUNTED, NUM_STEPS = 2, 3, 5, 6  # three steps, counted from 0, and how many there are
gradient_sums.BUCKET_ELEMENTS = 4000  # several buckets, also in towers as small as these


@contextlib.contextmanager
def unpatched() -> Iterator[None]:
    """Make engines of a `with` block work without `GradientSums`: DeepSpeed adds, measures and clips gradients."""
    originals = (engine_module.GradientSums, engine_module._norms_stay_on_device)
    engine_module.GradientSums = lambda *_, **__: None  # type: ignore[assignment, misc]
    engine_module._norms_stay_on_device = lambda *_, **__: contextlib.nullcontext()  # type: ignore[assignment]
    try:
        yield
    finally:
        engine_module.GradientSums, engine_module._norms_stay_on_device = originals  # type: ignore[misc]


def count_phases(engine: Engine, phases: dict[str, list[int]]) -> Callable[[], None]:
    """Make an engine count the operators and host reads of its calls, and return a function that undoes this.

    A host read is a copy of a value from the device to the host.

    Args:
        engine: the engine, whose methods are replaced.
        phases: "forward", "backward" and "update" -> [operators, host reads], to which the calls add.
    """
    phase_of_method = {"forward": "forward", "backward": "backward", "step": "update"}
    originals = {name: getattr(engine, name) for name in phase_of_method}

    def counting(name: str, phase: str) -> Callable[..., Any]:
        """Return a replacement of a method that counts its operators and host reads for a phase."""

        def call(*args: Any, **kwargs: Any) -> Any:
            """Call the original method, and count."""
            with OperatorCounter() as counter:
                result = originals[name](*args, **kwargs)
            phases.setdefault(phase, [0, 0])
            phases[phase][0] += counter.num_operators
            phases[phase][1] += counter.num_host_reads
            return result

        return call

    for name, phase in phase_of_method.items():
        setattr(engine, name, counting(name, phase))

    def undo() -> None:
        """Give the engine its own methods again."""
        for name in phase_of_method:
            delattr(engine, name)

    return undo


def config_of_case(precision: str, stage: int, num_layers: int, overlaps: bool) -> Config:
    """Return the config of one case; the arguments are those of `run`."""
    settings: dict[str, Any] = {
        "engine.zero_stage": stage,
        "engine.overlap_communication": overlaps,
        "train.precision": precision,
        "train.global_batch": NUM_ROWS,
        "train.micro_batch": MICRO_BATCH,
        "optimizer.clip_norm": 0.5,
    }
    tree = tiny_tree("unused", "unused", **settings)  # type: ignore[arg-type]
    for tower in ("discriminator", "generator"):
        tree["model"][tower]["num_layers"] = num_layers
    return Config.model_validate(tree)


def run(
    precision: str, stage: int, num_layers: int, *, overlaps: bool = False, takes_products: bool = False
) -> dict[str, Any]:
    """Train the six steps of one case, and return its results as a JSON object.

    Args:
        precision: value of `train.precision`.
        stage: value of `engine.zero_stage`.
        num_layers: number of layers of each tower.
        overlaps: value of `engine.overlap_communication`.
        takes_products: whether products add gradients of weights to the sums, as on a GPU.

    Returns:
        tensors: number of parameters of the model.
        results: for each step its loss and gradient norm in hexadecimal, and why it was not taken ("" if it was).
        phases: "forward", "backward", "update" and "rest" -> [operators, host reads] in step `COUNTED`.
        begun: for each step, how many buckets were being exchanged when the backward pass had ended.
    """
    config = config_of_case(precision, stage, num_layers, overlaps)
    # DeepSpeed is configured as on a GPU.
    engine_module.deepspeed_config = lambda train, section, clip, _: deepspeed_config(train, section, clip, "cuda")
    module = build_objective(config.model, config.objective, SPECIAL, 3)
    num_tensors = len(list(module.parameters()))
    plain_sums = engine_module.GradientSums

    def sums(*arguments: Any, **options: Any) -> GradientSums:
        """Make the sums of a GPU or of a CPU on this CPU."""
        return plain_sums(*arguments, **{**options, "takes_products": takes_products})

    engine_module.GradientSums = sums  # type: ignore[assignment, misc]
    engine = Engine(module, config.train, config.engine, config.optimizer)
    engine_module.GradientSums = plain_sums  # type: ignore[misc]
    train_step = TrainStep(engine, 7, MICRO_BATCH, Schedules(config.objective, 10))
    rows_per_rank = NUM_ROWS // dist.get_world_size()
    first_row = dist.get_rank() * rows_per_rank
    results = []
    phases: dict[str, list[int]] = {}
    begun: list[int] = []
    finish = GradientSums._finish_exchange

    def finish_and_note(self: GradientSums) -> None:
        """Record how many buckets are being exchanged at the end of a backward pass, and finish their exchange."""
        begun.append(self._num_started)
        finish(self)

    GradientSums._finish_exchange = finish_and_note  # type: ignore[method-assign]
    for step in range(NUM_STEPS):
        ids = synthetic_rows(NUM_ROWS, step)[first_row : first_row + rows_per_rank]
        batch = RowBatch(step, first_row, ids, np.arange(rows_per_rank), Receipt())
        if step == NOT_FINITE:
            before = whole_state(engine)
            engine.backward = lambda loss: Engine.backward(engine, loss * float("inf"))  # type: ignore[method-assign]
        undo = count_phases(engine, phases) if step == COUNTED else lambda: None
        reason = "refused" if step == REFUSED else ""
        with OperatorCounter() if step == COUNTED else contextlib.nullcontext() as counter:
            result = train_step(batch, 1e-3, lambda loss, reason=reason: reason)
        undo()
        if step == NOT_FINITE:
            del engine.backward
            after = whole_state(engine)
            is_unchanged = all(
                np.array_equal(before[name][kind], after[name][kind]) for name in after for kind in after[name]
            )
            assert is_unchanged, "a step whose gradients are not finite has changed the state"
        results.append([float(result.sums.loss).hex(), float(result.grad_norm).hex(), result.fault])
    GradientSums._finish_exchange = finish  # type: ignore[method-assign]
    assert counter is not None
    rest = [counter.num_operators, counter.num_host_reads]
    for operators, reads in phases.values():
        rest[0] -= operators
        rest[1] -= reads
    phases["rest"] = rest
    engine.close()
    return {"tensors": num_tensors, "results": results, "phases": phases, "begun": begun}


def main() -> None:
    """Run all cases with towers whose number of layers is the first argument; rank 0 prints the results."""
    warnings.simplefilter("ignore")
    num_layers = int(sys.argv[1])
    init_distributed()
    lines = {}
    for precision, stage in (("bf16", 1), ("bf16", 2), ("fp32", 1)):
        with unpatched():
            lines[f"{precision} {stage} unpatched"] = run(precision, stage, num_layers)
        lines[f"{precision} {stage}"] = run(precision, stage, num_layers)
    lines["bf16 1 overlap"] = run("bf16", 1, num_layers, overlaps=True)
    lines["bf16 1 products"] = run("bf16", 1, num_layers, overlaps=True, takes_products=True)
    if os.environ["RANK"] == "0":
        print("COUNTED", json.dumps(lines), flush=True)
    dist.destroy_process_group()


main()
