"""The command of `cluster.notify`: when it runs, what it can read, and that its faults stay away from the run."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from electra_launcher.supervise.messages import event_of, notify
from support.supervised_runs import FAKE, supervised

from electra_dist.run.this_node import is_alive

WRITE_ALL = 'echo "$ELECTRA_DIST_EVENT $ELECTRA_DIST_EXIT_CODE $ELECTRA_DIST_RUN_DIR $ELECTRA_DIST_REASON" >> '


@pytest.mark.parametrize(
    ("code", "node", "event"),
    [
        (0, 0, "done"),
        (1, 0, "no_progress"),
        (69, 0, "unhealthy"),
        (75, 0, None),
        (78, 0, "error"),
        (0, 1, None),
        (1, 1, None),
        (69, 1, "unhealthy"),
        (78, 1, None),
    ],
)
def test_node_0_notifies_of_the_run_and_every_node_of_itself(code: int, node: int, event: str | None) -> None:
    assert event_of(code, node) == event


def test_a_command_that_fails_is_one_line_in_the_log(tmp_path: Path) -> None:
    lines: list[str] = []

    notify("exit 3", tmp_path, "done", "why", 0, lines.append)
    notify("no-such-command-anywhere", tmp_path, "done", "why", 0, lines.append)

    assert lines == [
        "cluster.notify ended with exit code 3; check the command in the config",
        "cluster.notify ended with exit code 127; check the command in the config",
    ]


def test_a_command_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    lines: list[str] = []
    pid_file = tmp_path / "pid"
    begin = time.monotonic()

    notify(f"sleep 60 & echo $! > {pid_file}; wait", tmp_path, "done", "why", 0, lines.append, timeout_s=1.0)

    assert time.monotonic() - begin < 20
    assert lines == ["cluster.notify did not end within 1 s and was killed; check the command in the config"]
    child = int(pid_file.read_text())
    deadline = time.monotonic() + 10
    while is_alive(child):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("fault", "code", "event", "reason"),
    [
        ("", 0, "done", "the target step 10 is reached"),
        ("exit-0", 78, "error", "user error; fix what the `error:` line above names"),
    ],
)
def test_the_supervisor_runs_the_command_at_the_end_of_a_run(
    tiny_config: Callable[..., Path], tmp_path: Path, fault: str, code: int, event: str, reason: str
) -> None:
    """The file `exit-0` in the run folder makes the fake rank 0 end with the exit code in it."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    if fault:
        (run_dir / fault).write_text("78")
    notice = tmp_path / "notice"
    config = tiny_config(**{"train.num_steps": 10, "cluster.notify": f"{WRITE_ALL}{notice}; exit 1"})

    with supervised(FAKE, config, run_dir) as run:
        assert run.end() == code, run.story()
        assert "cluster.notify ended with exit code 1" in run.log()[-1]

    (line,) = notice.read_text().splitlines()
    assert line.startswith(f"{event} {code} {run_dir} {reason}")
