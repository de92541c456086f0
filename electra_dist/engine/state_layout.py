"""Compute how many bytes of training state DeepSpeed keeps on each GPU at each ZeRO stage."""

from __future__ import annotations

from dataclasses import dataclass

PARTS = ("weights", "gradients", "master", "moments")

# ZeRO stage -> parts of the training state of which each GPU keeps only its own piece.
_PARTITIONED_PARTS: dict[int, tuple[str, ...]] = {
    0: (),
    1: ("master", "moments"),
    2: ("gradients", "master", "moments"),
    3: ("weights", "gradients", "master", "moments"),
}


@dataclass(frozen=True)
class StateLayout:
    """Bytes per parameter that DeepSpeed keeps of each part of the training state, and where it keeps them."""

    weights: int  # that the forward pass reads
    gradients: int
    master: int  # fp32 copy of the weights
    moments: int  # of the optimizer
    partitioned: frozenset[str]  # parts that are cut into one piece per GPU; the others are whole on every GPU
    on_host: frozenset[str]  # parts that are kept in host memory

    def bytes_per_gpu(self, part: str, num_parameters: int, world_size: int) -> float:
        """Return the bytes of a part, such as "moments", on each of `world_size` GPUs; 0 if it is in host memory."""
        if part in self.on_host:
            return 0.0
        bytes_per_parameter = getattr(self, part)
        num_pieces = world_size if part in self.partitioned else 1
        return bytes_per_parameter * num_parameters / num_pieces

    def formula(self) -> str:
        """Return the device bytes per GPU as a formula of P parameters and W GPUs, such as "4P + 4P + 8P/W"."""
        terms = []
        for part in PARTS:
            bytes_per_parameter = getattr(self, part)
            if bytes_per_parameter == 0 or part in self.on_host:
                continue
            divisor = "/W" if part in self.partitioned else ""
            terms.append(f"{bytes_per_parameter}P{divisor}")
        return " + ".join(terms)


def state_layout(precision: str, zero_stage: int, offload_optimizer: bool) -> StateLayout:
    """Return the layout of the training state for a precision ("bf16", "fp16" or "fp32") and a ZeRO stage.

    At stages 1 to 3, bf16 and fp16 have 2-byte weights, and stage 1 in bf16 (BF16_Optimizer) keeps 2-byte gradients
    beside the fp32 sums. Stage 0 has 4-byte weights and no master copy, and ignores `offload_optimizer`.
    """
    partitioned = _PARTITIONED_PARTS[zero_stage]
    has_2_byte_weights = precision != "fp32" and zero_stage > 0
    keeps_2_byte_gradients = precision == "bf16" and zero_stage == 1
    has_master_copy = zero_stage > 0
    is_offloaded = offload_optimizer and zero_stage > 0
    return StateLayout(
        weights=2 if has_2_byte_weights else 4,
        gradients=2 + 4 if keeps_2_byte_gradients else 4,  # stage 1 in bf16: the gradients and their fp32 sums
        master=4 if has_master_copy else 0,
        moments=4 + 4,  # Adam's first and second moment
        partitioned=frozenset(partitioned),
        on_host=frozenset(("master", "moments") if is_offloaded else ()),
    )
