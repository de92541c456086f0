"""Two checkpoints, number by number, whatever world sizes and stages wrote them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from electra_dist.checkpoint.manifest import KINDS, Kind, Manifest, RunState
from electra_dist.checkpoint.read import fill
from electra_dist.checkpoint.tensor_file import Fragment
from electra_dist.errors import TornCheckpoint
from electra_dist.store.interface import Store


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One parameter of two checkpoints."""

    name: str
    largest: dict[Kind, float]  # kind -> largest absolute difference; nan if one side has a nan
    equal: bool  # bit for bit, in all kinds


@dataclass(frozen=True, kw_only=True)
class Side:
    """A checkpoint to compare."""

    store: Store
    folder: str
    manifest: Manifest

    def read(self, name: str) -> dict[Kind, torch.Tensor]:
        """A whole parameter, verified.

        Raises:
            TornCheckpoint: it is damaged.
        """
        numel = prod(self.manifest.state.shapes[name])
        views = {kind: torch.empty(numel) for kind in KINDS}
        fragment = Fragment(name=name, start=0, numel=numel, views=views)
        if faults := fill(self.store, self.folder, self.manifest, [fragment], check=()):
            raise TornCheckpoint(f"{self.store.url}/{self.folder}: {faults[0]}")
        return views


def state_differences(a: RunState, b: RunState) -> list[tuple[str, Any, Any]]:
    """(field, value of a, value of b) where they differ."""
    return [
        (field, getattr(a, field), getattr(b, field))
        for field in RunState.model_fields
        if getattr(a, field) != getattr(b, field)
    ]


def parameter_differences(a: Side, b: Side) -> Iterator[Difference]:
    """Every parameter that both have in one shape, in a's order; holds one at a time."""
    for name, shape in a.manifest.state.shapes.items():
        if b.manifest.state.shapes.get(name) != shape:
            continue
        left, right = a.read(name), b.read(name)
        yield Difference(
            name=name,
            largest={kind: float((left[kind] - right[kind]).abs().max()) for kind in KINDS},
            equal=all(torch.equal(left[kind].view(torch.int32), right[kind].view(torch.int32)) for kind in KINDS),
        )
