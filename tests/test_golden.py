"""The golden set: what the product computes, writes and prints equals the records; every planted change is found."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from golden import comparison, training
from golden.comparison import RECORDS, differences, machine, read_record, write_record
from golden.kinds import KINDS
from support.import_graph import ROOT

# One training for each objective, in turns over stages, precisions and numbers of ranks; the others are a drill.
SAMPLE_TRAININGS = [
    f"{objective} zero {number % 4} {training.PRECISIONS[number % 3]} ranks {1 + number % 2}"
    for number, objective in enumerate(training.OBJECTIVES * 2)
]
QUICK_TRAININGS = SAMPLE_TRAININGS[1:4]


def golden(kind: str, entry: str = "", *options: str) -> subprocess.CompletedProcess[str]:
    """Compare entries of a kind with the record by the command."""
    command = [sys.executable, str(ROOT / "tests/support/golden.py"), "--check", "--kind", kind, "--entry", entry]
    return subprocess.run([*command, *options], capture_output=True, text=True, cwd=ROOT)


def must_be_of_this_machine(kind: str) -> None:
    """Skip the test if the bits of a record hold on another kind of CPU only."""
    made_on, _ = read_record(KINDS[kind])
    if KINDS[kind].is_of_a_cpu and made_on != machine():
        pytest.skip(f"the record of {kind} was made on another kind of CPU: {made_on}")


@pytest.mark.parametrize("kind", KINDS)
def test_each_record_has_every_entry(kind: str):
    files = [file for file in RECORDS.glob("*.json") if file.stem.partition("-")[0] == kind]
    assert files
    for file in files:
        assert sorted(json.loads(file.read_text())["entries"]) == sorted(KINDS[kind].names()), file.name


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("kind", "entry"),
    [
        ("identities", ""),
        ("scripts", "chain"),
        *(
            pytest.param(kind, "", marks=pytest.mark.sample)
            for kind in ("scripts", "errors", "batches", "corpora", "json_outputs", "exports")
        ),
    ],
)
def test_entries_are_the_recorded_ones(kind: str, entry: str):
    must_be_of_this_machine(kind)
    done = golden(kind, entry)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.multiproc
@pytest.mark.parametrize(
    "entry",
    [
        *QUICK_TRAININGS,
        *(pytest.param(name, marks=pytest.mark.sample) for name in SAMPLE_TRAININGS if name not in QUICK_TRAININGS),
        *(pytest.param(name, marks=pytest.mark.drill) for name in training.names() if name not in SAMPLE_TRAININGS),
    ],
)
def test_a_training_is_the_recorded_one(entry: str):
    must_be_of_this_machine("training")
    done = golden("training", entry)
    assert done.returncode == 0, done.stdout + done.stderr


# The test of the test: a change in any kind of entry is found, in the record and in the product.


def _with_a_changed_leaf(tree: Any) -> Any:
    """Return a copy whose last value is another one."""
    if isinstance(tree, dict):
        *_, last = sorted(tree)
        return {**tree, last: _with_a_changed_leaf(tree[last])}
    if isinstance(tree, list):
        return [*tree[:-1], _with_a_changed_leaf(tree[-1])] if tree else ["planted"]
    return f"{tree}?" if isinstance(tree, str) else "planted"


@pytest.mark.parametrize("kind", KINDS)
def test_one_changed_value_of_a_record_is_found_in_one_line(kind: str, tmp_path: Path):
    _, expected = read_record(KINDS[kind])
    changed = copy.deepcopy(expected)
    entry = min(changed)
    changed[entry] = _with_a_changed_leaf(changed[entry])
    write_record(KINDS[kind], changed, tmp_path)
    lines = list(differences(read_record(KINDS[kind], tmp_path)[1], expected))
    assert len(lines) == 1 and lines[0].startswith(entry)


def test_each_kind_of_machine_has_a_record_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    kind = KINDS["training"]
    write_record(kind, {"run": "here"}, tmp_path)
    here = machine()
    monkeypatch.setattr(comparison, "machine", lambda: "another")
    assert read_record(kind, tmp_path) == (here, {"run": "here"})
    write_record(kind, {"run": "there"}, tmp_path)
    assert read_record(kind, tmp_path) == ("another", {"run": "there"})
    monkeypatch.setattr(comparison, "machine", lambda: here)
    assert read_record(kind, tmp_path) == (here, {"run": "here"})


def test_a_missing_and_a_new_entry_are_found():
    lines = list(differences({"a": 1, "b": [1, 2]}, {"b": [1], "c": 3}))
    assert lines == ["a: missing, was 1", "b: 1 values instead of 2", "c: new, 3"]


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("kind", "entry", "old", "new"),
    [
        ("identities", "config small.yaml", '"seed":', '"sEed":'),
        ("scripts", "chain", "--chain\u20035", "--chain\u20034"),
        *(
            pytest.param(*case, marks=pytest.mark.sample)
            for case in (
                ("corpora", "plain", "--workers\u20032", "--workers\u20032\u2003--set\u2003seed=3"),
                ("batches", "receipts: one corpus, 1 ranks", "shuffle_window_shards: 2", "shuffle_window_shards: 3"),
                ("exports", "bert embeddings", "seed: 7", "seed: 8"),
                ("json_outputs", "checkpoint list", "every_steps: 3", "every_steps: 2"),
                ("training", "rtd zero 0 fp32 ranks 1", "seed: 7", "seed: 8"),
            )
        ),
    ],
)
def test_a_planted_change_is_found(kind: str, entry: str, old: str, new: str):
    must_be_of_this_machine(kind)
    done = golden(kind, entry, f"--plant={old}=>{new}")
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"{kind}: {entry}" in done.stdout


@pytest.mark.multiproc
def test_a_check_of_no_entry_is_an_error():
    done = golden("identities", "no such entry")
    assert done.returncode == 2 and "no entry is named no such entry" in done.stderr


@pytest.mark.multiproc
@pytest.mark.sample
def test_another_text_of_an_error_is_found():
    done = golden("errors", "", "--plant=did you mean=>do you mean")
    assert done.returncode == 1 and "do you mean" in done.stdout, done.stdout + done.stderr
