"""Bytes that are flipped in transit are read again, so that no good checkpoint is set aside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support import checkpoints as small
from support.fault_server import FaultPlan, running_faults
from support.s3_server import S3Server

from electra_dist.checkpoint import file_reader
from electra_dist.checkpoint.restore_state import load_newest
from electra_dist.store.interface import Store
from electra_dist.store.open_store import open_store


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("seed", range(3))
def test_a_good_checkpoint_is_loaded_although_bytes_are_flipped_in_transit(
    open_s3: Callable[[str], Store], s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(file_reader, "THREADS", 1)  # so that the schedule of faults is the same each time
    target = open_s3("checkpoints")
    small.save([target], tmp_path / "staging", 5)
    # Each object is flipped twice before a read of it succeeds, whatever the seed.
    plan = FaultPlan(seed=seed, rate=1.0, faults=("flip:manifest", "flip:.safetensors"), in_a_row=2)
    with running_faults(s3.endpoint_url, plan) as proxy:
        far = open_store(target.url, proxy.endpoint_url)
        values = small.empty()
        state, notes = load_newest([far], small.share(values, 0, 1), small.state_at(0))
    assert state is not None and state.step == 5
    assert notes == []
    assert small.equal(values, small.content(5))
    assert plan.counts["flip"] >= 4


@pytest.mark.usefixtures("one_rank")
def test_a_checkpoint_whose_every_read_is_wrong_is_set_aside(
    open_s3: Callable[[str], Store], s3: S3Server, tmp_path: Path
) -> None:
    target = open_s3("checkpoints")
    for step in (5, 6):
        small.save([target], tmp_path / "staging", step)
    with running_faults(s3.endpoint_url, FaultPlan(rate=1.0, faults=("flip:00006",), in_a_row=10**9)) as proxy:
        values = small.empty()
        far = open_store(target.url, proxy.endpoint_url)
        state, notes = load_newest([far], small.share(values, 0, 1), small.state_at(0))
    assert state is not None and state.step == 5
    assert len(notes) == 1 and "step 5 is used instead" in notes[0]
    assert small.equal(values, small.content(5))


def test_entries_of_ranks_that_are_flipped_in_transit_are_read_again(
    open_s3: Callable[[str], Store], s3: S3Server, tmp_path: Path
) -> None:
    target = open_s3("checkpoints")
    plan = FaultPlan(rate=1.0, faults=("flip:.json",), in_a_row=2)
    with running_faults(s3.endpoint_url, plan) as proxy:
        small.save([open_store(target.url, proxy.endpoint_url)], tmp_path / "staging", 5)
    assert plan.counts["flip"] >= 2
    assert file_reader.verify(target, "step-00000005-a0001")[1] == []
