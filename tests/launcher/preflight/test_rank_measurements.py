"""Measurements of ranks: the partners of their exchanges, and the speed of a matrix product."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
from electra_launcher.preflight import rank_comparison
from electra_launcher.preflight.rank_comparison import exchange, partner, peers
from hypothesis import given
from hypothesis import strategies as st


@given(st.integers(3, 40))
def test_in_the_ring_every_rank_is_paired_with_both_neighbours_once_and_pairs_are_mutual(count: int):
    partners: dict[int, list[int]] = {position: [] for position in range(count)}
    for turn in range(3 if count % 2 else 2):
        for position in range(count):
            other = partner(position, count, turn)
            if other is not None:
                assert partner(other, count, turn) == position
                partners[position].append(other)
    for position in partners:
        assert sorted(partners[position]) == sorted([(position - 1) % count, (position + 1) % count])


def test_the_peers_of_a_rank_have_its_local_number_on_all_nodes_or_are_all_ranks_of_a_single_node():
    four_nodes = ["a", "a", "b", "b", "c", "c", "d", "d"]
    assert [peers(four_nodes, rank) for rank in (0, 1, 7)] == [[0, 2, 4, 6], [1, 3, 5, 7], [1, 3, 5, 7]]
    assert peers(["a"] * 3, 2) == [0, 1, 2]
    assert peers(["a", "a", "b"], 0) == []


def test_the_speed_of_a_product_is_its_operations_divided_by_its_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rank_comparison.torch, "mm", lambda a, b, out: time.sleep(0.004))
    tflops = rank_comparison.matmul_tflops(torch.device("cpu"), 1000, 0.1)  # 2e9 operations in a little over 4 ms
    assert 0.25 < tflops <= 0.5


@pytest.mark.parametrize("count", [3, 4, 7])
def test_all_ranks_of_a_ring_take_part_in_the_first_operation_on_the_gpu(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """NCCL opens a group's connections in its first operation, and waits until every rank has joined that one.

    The calls of each rank are recorded; tensors on "meta" stand for those on a GPU, and those on the CPU go over gloo.
    """
    first_operations = []
    for rank in range(count):
        on_gpu: list[tuple[str, int]] = []

        def all_reduce(tensor: torch.Tensor, calls: list = on_gpu) -> None:
            if tensor.device.type == "meta":
                calls.append(("all_reduce", tensor.numel()))

        def batch(operations: list, calls: list = on_gpu) -> list:
            calls.append(("batch_isend_irecv", operations[0].peer))
            return []

        monkeypatch.setattr(rank_comparison.dist, "all_reduce", all_reduce)
        monkeypatch.setattr(rank_comparison.dist, "batch_isend_irecv", batch)
        monkeypatch.setattr(rank_comparison.dist, "P2POp", lambda _, tensor, peer: SimpleNamespace(peer=peer))
        assert exchange(list(range(count)), rank, torch.device("meta")) is not None
        assert sum(name == "batch_isend_irecv" for name, _ in on_gpu) == 2 * 6  # with two neighbours, six tries each
        first_operations.append(on_gpu[0])
    assert first_operations == [("all_reduce", 1)] * count
