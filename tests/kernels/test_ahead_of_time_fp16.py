"""Triton kernels compiled in fp16 without a GPU, for the T4 (sm_75), which has no bf16, and for sm_90: no spills."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("compile_in_fp16.py")
LEAST_KERNELS = 21  # all but those that handle integers only and those that are listed a second time in fp32


@pytest.mark.drill  # the default tests compile the kernels in bf16, and two in fp32, which keeps pairs as fp16 does
def test_no_kernel_spills_registers_in_fp16():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(WORKER), "75", "90"], capture_output=True, text=True, env=environment, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(done.stdout.splitlines()[-1])
    for arch in (75, 90):
        assert len({row["name"] for row in rows if row["arch"] == arch}) >= LEAST_KERNELS
    for row in rows:
        assert row["stack_bytes"] == 0, row
        assert row["local_accesses"] == 0, row
        assert row["registers"] <= 128, row
