"""A preparation that is killed, itself or one of its tasks, continues and writes the bytes of an uninterrupted one."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from prepare_processes import finish, start_prepare

Run = tuple[Path, subprocess.CompletedProcess[str]]


def bytes_of(folder: Path) -> dict[str, bytes]:
    """Return all files of an output by their names."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def wait_for(condition: Callable[[], Any], process: subprocess.Popen[str]) -> Any:
    """Wait until a condition holds while a preparation runs; return its value."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    raise AssertionError("the preparation did not come this far")


def workers_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Return the processes below a preparation that run tasks: children of its fork server."""
    servers = psutil.Process(process.pid).children()
    return [worker for server in servers for worker in server.children()]


@pytest.mark.sample
def test_kills_of_the_command_and_of_a_task_change_no_byte(
    full_run: Run, full_config: Callable[[Path], dict[str, Any]], tmp_path: Path
):
    config = full_config(tmp_path)

    # The command itself, by kill -9, while the first tasks run.
    process = start_prepare(config, tmp_path)
    workers = wait_for(lambda: workers_of(process), process)
    wait_for((tmp_path / "work" / "01-filter" / "unfinished").exists, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(workers, timeout=120)
    assert alive == []  # a task that went on could write while the next start reads

    # A task, as the kernel kills for lack of memory.
    process = start_prepare(config, tmp_path)
    wait_for((tmp_path / "work" / "02-exact-signatures").exists, process)
    wait_for(lambda: workers_of(process), process)[0].kill()
    killed = finish(process)
    assert killed.returncode == 1, killed.stderr
    assert "was killed" in killed.stdout and "run the same command again" in killed.stdout
    assert "Traceback" not in killed.stderr

    # What completed before is not done again.
    completed = tmp_path / "work" / "01-filter" / "run" / "completions" / "00000"
    moment = completed.stat().st_mtime_ns
    done = finish(start_prepare(config, tmp_path))
    assert done.returncode == 0, done.stderr
    assert completed.stat().st_mtime_ns == moment
    assert bytes_of(tmp_path / "out") == bytes_of(full_run[0] / "out")


def test_an_output_that_is_complete_is_only_reported(full_run: Run, full_config: Callable[[Path], dict[str, Any]]):
    before = {path: path.stat().st_mtime_ns for path in full_run[0].rglob("*") if path.is_file()}
    again = finish(start_prepare(full_config(full_run[0]), full_run[0]))
    assert again.returncode == 0
    assert again.stdout.splitlines()[-1] == full_run[1].stdout.splitlines()[-1]
    changed = [path for path, moment in before.items() if path.stat().st_mtime_ns != moment]
    assert [path.name for path in changed] == ["pipeline.yaml"]  # the test itself writes it
