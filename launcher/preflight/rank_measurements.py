"""Measure with torch what rank_checks.py compares: matrix products, clocks, exchanges of data, and all-reduce.

Guarantee: `skew`, `exchange`, `all_reduce` and `meet` are collective over the default process group. Before each timed
try the ranks pass a barrier over gloo, so that the time of a try does not contain the wait for a late rank.

Cost: under a second without the matrix products. Each buffer takes 256 MiB on a GPU and 4 MiB on a CPU.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from electra_dist.collectives import gather

_SKEW_TRIES = 3  # comparisons of the clocks, of which the best one counts
_REPEATS = 5  # timed tries of an exchange, of which the fastest one counts
_CHUNK = 8  # matrix products that are timed together, without a synchronization between them
_FLOAT_BYTES = 4  # of an element of the exchanged buffers, which are fp32


def matmul_tflops(device: torch.device, size: int, seconds: float) -> float:
    """Return the median speed of bf16 products of square matrices of `size` rows, in 1e12 FLOP/s. Not collective."""
    matrix = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    product = torch.empty_like(matrix)
    flops_of_chunk = _CHUNK * 2 * size**3  # a product of n x n matrices takes n^3 multiplications and additions
    speeds: list[float] = []
    end = time.perf_counter() + seconds
    while not speeds or time.perf_counter() < end:
        begin = time.perf_counter()
        for _ in range(_CHUNK):
            torch.mm(matrix, matrix, out=product)
        _synchronize(device)
        chunk_s = time.perf_counter() - begin
        speeds.append(flops_of_chunk / chunk_s / 1e12)
    return statistics.median(speeds)


def skew(rank: int) -> float:
    """Return by how many seconds this rank's clock is ahead of the median clock of all ranks. Collective.

    The ranks read their clocks after a barrier, which they leave at slightly different moments. To reduce this error,
    three tries are made, and the difference nearest to 0 is returned.
    """
    differences = []
    for _ in range(_SKEW_TRIES):
        meet()
        times = gather(time.time())
        differences.append(times[rank] - statistics.median(times))
    return min(differences, key=abs)


def exchange(ring: Sequence[int], rank: int, device: torch.device) -> float | None:
    """Exchange data with both neighbours in the ring and return the seconds of the faster exchange. Collective.

    The faster exchange counts, so that a rank is not blamed for a slow neighbour. `ring` holds the ranks that exchange
    data (see `peers`); the rings of all ranks must have the same size. The result is None for fewer than three ranks,
    where a slow rank cannot be told from its neighbour.
    """
    if len(ring) < 3:
        return None
    _connect(device)
    sent = torch.zeros(_bytes(device) // _FLOAT_BYTES, device=device)
    received = torch.empty_like(sent)
    own_position = ring.index(rank)
    # In a turn a rank exchanges data with only one neighbour, see `partner`.
    num_turns = 2 if len(ring) % 2 == 0 else 3
    exchange_times = []
    for turn in range(num_turns):
        peer_position = partner(own_position, len(ring), turn)
        if peer_position is None:
            # This rank pauses, but the ranks that exchange data in this turn wait for it before each try.
            _best_s(_do_nothing, device)
        else:
            swap = functools.partial(_swap, sent, received, peer=ring[peer_position])
            exchange_times.append(_best_s(swap, device))
    return min(exchange_times)


def _connect(device: torch.device) -> None:
    """Run one small all-reduce on all ranks, so that NCCL opens its connections. Collective."""
    # NCCL opens a group's connections in the group's first operation, in which all ranks must take part. In a ring
    # with an odd number of ranks one of them pauses in each turn, and the others would wait for it until the timeout.
    dist.all_reduce(torch.zeros(1, device=device))
    _synchronize(device)


def _swap(sent: torch.Tensor, received: torch.Tensor, peer: int) -> None:
    """Send the buffer `sent` to the rank `peer`, and at the same time receive `received` from `peer`."""
    sending = dist.P2POp(dist.isend, sent, peer)
    receiving = dist.P2POp(dist.irecv, received, peer)
    for request in dist.batch_isend_irecv([sending, receiving]):
        request.wait()


def _do_nothing() -> None:
    """Do nothing. A rank that has no partner in a turn calls it in place of an exchange of data."""


def all_reduce(device: torch.device) -> float:
    """Return the bus bandwidth of an all-reduce over all ranks, in GB/s per rank and direction. Collective.

    As in nccl-tests, the bus bandwidth with n ranks is bytes / seconds * 2 (n - 1) / n.
    """
    world_size = dist.get_world_size()
    num_bytes = _bytes(device)
    data = torch.zeros(num_bytes // _FLOAT_BYTES, device=device)
    seconds = _best_s(lambda: dist.all_reduce(data), device)
    return 2 * (world_size - 1) / world_size * num_bytes / seconds / 1e9


def _best_s(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the fastest of five runs of `work`, after a warm-up run. Collective.

    All ranks begin each run together.
    """
    times = []
    for _ in range(1 + _REPEATS):
        meet()
        begin = time.perf_counter()
        work()
        _synchronize(device)
        times.append(time.perf_counter() - begin)
    # The first run opens the connections.
    counted_times = times[1:]
    return min(counted_times)


def _bytes(device: torch.device) -> int:
    """Return the size of a buffer to exchange, in bytes: 256 MiB on a GPU, 4 MiB on a CPU."""
    size_mib = 256 if device.type == "cuda" else 4
    return size_mib * 2**20


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def meet() -> None:
    """Wait until all ranks have called this function. Collective; uses gloo, which works even if a GPU is faulty."""
    dist.all_reduce(torch.zeros(1))


def partner(position: int, count: int, turn: int) -> int | None:
    """Return the ring position that exchanges data with `position` in a turn; None if `position` pauses in this turn.

    In all turns together, each of the `count` >= 3 positions is paired with each of its two neighbours once. Turn 0
    pairs (0, 1), (2, 3), ...; turn 1 pairs (1, 2), (3, 4), .... With an even count, turn 1 also pairs the last
    position with the first. With an odd count, the last position pauses in turn 0 and the first in turn 1; turn 2
    pairs only these two.
    """
    is_odd = count % 2 == 1
    last = count - 1
    if turn == 2:
        pair_of_turn_2 = {0: last, last: 0} if is_odd else {}
        return pair_of_turn_2.get(position)
    # Even positions begin the pairs of turn 0, odd ones those of turn 1; the other positions end a pair.
    begins_pair = position % 2 == turn
    neighbour = position + 1 if begins_pair else position - 1
    if is_odd:
        return neighbour if 0 <= neighbour <= last else None
    return neighbour % count


def peers(nodes: Sequence[str], rank: int) -> list[int]:
    """Return the ring of ranks in which `rank` exchanges data with its two neighbours. `nodes`: the node of each rank.

    With one node, the ring holds all ranks. With several nodes, it holds one rank of each node, the one with the local
    index of `rank`, so that all exchanges go over the network: for the nodes a, a, b, b, c, c the ring of rank 1 is
    [1, 3, 5]. If the nodes have different numbers of ranks, no comparison is fair, and the ring is empty.
    """
    ranks_by_node: dict[str, list[int]] = {}
    for number, node in enumerate(nodes):
        ranks_by_node.setdefault(node, []).append(number)
    if len(ranks_by_node) == 1:
        return list(range(len(nodes)))
    numbers_of_ranks = {len(ranks) for ranks in ranks_by_node.values()}
    if len(numbers_of_ranks) > 1:
        return []
    local_index = ranks_by_node[nodes[rank]].index(rank)
    return [ranks[local_index] for ranks in ranks_by_node.values()]
