"""Check the drill that hits one run with thousands of faults: a sample of it, its plan, progress and comparison."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from drills.faults import __main__ as long_drill
from drills.faults import campaign
from drills.faults.campaign import Campaign
from drills.faults.kinds import ALL_FAULTS, plan_legs
from drills.faults.progress import Leg, Progress, read_progress
from electra_launcher.chaos.drill import Hit
from support.real_runs import REPOSITORY
from support.run_records import step_with_loss

from electra_dist.run.records import encode

FIRST_LOSSES = [[5.7, 8.1], [5.6, 7.9]]


@pytest.mark.sample
def test_a_sampled_run_with_faults_equals_the_uninterrupted_one(tmp_path: Path) -> None:
    """The first five faults hit a leg of two ranks, the other three a leg of one rank.

    The seed is one whose sample has no hang, because a hang takes seconds until it is noticed.
    """
    command = [sys.executable, str(REPOSITORY / "tests" / "drills" / "faults"), "--state", str(tmp_path / "state")]
    command += ["--count", "8", "--leg", "5", "--seed", "4542"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=dict(os.environ))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    record = json.loads((tmp_path / "state" / "faults.json").read_text())
    kinds = {"commit", "missing", "torn", "ledger", "lease", "pause", "supervisor", "usr2"}
    assert record["faults"] == 8
    assert record["kinds"].keys() == kinds
    assert record["different_losses"] == 0
    assert record["unexpected_reactions"] == []
    assert record["process_ends"] == 7  # all but `pause`
    assert [leg["ranks"] for leg in record["legs"]] == [2, 1]
    # Read without the code of the drill: each step once in both runs, with equal losses.
    losses = [_losses(tmp_path / "state" / name) for name in ("run", "reference")]
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


def test_progress_is_read_as_it_was_written(tmp_path: Path) -> None:
    progress = Progress(folder=tmp_path, seed=3, count=5, first_losses=FIRST_LOSSES)
    progress.legs.append(Leg(number=0, ranks=2, place="local", first_step=0, last_step=17, different_steps=0))
    progress.legs.append(Leg(number=1, ranks=1, place="local", first_step=17))
    progress.write()
    progress.add(Hit(kind="kill", step=9, what="rank 1", code=1, recovery_s=1.5, steps_lost=2))
    found = read_progress(tmp_path)
    assert found == progress
    assert found.open_leg == progress.legs[1]
    assert read_progress(tmp_path / "elsewhere") is None


def test_a_new_run_begins_on_a_cpu_that_computes_the_first_steps_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = [FIRST_LOSSES, FIRST_LOSSES, [[5.7, 8.1], [5.6, 7.900000000000001]]]
    monkeypatch.setattr(campaign, "write_data", lambda folder: (folder / "corpus").mkdir(exist_ok=True))
    monkeypatch.setattr(campaign, "measure_first_losses", lambda folder: losses.pop(0))
    first = long_drill.begin_or_continue(tmp_path, seed=1, count=12)
    first.add(Hit(kind="kill", step=9, what="rank 1"))
    assert long_drill.begin_or_continue(tmp_path, seed=1, count=12).hits == first.hits
    assert "going on after 1 of 12 faults" in capsys.readouterr().out
    assert long_drill.begin_or_continue(tmp_path, seed=1, count=12).hits == []
    assert "this CPU computes the first 20 steps otherwise" in capsys.readouterr().out
    earlier = read_progress(tmp_path / "earlier-1")
    assert earlier is not None
    assert earlier.hits == first.hits
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "drill.json", "earlier-1"]


@pytest.mark.parametrize(("changed_step", "different"), [(None, 0), (3, 1), (6, 0)])
def test_one_changed_bit_in_a_step_of_the_leg_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed_step: int | None, different: int
) -> None:
    """The leg has steps 3 to 5; both runs have recorded steps before and after them."""
    drill = Campaign(Progress(folder=tmp_path, seed=1, count=1, first_losses=[]))
    monkeypatch.setattr(campaign, "newest_step", lambda run_dir: 5)
    for run_dir, changed in ((drill.run_dir, changed_step), (drill.reference_dir, None)):
        run_dir.mkdir()
        records = [step_with_loss(step, 0.3 if step == changed else 0.1 + 0.2) for step in range(1, 8)]
        (run_dir / "metrics.jsonl").write_bytes(b"".join(map(encode, records)))
    leg = Leg(number=0, ranks=2, place="local", first_step=2, last_step=5)
    drill.progress.legs.append(leg)
    drill.compare_leg(leg)
    assert leg.different_steps == different
    assert ('"step": 3' in leg.first_difference) == bool(different)
