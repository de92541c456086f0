"""The chaos drill: its plan, the scope of its faults, its observations, and its comparison of runs."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from electra_launcher.chaos import __main__, drill
from electra_launcher.chaos.__main__ import differences, fault_figure
from electra_launcher.chaos.drill import Drill, Hit, Planned, plan
from electra_launcher.chaos.faults import FAULTS, FILLER, SmallDisk, Victim, free_disk
from hypothesis import given, settings
from hypothesis import strategies as st
from support.run_records import EVAL, step_with_loss
from support.supervised_runs import FAKE

from electra_dist.errors import UserError
from electra_dist.run.heartbeat import Beat
from electra_dist.run.lease import LeaseLost, take_lease
from electra_dist.run.records import encode
from electra_dist.run.this_node import MARK, mark_of

KINDS = sorted(FAULTS)


@settings(deadline=None)
@given(count=st.integers(1, 80), every=st.integers(1, 50), spare=st.integers(0, 500), seed=st.integers(0, 10**6))
def test_a_plan_has_every_kind_equally_often_and_a_checkpoint_between_any_two_faults(
    count: int, every: int, spare: int, seed: int
) -> None:
    num_steps = 2 * every * (count + 1) + spare
    planned = plan(KINDS, count, num_steps, every, seed)
    assert planned == plan(KINDS, count, num_steps, every, seed)
    times = Counter(fault.kind for fault in planned)
    assert sum(times.values()) == count and max(times.values()) - min(times[k] for k in KINDS) <= 1
    for one, two in itertools.pairwise(planned):
        assert two.step // every > one.step // every
    assert planned[-1].step < num_steps


def test_a_run_too_short_for_its_faults_is_refused_naming_the_length_that_it_needs() -> None:
    with pytest.raises(UserError, match=r"at least 610 .*not 609"):
        plan(KINDS, 60, 609, 5, 1)


def victim_of(folder: Path, tmp_path: Path) -> tuple[Victim, Path]:
    """Make a run folder with three checkpoints, the newest uncommitted; return the victim and the newest committed."""
    for number in (5, 10, 15):
        checkpoint = folder / "checkpoints" / f"step-{number:08d}-a0001"
        checkpoint.mkdir(parents=True)
        (checkpoint / "rank-00000.safetensors").write_bytes(bytes(range(200)))
        if number < 15:
            (checkpoint / "manifest.json").write_bytes(b'{"a": 1}\n')
    return Victim(run_dir=folder, supervisor=None), folder / "checkpoints" / "step-00000010-a0001"


def contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every file below a folder, by relative path."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("kind", ["torn", "flip"])
def test_damage_hits_exactly_one_file_of_the_newest_committed_checkpoint(tmp_path: Path, kind: str) -> None:
    damaged_names = set()
    for seed in range(20):
        run = tmp_path / f"{seed}"
        victim, newest = victim_of(run, tmp_path)
        before = contents(run)
        FAULTS[kind].act(victim, random.Random(seed))
        after = contents(run)
        changed = [name for name in before if before[name] != after.get(name)]
        assert before.keys() == after.keys() and len(changed) == 1
        (name,) = changed
        assert (run / name).parent == newest
        damaged_names.add(Path(name).name)
        if kind == "torn":
            assert len(after[name]) < len(before[name]) and before[name].startswith(after[name])
        else:
            assert sum(a != b for a, b in zip(before[name], after[name], strict=True)) == 1
    assert damaged_names == {"rank-00000.safetensors", "manifest.json"}


def test_a_missing_part_is_a_tensor_file_of_the_newest_committed_checkpoint(tmp_path: Path) -> None:
    for seed in range(5):
        victim, newest = victim_of(tmp_path / f"{seed}", tmp_path)
        before = contents(victim.run_dir)
        FAULTS["missing"].act(victim, random.Random(seed))
        deleted = before.keys() - contents(victim.run_dir).keys()
        assert deleted == {f"checkpoints/{newest.name}/rank-00000.safetensors"}


@pytest.mark.parametrize(("kind", "name"), [("metrics", "metrics.jsonl"), ("ledger", "ledger.jsonl")])
def test_a_torn_tail_is_the_beginning_of_a_line_after_all_whole_lines(tmp_path: Path, kind: str, name: str) -> None:
    victim, _ = victim_of(tmp_path / "run", tmp_path)
    lines = b'{"step": 1}\n{"step": 2}\n'
    for seed in range(20):
        (victim.run_dir / name).write_bytes(lines)
        FAULTS[kind].act(victim, random.Random(seed))
        whole, tail = (victim.run_dir / name).read_bytes().split(lines)
        assert whole == b""
        assert tail
        assert b'{"step": 2}'.startswith(tail)
        assert len(tail) < len(b'{"step": 2}')


def test_a_stolen_lease_is_lost_to_its_owner_and_can_be_taken_once_it_is_returned(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    victim, _ = victim_of(run_dir, tmp_path)
    owner = take_lease(run_dir, "supervisor", say=print)
    fault = FAULTS["lease"]
    fault.act(victim, random.Random(1))
    with pytest.raises(LeaseLost, match="taken over by another start"):
        owner.check()
    assert fault.undo
    fault.undo(victim)
    owner.release()
    take_lease(run_dir, "supervisor", say=print).release()


@pytest.mark.parametrize("kind", ["kill", "hang", "pause", "term-rank", "usr2", "power", "torn", "flip", "missing"])
@pytest.mark.real_start
def test_no_fault_touches_a_process_of_another_run(tmp_path: Path, kind: str) -> None:
    victim, _ = victim_of(tmp_path / "run", tmp_path)
    sleep = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)", "--state", str(tmp_path / "run")]
    marks = [mark_of(tmp_path / "run", 0), mark_of(tmp_path / "run2", 0), mark_of(tmp_path, 0)]
    mine, *strangers = (
        subprocess.Popen(sleep, env={**os.environ, MARK: mark, "RANK": "0"}, stdout=subprocess.PIPE) for mark in marks
    )
    try:
        for process in (mine, *strangers):
            assert process.stdout
            process.stdout.readline()
        FAULTS[kind].act(victim, random.Random(1))
        if kind in ("hang", "pause"):
            os.waitpid(mine.pid, os.WUNTRACED)
        else:
            assert mine.wait(10) < 0
        for stranger in strangers:
            state = Path(f"/proc/{stranger.pid}/stat").read_text().rpartition(")")[2].split()[0]
            assert stranger.poll() is None and state in "RSD"
    finally:
        for process in (mine, *strangers):
            process.kill()
            process.wait()


def write_metrics(run: Path, losses: list[float]) -> Path:
    """Make a run folder whose metrics have these losses, in steps from 1, and one evaluation; return the folder."""
    run.mkdir()
    records = [step_with_loss(step, loss, step_s=step / 7) for step, loss in enumerate(losses, start=1)]
    (run / "metrics.jsonl").write_bytes(b"".join(map(encode, [*records, EVAL])))
    return run


def test_a_difference_of_one_bit_in_one_loss_is_found(tmp_path: Path) -> None:
    losses = [5.1, 5.0, 0.1 + 0.2]
    reference = write_metrics(tmp_path / "reference", losses)
    assert differences(write_metrics(tmp_path / "same", losses), reference) == (3, "")
    assert '"step": 3' in differences(write_metrics(tmp_path / "bit", [5.1, 5.0, 0.3]), reference)[1]
    assert differences(write_metrics(tmp_path / "short", losses[:2]), reference)[1] == (
        f"{tmp_path / 'short'} recorded 2 steps, the reference run 3"
    )


def test_the_picture_shows_both_losses_of_both_runs_how_far_they_are_apart_and_every_fault_in_its_group(
    tmp_path: Path,
) -> None:
    reference = write_metrics(tmp_path / "reference", [5.0, 4.0, 3.0])
    kinds = ("kill", "hang", "flip", "disk", "s3-500")
    hits = [Hit(kind=kind, step=step, what="") for step, kind in enumerate(kinds, start=2)]
    generator, discriminator, faults = fault_figure(
        reference, write_metrics(tmp_path / "same", [5.0, 4.0, 3.0]), hits
    ).axes
    assert generator.get_legend_handles_labels()[1] == ["uninterrupted run", "run with faults"]
    for axes in (generator, discriminator):
        assert axes.get_title().endswith("exactly 0 at every step")
    groups = ["process killed or frozen: 2", "file damaged: 1", "storage failed: 2"]
    assert [label.get_text() for label in faults.get_yticklabels()] == groups
    assert [list(line.get_xdata()) for line in faults.lines] == [[2, 3], [4], [5, 6]]
    other = write_metrics(tmp_path / "other", [5.0, 4.0, 3.5])
    for axes in fault_figure(reference, other, hits).axes[:2]:
        assert list(axes.lines[1].get_ydata()) == [5.0, 4.0, 3.5]
        assert axes.get_title().endswith("up to 0.5 in 3 of 3 steps")
    short = write_metrics(tmp_path / "short", [5.0, 4.0])
    for axes in fault_figure(reference, short, hits).axes[:2]:
        assert axes.get_title().endswith("up to 0 in 2 of 3 steps")


def test_each_kind_of_process_fault_is_injected_observed_and_survived(
    tiny_config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks are fakes without training; tests/drills/chaos_drill.py injects all faults into real ranks."""
    monkeypatch.setattr(drill, "PATIENCE_S", 120.0)
    config = tiny_config(**{"train.num_steps": 100_000, "cluster.hang_step_floor_s": 3.0})
    command = [*FAKE, "--config", str(config), "--gpus-per-node", "2"]
    run = Drill(tmp_path / "run", command, seed=1)
    try:
        kinds = ["kill", "hang", "term", "power"]
        hits = [
            run.hit(Planned(kind=kind, step=20 * n, in_save=False, delay=0.5)) for n, kind in enumerate(kinds, start=1)
        ]
        for hit in hits:
            assert not hit.problem, hit
            assert hit.recovery_s and hit.recovery_s > 0.1
        assert [hit.code for hit in hits] == [1, 1, 75, -9]
        assert hits[2].steps_lost == 0
        assert all(0 <= hit.steps_lost <= 6 for hit in hits)
        assert hits[1].notice_s and 2.5 < hits[1].notice_s < 20
        assert hits[3].notice_s is None  # after `power` no process is left to notice it
    finally:
        run.close()
    assert run._victim().pids() == []


def test_a_rank_that_only_an_earlier_start_had_does_not_delay_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first start of the ranks had ranks 0 and 1, the second one has only rank 0."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    event = {"time": "2026-01-01T00:00:00+00:00", "event": "checkpoint", "step": 4, "attempt": 2}
    (run_dir / "ledger.jsonl").write_text(json.dumps(event) + "\n")
    fields = {"host": "n1", "reason": "", "time": 1.0, "phase_since": 1.0}
    beats = [
        Beat(pid=7, rank=0, attempt=2, phase="step", step=6, step_s=0.1, **fields),
        Beat(pid=6, rank=1, attempt=1, phase="done", step=3, step_s=None, **fields),
    ]
    monkeypatch.setattr(drill, "read_heartbeats", lambda run_dir: beats)
    run = Drill(run_dir, ["true"], seed=1)
    run.finish()
    planned = Planned(kind="kill", step=5, in_save=False, delay=0.0)
    assert run._ready(planned) == beats[0]
    beats[1] = dataclasses.replace(beats[1], attempt=2, phase="step")  # a rank that has not measured a step yet
    assert run._ready(planned) is None


def test_a_fault_without_its_effect_raises_stuck(
    tiny_config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault `hang` that hangs no process: the run continues, which the drill must report."""
    monkeypatch.setitem(FAULTS, "hang", dataclasses.replace(FAULTS["hang"], act=lambda victim, draw: "nobody"))
    config = tiny_config(**{"train.num_steps": 100_000})
    command = [*FAKE, "--config", str(config), "--gpus-per-node", "2"]
    run = Drill(tmp_path / "run", command, seed=1)
    try:
        run._wait_for(lambda: ((beat := run._beat()) and beat.step > 8) or None)
        monkeypatch.setattr(drill, "PATIENCE_S", 5.0)
        with pytest.raises(drill.Stuck):
            run.hit(Planned(kind="hang", step=10, in_save=False, delay=0.0))
    finally:
        run.close()


def test_an_unknown_fault_or_an_existing_run_folder_is_refused_with_78(
    tiny_config: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(tiny_config(**{"train.num_steps": 1000}))
    assert __main__.main([config, "--faults", "kill,fire"]) == 78
    assert "--faults fire: no such kind of fault; choose from kill,hang" in capsys.readouterr().err
    (tmp_path / "run-chaos").mkdir()
    assert __main__.main([config]) == 78
    assert "run-chaos exists already" in capsys.readouterr().err
    assert not (tmp_path / "run-reference").exists()


def test_a_reference_that_fails_is_named_with_the_last_line_of_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drill may work in a temporary folder, which takes the output with it."""
    failing = [sys.executable, "-c", "print('one'); print('port 29500 is taken'); raise SystemExit(1)"]
    monkeypatch.setattr(__main__, "_supervise_command", lambda *_: failing)
    with pytest.raises(UserError, match=r"ended with exit code 1 \(port 29500 is taken\); fix what .*reference.log"):
        __main__._make_reference(tmp_path / "reference", argparse.Namespace(config="c.yaml", ranks=1, set=[]))


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_only_the_checkpoint_folder_runs_full_and_its_files_are_kept_afterwards(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    disk = SmallDisk(folder, 1 << 20)
    try:
        (folder / "kept").write_bytes(b"x" * 5000)
        victim = Victim(run_dir=tmp_path / "run", supervisor=None)
        FAULTS["disk"].act(victim, random.Random(1))
        with pytest.raises(OSError, match="No space left"):
            (folder / "more").write_bytes(b"x" * 5000)
        (tmp_path / "run" / "elsewhere").write_bytes(b"x" * (2 << 20))
        free_disk(victim)
        (folder / "more").write_bytes(b"y" * 5000)
    finally:
        disk.close()
    assert sorted(file.name for file in folder.iterdir()) == ["kept", "more"]
    assert not os.path.ismount(folder) and not (folder / FILLER).exists()
