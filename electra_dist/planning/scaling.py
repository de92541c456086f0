"""How long a step takes on N nodes: compute of one GPU, bytes on the wire, and the links that carry them.

Guarantee: pure functions of what they are given. `bytes_on_wire` counts what DeepSpeed 0.19.8 sends under
`engine/engine.py`; a test compares it with the collectives of real steps, `benchmarks/scaling.py` the step time with
measured ones at limited bandwidth.

Model, each point of which `ASSUMPTIONS` tells the user: a step is compute, then communication, nothing hidden behind
the other (so the figure is an upper bound where DeepSpeed overlaps); collectives are rings, whose slowest link
decides: within a node each GPU's own, between nodes the node's links together, because of a ring's edges one leaves a
node; latency, stragglers, saves and evaluations are not in it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from electra_dist.config import Config
from electra_dist.errors import UserError
from electra_dist.planning.budget import make_budget

Precision = Literal["bf16", "fp32"]

ASSUMPTIONS = (
    "compute, then communication: nothing of one is hidden behind the other",
    "ring collectives; the fabric carries what --fabric says, all of a node's links together",
    "latency, stragglers, checkpoints, evaluation and data stalls are not counted",
)

# Bytes a second that a GPU sends to others of its node: half of the vendors' two-way NVLink figures.
_NODE_LINK = {"A100": 300e9, "H100": 450e9, "H200": 450e9, "B200": 900e9, "GB200": 900e9}
_PERSISTENT = 100_000  # DeepSpeed's stage3_param_persistence_threshold


def bytes_on_wire(
    parameters: int,
    stage: int,
    dtype: Precision,
    ranks: int,
    *,
    micro_batches: int = 1,
    persistent: int = 0,
) -> float:
    """Bytes that each rank sends in one optimizer step, over rings.

    Gradients and parameters travel in 2 bytes in bf16, in 4 in fp32; at stage 0 bf16 is autocast, so gradients are
    fp32. With n bytes and W ranks a ring all-reduce sends 2 n (W - 1) / W from each rank, a reduce-scatter or
    all-gather half of it (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", JPDC 2009).

        stage 0  all-reduce of the gradients, once a step
        stage 1  the same, then all-gather of the parameters
        stage 2  all-reduce in every micro-batch (DeepSpeed reduces buckets of many ranks by all-reduce), all-gather
        stage 3  reduce-scatter in every micro-batch; all-gather of large tensors in every micro-batch, of persistent
                 ones once a step. Models of more than 1e9 parameters are gathered twice as often: not counted here

    Source: counted, tests/planning/test_scaling.py.

    Args:
        parameters: trained ones.
        micro_batches: forward passes of a rank in a step.
        persistent: parameters in tensors of at most 100,000 elements, which stage 3 does not cut up.
    """
    size = 2 if dtype == "bf16" and stage else 4
    one_way = parameters * size * (ranks - 1) / ranks
    if stage == 0:
        return 2 * one_way
    if stage == 1:
        return 3 * one_way
    if stage == 2:
        return (2 * micro_batches + 1) * one_way
    gathered = micro_batches * (parameters - persistent) + persistent
    return micro_batches * one_way + gathered * size * (ranks - 1) / ranks


def persistent_parameters(sizes: Sequence[int]) -> int:
    """Those of `sizes` (elements of each tensor) that stage 3 leaves whole, added up."""
    return sum(size for size in sizes if size < _PERSISTENT)


def step_seconds(compute_s: float, wire_bytes: float, bytes_per_s: float) -> float:
    """Compute, then communication over the slowest link."""
    return compute_s + wire_bytes / bytes_per_s


def parse_fabric(text: str) -> float:
    """Bytes a second of `400Gb`, `8x400Gb` (links of a node), `50GB`.

    Raises:
        UserError: something else.
    """
    found = re.fullmatch(r"(?:(\d+)x)?(\d+(?:\.\d+)?)(M|G|T)(b|B)(?:/s|it)?", text)
    if found is None:
        raise UserError(f"--fabric {text}: say 400Gb, 8x400Gb (links of one node) or 50GB")
    links, number, scale, unit = found.groups()
    each = float(number) * {"M": 1e6, "G": 1e9, "T": 1e12}[scale] / (8 if unit == "b" else 1)
    return int(links or 1) * each


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """What a run is planned for."""

    nodes: int
    gpu: str
    gpus_per_node: int
    fabric_bytes_per_s: float  # of one node
    gpu_tokens_per_s: float | None  # measured on one GPU; None: the peak times plan.utilisation
    gpu_hour_price: float | None


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """A run on some number of nodes."""

    nodes: int
    ranks: int
    micro_batches: int
    wire_bytes: float  # a rank and step
    compute_s: float
    communication_s: float
    tokens_per_s: float
    days: float
    gpu_hours: float

    @property
    def step_s(self) -> float:
        """Both parts."""
        return self.compute_s + self.communication_s

    @property
    def efficiency(self) -> float:
        """Share of the step that computes: 1 on one GPU."""
        return self.compute_s / self.step_s


def scale(config: Config, cluster: Cluster) -> list[Scaled]:
    """The run on 1, 2, 4, ... and `cluster.nodes` nodes, those left out that the global batch does not go into.

    Raises:
        UserError: the GPU's links or peak are not known, or the batch does not go into the nodes asked for.
    """
    nodes = [n for n in (2**i for i in range(cluster.nodes.bit_length())) if n < cluster.nodes] + [cluster.nodes]
    fitting = [n for n in nodes if config.train.micro_batches(n * cluster.gpus_per_node)]
    if cluster.nodes not in fitting:
        raise UserError(
            f"--nodes {cluster.nodes}: {cluster.nodes * cluster.gpus_per_node} GPUs do not share "
            f"train.global_batch {config.train.global_batch} in micro-batches of {config.train.micro_batch}; "
            "choose other --nodes, --gpus-per-node or train.micro_batch"
        )
    gpu_tokens_per_s = cluster.gpu_tokens_per_s or _assumed_tokens_per_s(config, cluster.gpu)
    return [_scaled(config, cluster, n, gpu_tokens_per_s) for n in fitting]


def _assumed_tokens_per_s(config: Config, gpu: str) -> float:
    plan = config.plan.model_copy(update={"gpu": gpu, "num_gpus": 1})
    compute = make_budget(config.model_copy(update={"plan": plan})).compute
    if compute is None:
        raise UserError("no peak is known in fp32; say --step-tokens-per-s, measured on one GPU")
    return compute.tokens_per_s


def _scaled(config: Config, cluster: Cluster, nodes: int, gpu_tokens_per_s: float) -> Scaled:
    if cluster.gpu.upper() not in _NODE_LINK:
        raise UserError(f"--gpu {cluster.gpu}: the links within a node are known for {', '.join(_NODE_LINK)}")
    budget, ranks = make_budget(config), nodes * cluster.gpus_per_node
    micro_batches = config.train.micro_batches(ranks)
    wire_bytes = bytes_on_wire(
        budget.parameters.total,
        config.engine.zero_stage,
        config.train.precision,
        ranks,
        micro_batches=micro_batches,
    )
    link = _NODE_LINK[cluster.gpu.upper()]
    compute_s = budget.tokens_per_step / (ranks * gpu_tokens_per_s)
    step_s = step_seconds(compute_s, wire_bytes, min(link, cluster.fabric_bytes_per_s) if nodes > 1 else link)
    seconds = config.train.num_steps * step_s
    return Scaled(
        nodes=nodes,
        ranks=ranks,
        micro_batches=micro_batches,
        wire_bytes=wire_bytes,
        compute_s=compute_s,
        communication_s=step_s - compute_s,
        tokens_per_s=budget.tokens_per_step / step_s,
        days=seconds / 86_400,
        gpu_hours=ranks * seconds / 3600,
    )
