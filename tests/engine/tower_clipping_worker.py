"""Runs one rank, and prints how far an update with `optimizer.generator` is from a computation in float64.

For every ZeRO stage and precision, an engine without clipping gives the gradients of a step. NumPy clips them by two
norms and computes AdamW's update with the settings of each tower; an engine with `optimizer.generator` makes the same
step. Each line has the stage, the precision, and the largest difference of a weight as a fraction of its update's
learning rate.
"""

from __future__ import annotations

import os
import sys
import warnings
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from support.real_runs import synthetic_rows
from support.tiny_engine import tiny_engine, whole_state

from electra_dist.config import Config
from electra_dist.engine.engine import Engine
from electra_dist.engine.process_group import init_distributed
from electra_dist.objectives.base import StepInput

NUM_ROWS = 4
EPS = 1e-6
ONLY_THE_GENERATORS = ("towers.generator.", "towers.generator_head.")


class Place(NamedTuple):
    """Where the training state is: the ZeRO stage, the precision, and whether the optimizer's part is offloaded."""

    stage: int
    precision: str
    offload: bool = False


PLACES = [Place(stage, precision) for precision in ("fp32", "bf16") for stage in (0, 1, 2, 3)]
PLACES += [Place(stage, "fp32", offload=True) for stage in (1, 2, 3)]
# Stage 0 last: DeepSpeed's autocast of fp16 at that stage stays on for the engines after it in the same process.
PLACES += [Place(stage, "fp16") for stage in (1, 2, 3, 0)]


class Settings(NamedTuple):
    """Settings of one tower's update."""

    lr: float
    beta1: float
    beta2: float
    weight_decay: float
    clip_norm: float


DISCRIMINATOR = Settings(2e-3, 0.9, 0.98, 0.01, 0.3)
GENERATOR = Settings(5e-4, 0.8, 0.95, 0.1, 0.02)


def build(place: Place, sharing: str, optimizer: dict) -> tuple[Config, Engine]:
    """Return an engine of two tiny towers."""
    settings = {
        "model.sharing": sharing,
        "train.global_batch": NUM_ROWS,
        "train.micro_batch": NUM_ROWS // dist.get_world_size(),
        "train.precision": place.precision,
        "engine.zero_stage": place.stage,
        "engine.offload_optimizer": place.offload,
        "optimizer": optimizer,
    }
    return tiny_engine(settings)


def run_step(config: Config, engine: Engine, lr: float, generator_lr: float | None) -> None:
    """Make one step on this rank's share of four rows."""
    ids = torch.from_numpy(synthetic_rows(NUM_ROWS, 5).astype(np.int64))
    scales = 1 / engine.module.loss_counts(ids).sum(0)
    per_rank = NUM_ROWS // dist.get_world_size()
    first = dist.get_rank() * per_rank
    rows = torch.arange(first, first + per_rank)
    engine.backward(engine.forward(StepInput(ids[rows], rows, 0, 11, *scales)).loss)
    _, was_updated = engine.step(lr, generator_learning_rate=generator_lr)
    assert was_updated


def settings_of(name: str, sharing: str) -> Settings:
    """Return the settings of a parameter; the embeddings are the generator's unless both towers read them."""
    has_own_tables = sharing in ("none", "gdes")
    is_generators = name.startswith(ONLY_THE_GENERATORS)
    if has_own_tables and name.startswith("towers.embeddings."):
        is_generators = True
    return GENERATOR if is_generators else DISCRIMINATOR


def worst_difference(place: Place, sharing: str) -> float:
    """Return the largest difference of a weight after one step, divided by the learning rate of its tower."""
    config, engine = build(place, sharing, {"clip_norm": 1e9, "beta1": 0.5})
    run_step(config, engine, 0.0, None)
    gradients = {name: kinds["exp_avg"] / (1 - 0.5) for name, kinds in whole_state(engine).items()}
    engine.close()

    config, engine = build(place, sharing, {**DISCRIMINATOR._asdict(), "generator": GENERATOR._asdict()})
    before = whole_state(engine)
    run_step(config, engine, DISCRIMINATOR.lr, GENERATOR.lr)
    after = whole_state(engine)
    engine.close()

    squares = {DISCRIMINATOR: 0.0, GENERATOR: 0.0}
    for name, gradient in gradients.items():
        squares[settings_of(name, sharing)] += float((gradient**2).sum())
    differences = []
    for name, gradient in gradients.items():
        tower = settings_of(name, sharing)
        norm = squares[tower] ** 0.5
        assert norm > tower.clip_norm, "the bound would not be tested"
        clipped = gradient * tower.clip_norm / norm
        first = (1 - tower.beta1) * clipped
        second = (1 - tower.beta2) * clipped**2
        decay = 0.0 if name.endswith("bias") or "norm" in name else tower.weight_decay
        update = first / (np.sqrt(second) + EPS) + decay * before[name]["master"]
        expected = before[name]["master"] - tower.lr * update
        differences.append(float(np.abs(after[name]["master"] - expected).max()) / tower.lr)
        assert np.allclose(after[name]["exp_avg"], first, rtol=1e-4, atol=1e-9), name
    return max(differences)


warnings.simplefilter("ignore")
get_accelerator().is_fp16_supported = lambda: True  # torch computes it on every CPU; DeepSpeed refuses some
init_distributed()
for sharing in sys.argv[1:]:
    for place in PLACES:
        print("MEASURED", sharing, *place, f"{worst_difference(place, sharing):.1e}", flush=True)
dist.destroy_process_group()
os._exit(0)
