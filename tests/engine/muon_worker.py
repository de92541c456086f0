"""Runs one rank of engines with Muon, and prints what a test compares.

Each argument is a place of the training state, such as "1,bf16" or "2,fp32,offload". For each place it prints:

- MEASURED place difference: the largest difference of a weight from NumPy's Muon in float64, in learning rates. The
  gradients are those of AdamW's moments in engines of the same place that update no weight.
- RESUMED place cuts: the steps at which a run was cut and continued by a new engine, bit for bit.
- REFUSED place: a step that was refused has changed neither weights nor momenta.
- LOSSES place losses: of the uncut run, as hexadecimal numbers, added up over the ranks.
"""

from __future__ import annotations

import os
import sys
import warnings

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from support.real_runs import synthetic_rows
from support.tiny_engine import SPECIAL, tiny_engine, whole_state

from electra_dist.config import Config
from electra_dist.engine.engine import Engine
from electra_dist.engine.process_group import init_distributed
from electra_dist.engine.state_fragments import held_fragments, publish
from electra_dist.objectives.base import StepInput, loss_counts

NUM_ROWS = 4
NUM_STEPS = 6
CUTS = (1, 2, 5)
LR = 2e-3
DECAY = 0.1
MUON = {"name": "muon", "clip_norm": 1e9, "weight_decay": DECAY}
# At a learning rate of 0 its first moment is a sum of gradients, each halved by every later step.
GRADIENTS = {"name": "adamw", "clip_norm": 1e9, "beta1": 0.5}


def build(place: str, optimizer: dict) -> tuple[Config, Engine]:
    """Return an engine of two tiny towers at a place."""
    stage, precision, *options = place.split(",")
    settings = {
        "train.global_batch": NUM_ROWS,
        "train.micro_batch": NUM_ROWS // 2,
        "train.precision": precision,
        "engine.zero_stage": int(stage),
        "engine.offload_optimizer": "offload" in options,
        "optimizer": optimizer,
    }
    return tiny_engine(settings)


def run_step(config: Config, engine: Engine, step: int, lr: float, accept: bool = True) -> float:
    """Make one step on this rank's share of four rows in micro-batches of two; return the loss of all ranks."""
    ids = torch.from_numpy(synthetic_rows(NUM_ROWS, 5 + step).astype(np.int64))
    scales = 1 / loss_counts(ids, SPECIAL, config.objective).sum(0)
    micro_batches = torch.arange(NUM_ROWS).view(-1, 2)[dist.get_rank() :: dist.get_world_size()]
    loss = torch.zeros(())
    for number, rows in enumerate(micro_batches):
        if number:
            engine.step_micro_batch()
        output = engine.forward(StepInput(ids[rows], rows, step, 11, *scales))
        engine.backward(output.loss)
        loss += output.loss.detach()
    _, was_updated = engine.step(lr, lambda: accept)
    assert was_updated == accept
    dist.all_reduce(loss)
    return loss.item()


def newton_schulz(matrix: np.ndarray) -> np.ndarray:
    """Return the result of five steps of the quintic iteration, written from its definition by Jordan et al."""
    x = matrix / (np.sqrt((matrix**2).sum()) + 1e-7)
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * (x @ x.T @ x) + 2.0315 * (x @ x.T @ x @ x.T @ x)
    return x


def measure_difference(place: str) -> float:
    """Return the largest difference of a matrix's weight from float64 after the second of two steps, over LR.

    The first step has a learning rate of 0, so that both gradients are those of the initial weights.
    """
    config, engine = build(place, GRADIENTS)
    run_step(config, engine, 0, 0.0)
    first_sum = whole_state(engine)
    run_step(config, engine, 1, 0.0)
    second_sum = whole_state(engine)
    engine.close()

    config, engine = build(place, MUON)
    run_step(config, engine, 0, 0.0)
    before = whole_state(engine)
    run_step(config, engine, 1, LR)
    after = whole_state(engine)
    engine.close()

    differences = []
    for name, kinds in before.items():
        if ".layers." not in name or kinds["master"].ndim != 2:
            assert after[name]["exp_avg_sq"].any(), f"{name} is not updated by AdamW"
            continue
        first = first_sum[name]["exp_avg"] / 0.5
        second = (second_sum[name]["exp_avg"] - 0.5 * first_sum[name]["exp_avg"]) / 0.5
        momentum = 0.95 * 0.05 * first + 0.05 * second
        np.testing.assert_allclose(after[name]["exp_avg"], momentum, rtol=1e-4, atol=1e-9, err_msg=name)
        assert not after[name]["exp_avg_sq"].any()
        parts = np.split(0.05 * second + 0.95 * momentum, 3 if "qkv" in name else 1)
        update = np.concatenate([newton_schulz(part) for part in parts])
        scale = 0.2 * np.sqrt(max(parts[0].shape))
        expected = kinds["master"] - LR * (scale * update + DECAY * kinds["master"])
        differences.append(float(np.abs(after[name]["master"] - expected).max()) / LR)
    assert len(differences) == 16
    return max(differences)


def copy_state(engine: Engine) -> dict[str, dict[str, torch.Tensor]]:
    """Return a copy of all that this rank holds of the training state."""
    copies = {}
    for fragment in held_fragments(engine.deepspeed.module, engine.optimizer):
        copies[fragment.name] = {kind: view.clone() for kind, view in fragment.views.items()}
    return copies


def assert_equal(state: dict[str, dict[str, torch.Tensor]], expected: dict[str, dict[str, torch.Tensor]]) -> None:
    """Compare two copies of a state bit for bit."""
    assert state.keys() == expected.keys()
    for name, kinds in state.items():
        for kind, values in kinds.items():
            assert torch.equal(values, expected[name][kind]), (name, kind)


def run_uncut_and_cut(place: str) -> list[float]:
    """Continue a run from its state at each of CUTS by a new engine; return the losses of the uncut run."""
    config, engine = build(place, MUON)
    states = [copy_state(engine)]
    losses = []
    for step in range(NUM_STEPS):
        losses.append(run_step(config, engine, step, LR))
        states.append(copy_state(engine))
    engine.close()
    for cut in CUTS:
        config, engine = build(place, MUON)
        for fragment in held_fragments(engine.deepspeed.module, engine.optimizer):
            for kind, view in fragment.views.items():
                view.copy_(states[cut][fragment.name][kind])
        publish(engine.optimizer)
        for step in range(cut, NUM_STEPS):
            assert run_step(config, engine, step, LR) == losses[step], (place, cut, step)
        assert_equal(copy_state(engine), states[-1])
        engine.close()
    return losses


def check_refused_step(place: str) -> None:
    """Refuse the second of three steps, and compare with a run that never makes it."""
    config, engine = build(place, MUON)
    run_step(config, engine, 0, LR)
    before = copy_state(engine)
    run_step(config, engine, 1, LR, accept=False)
    assert_equal(copy_state(engine), before)
    run_step(config, engine, 2, LR)
    after = copy_state(engine)
    engine.close()
    config, engine = build(place, MUON)
    run_step(config, engine, 0, LR)
    run_step(config, engine, 2, LR)
    assert_equal(copy_state(engine), after)
    engine.close()


warnings.simplefilter("ignore")
get_accelerator().is_fp16_supported = lambda: True  # torch computes it on every CPU; DeepSpeed refuses some
init_distributed()
for place in sys.argv[1:]:
    print("MEASURED", place, f"{measure_difference(place):.1e}", flush=True)
    losses = run_uncut_and_cut(place)
    print("RESUMED", place, *CUTS, flush=True)
    check_refused_step(place)
    print("REFUSED", place, flush=True)
    print("LOSSES", place, *(loss.hex() for loss in losses), flush=True)
dist.destroy_process_group()
os._exit(0)
