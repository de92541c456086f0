"""Compare two checkpoints number by number, whatever world sizes and ZeRO stages wrote them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from electra_dist.checkpoint.manifest import KINDS, Kind, RunState
from electra_dist.checkpoint.reader import CheckpointReader
from electra_dist.checkpoint.tensor_file import Fragment
from electra_dist.errors import TornCheckpoint


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Result of comparing one parameter and its optimizer moments in two checkpoints."""

    name: str  # of the parameter
    largest: dict[Kind, float]  # kind (weights or a moment) -> largest absolute difference; NaN if either has a NaN
    equal: bool  # bit for bit, weights and both moments


def state_differences(a: RunState, b: RunState) -> list[tuple[str, Any, Any]]:
    """Return (field, value in `a`, value in `b`) for every field in which the run states of two checkpoints differ.
    World size, ZeRO stage and package versions are among them; they may differ although all weights are equal.
    """
    return [
        (field, getattr(a, field), getattr(b, field))
        for field in RunState.model_fields
        if getattr(a, field) != getattr(b, field)
    ]


def parameter_differences(a: CheckpointReader, b: CheckpointReader) -> Iterator[Difference]:
    """Compare every parameter that both checkpoints have in the same shape, in the order of `a`, one at a time.
    Raises TornCheckpoint if a parameter of either side is damaged.
    """
    for name, shape in a.manifest.state.shapes.items():
        if b.manifest.state.shapes.get(name) != shape:
            continue
        left = _read(a, name)
        right = _read(b, name)
        largest = {kind: float((left[kind] - right[kind]).abs().max()) for kind in KINDS}
        # Bits are compared as integers: as floats a NaN would differ from itself, and -0 would equal 0.
        is_equal = all(torch.equal(left[kind].view(torch.int32), right[kind].view(torch.int32)) for kind in KINDS)
        yield Difference(name=name, largest=largest, equal=is_equal)


def _read(reader: CheckpointReader, name: str) -> dict[Kind, torch.Tensor]:
    """Read and verify a whole parameter and its moments, as flat fp32 CPU tensors."""
    numel = prod(reader.manifest.state.shapes[name])
    views = {kind: torch.empty(numel) for kind in KINDS}
    faults = reader.fill([Fragment(name=name, start=0, numel=numel, views=views)], check=())
    if faults:
        raise TornCheckpoint(f"{reader.checkpoint.url} is damaged: {faults[0]}; run `electra-dist checkpoint repair`")
    return views
