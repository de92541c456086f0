"""Why a start has failed: what the supervisor records of real ends of ranks, and what it starts again."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from electra_launcher.cli.main import app
from electra_launcher.supervise.rank_processes import Placement
from electra_launcher.supervise.start_outcome import FailedStart, explain, kills_for_memory
from support.real_runs import REPOSITORY
from support.small_disks import can_mount
from support.supervised_runs import FAKE, supervised
from typer.testing import CliRunner

from electra_dist.run.failures import Failure, output_file, read_failures
from electra_dist.run.heartbeat import Beat
from electra_dist.run.this_node import node_name

MakeConfig = Callable[..., Path]
TWO = ("--gpus-per-node", "2")
FAILS_AT = 7  # of fake_rank.py


@pytest.mark.parametrize(
    ("bug", "error", "words"),
    [
        ("the label is 7", "exception", "Python exception"),
        ("module", "import", "a Python module cannot be imported"),
    ],
)
def test_a_fault_of_the_code_at_the_same_step_is_not_started_a_third_time(
    tiny_config: MakeConfig, tmp_path: Path, bug: str, error: str, words: str
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "bug").write_text(bug)
    with supervised(FAKE, tiny_config(**{"train.num_steps": 50, "train.global_batch": 16}), run_dir, *TWO) as run:
        assert run.end() == 78, run.story()
        assert run.starts() == 2
        assert "Traceback" in run.output.read_text()  # what the rank wrote is shown, too
    first, second = read_failures(run_dir)
    assert (first.rank, first.node, first.code, first.step, first.repeated) == (1, node_name(), 1, FAILS_AT, False)
    assert (second.error, second.step, second.repeated) == (error, FAILS_AT, True)
    assert second.positions == [16 * FAILS_AT + 8, 16 * FAILS_AT + 15]  # the second of two slices of the batch
    assert output_file(run_dir, 1).read_text().splitlines()[-1] == second.line
    told = CliRunner().invoke(app, ["why", str(run_dir)]).output
    assert f"rank 1 on {node_name()}: {words}, at step 7: the same step on the same rows as before: " in told
    assert "120 to 127 of the run's order" in told
    assert ("train.skip_steps=[7]" in told) == (error == "exception")  # no row is at fault for a missing module


@pytest.mark.parametrize("is_one_console", [True, False])
def test_a_refusal_is_shown_once_on_a_console_and_is_in_each_log(
    is_one_console: bool, tiny_config: MakeConfig, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    line = "error: corpus/corpus.json: no finished corpus"
    (run_dir / "exit-0").write_text(f"78 {line}\n")
    stderr = subprocess.STDOUT if is_one_console else subprocess.PIPE
    command = [*FAKE, "--config", str(tiny_config())]

    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=stderr, text=True, timeout=60)

    refused = f"rank 0 on {node_name()}: the config or an input was refused, at step 0"
    assert done.returncode == 78 and refused in done.stdout, done.stdout
    assert done.stdout.count(line) == 1  # without a common console, stdout may be a file that is read alone
    assert f"{refused}: {line}\n" in (run_dir / "supervise-0.log").read_text()


def test_a_message_is_written_where_stderr_is_closed(tmp_path: Path) -> None:
    program = (
        "import os, pathlib, sys; from electra_launcher.supervise.messages import Log;"
        "log = Log(pathlib.Path(sys.argv[1]), 0); os.close(2); log('refused', quoted='why')"
    )

    done = subprocess.run([sys.executable, "-c", program, tmp_path], stdout=subprocess.PIPE, text=True, timeout=60)

    assert (done.returncode, done.stdout) == (0, "supervise: refused: why\n")


@pytest.mark.parametrize(("bug", "code"), [("kill", -signal.SIGKILL), ("term", -signal.SIGTERM)])
def test_a_rank_that_a_signal_from_outside_ends_is_started_again(
    tiny_config: MakeConfig, tmp_path: Path, bug: str, code: int
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "bug").write_text(bug)
    with supervised(FAKE, tiny_config(**{"train.num_steps": 20}), run_dir, *TWO) as run:
        run.wait(lambda: len(read_failures(run_dir)) >= 2)  # the same twice
        (run_dir / "bug").unlink()
        assert run.end() == 0, run.story()
        # The traceback of the other rank, which only lost its peer, would bury the cause.
        assert "Traceback" not in run.output.read_text()
        assert f"1 of 2 ranks ended because of this one; what rank 0 wrote: {output_file(run_dir, 0)}" in run.story()
    assert "connection reset by peer" in output_file(run_dir, 0).read_text()
    failures = read_failures(run_dir)
    assert {(failure.rank, failure.code, failure.error, failure.repeated) for failure in failures} == {
        (1, code, "killed", False)
    }
    known = json.loads(CliRunner().invoke(app, ["why", str(run_dir), "--json"]).output)
    assert (known["state"], known["class"]) == ("done", None)  # the newer end


def test_storage_that_is_away_before_the_training_is_told(tiny_config: MakeConfig, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "away-0").touch()
    (run_dir / "away-1").touch()
    with supervised(FAKE, tiny_config(), run_dir, *TWO) as run:
        assert run.end() == 75, run.story()
    (failure,) = read_failures(run_dir)
    assert (failure.error, failure.step, failure.kind.restart) == ("storage-away", None, "as it is")


@pytest.mark.sample
@pytest.mark.skipif(
    not can_mount() or not Path("/sys/fs/cgroup/memory").is_dir() or shutil.which("mkfs.btrfs") is None,
    reason="needs root, cgroup version 1 and btrfs-progs",
)
def test_a_real_run_names_the_exception_and_the_memory_limit_that_ended_it() -> None:
    """A sample of the drill reasons.py, in which torch puts the number of the rank before each line of a traceback."""
    drill = [
        sys.executable,
        str(REPOSITORY / "tests" / "drills" / "reasons.py"),
        "--only",
        "exception in every",
        "memory",
    ]
    done = subprocess.run(drill, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 good, 0 bad" in done.stdout


def beat(rank: int, step: int, phase: str = "step") -> Beat:
    """Return a heartbeat of the rank whose process is 100 + rank."""
    return Beat(
        pid=100 + rank, host="n", rank=rank, attempt=1, phase=phase, step=step, time=0, phase_since=0, step_s=None
    )


def failed(**fields: object) -> FailedStart:
    """Return a failed start of the ranks 2 and 3 of four; `fields` replace the defaults."""
    placement = Placement(node=1, num_nodes=2, ranks_per_node=2)
    known = {"codes": {}, "outputs": {}, "is_hung": False, "num_killed_for_memory": 0, "global_batch": 8, **fields}
    return FailedStart(name="start-000001", placement=placement, pids={2: 102, 3: 103}, **known)  # type: ignore[arg-type]


def test_the_slowest_rank_explains_a_hang() -> None:
    failure = explain(failed(is_hung=True), [beat(2, 9), beat(3, 8)], [])
    assert failure is not None and (failure.rank, failure.error, failure.step, failure.code) == (3, "hang", 8, None)


def test_a_heartbeat_of_an_earlier_process_gives_no_step() -> None:
    old = beat(2, 9).__class__(**{**beat(2, 9).__dict__, "pid": 7})
    failure = explain(failed(codes={2: 1}, outputs={2: "ModuleNotFoundError: No module named 'a'"}), [old], [])
    assert failure is not None and (failure.step, failure.positions) == (None, None)
    setup = explain(failed(codes={2: -9}), [beat(2, 0, "setup")], [])
    assert setup is not None and setup.step is None


def test_only_the_same_fault_at_the_same_step_is_a_repetition() -> None:
    def end(step: int, text: str, earlier: list[Failure]) -> Failure:
        output = f"Traceback (most recent call last):\n{text}"
        failure = explain(failed(codes={3: 1}, outputs={3: output}), [beat(3, step)], earlier)
        assert failure is not None
        return failure

    first = end(7, "ValueError: row 3", [])
    assert end(7, "ValueError: row 4", [first]).repeated
    assert not end(8, "ValueError: row 4", [first]).repeated
    assert not end(7, "KeyError: 3", [first]).repeated
    assert not end(
        7, "RuntimeError: Connection closed by peer", [end(7, "RuntimeError: Connection closed by peer", [])]
    ).repeated


def test_ranks_that_the_supervisor_has_ended_explain_nothing() -> None:
    assert explain(failed(), [beat(2, 9)], []) is None


def test_the_kernels_count_of_processes_killed_for_memory(tmp_path: Path) -> None:
    (tmp_path / "vmstat").write_text("nr_free_pages 5\noom_kill 12\n")
    assert kills_for_memory(tmp_path / "vmstat") == 12
    assert kills_for_memory(tmp_path / "none") == 0
