"""The order of rows in a run with `data.phases`: each phase has the order of its corpus alone."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.real_runs import synthetic_rows, write_corpus

from electra_dist.config import DataConfig
from electra_dist.config.sections.training import PhaseConfig
from electra_dist.data.corpora import open_corpora, steps_of_phases
from electra_dist.data.loader import RowLoader
from electra_dist.data.order import CorpusOrder, RowOrder
from electra_dist.data.receipt import Receipt
from electra_dist.data.row_audit import Expected, Mark, verify
from electra_dist.data.shard_cache import ShardCache

GLOBAL_BATCH = 48
SEED = 5
CORPORA = {"a": [21, 5, 33, 14], "b": [40, 9], "c": [12, 30, 7, 19, 3]}  # rows of each shard
WORLD_SIZES = (1, 2, 3, 4, 6, 8, 12, 16)
shards = st.lists(st.integers(1, 30), min_size=1, max_size=6)


@st.composite
def phased(draw: st.DrawFn) -> tuple[RowOrder, list[list[int]], list[int], int]:
    """Draw an order of up to four phases, the rows per shard of each corpus, the first positions, and the window."""
    rows_per_shard = draw(st.lists(shards, min_size=1, max_size=4))
    lengths = draw(st.lists(st.integers(1, 150), min_size=len(rows_per_shard) - 1, max_size=len(rows_per_shard) - 1))
    first_positions = [sum(lengths[:number]) for number in range(len(rows_per_shard))]
    window = draw(st.integers(1, 4))
    orders = [CorpusOrder(rows, SEED, window) for rows in rows_per_shard]
    return RowOrder(orders, first_positions), rows_per_shard, first_positions, window


def ids_by_hand(rows_per_shard: list[list[int]], first_positions: list[int], window: int, end: int) -> list[int]:
    """Return the expected row ids of the first `end` positions, from a `RowOrder` of each corpus alone."""
    ids: list[int] = []
    for number, rows in enumerate(rows_per_shard):
        order = CorpusOrder(rows, SEED, window)
        ends = [*first_positions[1:], end]
        length = max(0, min(ends[number], end) - first_positions[number])
        _, shard, row = order.locate(np.arange(length))
        ids += (sum(map(sum, rows_per_shard[:number])) + RowOrder([order]).row_ids(shard, row)).tolist()
    return ids


@settings(max_examples=30, deadline=None)
@given(drawn=phased(), data=st.data())
def test_every_position_has_the_row_that_its_phase_has_alone(drawn: Any, data: st.DataObject) -> None:
    order, rows_per_shard, first_positions, window = drawn
    end = first_positions[-1] + 200
    expected = ids_by_hand(rows_per_shard, first_positions, window, end)
    positions = data.draw(st.permutations(range(end)))[: data.draw(st.integers(1, end))]
    _, shard, row = order.locate(np.array(positions))
    assert order.row_ids(shard, row).tolist() == [expected[position] for position in positions]

    # Each row of a corpus is used as often as the epochs of its phase say: n or n + 1 times.
    counts = Counter(expected)
    first_id = 0
    for rows, length in zip(rows_per_shard, steps_of_phases(first_positions, end)):
        num_epochs, num_further = divmod(length, sum(rows))
        uses = [counts[first_id + number] for number in range(sum(rows))]
        assert sorted(uses) == [num_epochs] * (sum(rows) - num_further) + [num_epochs + 1] * num_further
        first_id += sum(rows)


@settings(max_examples=30, deadline=None)
@given(drawn=phased())
def test_windows_tile_the_run_and_hold_the_shards_of_their_positions(drawn: Any) -> None:
    order, _, first_positions, _ = drawn
    end = first_positions[-1] + 100
    position = 0
    while position < end:
        window = order.window_at(position)
        assert window.first_position == position < window.end_position
        assert not any(window.first_position < border < window.end_position for border in first_positions)
        middle = (window.first_position + window.end_position) // 2
        assert order.window_at(middle).first_position == window.first_position
        _, shard, _ = order.locate(np.arange(window.first_position, window.end_position))
        assert set(shard.tolist()) <= set(window.shards.tolist())
        position = window.end_position


@settings(max_examples=10, deadline=None)
@given(drawn=phased())
def test_the_uses_of_a_row_are_the_positions_that_have_it(drawn: Any) -> None:
    order, rows_per_shard, first_positions, window = drawn
    end = first_positions[-1] + 40
    ids = ids_by_hand(rows_per_shard, first_positions, window, end)
    all_rows = [rows for corpus in rows_per_shard for rows in corpus]
    shard = np.repeat(np.arange(len(all_rows)), all_rows)
    row = np.concatenate([np.arange(rows) for rows in all_rows])
    found = order.uses_of_rows(shard, row, end)
    assert [[use.position for use in uses] for uses in found] == [
        [position for position, used in enumerate(ids) if used == row_id] for row_id in range(len(shard))
    ]


@settings(max_examples=20, deadline=None)
@given(drawn=phased(), skipped=st.sets(st.integers(0, 40), max_size=4), every=st.integers(1, 5), data=st.data())
def test_the_audit_accepts_a_right_run_and_finds_a_changed_receipt(
    drawn: Any, skipped: set[int], every: int, data: st.DataObject
) -> None:
    _, rows_per_shard, first_positions, window = drawn
    batch = 8
    steps_of_borders = sorted({-(-position // batch) for position in first_positions})
    borders = [step * batch for step in steps_of_borders]
    rows_per_shard = rows_per_shard[: len(borders)]
    order = RowOrder([CorpusOrder(rows, SEED, window) for rows in rows_per_shard], borders)
    num_steps = steps_of_borders[-1] + 12
    ids = np.array(ids_by_hand(rows_per_shard, borders, window, num_steps * batch)).reshape(num_steps, batch)
    marks, receipt = [], Receipt()
    for step in range(num_steps):
        if step not in skipped:
            receipt += Receipt.of(ids[step])
        if (step + 1) % every == 0:
            marks.append(Mark(step + 1, "metrics.jsonl", receipt))
    manifest: Any = NamedRows()
    assert verify(marks, Expected(order, batch, skipped), manifest).deviation is None

    wrong = data.draw(st.sampled_from(range(len(marks)))) if marks else None
    if wrong is None:
        return
    marks[wrong:] = [Mark(mark.step, mark.source, mark.receipt + Receipt(0, 1)) for mark in marks[wrong:]]
    deviation = verify(marks, Expected(order, batch, skipped), manifest).deviation
    assert deviation is not None
    assert (deviation.first_step, deviation.end_step) == (wrong * every, (wrong + 1) * every)


class NamedRows:
    """Substitute for the corpora, from which the audit takes the names of rows."""

    def row_name(self, row_id: int) -> str:
        """Return the id of a row as its name."""
        return str(row_id)


class Phases:
    """Three corpora on disk, all their rows in the order of their ids, and a run that trains on them in turn."""

    def __init__(self, folder: Path) -> None:
        for seed, (name, rows_per_shard) in enumerate(CORPORA.items()):
            write_corpus(str(folder / name), rows_per_shard, seed)
        self.rows = np.concatenate(
            [
                synthetic_rows(num_rows, seed * 1000 + number)
                for seed, rows_per_shard in enumerate(CORPORA.values())
                for number, num_rows in enumerate(rows_per_shard)
            ]
        )
        phases = (PhaseConfig(corpus=str(folder / name), from_step=step) for name, step in (("b", 5), ("c", 9)))
        self.corpora = open_corpora(DataConfig(corpus=str(folder / "a"), phases=tuple(phases)))
        self.order = self.corpora.row_order(SEED, 2, GLOBAL_BATCH)

    def read(self, rank: int, world_size: int, first_step: int, num_steps: int) -> dict[int, tuple[np.ndarray, Any]]:
        """Return the rows and row ids that a rank reads in each step of one start."""
        cache = ShardCache(self.corpora, Path("unused"), fetch_threads=1)
        loader = RowLoader(cache, self.order, GLOBAL_BATCH, rank, world_size, first_step)
        with closing(cache), closing(loader):
            batches = [loader.next() for _ in range(num_steps)]
        return {batch.step: (batch.ids, batch.row_ids) for batch in batches}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Phases:
    """Return a run of three phases, the later two of which begin at the steps 5 and 9."""
    return Phases(tmp_path_factory.mktemp("phases"))


@settings(max_examples=4, deadline=None)
@given(starts=st.lists(st.tuples(st.sampled_from(WORLD_SIZES), st.integers(1, 6)), min_size=1, max_size=4))
@example(starts=[(16, 4), (1, 1), (3, 3), (8, 1), (2, 4)])  # cut right before and right after both borders
def test_any_cuts_and_ranks_read_the_rows_of_one_uninterrupted_rank(run: Phases, starts: list[Any]) -> None:
    end = sum(length for _, length in starts)
    ids_of_corpora = [list(rows) for rows in CORPORA.values()]
    borders = [0, 5 * GLOBAL_BATCH, 9 * GLOBAL_BATCH]
    expected = ids_by_hand(ids_of_corpora, borders, 2, 9 * GLOBAL_BATCH + 2000)
    step = 0
    for world_size, length in starts:
        for rank in range(world_size):
            share = GLOBAL_BATCH // world_size
            for read_step, (ids, row_ids) in run.read(rank, world_size, step, length).items():
                first = read_step * GLOBAL_BATCH + rank * share
                assert row_ids.tolist() == expected[first : first + share]
                assert (ids == run.rows[row_ids]).all()
        step += length
    assert step == end


def test_the_first_window_of_a_phase_is_fetched_before_the_phase_begins(run: Phases) -> None:
    fetched: list[int] = []

    class Watched(ShardCache):
        def prefetch(self, shard_indices: Any) -> None:
            indices = list(map(int, shard_indices))
            fetched.extend(indices)
            super().prefetch(indices)

    cache = Watched(run.corpora, Path("unused"), fetch_threads=1)
    loader = RowLoader(cache, run.order, GLOBAL_BATCH, 0, 1, 2)
    with closing(cache), closing(loader):
        for step in (2, 3, 4):
            assert loader.next().step == step
        first_window = run.order.window_at(5 * GLOBAL_BATCH).shards.tolist()
        # The thread reads ahead; when it has the last batch of the phase, it has asked for the next phase's window.
        loader.next()
    assert set(first_window) <= set(fetched)
    assert min(first_window) >= len(CORPORA["a"])
