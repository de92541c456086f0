"""The positions of rows in a run's sequence: the exact inverse of the order in which batches are read."""

from __future__ import annotations

import numpy as np
from electra_kernels.keyed_random import Purpose
from hypothesis import given, settings
from hypothesis import strategies as st

from electra_dist.data.order import CorpusOrder, permute


@settings(max_examples=40, deadline=None)
@given(
    rows_per_shard=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    seed=st.integers(0, 2**63),
    window=st.integers(1, 14),
    epoch=st.integers(0, 3),
)
def test_every_row_is_found_where_the_order_has_it(
    rows_per_shard: list[int], seed: int, window: int, epoch: int
) -> None:
    order = CorpusOrder(rows_per_shard, seed, window)
    positions = np.arange(epoch * order.rows_per_epoch, (epoch + 1) * order.rows_per_epoch)
    _, shards, rows = order.locate(positions)

    found = order.positions_of(epoch, shards, rows)

    assert found.tolist() == positions.tolist()


@settings(max_examples=20, deadline=None)
@given(size=st.integers(1, 2**40), seed=st.integers(0, 2**63), data=st.data())
def test_a_permutation_of_any_length_is_undone(size: int, seed: int, data: st.DataObject) -> None:
    index = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=8)))
    sizes = np.full(index.size, size)
    block = np.arange(index.size)
    key = {"seed": seed, "purpose": Purpose.ROW_ORDER}
    place = permute(index, sizes, **key, epoch=np.full(index.size, 7), block=block)

    back = permute(place.astype(np.int64), sizes, **key, epoch=np.full(index.size, 7), block=block, backwards=True)
    assert back.tolist() == index.tolist()
