"""Bytes that are flipped in transit are read again, so that no good checkpoint is set aside."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import checkpoints as small
from support.fault_server import FaultPlan, running_faults
from support.s3_server import S3Server

from electra_dist.checkpoint import reader
from electra_dist.checkpoint.reader import load_newest
from electra_dist.errors import StoreError
from electra_dist.store.interface import Store
from electra_dist.store.open_store import open_store
from electra_dist.store.patience import Pace, Patience

PAUSES = Pace(reread_pauses_s=(0.01, 0.01, 0.01, 0.01))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("seed", range(3))
def test_a_good_checkpoint_is_loaded_although_bytes_are_flipped_in_transit(
    open_s3: Callable[[str], Store], s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(reader, "THREADS", 1)  # so that the schedule of faults is the same each time
    target = open_s3("checkpoints")
    small.save([target], 5)
    # Each object is flipped twice before a read of it succeeds, whatever the seed.
    plan = FaultPlan(seed=seed, rate=1.0, faults=("flip:manifest", "flip:.safetensors"), in_a_row=2)
    with running_faults(s3.endpoint_url, plan) as proxy:
        far = open_store(target.url, proxy.endpoint_url, Patience(60.0, pace=PAUSES))
        values = small.empty()
        state, notes, _ = load_newest([far], small.share(values, 0, 1), small.state_at(0))
    assert state is not None and state.step == 5
    assert notes == []
    assert small.equal(values, small.content(5))
    assert plan.counts["flip"] >= 4


@pytest.fixture
def flipped_in_6(open_s3: Callable[[str], Store], s3: S3Server, tmp_path: Path) -> Iterator[tuple[Store, FaultPlan]]:
    """A store with checkpoints of steps 5 and 6, in which every read of step 6 is wrong, and the schedule for it."""
    target = open_s3("checkpoints")
    for step in (5, 6):
        small.save([target], step)
    plan = FaultPlan(rate=1.0, faults=("flip:00006",), in_a_row=10**9)
    with running_faults(s3.endpoint_url, plan) as proxy:
        yield open_store(target.url, proxy.endpoint_url, Patience(0.0, pace=PAUSES)), plan


@pytest.mark.usefixtures("one_rank")
def test_a_checkpoint_with_the_same_damage_at_every_read_is_set_aside(
    flipped_in_6: tuple[Store, FaultPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    far, plan = flipped_in_6
    draw = plan.draw
    monkeypatch.setattr(plan, "draw", lambda method, path: (draw(method, path)[0], 0.5))  # always the same byte
    values = small.empty()
    state, notes, _ = load_newest([far], small.share(values, 0, 1), small.state_at(0))
    assert state is not None and state.step == 5
    assert len(notes) == 1 and "step 5 is used instead" in notes[0]
    assert small.equal(values, small.content(5))


@pytest.mark.usefixtures("one_rank")
def test_a_checkpoint_that_is_wrong_in_another_way_at_every_read_is_not_set_aside(
    flipped_in_6: tuple[Store, FaultPlan],
) -> None:
    far, plan = flipped_in_6
    with pytest.raises(StoreError, match=r"00006-a0001/.* was read 5 times and was wrong in different ways"):
        load_newest([far], small.share(small.empty(), 0, 1), small.state_at(0))
    plan.rate = 0.0
    values = small.empty()
    state, notes, _ = load_newest([far], small.share(values, 0, 1), small.state_at(0))
    assert state is not None and state.step == 6
    assert notes == []
    assert small.equal(values, small.content(6))


@pytest.mark.usefixtures("one_rank")
def test_a_wrong_body_that_lasts_longer_than_five_immediate_readings_is_waited_for(
    flipped_in_6: tuple[Store, FaultPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same wrong bytes are served for 0.3 s, as from the cache of a proxy; the last pause is longer."""
    far, plan = flipped_in_6
    far.reread_pauses_s = (0.01, 0.01, 0.01, 1.0)
    draw = plan.draw
    monkeypatch.setattr(plan, "draw", lambda method, path: (draw(method, path)[0], 0.5))
    timer = threading.Timer(0.3, lambda: setattr(plan, "rate", 0.0))
    timer.start()
    values = small.empty()
    state, notes, _ = load_newest([far], small.share(values, 0, 1), small.state_at(0))
    timer.join()
    assert state is not None and state.step == 6
    assert notes == []
    assert small.equal(values, small.content(6))


def test_headers_that_are_flipped_in_transit_are_read_again_before_a_commit(
    open_s3: Callable[[str], Store], s3: S3Server, tmp_path: Path
) -> None:
    target = open_s3("checkpoints")
    plan = FaultPlan(rate=1.0, faults=("flip:.safetensors",), in_a_row=2)
    with running_faults(s3.endpoint_url, plan) as proxy:
        small.save([open_store(target.url, proxy.endpoint_url, Patience(60.0, pace=PAUSES))], 5)
    assert plan.counts["flip"] >= 2
    assert small.verify(target, "step-00000005-a0001")[1] == []
