"""Compute how many bytes of training state DeepSpeed keeps on each GPU at each ZeRO stage."""

from __future__ import annotations

from dataclasses import dataclass

PARTS = ("weights", "gradients", "master", "moments")


@dataclass(frozen=True)
class StateLayout:
    """Bytes per parameter of each part of the training state, and where that part is kept.

    A part is one of PARTS: "weights" (that the forward reads), "gradients", "master" (fp32 copy) and "moments".
    """

    weights: int
    gradients: int
    master: int
    moments: int
    partitioned: frozenset[str]  # parts that are cut into one piece per GPU; the others are whole on every GPU
    on_host: frozenset[str]  # parts that are kept in host memory

    def bytes_per_gpu(self, part: str, num_parameters: int, world_size: int) -> float:
        """Return the device bytes that one GPU holds of one part.

        Args:
            part: one of "weights", "gradients", "master" and "moments".
            num_parameters: parameters of the whole model.
            world_size: number of GPUs that share the partitioned parts.

        Returns:
            0 for a part in host memory; otherwise a share that is not rounded to whole bytes.
        """
        if part in self.on_host:
            return 0.0
        num_pieces = world_size if part in self.partitioned else 1
        return getattr(self, part) * num_parameters / num_pieces

    def formula(self) -> str:
        """Return the device bytes per GPU as a formula of P parameters and W GPUs, for example "4P + 4P + 8P".

        There is one term for each part in the order of PARTS; parts of 0 bytes and parts in host memory are left out.
        """
        terms = []
        for part in PARTS:
            bytes_per_parameter = getattr(self, part)
            if bytes_per_parameter == 0 or part in self.on_host:
                continue
            divisor = "/W" if part in self.partitioned else ""
            terms.append(f"{bytes_per_parameter}P{divisor}")
        return " + ".join(terms)


def state_layout(precision: str, zero_stage: int, offload_optimizer: bool) -> StateLayout:
    """Return the bytes per parameter that DeepSpeed keeps for a precision and a ZeRO stage.

    With bf16 at stages 1 to 3 the weights take 2 bytes, the fp32 master copy 4, the fp32 sums of gradients 4 and
    Adam's moments 8; stage 1 (BF16_Optimizer) keeps 2-byte gradients beside the sums. Stage 0 is autocast over 4-byte
    weights, without a master copy. In fp32, stages 1 to 3 keep a master copy, too.

    Args:
        precision: "bf16" or "fp32", as in `train.precision`.
        zero_stage: 0 to 3.
        offload_optimizer: whether master and moments are in host memory; has no effect at stage 0.
    """
    partitioned = {0: (), 1: PARTS[2:], 2: PARTS[1:], 3: PARTS}[zero_stage]
    has_bf16_weights = precision == "bf16" and zero_stage > 0
    return StateLayout(
        weights=2 if has_bf16_weights else 4,
        gradients=6 if has_bf16_weights and zero_stage == 1 else 4,
        master=4 if zero_stage else 0,
        moments=8,
        partitioned=frozenset(partitioned),
        on_host=frozenset(PARTS[2:] if offload_optimizer and zero_stage else ()),
    )
