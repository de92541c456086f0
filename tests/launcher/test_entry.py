"""Every program ends with the documented code and one line, and goes on when nobody reads its output any more."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from electra_launcher.entry import LastingStream, exit_code_of
from electra_launcher.pretrain import hidden
from support.real_runs import quick_command, step_records

from electra_dist.errors import StorageLost, StoreAway, StoreMissing, UserError


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("the key is wrong"), 78, "error: the key is wrong"),
        (StoreMissing("no such object"), 78, "error: no such object"),
        (StoreAway("disk full"), 75, "error: disk full"),
        (StorageLost("silent for 900 s"), 75, "error: silent for 900 s"),
        (KeyboardInterrupt(), 75, "interrupted"),
    ],
)
def test_an_error_that_a_person_must_know_is_one_line_and_its_exit_code(
    error: BaseException, code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def program() -> int:
        raise error

    assert exit_code_of(program) == code
    assert capsys.readouterr().err == f"{line}\n"
    assert exit_code_of(program, shows=lambda error: False, interrupted="") == code
    assert capsys.readouterr().err == ""
    is_away = isinstance(error, StoreAway)
    assert exit_code_of(program, code_if_away=78) == (78 if is_away else code)


def test_a_program_that_ends_by_itself_keeps_its_code_and_a_bug_is_raised() -> None:
    assert exit_code_of(lambda: 69) == 69
    with pytest.raises(ZeroDivisionError):
        exit_code_of(lambda: 1 // 0)


@pytest.mark.parametrize(("body", "code"), [("return 69", 69), ("sys.exit(2)", 2), ("1 / 0", 1)])
def test_a_process_that_is_ended_has_the_code_of_its_program_whatever_would_follow(body: str, code: int) -> None:
    """Python's own clean-up may abort a process with threads of torch."""
    lines = [
        "import atexit, os, sys",
        "from electra_launcher.entry import end_process_with",
        "atexit.register(os._exit, 3)",
    ]
    lines += ["def program():", "    print('last line')", f"    {body}", "end_process_with(program)"]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=60)
    assert done.returncode == code
    assert done.stdout == "last line\n"
    assert ("ZeroDivisionError" in done.stderr) == (code == 1)


def test_a_hidden_module_is_as_good_as_not_installed_until_the_end_of_the_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start hides MLflow from DeepSpeed, and a run that reports to MLflow imports it later."""
    (tmp_path / "slow_to_import.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    with hidden("slow_to_import"), pytest.raises(ImportError):
        importlib.import_module("slow_to_import")
    assert importlib.import_module("slow_to_import").value == 1
    with hidden("slow_to_import"):
        assert importlib.import_module("slow_to_import").value == 1
    assert sys.modules.pop("slow_to_import").value == 1


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
    command = [sys.executable, "-m", "electra_launcher.preflight", "--config", str(tiny_config("run"))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()  # long before the command prints: it has to import its modules first
        assert "Error" not in process.stderr.read()
        assert process.wait(timeout=120) == 0
