"""The measurements of ranks: who exchanges with whom, and the speed of a matrix product."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from launcher.preflight import measurements
from launcher.preflight.measurements import partner, peers


@given(st.integers(3, 40))
def test_in_the_ring_everybody_meets_both_neighbours_once_and_a_partner_agrees(count: int):
    met: dict[int, list[int]] = {position: [] for position in range(count)}
    for turn in range(3 if count % 2 else 2):
        for position in range(count):
            other = partner(position, count, turn)
            if other is not None:
                assert partner(other, count, turn) == position
                met[position].append(other)
    assert all(sorted(met[p]) == sorted([(p - 1) % count, (p + 1) % count]) for p in met)


def test_a_rank_exchanges_with_its_likes_on_all_nodes_or_with_all_of_a_single_node():
    four_nodes = ["a", "a", "b", "b", "c", "c", "d", "d"]
    assert [peers(four_nodes, rank) for rank in (0, 1, 7)] == [[0, 2, 4, 6], [1, 3, 5, 7], [1, 3, 5, 7]]
    assert peers(["a"] * 3, 2) == [0, 1, 2]
    assert peers(["a", "a", "b"], 0) == []


def test_the_speed_of_a_product_is_its_operations_by_its_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(measurements.torch, "mm", lambda a, b, out: time.sleep(0.004))
    tflops = measurements.matmul_tflops(torch.device("cpu"), 1000, 0.1)  # 2e9 operations in a little over 4 ms
    assert 0.25 < tflops <= 0.5
