"""Predicts the parts of a step of one GPU that are not products of matrices: launches, update, waits of the host.

Guarantee: all functions are pure.

How: the host starts the operators of a micro-batch one after another, so a micro-batch takes at least the time of
these launches, however few rows it has. The update is bound by the memory of the GPU: bytes read and written, divided
by the bandwidth. After the host has read the norm, the device is idle until the first operators of the update arrive.

Limits: the time of a launch and the share of a bandwidth that is reached are assumptions, which `ASSUMPTIONS` states;
they were not measured on a GPU. ZeRO stages 2 and 3 are counted as stage 1, and a compiled model as an eager one.
"""

from __future__ import annotations

from electra_dist.config import Config

LAUNCH_S = 10e-6  # of the host, for one operator; assumed
BANDWIDTH_SHARE = 0.8  # of the nominal bandwidth of a link or a memory that is reached; assumed
BACKWARD_SHARE = 2 / 3  # of a micro-batch's time: a backward pass has twice the products of a forward pass

# tests/rehearsal/recorded.json: 2,883 operators of a micro-batch of ELECTRA-Large, which has 48 layers in both towers.
_OPERATORS_PER_LAYER = 60
_OPERATORS_OF_UPDATE = 80  # after the read of the norm; tests/engine/test_step_counts.py counts fewer

# Bytes per second of the memory of a GPU, from the vendors' data sheets.
_MEMORY_BYTES_PER_S = {"A100": 2.0e12, "H100": 3.35e12, "H200": 4.8e12, "B200": 8e12, "GB200": 8e12}

# Bytes of memory traffic for each parameter.
_BYTES_OF_A_SUM = 4 + 4 + 2  # in a micro-batch: fp32 sum read and written, bf16 gradient read
_BYTES_OF_AN_EXCHANGE = 8 + 4 + 4  # in a step: division by the ranks, norm, setting the sum to zero
_BYTES_OF_AN_UPDATE = 8 + 4 + 24 + 2  # clipping, gradient read, master and moments read and written, bf16 weight

ASSUMPTIONS = (
    f"the host starts an operator in {1e6 * LAUNCH_S:g} us, which bounds small micro-batches",
    f"links and memories reach {BANDWIDTH_SHARE:.0%} of their nominal bandwidth",
)


def micro_batch_seconds(config: Config, gpu_tokens_per_s: float) -> float:
    """Return the seconds of one micro-batch: the time of its tokens or the time of its launches, the longer of them.

    Args:
        config: gives the rows of a micro-batch, their length and the layers of both towers.
        gpu_tokens_per_s: what one GPU trains if it never waits for the host.
    """
    tokens = config.train.micro_batch * config.data.seq_len
    return max(tokens / gpu_tokens_per_s, launch_seconds(config))


def launch_seconds(config: Config) -> float:
    """Return the seconds in which the host starts the operators of one micro-batch, forward and backward."""
    model = config.model
    num_layers = model.discriminator.num_layers
    if config.objective.name != "mlm" and config.objective.generator in ("trained", "frozen"):
        num_layers += model.generator.num_layers
    return _OPERATORS_PER_LAYER * num_layers * LAUNCH_S


def update_seconds(num_parameters: int, stage: int, micro_batches: int, ranks: int, gpu: str) -> float:
    """Return the seconds of a step outside the model and the collectives: sums of gradients, norm, update, wait.

    Args:
        num_parameters: trained parameters.
        stage: ZeRO stage; from stage 1 on each rank updates its share only.
        micro_batches: forward passes of a rank in a step.
        ranks: number of ranks.
        gpu: name of the GPU, in capital letters, of those with a known memory bandwidth.
    """
    num_updated = num_parameters / ranks if stage > 0 else num_parameters
    gradient_bytes = num_parameters * (_BYTES_OF_A_SUM * micro_batches + _BYTES_OF_AN_EXCHANGE)
    num_bytes = gradient_bytes + num_updated * _BYTES_OF_AN_UPDATE
    wait_s = _OPERATORS_OF_UPDATE * LAUNCH_S
    return num_bytes / (BANDWIDTH_SHARE * _MEMORY_BYTES_PER_S[gpu]) + wait_s
