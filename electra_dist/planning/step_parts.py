"""Predict the times in a step of one GPU that are not matrix products: kernel launches, update, waits for the host.

How: the host launches the operators of a micro-batch one after another, so a micro-batch takes at least as long as
these launches, however few rows it has. The update is limited by the memory bandwidth of the GPU: its time is the
number of bytes read and written, divided by the bandwidth. The host launches the update only after it has read the
norm from the device, and the device is taken to be idle during these launches.

Limits: the time of a launch and the share of a bandwidth that is reached are assumptions, listed in `ASSUMPTIONS`;
they were not measured on a GPU. ZeRO stages 2 and 3 are treated like stage 1, and a compiled model like an eager one.
"""

from __future__ import annotations

from electra_dist.config import Config

LAUNCH_S = 10e-6  # time in which the host launches one operator; assumed
BANDWIDTH_SHARE = 0.8  # share of the nominal bandwidth of a link or a memory that is reached; assumed
BACKWARD_SHARE = 2 / 3  # share of a micro-batch's time: a backward pass has twice the products of a forward pass

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
    """Return the seconds of one micro-batch, forward and backward: to compute it or to launch it, if that is longer.

    `gpu_tokens_per_s` is the throughput of one GPU that never waits for the host.
    """
    tokens = config.train.micro_batch * config.data.seq_len
    return max(tokens / gpu_tokens_per_s, launch_seconds(config))


def launch_seconds(config: Config) -> float:
    """Return the seconds that the host needs to launch the operators of one micro-batch, forward and backward.

    The time is proportional to the number of layers, with the generator's layers if the objective runs a generator.
    """
    model = config.model
    num_layers = model.discriminator.num_layers
    if config.objective.runs_generator:
        num_layers += model.generator.num_layers
    return _OPERATORS_PER_LAYER * num_layers * LAUNCH_S


def update_seconds(num_parameters: int, stage: int, micro_batches: int, ranks: int, gpu: str) -> float:
    """Return the seconds of a step that are spent neither in the model nor in collectives.

    In this time the GPU reads and writes memory (to add up gradients per micro-batch, for the norm and the update), or
    waits for the host, which launches the update only after it has read the norm. From ZeRO stage 1 on, each rank
    updates only its share of the parameters. `gpu` is a key of `_MEMORY_BYTES_PER_S`, such as "H100".
    """
    num_updated = num_parameters / ranks if stage > 0 else num_parameters
    gradient_bytes = num_parameters * (_BYTES_OF_A_SUM * micro_batches + _BYTES_OF_AN_EXCHANGE)
    num_bytes = gradient_bytes + num_updated * _BYTES_OF_AN_UPDATE
    wait_s = _OPERATORS_OF_UPDATE * LAUNCH_S
    return num_bytes / (BANDWIDTH_SHARE * _MEMORY_BYTES_PER_S[gpu]) + wait_s
