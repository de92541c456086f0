"""What shows only when devices work and ranks talk: speed under load, clocks, bandwidth, and who is slow.

Guarantees: every rank ends with the same findings of all ranks, so all agree on who is slow. A node is blamed only
where the measurement can tell it from its neighbours: a rank exchanges data with two others, and counts as slow only
if both exchanges were; fewer than three nodes (or, on one node, ranks) are measured and blamed on nobody. Without a
GPU the figures are gloo's and a slow rank is a warning.

Cost: torch's import (2 to 4 s), 3 s of matrix products, under a second of exchanges, no matter how many ranks.

Where it stops: a collective of NCCL that hangs ends the process by NCCL's own watchdog after TIMEOUT, without a
finding; a GPU that hangs in a product hangs this check: start it under a time limit (`timeout`). What the fabric of a
cluster reaches when it is sound is not known here: ranks are compared with each other only.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from electra_dist.nvml import GpuProbe
from launcher.preflight.findings import JOB, Finding, Severity
from launcher.preflight.gpu_checks import Speed, classify_load, classify_speeds
from launcher.preflight.storage_checks import classify_skew

if TYPE_CHECKING:
    import torch
from launcher.preflight.measurements import peers

TIMEOUT = timedelta(minutes=5)  # a node may still be waiting for its storage
LOAD_S, LOAD_SIZE = 3.0, 8192
SLOW_LINK_FACTOR = 2.0


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """What a rank measured."""

    rank: int
    node: str
    skew_s: float  # its clock against the median of all
    speed: Speed | None  # of its GPU
    exchange_s: float | None  # the better of its exchanges with two others; None where nobody can be blamed
    all_reduce_gb_s: float | None  # per rank and direction ("bus bandwidth"); None: not tried
    findings: tuple[Finding, ...]


def check_load(node: str) -> list[Finding]:
    """Matrix products on all GPUs of this node at once, by this process alone."""
    import torch

    if not torch.cuda.is_available():
        what = f"no matrix product was tried: torch {torch.__version__} sees no GPU"
        return [Finding(severity="warning", node=node, what=what, next_step="install a CUDA build of torch")]
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    speeds, findings = _load(devices, node, look=True)
    return findings + classify_speeds(speeds)


def check_ranks(node: str, own: Sequence[Finding]) -> list[Finding]:
    """Collective, as the launcher's environment describes. The findings of all ranks, `own` among them."""
    import torch.distributed as dist

    try:
        dist.init_process_group(_backend(), timeout=TIMEOUT)
        try:
            reports = _measure(node, own)
        finally:
            dist.destroy_process_group()
    except RuntimeError as error:  # what torch raises where ranks do not answer
        what = f"the {os.environ['WORLD_SIZE']} ranks cannot work together: {str(error).strip().splitlines()[0]}"
        step = "look at the network between the nodes, and for nodes that did not start"
        return [*own, Finding(severity="unhealthy", node=JOB, what=what, next_step=step)]
    return classify_ranks(reports, on_gpu=_backend() != "gloo")


def classify_ranks(reports: Sequence[RankReport], *, on_gpu: bool) -> list[Finding]:
    """The findings of all ranks and what follows from comparing them. Pure."""
    findings = [finding for report in reports for finding in report.findings]
    skews: dict[str, float] = {}
    for report in reports:
        skews.setdefault(report.node, report.skew_s)
    if len(skews) > 1:
        findings += [classify_skew(skew_s, "the other nodes", node) for node, skew_s in skews.items()]
    findings += classify_speeds([report.speed for report in reports if report.speed])
    findings += _slow_links(reports, on_gpu)
    bandwidths = [report.all_reduce_gb_s for report in reports if report.all_reduce_gb_s is not None]
    what = f"all-reduce over {len(reports)} ranks: {min(bandwidths):.2f} GB/s" if bandwidths else "no all-reduce tried"
    return [*findings, Finding(severity="ok", node=JOB, what=what)]


def _slow_links(reports: Sequence[RankReport], on_gpu: bool) -> list[Finding]:
    measured = [(report, report.exchange_s) for report in reports if report.exchange_s is not None]
    median = statistics.median(seconds for _, seconds in measured) if measured else 0.0
    severity: Severity = "unhealthy" if on_gpu else "warning"
    return [
        Finding(
            severity=severity,
            node=report.node,
            device=f"rank {report.rank}",
            what=f"exchanges data {seconds / median:.1f} times slower than the median rank",
            next_step="leave the node out and look at its network card and links",
        )
        for report, seconds in measured
        if seconds > SLOW_LINK_FACTOR * median
    ]


def _backend() -> str:
    import torch

    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def _measure(node: str, own: Sequence[Finding]) -> list[RankReport]:
    import torch
    import torch.distributed as dist

    from electra_dist.collectives import gather
    from launcher.preflight.measurements import all_reduce, exchange, meet, skew

    rank = dist.get_rank()
    nodes = gather(node)
    device = torch.device("cpu")
    speeds: list[Speed] = []
    findings = list(own)
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        meet()
        speeds, under_load = _load([device], node, look=nodes.index(node) == rank)
        findings += under_load
    elif rank == 0:
        findings.append(Finding(severity="ok", node=JOB, what="no GPU: no matrix product was tried"))
    sound = all(gather(bool(speeds) or device.type == "cpu"))  # a GPU that failed would hang an exchange
    report = RankReport(
        rank=rank,
        node=node,
        skew_s=skew(rank),
        speed=speeds[0] if speeds else None,
        exchange_s=exchange(peers(nodes, rank), rank, device) if sound else None,
        all_reduce_gb_s=all_reduce(device) if sound else None,
        findings=tuple(dict.fromkeys(findings)),
    )
    return gather(report)


def _load(devices: Sequence[torch.device], node: str, *, look: bool) -> tuple[list[Speed], list[Finding]]:
    """Speeds of the devices, and (if `look`) what NVML says of all this node's GPUs while they work."""
    from launcher.preflight.measurements import matmul_tflops

    findings: list[Finding] = []
    speeds = []
    probe = GpuProbe.open() if look else None
    with ThreadPoolExecutor(len(devices)) as pool:
        running = [pool.submit(matmul_tflops, device, LOAD_SIZE, LOAD_S) for device in devices]
        time.sleep(0.7 * LOAD_S)
        if probe is not None:
            findings += classify_load(probe.health(), node)
            probe.close()
        for device, result in zip(devices, running):
            try:
                speeds.append(Speed(node=node, device=str(device), tflops=result.result()))
            except RuntimeError as error:  # CUDA's errors, out of memory among them
                what = f"a matrix product failed: {str(error).strip().splitlines()[0]}"
                step = "look for processes left on it (nvidia-smi), then reset it"
                findings.append(
                    Finding(severity="unhealthy", node=node, device=str(device), what=what, next_step=step)
                )
    return speeds, findings
