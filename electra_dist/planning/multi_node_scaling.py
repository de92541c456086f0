"""Predict the time of a step on N nodes from compute, kernel launches, bytes sent, bandwidth and the update.

Guarantee: `bytes_on_wire` counts what DeepSpeed 0.19.8 sends under `engine/engine.py`. A test compares it with the
collectives of real steps. Step times measured at limited bandwidths differed by at most 14 % (scaling-20261121.json).

How: a step consists of compute, communication and the update, one after another. With `engine.overlap_communication`
the exchange of gradients is hidden behind the backward pass of the last micro-batch, as far as that is long enough.
The host launches the operators of a micro-batch one after another, so a micro-batch takes at least as long as these
launches, however few rows it has. The update is limited by the memory bandwidth of the GPU; the host launches it only
after it has read the norm from the device, which is taken to be idle during these launches. Collectives are rings,
which are as fast as their slowest link. On one node that is the link between GPUs. On several nodes it may be the
network: only one edge of the ring leaves each node, and it is assumed to use the bandwidth of all network links of the
node together.

Limits: the time of a launch and the share of a bandwidth that is reached are assumed, not measured on a GPU. A
compiled model is treated like an eager one, the update of ZeRO stages 2 and 3 like that of stage 1, and a step of the
first stage of two-stage training like one of the second. Latency, stragglers, checkpoints, evaluations and data stalls
are not counted, so that a real step can take longer; where the assumed launches, bandwidths or throughput are too
pessimistic, it takes less. The result is no bound in either direction. The constant `ASSUMPTIONS` states most of this,
and the printed plan shows it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from electra_dist.config import Config
from electra_dist.errors import UserError
from electra_dist.gpu_models import MEMORY_BYTES_PER_S, NODE_LINK, peak_flops
from electra_dist.model.counts import parameter_counts, token_flops
from electra_dist.planning.training_days import LAUNCH_S, OPERATORS_OF_UPDATE, launch_seconds

Precision = Literal["bf16", "fp16", "fp32"]

BANDWIDTH_SHARE = 0.8  # share of the nominal bandwidth of a link or a memory that is reached; assumed
BACKWARD_SHARE = 2 / 3  # share of a micro-batch's time: a backward pass has twice the products of a forward pass

# Bytes of memory traffic for each parameter.
_BYTES_OF_A_SUM = 4 + 4 + 2  # in a micro-batch: fp32 sum read and written, bf16 gradient read
_BYTES_OF_AN_EXCHANGE = 8 + 4 + 4  # in a step: division by the ranks, norm, setting the sum to zero
_BYTES_OF_AN_UPDATE = 8 + 4 + 24 + 2  # clipping, gradient read, master and moments read and written, bf16 weight

ASSUMPTIONS = (
    "compute, then communication, then the update: nothing of one is hidden behind another, except gradients behind "
    "the backward pass with engine.overlap_communication",
    f"the host starts an operator in {1e6 * LAUNCH_S:g} us, which bounds small micro-batches",
    f"links and memories reach {BANDWIDTH_SHARE:.0%} of their nominal bandwidth",
    "ring collectives; --fabric is the bandwidth of all of a node's links together",
    "latency, stragglers, checkpoints, evaluation and data stalls are not counted",
)


def bytes_on_wire(
    parameters: int,
    stage: int,
    dtype: Precision,
    ranks: int,
    *,
    micro_batches: int = 1,
    persistent: int = 0,
    exchanges_fp32: bool = False,
) -> float:
    """Return the bytes that each rank sends in one optimizer step at a ZeRO `stage`, with ring collectives.

    A parameter takes 4 bytes in fp32, otherwise 2. A gradient takes 4 bytes, except in bf16 above stage 0: there it
    takes 2, unless `exchanges_fp32` is set (as `engine.py` configures it on GPUs). At stage 0 16-bit precision is
    autocast with fp32 gradients. In a ring reduce-scatter or all-gather of n bytes over W ranks, each rank sends
    n (W - 1) / W bytes; in an all-reduce it sends twice as many (Patarasuk and Yuan, "Bandwidth optimal all-reduce
    algorithms", JPDC 2009). In one step DeepSpeed runs

        stage 0  an all-reduce of the gradients
        stage 1  the same, and an all-gather of the parameters
        stage 2  an all-reduce of the gradients in every micro-batch, and one all-gather of the parameters
        stage 3  a reduce-scatter of the gradients and an all-gather of the large tensors in every micro-batch, and one
                 all-gather of the tensors of less than 100,000 elements, in all `persistent`

    DeepSpeed gathers models of more than 1e9 parameters twice as often at stage 3, which is not counted.
    """
    parameter_size = 4 if dtype == "fp32" else 2
    gradient_size = 2 if dtype == "bf16" and stage > 0 and not exchanges_fp32 else 4
    # A reduce-scatter or an all-gather is one pass around the ring, an all-reduce is two.
    gradient_pass = _ring_pass_bytes(parameters, gradient_size, ranks)
    parameter_pass = _ring_pass_bytes(parameters, parameter_size, ranks)
    if stage == 0:
        return 2 * gradient_pass
    if stage == 1:
        return 2 * gradient_pass + parameter_pass
    if stage == 2:
        return 2 * micro_batches * gradient_pass + parameter_pass
    elements_gathered = micro_batches * (parameters - persistent) + persistent
    return micro_batches * gradient_pass + _ring_pass_bytes(elements_gathered, parameter_size, ranks)


def _ring_pass_bytes(num_elements: int, element_size: int, ranks: int) -> float:
    """Return the bytes that a rank sends in a ring reduce-scatter or all-gather: all but one of `ranks` pieces."""
    return num_elements * element_size * (ranks - 1) / ranks


def update_seconds(num_parameters: int, stage: int, micro_batches: int, ranks: int, gpu: str) -> float:
    """Return the seconds of a step that are spent neither in the model nor in collectives.

    In this time the GPU reads and writes memory (to add up gradients per micro-batch, for the norm and the update), or
    waits for the host, which launches the update only after it has read the norm. From ZeRO stage 1 on, each rank
    updates only its share of the parameters. `gpu` is a key of `MEMORY_BYTES_PER_S`, such as "H100".
    """
    num_updated = num_parameters / ranks if stage > 0 else num_parameters
    gradient_bytes = num_parameters * (_BYTES_OF_A_SUM * micro_batches + _BYTES_OF_AN_EXCHANGE)
    num_bytes = gradient_bytes + num_updated * _BYTES_OF_AN_UPDATE
    wait_s = OPERATORS_OF_UPDATE * LAUNCH_S
    return num_bytes / (BANDWIDTH_SHARE * MEMORY_BYTES_PER_S[gpu]) + wait_s


def parse_fabric(text: str) -> float:
    """Return the bandwidth of a node in bytes per second, from the text of the option `--fabric`.

    The text is `400Gb` (gigabits per second), `8x400Gb` (eight links of a node) or `50GB` (gigabytes per second); the
    prefixes are M, G and T, powers of 1000. Raises UserError for any other text.
    """
    match = re.fullmatch(r"(?:(\d+)x)?(\d+(?:\.\d+)?)(M|G|T)(b|B)(?:/s|it)?", text)
    if match is None:
        raise UserError(
            f"--fabric {text}: not a bandwidth of a node; write it as 400Gb, 8x400Gb (eight links) or 50GB"
        )
    # "8x400Gb" has the groups "8", "400", "G" and "b"; without "8x" the first one is None.
    links_text, number, prefix, unit = match.groups()
    num_links = 1 if links_text is None else int(links_text)
    factor = {"M": 1e6, "G": 1e9, "T": 1e12}[prefix]
    units_per_byte = 8 if unit == "b" else 1  # bits or bytes
    link_bytes_per_s = float(number) * factor / units_per_byte
    return num_links * link_bytes_per_s


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Cluster for which a run is planned: GPUs, nodes, the network between the nodes, and the price."""

    nodes: int  # the largest number of nodes to plan for
    gpu: str  # one of A100, H100, H200, B200, GB200, in upper or lower case
    gpus_per_node: int
    fabric_bytes_per_s: float  # bandwidth of one node to the others
    gpu_tokens_per_s: float | None  # measured on one GPU; None: the peak times plan.utilisation
    gpu_hour_price: float | None  # in any currency; None: no cost is shown


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """Prediction for a run on a given number of nodes: bytes sent, time of each part of a step, speed and duration."""

    nodes: int
    ranks: int
    micro_batches: int  # per rank and step
    wire_bytes: float  # sent per rank and step
    compute_s: float  # per step; at least the time that the host needs to launch the operators
    communication_s: float  # per step, without the part that is hidden behind the backward pass
    update_s: float  # per step: adding up gradients, norm, update, and the device's wait for the host
    tokens_per_s: float  # of all GPUs
    days: float  # of the whole run
    gpu_hours: float  # of the whole run
    utilisation: float | None  # share of the GPUs' peak (MFU); None in fp32, for which no peak is known

    @property
    def step_s(self) -> float:
        """Return the seconds of one optimizer step: compute, communication that is not hidden, and the update."""
        return self.compute_s + self.communication_s + self.update_s

    @property
    def efficiency(self) -> float:
        """Return the share of the step's time that is compute, from 0 to 1."""
        return self.compute_s / self.step_s


def scale(config: Config, cluster: Cluster) -> list[Scaled]:
    """Predict how a run scales: its speed on 1, 2, 4, ... and `cluster.nodes` nodes, such as 1, 2, 4 and 6 nodes.

    A number of nodes is left out if its GPUs cannot share the global batch evenly in whole micro-batches. Raises
    UserError if `cluster.nodes` is such a number, or if the bandwidth of the GPU's links or its peak is not known.
    """
    node_counts = []
    power_of_two = 1
    while power_of_two < cluster.nodes:
        node_counts.append(power_of_two)
        power_of_two *= 2
    node_counts.append(cluster.nodes)

    if cluster.gpu.upper() not in NODE_LINK:
        raise UserError(
            f"--gpu {cluster.gpu}: the bandwidth of its links within a node is not known; "
            f"set --gpu to one of {', '.join(NODE_LINK)}"
        )
    # The micro-batch is 0 for a number of GPUs that cannot share the global batch.
    fitting_counts = [
        count for count in node_counts if config.train.fitting_micro_batch(count * cluster.gpus_per_node)
    ]
    if cluster.nodes not in fitting_counts:
        raise UserError(
            f"--nodes {cluster.nodes}: {cluster.nodes * cluster.gpus_per_node} GPUs do not share "
            f"train.global_batch {config.train.global_batch} evenly; choose other values of --nodes, --gpus-per-node "
            "or train.global_batch"
        )

    gpu_tokens_per_s = cluster.gpu_tokens_per_s or _assumed_tokens_per_s(config, cluster.gpu)
    return [_scaled(config, cluster, count, gpu_tokens_per_s) for count in fitting_counts]


def _assumed_tokens_per_s(config: Config, gpu: str) -> float:
    """Return how many tokens per second one GPU trains on at the share `plan.utilisation` of its peak FLOP/s."""
    peak = peak_flops(gpu, config.train.precision)
    if peak is None:
        raise UserError(
            "train.precision is fp32, but only 16-bit peaks of GPUs are known; pass --step-tokens-per-s as measured "
            "on one GPU, or set train.precision to bf16"
        )
    flops_per_token = token_flops(config.model, config.data.seq_len, config.objective).total
    return peak * config.plan.utilisation / flops_per_token


def _scaled(config: Config, cluster: Cluster, nodes: int, gpu_tokens_per_s: float) -> Scaled:
    """Predict the run on `nodes` nodes, if one GPU alone trains on `gpu_tokens_per_s` tokens per second."""
    gpu_model = cluster.gpu.upper()
    ranks = nodes * cluster.gpus_per_node
    # As in training, a micro-batch that does not divide the rows of a rank is made smaller.
    train = config.train.model_copy(update={"micro_batch": config.train.fitting_micro_batch(ranks)})
    config = config.model_copy(update={"train": train})
    num_parameters = parameter_counts(config.model, config.objective).total
    micro_batches = train.micro_batches(ranks)
    wire_bytes = bytes_on_wire(
        num_parameters,
        config.engine.zero_stage,
        config.train.precision,
        ranks,
        micro_batches=micro_batches,
        exchanges_fp32=True,
    )
    slowest_link = NODE_LINK[gpu_model]
    if nodes > 1:
        slowest_link = min(slowest_link, cluster.fabric_bytes_per_s)
    bytes_per_s = BANDWIDTH_SHARE * slowest_link
    micro_batch_tokens = train.micro_batch * config.data.seq_len
    micro_batch_s = max(micro_batch_tokens / gpu_tokens_per_s, launch_seconds(config))
    compute_s = micro_batches * micro_batch_s
    communication_s = wire_bytes / bytes_per_s
    if config.engine.overlap_communication:
        # Only the exchange of gradients can be hidden. The all-gather of the bf16 parameters follows the update.
        parameter_bytes = _ring_pass_bytes(num_parameters, 2, ranks)
        gradient_s = (wire_bytes - parameter_bytes) / bytes_per_s
        last_backward_s = BACKWARD_SHARE * micro_batch_s
        communication_s -= min(gradient_s, last_backward_s)
    update_s = update_seconds(num_parameters, config.engine.zero_stage, micro_batches, ranks, gpu_model)
    step_s = compute_s + communication_s + update_s
    tokens_per_s = train.global_batch * config.data.seq_len / step_s
    flops_per_token = token_flops(config.model, config.data.seq_len, config.objective).total
    peak = peak_flops(gpu_model, config.train.precision)
    run_s = config.train.num_steps * step_s
    return Scaled(
        nodes=nodes,
        ranks=ranks,
        micro_batches=micro_batches,
        wire_bytes=wire_bytes,
        compute_s=compute_s,
        communication_s=communication_s,
        update_s=update_s,
        tokens_per_s=tokens_per_s,
        days=run_s / 86_400,
        gpu_hours=ranks * run_s / 3600,
        utilisation=None if peak is None else tokens_per_s * flops_per_token / (ranks * peak),
    )
