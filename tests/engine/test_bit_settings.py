"""A start names what may change the last bits of its losses, if that differs from its checkpoint."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.real_runs import quick_command

from electra_dist.collectives import Choice
from electra_dist.config.load import load_config
from electra_dist.engine.bit_settings import bit_settings, changed_draws, changes

SETTINGS = st.dictionaries(st.sampled_from("abcd"), st.sampled_from(["1", "2"]), min_size=1)


@given(SETTINGS, SETTINGS)
def test_exactly_the_settings_that_differ_are_named(before: dict[str, str], now: dict[str, str]) -> None:
    differing = {name for name in {*before, *now} if before.get(name) != now.get(name)}
    assert changes(before, now).keys() == differing
    assert changes(before, before) == changes({}, now) == {}


@pytest.mark.usefixtures("one_rank")
def test_another_implementation_of_the_optimizer_is_named(tiny_config: Callable[..., Path]) -> None:
    config = load_config(tiny_config("run"), [])
    device = torch.device("cpu")
    module = SimpleNamespace(attention=Choice("sdpa"))
    before, now = (
        bit_settings(config, cast(Any, SimpleNamespace(module=module, device=device, optimizer_name=name)))
        for name in ("FusedAdam (DeepSpeed)", "ForeachAdamW (electra-dist)")
    )
    assert changes(before, now) == {"optimizer": "FusedAdam (DeepSpeed) to ForeachAdamW (electra-dist)"}


@pytest.mark.sample
def test_a_start_with_more_threads_and_another_guard_says_so(
    tiny_config: Callable[..., Path], pretrain: Callable[..., Any], tmp_path: Path
) -> None:
    config = tiny_config("run", **{"train.num_steps": 12, "checkpoint.every_steps": 3})
    command = quick_command(config, 1)
    command[1] = str(Path(__file__).parents[1] / "train" / "faulty_pretrain.py")
    for step in (4, 7):
        faults = json.dumps({"signal_at": [signal.SIGTERM, step]})
        assert subprocess.run(command, env={**os.environ, "FAULTS": faults}, timeout=300).returncode == 75
    done = pretrain(config, 1, "guard.window=9", env={"OMP_NUM_THREADS": "2"})
    (line,) = [line for line in done.stdout.splitlines() if "changed since the checkpoint" in line]
    assert "guard.window from 128 to 9, threads from 1 to 2; rows, masks and samples stay the same" in line
    events = [json.loads(line) for line in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()]
    begun = [event for event in events if event["event"] in ("start", "resume")]
    assert [event.get("changed") for event in begun] == [None, None, {"guard.window": "128 to 9", "threads": "1 to 2"}]


@pytest.mark.parametrize(
    ("changed", "dropout", "device", "cause"),
    [
        (["ranks", "train.micro_batch"], 0.1, "cuda", "train.micro_batch"),
        (["attention", "train.micro_batch"], 0.1, "cuda", "train.micro_batch and attention"),
        (["ranks", "threads"], 0.1, "cuda", ""),
        (["train.micro_batch"], 0.0, "cuda", ""),
        (["train.micro_batch"], 0.1, "cpu", ""),
    ],
)
def test_a_resume_says_whether_other_dropout_is_drawn(
    changed: list[str], dropout: float, device: str, cause: str
) -> None:
    text = changed_draws(changed, dropout, device)
    assert bool(text) == bool(cause)
    assert f"because {cause} changed" in text or not cause
