"""Texts are read and written with a named encoding, because that of the locale differs from machine to machine.

What other programs print may hold any byte, so it is never decoded strictly.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.real_runs import write_tiny_config

ROOT = Path(__file__).parents[1]
ASCII_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
# Number of the positional argument that is the encoding, and of the one that is the mode.
ENCODING_AT = {"read_text": 0, "write_text": 1}
MODE_AT = {"open": 1, "fdopen": 1}
OTHER_OPENS = ("os", "tarfile", "cls", "self")  # they open no text file


@pytest.fixture(scope="module")
def calls() -> list[tuple[str, ast.Call]]:
    """The calls of all sources that open, read or write files or start programs, each with its place."""
    found = []
    for package in ("electra_dist", "launcher", "kernels"):
        for file in sorted((ROOT / package).rglob("*.py")):
            text = file.read_text("utf-8")
            if re.search(r"open\(|read_text|write_text|subprocess", text):
                nodes = ast.walk(ast.parse(text))
                found += [
                    (f"{file.relative_to(ROOT)}:{node.lineno}", node) for node in nodes if isinstance(node, ast.Call)
                ]
    return found


def lacks_encoding(call: ast.Call) -> bool:
    """Return whether a call opens, reads or writes a text without naming its encoding."""
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    if name in ENCODING_AT:
        return len(call.args) <= ENCODING_AT[name] and "encoding" not in keywords
    if name not in MODE_AT or (isinstance(owner, ast.Name) and owner.id in OTHER_OPENS and name == "open"):
        return False
    mode_at = 0 if owner is not None and name == "open" else MODE_AT[name]
    mode = keywords.get("mode", call.args[mode_at] if len(call.args) > mode_at else ast.Constant("r"))
    if not isinstance(mode, ast.Constant) or not isinstance(mode.value, str):
        return False  # the method of another class, or a mode that a caller chooses
    is_of_a_class = isinstance(owner, ast.Name) and owner.id[0].isupper()
    return not is_of_a_class and "b" not in mode.value and "encoding" not in keywords


def decodes_strictly(call: ast.Call) -> bool:
    """Return whether a call reads the output of a program as text of the locale, or fails on a byte of it."""
    keywords = {keyword.arg for keyword in call.keywords}
    if "encoding" in keywords and "errors" not in keywords:
        return "capture_output" in keywords
    return ast.unparse(call.func).startswith("subprocess.") and bool(keywords & {"text", "universal_newlines"})


def test_every_text_file_is_opened_with_an_encoding(calls: list[tuple[str, ast.Call]]):
    assert [place for place, call in calls if lacks_encoding(call)] == []


def test_what_a_program_prints_is_never_decoded_strictly(calls: list[tuple[str, ast.Call]]):
    assert [place for place, call in calls if decodes_strictly(call)] == []


@pytest.mark.real_start
def test_programs_run_in_utf8_mode_in_an_ascii_locale():
    program = (
        "import sys; from electra_launcher.entry import begin_program; begin_program();"
        "print(sys.flags.utf8_mode, sys.flags.dont_write_bytecode, sys.argv[1])"
    )
    environment = {**os.environ, **ASCII_LOCALE}
    command = [sys.executable, "-B", "-c", program, "\N{LATIN SMALL LETTER E WITH ACUTE}"]
    done = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", cwd=ROOT)
    assert done.stdout == "1 1 \N{LATIN SMALL LETTER E WITH ACUTE}\n", done.stderr


@pytest.mark.real_start
def test_the_command_line_finds_a_folder_whose_name_is_not_ascii_in_an_ascii_locale(tmp_path: Path):
    name = "\N{LATIN SMALL LETTER E WITH ACUTE}"
    config = write_tiny_config(tmp_path / f"{name}.yaml", tmp_path / name, "corpus")
    command = [sys.executable, "-c", "from electra_launcher.cli.main import main; main()", "submit", "--dry-run"]
    command += ["--config", str(config), "--nodes", "1", "--gpus-per-node", "0"]
    environment = {**os.environ, **ASCII_LOCALE}
    done = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert f"\nrun_dir='{tmp_path}/{name}'\n" in done.stdout


@pytest.mark.sample
@pytest.mark.real_start
def test_a_run_trains_in_an_ascii_locale(tiny_config, pretrain, losses):
    """torch's compiler, which DeepSpeed loads, opens files of its own without an encoding."""
    config = tiny_config("run", **{"train.num_steps": 2, "data.heldout": None})
    pretrain(config, 1, env=ASCII_LOCALE)
    assert len(losses(config.parent / "run")) == 2
