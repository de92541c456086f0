"""Check the drill that hits one run with thousands of faults: a sample of it, its plan and its comparison."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from drills.faults.campaign import Campaign, Leg
from drills.faults.kinds import ALL_FAULTS, plan_legs
from support.checkpoints import folder_name
from support.real_runs import REPOSITORY
from support.run_records import step_with_loss

from electra_dist.checkpoint.manifest import MANIFEST
from electra_dist.config import CHECKPOINTS_DIR
from electra_dist.run.records import encode


@pytest.mark.sample
def test_a_sampled_run_with_faults_equals_the_uninterrupted_one(tmp_path: Path) -> None:
    """The first five faults hit a leg of two ranks, the other three a leg of one rank.

    The seed is one whose sample has no hang, because a hang takes seconds until it is noticed.
    """
    command = [sys.executable, str(REPOSITORY / "tests" / "drills" / "faults"), "--keep", str(tmp_path / "kept")]
    command += ["--count", "8", "--leg", "5", "--seed", "4542"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=dict(os.environ))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    record = json.loads((tmp_path / "kept" / "faults.json").read_text())
    kinds = {"commit", "missing", "torn", "ledger", "lease", "pause", "supervisor", "usr2"}
    assert record["faults"] == 8
    assert record["kinds"].keys() == kinds
    assert record["different_losses"] == 0
    assert record["unexpected_reactions"] == []
    assert record["process_ends"] == 7  # all but `pause`
    assert [leg["ranks"] for leg in record["legs"]] == [2, 1]
    # Read without the code of the drill: each step once in both runs, with equal losses.
    losses = [_losses(tmp_path / "kept" / name) for name in ("run", "reference")]
    assert losses[0] == losses[1]
    assert [step for step, _, _ in losses[0]] == list(range(1, record["compared_steps"] + 1))


def _losses(run_dir: Path) -> list[tuple[int, float, str]]:
    """Return (step, loss, receipt) of each record in a run's metrics.jsonl."""
    records = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [(record["step"], record["loss"], record["receipt"]) for record in records]


def test_the_plan_of_the_whole_drill_has_every_kind_and_enough_ends_of_processes() -> None:
    legs = plan_legs(1, 2000, 40, 4, has_disk=True)
    assert legs == plan_legs(1, 2000, 40, 4, has_disk=True) != plan_legs(2, 2000, 40, 4, has_disk=True)
    faults = [fault for leg in legs for fault in leg.faults]
    counts = Counter(fault.kind for fault in faults)
    assert len(faults) == 2000
    assert counts.keys() == ALL_FAULTS.keys()
    assert min(counts.values()) >= 19
    ends = [fault for fault in faults if ALL_FAULTS[fault.kind].then != "goes on"]
    assert len(ends) >= 800
    assert {leg.ranks for leg in legs} == {1, 2, 4}
    ranks_text = "".join(str(leg.ranks) for leg in legs)
    assert "12" in ranks_text
    assert "24" in ranks_text
    assert all(fault.kind != "disk" for leg in plan_legs(1, 400, 40, 4, has_disk=False) for fault in leg.faults)


@pytest.mark.parametrize(("changed_step", "different"), [(None, 0), (3, 1), (6, 0)])
def test_one_changed_bit_in_a_step_of_the_leg_is_counted(
    tmp_path: Path, changed_step: int | None, different: int
) -> None:
    """The leg has steps 3 to 5; both runs have recorded steps before and after them."""
    drill = Campaign(tmp_path, seed=1)
    for run_dir, changed in ((drill.run_dir, changed_step), (drill.reference_dir, None)):
        (run_dir / CHECKPOINTS_DIR / folder_name(5, 1)).mkdir(parents=True)
        (run_dir / CHECKPOINTS_DIR / folder_name(5, 1) / MANIFEST).touch()
        records = [step_with_loss(step, 0.3 if step == changed else 0.1 + 0.2) for step in range(1, 8)]
        (run_dir / "metrics.jsonl").write_bytes(b"".join(map(encode, records)))
    leg = Leg(ranks=2, place="local", first_step=2, last_step=5)
    drill.compare_leg(leg)
    assert leg.different_steps == different
    assert ('"step": 3' in leg.first_difference) == bool(different)
