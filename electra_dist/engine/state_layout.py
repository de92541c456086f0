"""How DeepSpeed lays the training state out over ranks at each ZeRO stage."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StateLayout:
    """Bytes per parameter of a training state and which of its parts are cut into one piece per GPU."""

    weights: int
    gradients: int
    master: int
    moments: int
    partitioned: frozenset[str]
    on_host: frozenset[str]

    def bytes_per_gpu(self, part: str, num_parameters: int, world_size: int) -> float:
        """Device bytes of `part` ("weights", "gradients", "master", "moments")."""
        if part in self.on_host:
            return 0.0
        return getattr(self, part) * num_parameters / (world_size if part in self.partitioned else 1)

    def formula(self) -> str:
        """The same in letters: P parameters, W GPUs."""
        terms = []
        for part in PARTS:
            if getattr(self, part) and part not in self.on_host:
                terms.append(f"{getattr(self, part)}P" + ("/W" if part in self.partitioned else ""))
        return " + ".join(terms)


PARTS = ("weights", "gradients", "master", "moments")


def state_layout(precision: str, zero_stage: int, offload_optimizer: bool) -> StateLayout:
    """How `engine.py` keeps the state at each ZeRO stage.

    bf16: 2-byte weights, 4-byte master and gradient sums, 8 bytes of Adam moments; stage 1 (BF16_Optimizer) keeps
    2-byte gradients beside the sums, stage 0 is autocast over 4-byte weights. fp32: DeepSpeed's stages 1 to 3 keep a
    master copy here, too.
    """
    partitioned = {0: (), 1: PARTS[2:], 2: PARTS[1:], 3: PARTS}[zero_stage]
    half = precision == "bf16" and zero_stage > 0
    return StateLayout(
        weights=2 if half else 4,
        gradients=6 if half and zero_stage == 1 else 4,
        master=4 if zero_stage else 0,
        moments=8,
        partitioned=frozenset(partitioned),
        on_host=frozenset(PARTS[2:] if offload_optimizer and zero_stage else ()),
    )
