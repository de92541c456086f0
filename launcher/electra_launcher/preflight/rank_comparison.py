"""Compare ranks while they work: speed of the GPUs under load, clocks, network bandwidth, and which rank is slow.

Guarantees: all ranks get the same findings, so they agree on which rank is slow. A rank is blamed for slow exchanges
of data only if the measurement can separate it from its neighbours: it exchanges data with two other ranks, and both
exchanges must be slow. With fewer than three nodes (or, on one node, fewer than three ranks) no exchange is measured.
Without a GPU the exchanges go over gloo, and a slow rank is only a warning.

How: measurements that need all ranks are collective over the default process group. Before each timed try the ranks
pass a barrier over gloo, so that the time of a try does not contain the wait for a late rank. Each buffer takes
256 MiB on a GPU and 4 MiB on a CPU.

Cost: torch's import (2 to 4 s), 3 s of matrix products, under a second of exchanges, for any number of ranks.

Limits: if an NCCL collective hangs, NCCL's watchdog ends the process after TIMEOUT, without a finding. If a GPU hangs
in a matrix product, this check hangs: start it under a time limit (`timeout`). Ranks are compared with each other
only, because the bandwidth of a sound network of this kind is not known.
"""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from electra_dist.collectives import gather
from electra_dist.engine.rank_environment import check_meeting, rank_place
from electra_dist.errors import UserError
from electra_dist.nvml import GpuProbe
from electra_dist.run.environment_record import check_gpus
from electra_dist.store.json_file import validate_json
from electra_launcher.preflight.findings import JOB, Finding, Severity, from_error
from electra_launcher.preflight.gpu_checks import Speed, classify_load, classify_speeds
from electra_launcher.preflight.storage_checks import classify_skew

TIMEOUT = timedelta(minutes=5)  # of the process group; long, because a node may still be waiting for its storage
LOAD_S = 3.0  # seconds of matrix products
LOAD_SIZE = 8192  # rows and columns of the matrices
SLOW_LINK_FACTOR = 2.0  # A rank is slow if its exchange takes more than this times the median.
_SKEW_TRIES = 3  # comparisons of the clocks, of which the best one counts
_REPEATS = 5  # timed tries of an exchange, of which the fastest one counts
_CHUNK = 8  # matrix products that are timed together, without a synchronization between them
_FLOAT_BYTES = 4  # of an element of the exchanged buffers, which are fp32


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """Measurements and findings of one rank. Each rank makes a report and receives the reports of all other ranks."""

    rank: int
    node: str
    skew_s: float  # seconds by which the rank's clock is ahead of the median of all ranks' clocks
    speed: Speed | None  # speed of the rank's GPU; None without a GPU, or if the matrix product failed
    exchange_s: float | None  # seconds of the faster of its two exchanges with other ranks; None: not measured
    all_reduce_gb_s: float | None  # bus bandwidth, per rank and direction; None: not measured
    findings: tuple[Finding, ...]


_REPORT = TypeAdapter(RankReport)


def check_load(node: str) -> list[Finding]:
    """Run matrix products on all GPUs of this node at once for 3 s; return findings from NVML and the speeds.

    Not collective: call it from one process per node. If torch sees no GPU, the result is one finding: a warning if
    the user has asked for the CPU, otherwise a user error.
    """
    if not torch.cuda.is_available():
        hidden = _hidden_gpus(node)
        if hidden:
            return hidden
        what = f"no matrix product was tried: torch {torch.__version__} sees no GPU"
        return [Finding(severity="warning", node=node, what=what, next_step="install a CUDA build of torch")]
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    speeds, findings = _load(devices, node, sample_gpus=True)
    return findings + classify_speeds(speeds)


def _hidden_gpus(node: str) -> list[Finding]:
    """Return a user error if this node has GPUs, torch sees none, and nobody has asked for the CPU; otherwise []."""
    try:
        check_gpus()
    except UserError as error:
        return [from_error(error, node)]
    return []


def check_ranks(node: str, own: Sequence[Finding]) -> list[Finding]:
    """Measure all ranks together, and return the findings of all ranks. Collective.

    `own` are this rank's findings so far; the result includes them for all ranks. The process group is made from the
    launcher's environment variables, and destroyed again. If the ranks cannot work together, the result is `own` and
    one finding about the job as a whole, because the faulty node is not known. If torch sees no GPU of this node's,
    the result is `own` and that finding, without waiting for the other nodes.
    """
    hidden = _hidden_gpus(node)
    if hidden:
        return [*own, *hidden]
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    check_meeting(os.environ.setdefault("MASTER_ADDR", "127.0.0.1"))
    os.environ.setdefault("MASTER_PORT", "29500")
    try:
        dist.init_process_group(backend, timeout=TIMEOUT)
        try:
            reports = _measure(node, own)
        finally:
            dist.destroy_process_group()
    except RuntimeError as error:  # torch raises it when ranks do not answer.
        reason = str(error).strip().splitlines()[0]
        what = f"the {os.environ['WORLD_SIZE']} ranks cannot work together: {reason}"
        next_step = "check that every node has started, and the network between the nodes"
        return [*own, Finding(severity="unhealthy", node=JOB, what=what, next_step=next_step)]
    return classify_ranks(reports, on_gpu=backend != "gloo")


def classify_ranks(reports: Sequence[RankReport], *, on_gpu: bool) -> list[Finding]:
    """Compare the ranks' clocks, speeds and exchanges of data; return new findings and those in the reports.

    The reports are ordered by rank. If `on_gpu` is False, data was exchanged between CPUs, and a slow exchange gives
    only a warning.
    """
    findings = [finding for report in reports for finding in report.findings]
    # All ranks of a node share its clock, so the first rank of each node stands for it.
    skew_by_node: dict[str, float] = {}
    for report in reports:
        skew_by_node.setdefault(report.node, report.skew_s)
    if len(skew_by_node) > 1:
        findings += [classify_skew(skew_s, "the other nodes", node) for node, skew_s in skew_by_node.items()]
    findings += classify_speeds([report.speed for report in reports if report.speed])
    findings += _slow_links(reports, on_gpu)
    bandwidths = [report.all_reduce_gb_s for report in reports if report.all_reduce_gb_s is not None]
    summary = "no all-reduce was tried"
    if bandwidths:
        summary = f"all-reduce over {len(reports)} ranks: {min(bandwidths):.2f} GB/s"
    findings.append(Finding(severity="ok", node=JOB, what=summary))
    return findings


def _slow_links(reports: Sequence[RankReport], on_gpu: bool) -> list[Finding]:
    """Return a finding for each rank whose exchange of data took more than twice the ranks' median time."""
    seconds_by_rank = {report.rank: report.exchange_s for report in reports if report.exchange_s is not None}
    if not seconds_by_rank:
        return []
    median = statistics.median(seconds_by_rank.values())
    severity: Severity = "unhealthy" if on_gpu else "warning"
    findings = []
    for report in reports:
        seconds = seconds_by_rank.get(report.rank)
        if seconds is None or seconds <= SLOW_LINK_FACTOR * median:
            continue
        findings.append(
            Finding(
                severity=severity,
                node=report.node,
                device=f"rank {report.rank}",
                what=f"exchanges data {seconds / median:.1f} times slower than the median rank",
                next_step="leave the node out and check its network card and links",
            )
        )
    return findings


def _measure(node: str, own: Sequence[Finding]) -> list[RankReport]:
    """Measure this rank, exchange reports with all ranks, and return all reports, ordered by rank. Collective.

    `own` are the findings about this rank so far; its report includes them.
    """
    rank = dist.get_rank()
    nodes = gather(node)  # the node of each rank
    device = torch.device("cpu")
    speed: Speed | None = None
    findings = list(own)
    if torch.cuda.is_available():
        device = torch.device("cuda", rank_place().local_rank)
        torch.cuda.set_device(device)
        meet()  # All GPUs begin their load at the same time.
        is_first_of_node = nodes.index(node) == rank
        speeds, load_findings = _load([device], node, sample_gpus=is_first_of_node)
        speed = speeds[0] if speeds else None
        findings += load_findings
    elif rank == 0:
        findings.append(Finding(severity="ok", node=JOB, what="no GPU: no matrix product was tried"))
    device_works = device.type == "cpu" or speed is not None
    all_devices_work = all(gather(device_works))
    skew_s = skew(rank)
    exchange_s: float | None = None
    all_reduce_gb_s: float | None = None
    # A faulty GPU of any rank would hang the exchange.
    if all_devices_work:
        exchange_s = exchange(peers(nodes, rank), rank, device)
        all_reduce_gb_s = all_reduce(device)
    report = RankReport(
        rank=rank,
        node=node,
        skew_s=skew_s,
        speed=speed,
        exchange_s=exchange_s,
        all_reduce_gb_s=all_reduce_gb_s,
        findings=tuple(dict.fromkeys(findings)),  # without repetitions, in order
    )
    reports = gather(_REPORT.dump_python(report, mode="json"))
    return [validate_json(_REPORT, content) for content in reports]


def _load(devices: Sequence[torch.device], node: str, *, sample_gpus: bool) -> tuple[list[Speed], list[Finding]]:
    """Run matrix products on all devices at once for 3 s; return the speeds of the working devices, and findings.

    With `sample_gpus`, NVML reads all GPUs of the node during the load, and its findings are included.
    """
    speeds: list[Speed] = []
    findings: list[Finding] = []
    probe = GpuProbe.open() if sample_gpus else None
    with ThreadPoolExecutor(len(devices)) as pool:
        running = [pool.submit(matmul_tflops, device, size=LOAD_SIZE, seconds=LOAD_S) for device in devices]
        time.sleep(0.7 * LOAD_S)  # NVML's values are read while the GPUs work.
        if probe is not None:
            findings += classify_load(probe.health(), node)
            probe.close()
        for device, product in zip(devices, running):
            try:
                tflops = product.result()
                speeds.append(Speed(node=node, device=str(device), tflops=tflops))
            except RuntimeError as error:  # errors of CUDA, also "out of memory"
                findings.append(_failed_product(node, device, error))
    return speeds, findings


def _failed_product(node: str, device: torch.device, error: RuntimeError) -> Finding:
    reason = str(error).strip().splitlines()[0]
    return Finding(
        severity="unhealthy",
        node=node,
        device=str(device),
        what=f"a matrix product failed: {reason}",
        next_step="end the processes left on this GPU (see nvidia-smi), then reset the GPU",
    )


# Measurements


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
            _best_s(lambda: None, device)
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
