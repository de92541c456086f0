"""Every Triton kernel compiled for GPUs without a GPU: no spills, wide loads, no tensor-core products.

The default tests compile for the H100 (sm_90), the tests with the marker `drill` for the A100 and the B200, too.
"""

import dataclasses
import importlib.metadata
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from electra_kernels.triton import compile_without_gpu

SNAPSHOT = Path(__file__).with_name("compiled_kernels.txt")
NUM_KERNELS = 27  # three of them are compiled in bf16 and in fp32
# Kernels whose rows are aligned: each must move 16 bytes at a time. Those of STORES_ROWS store rows, too.
NORMS = {
    *("norm_fwd_256", "norm_fwd_256_p0", "norm_fwd_1024", "norm_fwd_1024_p0"),
    *("norm_bwd_256", "norm_bwd_256_p0", "norm_bwd_1024", "norm_bwd_1024_p0"),
}
STORES_ROWS = {"head_train", "tail_backward", "gather_backward"} | NORMS
STORES_ROWS |= {"keyed_dropout", "gelu_gradient", "join_256", "join_1024"}
STORES_ROWS |= {"rotary_256", "rotary_1024", "geglu_forward", "geglu_backward"}
LOADS_ROWS = {"head_evaluate", "tail_forward", "sum_strips"} | STORES_ROWS


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler has printed for some architectures."""

    architectures: tuple[int, ...]
    table: str
    rows: list[dict]


@pytest.fixture(
    scope="module", params=[pytest.param((90,), id="sm_90"), pytest.param((80, 100), marks=pytest.mark.drill)]
)
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """The printed table and its rows, from a process in which Triton is imported with its interpreter off."""
    rows = tmp_path_factory.mktemp("compiled") / "rows.json"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "electra_kernels.triton.compile_without_gpu", "--json", str(rows), "--arch"]
    command += [str(architecture) for architecture in request.param]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return Compiled(request.param, done.stdout, json.loads(rows.read_text()))


def test_no_kernel_spills_registers_or_uses_tensor_cores_and_aligned_rows_move_16_bytes_at_a_time(compiled: Compiled):
    """With up to 128 of its 65536 registers for a thread, a multiprocessor can run at least 512 threads."""
    print(compiled.table)

    assert Counter(row["arch"] for row in compiled.rows) == dict.fromkeys(compiled.architectures, NUM_KERNELS)
    for row in compiled.rows:
        assert row["stack_bytes"] == 0, row
        assert row["local_accesses"] == 0, row
        assert row["tensor_core"] == 0, row
        assert row["registers"] <= 128, row
        if row["name"] in LOADS_ROWS:
            assert row["wide_loads"] > 0, row
        if row["name"] in STORES_ROWS:
            assert row["wide_stores"] > 0, row


def test_norms_at_dropout_probability_0_are_compiled_without_the_random_numbers(compiled: Compiled):
    """They have the suffix _p0. Philox's ten rounds are nearly half of the instructions of a norm's forward pass."""
    num_instructions = {(row["name"], row["arch"]): row["instructions"] for row in compiled.rows}

    for (name, arch), without_dropout in num_instructions.items():
        if not name.endswith("_p0"):
            continue
        with_dropout = num_instructions[name.removesuffix("_p0"), arch]
        assert without_dropout < 0.8 * with_dropout, name


def test_the_compilers_table_is_the_recorded_snapshot(compiled: Compiled):
    """To refresh it: `python -m electra_kernels.triton.compile_without_gpu > tests/kernels/compiled_kernels.txt`."""
    recorded, *lines = SNAPSHOT.read_text().splitlines()
    present = f"triton {importlib.metadata.version('triton')}"
    if present != recorded:
        pytest.skip(f"the snapshot is of {recorded}, here is {present}: other compilers allot other registers")
    own = {f"sm_{architecture}" for architecture in compiled.architectures}
    others = {f"sm_{architecture}" for architecture in compile_without_gpu.ARCHITECTURES} - own
    expected = [line for line in lines if not others.intersection(line.split())]
    assert len(expected) >= len(own) * NUM_KERNELS
    assert compiled.table.splitlines() == [recorded, *expected]


def test_all_dtypes_are_every_kernel_three_times_and_the_one_of_integers_once():
    names = [(case.name, case.dtype) for case in compile_without_gpu.cases(all_dtypes=True)]
    dtypes_of_kernel = {name: [dtype for other, dtype in names if other == name] for name, _ in names}

    assert dtypes_of_kernel.pop("replace") == ["int64"]
    assert set(map(tuple, dtypes_of_kernel.values())) == {("bf16", "fp16", "fp32")}
    for case in compile_without_gpu.cases(all_dtypes=True):
        is_pair = case.dtype != "bf16"  # as the launches do: fp32 holds the sum of two values of bf16 only
        assert case.constants.get("PAIR", is_pair) == is_pair


def test_a_kernel_that_the_compiler_refuses_is_a_row_with_its_error(monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("first line\nptxas raised SIGSEGV")

    monkeypatch.setattr(compile_without_gpu.triton, "compile", refuse)
    row = compile_without_gpu.try_to_compile(compile_without_gpu.cases()[0], 100)

    assert row == ("head_train", "bf16", 100, "RuntimeError: ptxas raised SIGSEGV")
    assert "sm_100 RuntimeError: ptxas" in compile_without_gpu.table([row])
