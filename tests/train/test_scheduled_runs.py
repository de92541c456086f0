"""Real runs with schedules: records, exact resume with another number of ranks, and a weight that jumps."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.real_runs import go_back, step_records

Pretrain = Callable[..., subprocess.CompletedProcess[str]]
Losses = Callable[[Path], list[tuple]]
MakeConfig = Callable[..., Path]

pytestmark = pytest.mark.multiproc

NUM_STEPS = 20
JUMP = 6  # step at which the weight of the discriminator's loss jumps: 30 % of the run
SETTINGS = {
    "train.num_steps": NUM_STEPS,
    "train.precision": "bf16",  # bit for bit the same on one and two ranks
    "model.hidden_dropout": 0.1,
    "objective.temperature": {"from": 4, "to": 1, "shape": "exponential", "tau": 0.15},
    "objective.mask_prob": {"from": 0.3, "to": 0.15, "shape": "linear"},
    "objective.mlm_weight": {"from": 1, "to": 0.5, "shape": "cosine", "over": 0.5},
    "objective.rtd_weight": {"from": 0, "to": 50, "shape": "step", "over": 0.3},
    "objective.random_share": {"from": 1, "to": 0, "shape": "linear", "over": 0.6},
    "objective.random_from": "unigram",
    "optimizer.generator": {"lr": 5e-4, "warmup_steps": 4, "beta2": 0.95, "weight_decay": 0.1, "clip_norm": 0.05},
    "guard.window": 4,  # full before the jump
    "guard.spike_sigma": 30,
    "checkpoint.every_steps": 3,
    "checkpoint.keep_last": 10,
}


def without_gradient_norm(run: list[tuple]) -> list[tuple]:
    """Return the losses of a run without the gradient norm, a sum in an order that depends on the number of ranks."""
    return [record[:4] + record[5:] for record in run]


def test_scheduled_runs_resume_exactly_and_a_jump_of_a_weight_stops_no_step(
    tiny_config: MakeConfig, pretrain: Pretrain, losses: Losses, tmp_path: Path
) -> None:
    """The checkpoint of step 6 is of the moment before the jump, when the guard's window holds other losses."""
    uncut = tmp_path / "uncut"
    pretrain(tiny_config("uncut", **SETTINGS), 2)

    events = [json.loads(line)["event"] for line in (uncut / "ledger.jsonl").read_text().splitlines()]
    assert "stopped_step" not in events
    assert not (uncut / "skipped_steps.json").exists()

    # The total loss does jump, far above what the guard would accept.
    records = step_records(uncut)
    assert len(records) == NUM_STEPS
    assert records[JUMP]["loss"] > 3 * records[JUMP - 1]["loss"]

    # Every record has the values of its step.
    u = np.arange(NUM_STEPS) / NUM_STEPS
    expected = {
        "temperature": 1 + 3 * np.exp(-u / 0.15),
        "mask_prob": 0.3 - 0.15 * u,
        "mlm_weight": 0.5 + 0.25 * (1 + np.cos(np.pi * np.minimum(u / 0.5, 1))),
        "rtd_weight": np.where(np.arange(NUM_STEPS) < JUMP, 0.0, 50.0),
        "random_share": np.maximum(1 - u / 0.6, 0),
    }
    for key, values in expected.items():
        np.testing.assert_allclose([record[key] for record in records], values, atol=1e-12)
    for record in records:
        total = record["mlm_weight"] * record["mlm_loss"] + record["rtd_weight"] * record["rtd_loss"]
        assert record["loss"] == pytest.approx(total, rel=1e-5)

    cut = tmp_path / "cut"
    shutil.copytree(uncut, cut)
    go_back(cut, JUMP)
    output = pretrain(tiny_config("cut", **SETTINGS), 1).stdout
    assert f"restored step {JUMP}" in output
    assert "schedules | objective.mask_prob 0.3 to 0.15 (linear, over 1)" in output
    assert without_gradient_norm(losses(cut)) == without_gradient_norm(losses(uncut))
