"""The drill itself: its plan, what its faults touch, what it sees, and that it finds a run that is not the same."""

from __future__ import annotations

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
from hypothesis import given
from hypothesis import strategies as st
from support.supervised_runs import FAKE_WITHOUT_DEEPSPEED

from electra_dist.errors import UserError
from electra_dist.run.processes import MARK, mark_of
from launcher.chaos import __main__, drill
from launcher.chaos.__main__ import differences
from launcher.chaos.drill import Drill, Planned, plan
from launcher.chaos.faults import FAULTS, FILLER, Victim

KINDS = sorted(FAULTS)


@given(count=st.integers(1, 80), every=st.integers(1, 50), spare=st.integers(0, 500), seed=st.integers(0, 10**6))
def test_a_plan_has_every_kind_as_often_and_a_checkpoint_between_any_two(
    count: int, every: int, spare: int, seed: int
) -> None:
    num_steps = 2 * every * (count + 1) + spare
    planned = plan(KINDS, count, num_steps, every, seed)
    assert planned == plan(KINDS, count, num_steps, every, seed)
    times = Counter(fault.kind for fault in planned)
    assert sum(times.values()) == count and max(times.values()) - min(times[k] for k in KINDS) <= 1
    for one, two in itertools.pairwise(planned):
        assert two.step // every > one.step // every
        assert (one.kind, two.kind) != ("launcher", "launcher")  # there is none left after the first
    assert planned[-1].step < num_steps


def test_a_run_too_short_for_its_faults_is_refused_with_the_length_that_it_needs() -> None:
    with pytest.raises(UserError, match=r"at least 610 .*not 609"):
        plan(KINDS, 60, 609, 5, 1)


def test_a_plan_of_two_kinds_is_possible_and_one_of_a_fault_that_changes_nothing_is_refused() -> None:
    kinds = [fault.kind for fault in plan(["launcher", "kill"], 60, 610, 5, 1)]
    assert Counter(kinds) == {"launcher": 30, "kill": 30}
    with pytest.raises(UserError, match="launcher can be done once a start"):
        plan(["launcher"], 3, 610, 5, 1)


def victim_of(folder: Path, tmp_path: Path) -> tuple[Victim, Path]:
    """A run folder with three checkpoints, the newest of which is not committed."""
    for number in (5, 10, 15):
        checkpoint = folder / "checkpoints" / f"step-{number:08d}-a0001"
        checkpoint.mkdir(parents=True)
        (checkpoint / "rank-00000.safetensors").write_bytes(bytes(range(200)))
        if number < 15:
            (checkpoint / "manifest.json").write_bytes(b'{"a": 1}\n')
    return Victim(run_dir=folder, supervisor=None), folder / "checkpoints" / "step-00000010-a0001"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("kind", ["torn", "flip"])
def test_damage_is_done_to_one_file_of_the_newest_committed_checkpoint(tmp_path: Path, kind: str) -> None:
    seen = set()
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
        seen.add(Path(name).name)
        if kind == "torn":
            assert len(after[name]) < len(before[name]) and before[name].startswith(after[name])
        else:
            assert sum(a != b for a, b in zip(before[name], after[name], strict=True)) == 1
    assert seen == {"rank-00000.safetensors", "manifest.json"}


@pytest.mark.parametrize("kind", ["kill", "hang", "term-rank", "usr2", "power", "torn", "flip"])
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
        if kind == "hang":
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
    run.mkdir()
    lines = [
        {"step": n, "loss": x, "mlm_loss": x, "rtd_loss": x, "grad_norm": x, "receipt": f"{n:016x}", "step_s": n / 7}
        for n, x in enumerate(losses, start=1)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"step": 3, "auc": 0.5}]))
    return run


def test_one_bit_of_one_loss_is_a_difference(tmp_path: Path) -> None:
    losses = [5.1, 5.0, 0.1 + 0.2]
    reference = write_metrics(tmp_path / "reference", losses)
    assert differences(write_metrics(tmp_path / "same", losses), reference) == (3, "")
    assert '"step": 3' in differences(write_metrics(tmp_path / "bit", [5.1, 5.0, 0.3]), reference)[1]
    assert differences(write_metrics(tmp_path / "short", losses[:2]), reference)[1] == "2 steps, not 3"


def test_each_kind_of_process_fault_is_done_seen_and_survived(
    tiny_config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On ranks that only pretend; tests/drills/chaos_drill.py does it to real ones, with all faults."""
    monkeypatch.setattr(drill, "PATIENCE_S", 120.0)
    config = tiny_config(**{"train.num_steps": 100_000, "cluster.hang_step_floor_s": 3.0})
    command = [*FAKE_WITHOUT_DEEPSPEED, "--config", str(config), "--gpus-per-node", "2"]
    run = Drill(tmp_path / "run", command, seed=1, disk=None)
    try:
        kinds = ["kill", "hang", "term", "power"]
        hits = [
            run.hit(Planned(kind=kind, step=20 * n, in_save=False, delay=0.5)) for n, kind in enumerate(kinds, start=1)
        ]
        for hit in hits:
            assert not hit.fault, hit
            assert hit.recovery_s and hit.recovery_s > 0.1
        assert [hit.code for hit in hits] == [1, 1, 75, -9]
        assert [hit.steps_lost for hit in hits][2] == 0
        assert all(0 <= hit.steps_lost <= 6 for hit in hits)
        assert hits[1].notice_s and 2.5 < hits[1].notice_s < 20
        assert hits[3].notice_s is None  # nobody is left to notice that
    finally:
        run.close()
    assert run._victim().pids() == []


def test_a_fault_without_its_effect_is_bad(
    tiny_config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hang that is none: the run goes on, and the drill says that it should not have."""
    monkeypatch.setitem(FAULTS, "hang", dataclasses.replace(FAULTS["hang"], act=lambda victim, draw: "nobody"))
    config = tiny_config(**{"train.num_steps": 100_000})
    command = [*FAKE_WITHOUT_DEEPSPEED, "--config", str(config), "--gpus-per-node", "2"]
    run = Drill(tmp_path / "run", command, seed=1, disk=None)
    try:
        run._wait_for(lambda: ((beat := run._beat()) and beat.step > 8) or None)
        monkeypatch.setattr(drill, "PATIENCE_S", 5.0)
        with pytest.raises(drill.Stuck):
            run.hit(Planned(kind="hang", step=10, in_save=False, delay=0.0))
    finally:
        run.close()


def test_mistakes_of_the_command_line_are_one_line_and_78(
    tiny_config: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(tiny_config(**{"train.num_steps": 1000}))
    assert __main__.main([config, "--faults", "kill,fire"]) == 78
    assert "--faults fire: choose of kill,hang" in capsys.readouterr().err
    (tmp_path / "run-chaos").mkdir()
    assert __main__.main([config]) == 78
    assert "run-chaos is there already" in capsys.readouterr().err
    assert not (tmp_path / "run-reference").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_the_full_disk_is_a_small_one_of_its_own_and_leaves_its_files(tmp_path: Path) -> None:
    from launcher.chaos.faults import SmallDisk

    folder = tmp_path / "run" / "checkpoints"
    disk = SmallDisk(folder, 1 << 20)
    try:
        (folder / "kept").write_bytes(b"x" * 5000)
        FAULTS["disk"].act(Victim(run_dir=tmp_path / "run", supervisor=None), random.Random(1))
        with pytest.raises(OSError, match="No space left"):
            (folder / "more").write_bytes(b"x" * 5000)
        (tmp_path / "run" / "elsewhere").write_bytes(b"x" * (2 << 20))
        disk.free()
        (folder / "more").write_bytes(b"y" * 5000)
    finally:
        disk.close()
    assert sorted(file.name for file in folder.iterdir()) == ["kept", "more"]
    assert not os.path.ismount(folder) and not (folder / FILLER).exists()
