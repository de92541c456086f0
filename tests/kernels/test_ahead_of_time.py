"""Every Triton kernel compiled for sm_80 and sm_90 without a GPU: no spills, wide loads, no tensor-core products."""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SNAPSHOT = Path(__file__).with_name("compiled_kernels.txt")
NUM_ARCHITECTURES = 2  # sm_80 and sm_90
NUM_KERNELS = 18
# Kernels whose rows are aligned: each must move 16 bytes at a time. Those of STORES_ROWS store rows, too.
NORMS = {
    *("norm_fwd_256", "norm_fwd_256_p0", "norm_fwd_1024", "norm_fwd_1024_p0"),
    *("norm_bwd_256", "norm_bwd_256_p0", "norm_bwd_1024", "norm_bwd_1024_p0"),
}
STORES_ROWS = {"head_train", "head_train_fp32", "tail_backward", "gather_backward", "keyed_dropout", "gelu_gradient"}
STORES_ROWS |= NORMS
LOADS_ROWS = {"head_evaluate", "sample", "tail_forward", "tail_fwd_fp32"} | STORES_ROWS


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict]]:
    """The printed table and its rows, from a process in which Triton is imported with its interpreter off."""
    rows = tmp_path_factory.mktemp("compiled") / "rows.json"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "electra_kernels.ahead_of_time", "--arch", "80", "90", "--json", str(rows)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, json.loads(rows.read_text())


def test_no_kernel_spills_registers_or_uses_tensor_cores_and_aligned_rows_move_16_bytes_at_a_time(compiled):
    """With up to 128 of its 65536 registers for a thread, a multiprocessor can run at least 512 threads."""
    table, rows = compiled
    print(table)

    assert len(rows) == NUM_ARCHITECTURES * NUM_KERNELS
    for row in rows:
        assert row["stack_bytes"] == 0, row
        assert row["local_accesses"] == 0, row
        assert row["tensor_core"] == 0, row
        assert row["registers"] <= 128, row
        if row["name"] in LOADS_ROWS:
            assert row["wide_loads"] > 0, row
        if row["name"] in STORES_ROWS:
            assert row["wide_stores"] > 0, row


def test_norms_at_dropout_probability_0_are_compiled_without_the_random_numbers(compiled):
    """They have the suffix _p0. Philox's ten rounds are nearly half of the instructions of a norm's forward pass."""
    _, rows = compiled
    num_instructions = {(row["name"], row["arch"]): row["instructions"] for row in rows}

    for (name, arch), without_dropout in num_instructions.items():
        if not name.endswith("_p0"):
            continue
        with_dropout = num_instructions[name.removesuffix("_p0"), arch]
        assert without_dropout < 0.8 * with_dropout, name


def test_the_compilers_table_is_the_recorded_snapshot(compiled):
    """To refresh it, run `python -m electra_kernels.ahead_of_time > tests/kernels/compiled_kernels.txt`."""
    recorded = SNAPSHOT.read_text().splitlines()[0]
    present = f"triton {importlib.metadata.version('triton')}"
    if present != recorded:
        pytest.skip(f"the snapshot is of {recorded}, here is {present}: other compilers allot other registers")
    table, _ = compiled
    assert table == SNAPSHOT.read_text()
