"""The measurements of `rank_checks.py`: matrix products, clocks, exchanges, all-reduce. The part that needs torch.

Guarantee: all but `matmul_tflops` are collective over the default process group; ranks meet over gloo before each try,
so that a try times the exchange and not a late rank.

Cost: under a second, without the products; 256 MiB of device memory for each buffer on a GPU, 4 MiB on a CPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from electra_dist.collectives import gather

_LOOKS, _REPEATS, _CHUNK = 3, 5, 8


def matmul_tflops(device: torch.device, size: int, seconds: float) -> float:
    """Median speed of bf16 products of square matrices over about `seconds`, in 1e12 FLOP/s."""
    matrix = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    product = torch.empty_like(matrix)
    speeds: list[float] = []
    end = time.perf_counter() + seconds
    while not speeds or time.perf_counter() < end:
        begin = time.perf_counter()
        for _ in range(_CHUNK):
            torch.mm(matrix, matrix, out=product)
        _synchronize(device)
        speeds.append(_CHUNK * 2 * size**3 / (time.perf_counter() - begin) / 1e12)
    return statistics.median(speeds)


def skew(rank: int) -> float:
    """This rank's clock less the median of all: the smallest of a few looks, because meeting takes unequal time."""
    looks = []
    for _ in range(_LOOKS):
        meet()
        times = gather(time.time())
        looks.append(times[rank] - statistics.median(times))
    return min(looks, key=abs)


def exchange(ring: Sequence[int], rank: int, device: torch.device) -> float | None:
    """Seconds of the better of two exchanges with neighbours in the ring; None with fewer than three in it."""
    if len(ring) < 3:
        return None
    sent = torch.zeros(_bytes(device) // 4, device=device)
    received = torch.empty_like(sent)
    best = []
    for turn in range(3 if len(ring) % 2 else 2):
        other = partner(ring.index(rank), len(ring), turn)

        def swap(other: int | None = other) -> None:
            if other is not None:
                sending = dist.P2POp(dist.isend, sent, ring[other])
                receiving = dist.P2POp(dist.irecv, received, ring[other])
                for request in dist.batch_isend_irecv([sending, receiving]):
                    request.wait()

        seconds = _best_s(swap, device)
        best += [] if other is None else [seconds]
    return min(best)


def all_reduce(device: torch.device) -> float:
    """GB/s per rank and direction ("bus bandwidth") of an all-reduce over all ranks."""
    world_size = dist.get_world_size()
    data = torch.zeros(_bytes(device) // 4, device=device)
    seconds = _best_s(lambda: dist.all_reduce(data), device)
    return 2 * (world_size - 1) / world_size * _bytes(device) / seconds / 1e9


def _best_s(work: Callable[[], object], device: torch.device) -> float:
    """The quickest of a few tries, after one that connects; all ranks begin each together."""
    times = []
    for _ in range(1 + _REPEATS):
        meet()
        begin = time.perf_counter()
        work()
        _synchronize(device)
        times.append(time.perf_counter() - begin)
    return min(times[1:])


def _bytes(device: torch.device) -> int:
    return 256 << 20 if device.type == "cuda" else 4 << 20


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def meet() -> None:
    """A barrier over gloo, which needs no GPU to be sound."""
    dist.all_reduce(torch.zeros(1))


def partner(position: int, count: int, turn: int) -> int | None:
    """With whom `position` of a ring of `count` exchanges in turn 0, 1 or 2: each meets both neighbours once.

    Turn 2 is for an odd count, where the last and the first are left over. None: nobody in this turn.
    """
    if turn == 2:
        return {0: count - 1, count - 1: 0}.get(position) if count % 2 else None
    other = position + 1 if position % 2 == turn else position - 1
    if count % 2:
        return other if 0 <= other < count else None
    return other % count


def peers(nodes: Sequence[str], rank: int) -> list[int]:
    """The ring that `rank` exchanges with, itself included: its likes on all nodes, or all ranks of a single node.

    Args:
        nodes: node of each rank. Unless all have as many ranks, nobody can be compared: an empty ring.
    """
    ranks_of = {node: [r for r, n in enumerate(nodes) if n == node] for node in nodes}
    if len(ranks_of) == 1:
        return list(range(len(nodes)))
    if len({len(ranks) for ranks in ranks_of.values()}) > 1:
        return []
    place = ranks_of[nodes[rank]].index(rank)
    return [ranks[place] for ranks in ranks_of.values()]
