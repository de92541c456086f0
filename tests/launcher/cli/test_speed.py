"""`electra-dist speed`: what it prints for a config, and what it advises."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from electra_launcher.cli.plans import _print_tables, advice

from electra_dist.train.step_profile import HOST, AttentionInUse, Part, StepProfile


def step_profile(**changes: object) -> StepProfile:
    """Return the profile of a GPU step of which nothing stands out, with some fields changed."""
    fields: dict[str, object] = {
        "device": "a GPU",
        "rows": "corpus",
        "micro_batch": 64,
        "micro_batches": 2,
        "step_ms": 400.0,
        "tokens_per_s": 160_000.0,
        "wait_share": 0.0,
        "padding_share": 0.01,
        "operators_per_micro_batch": 3000,
        "host_reads": 1,
        "device_ms": 390.0,
        "attention": AttentionInUse(backend="flash", dropout=0.1, reason=""),
        "optimizer": "FusedAdam",
        "parts": (Part(name="matrix products", ms=300.0, share=0.75), Part(name=HOST, ms=100.0, share=0.1)),
    }
    return StepProfile(**(fields | changes))  # type: ignore[arg-type]


@pytest.mark.multiproc
def test_json_has_the_fields_that_others_rely_on(tiny_config: Callable[..., Path]) -> None:
    config = tiny_config()
    run = "from electra_launcher.cli.main import main; main()"
    command = [sys.executable, "-c", run, "speed", str(config), "--json", "--steps", "1"]

    # Without the variable DeepSpeed prints a line about the missing GPU when it is imported.
    environment = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}

    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["step_ms"] > 0
    assert found["tokens_per_s"] > 0
    assert 0 <= found["wait_share"] < 1
    assert found["operators_per_micro_batch"] > 100
    assert found["host_reads"] >= 1
    assert found["attention"]["backend"] == "sdpa"
    assert "dropout" in found["attention"]
    assert sum(part["ms"] for part in found["parts"]) == pytest.approx(found["step_ms"])
    assert sum(part["share"] for part in found["parts"]) == pytest.approx(1)


def test_the_speed_of_one_rank_is_said_to_be_that_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    _print_tables(step_profile(), 2)
    assert "160,000 tokens/s of one rank; `electra-dist train` starts 2 here" in capsys.readouterr().out
    _print_tables(step_profile(), 1)
    assert "of one rank" not in capsys.readouterr().out


def test_a_step_that_waits_for_rows_is_advised_on_fetching() -> None:
    lines = advice(step_profile(wait_share=0.3))

    assert "30% of the step waits for rows" in lines[0]
    assert "data.fetch_threads" in lines[0]


def test_a_step_bound_by_the_host_is_advised_on_larger_micro_batches() -> None:
    parts = (Part(name=HOST, ms=200.0, share=0.5), Part(name="matrix products", ms=200.0, share=0.5))

    lines = advice(step_profile(parts=parts))

    assert "train.micro_batch" in lines[0]


def test_attention_with_a_bias_on_a_gpu_is_pointed_out_with_the_reason() -> None:
    attention = AttentionInUse(backend="sdpa", dropout=0.1, reason="objective electric")

    lines = advice(step_profile(attention=attention))

    assert "objective electric" in lines[0]


def test_a_step_without_anything_to_change_names_its_largest_part() -> None:
    assert advice(step_profile()) == ["nothing stands out; the largest part is matrix products with 75% of the step"]
