"""Every Triton kernel compiled for sm_80 and sm_90 without a GPU: no spills, wide loads, no tensor-core products."""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SNAPSHOT = Path(__file__).with_name("compiled_kernels.txt")
# Kernels whose rows are aligned: each must move 16 bytes at a time.
NORMS = {f"norm_{way}_{width}{suffix}" for way in ("fwd", "bwd") for width in (256, 1024) for suffix in ("", "_p0")}
STORES_ROWS = {"head_train", "head_train_fp32", "tail_backward", "gather_backward"} | NORMS
WIDE = {"head_evaluate", "sample", "tail_forward", "tail_fwd_fp32"} | STORES_ROWS


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict]]:
    """The printed table and its rows. A process of its own: the interpreter must be off where Triton is imported."""
    rows = tmp_path_factory.mktemp("compiled") / "rows.json"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "electra_kernels.ahead_of_time", "--arch", "80", "90", "--json", str(rows)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, json.loads(rows.read_text())


def test_no_spills_wide_loads_and_no_dot(compiled):
    text, rows = compiled
    print(text)
    assert len(rows) == 2 * 17
    for row in rows:
        assert row["stack_bytes"] == row["local_accesses"] == row["tensor_core"] == 0, row
        assert row["registers"] <= 128, row
        assert row["name"] not in WIDE or row["wide_loads"] > 0, row
        assert row["name"] not in STORES_ROWS or row["wide_stores"] > 0, row


def test_nothing_is_drawn_at_dropout_probability_0(compiled):
    """Philox's ten rounds are nearly half of a norm's forward instructions."""
    size = {(row["name"], row["arch"]): row["instructions"] for row in compiled[1]}
    for name, arch in [key for key in size if key[0].endswith("_p0")]:
        assert size[name, arch] < 0.8 * size[name.removesuffix("_p0"), arch], name


def test_the_table_is_the_snapshot(compiled):
    """Refresh: `python -m electra_kernels.ahead_of_time > tests/kernels/compiled_kernels.txt`, and read the diff."""
    recorded = SNAPSHOT.read_text().splitlines()[0]
    present = f"triton {importlib.metadata.version('triton')}"
    if present != recorded:
        pytest.skip(f"the snapshot is of {recorded}, here is {present}: other compilers allot other registers")
    assert compiled[0] == SNAPSHOT.read_text()
