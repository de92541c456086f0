"""A run, its supervisor and a command go on when nobody reads their output any more."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.real_runs import quick_command, step_records

from launcher.lasting_output import LastingStream


def test_a_stream_is_silent_after_the_first_failed_write() -> None:
    read_end, write_end = os.pipe()
    stream = LastingStream(os.fdopen(write_end, "w"))
    assert stream.write("one\n") == 4
    stream.flush()
    assert os.read(read_end, 100) == b"one\n"
    os.close(read_end)
    for _ in range(3):
        assert stream.write("two\n") == 4
        stream.flush()
    assert not stream.isatty() and stream.encoding.lower() == "utf-8"


@pytest.mark.parametrize("way", ["reader ends", pytest.param("closed at the start", marks=pytest.mark.sample)])
def test_a_run_reaches_its_end_without_a_reader_of_its_output(
    tiny_config: Callable[..., Path], tmp_path: Path, way: str
) -> None:
    config = tiny_config("run", **{"train.num_steps": 12, "log.eval_every_steps": 6})
    command = quick_command(config, 1)
    if way == "reader ends":
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=300) == 0
    else:
        shell = " ".join(["exec", *command, "1>&-", "2>&-"])
        assert subprocess.run(shell, shell=True, stdin=subprocess.DEVNULL, timeout=300).returncode == 0
    assert [record["step"] for record in step_records(tmp_path / "run")] == list(range(1, 13))
    assert "12/12" in (tmp_path / "run" / "log.txt").read_text()


def test_a_command_without_a_reader_of_its_output_ends_well() -> None:
    program = Path(sys.executable).with_name("electra-dist")
    process = subprocess.Popen(
        [program, "config", "configs/small.yaml"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()  # long before the command prints: it has to import its modules first
    assert (process.stderr.read(), process.wait(timeout=60)) == ("", 0)


def test_preflight_judges_the_node_without_a_reader_of_its_output(tiny_config: Callable[..., Path]) -> None:
    command = [sys.executable, "-m", "launcher.preflight", "--config", str(tiny_config("run"))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()  # long before the command prints: it has to import its modules first
        assert "Error" not in process.stderr.read()
        assert process.wait(timeout=120) == 0
