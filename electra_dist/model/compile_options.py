"""The options with which FlexAttention and the layers of the towers are compiled.

torch.compile keeps one graph for each combination of shapes, grad mode and kind of mask. By default it compiles at
most eight graphs of a function. For the ninth it warns once and runs that call eagerly from then on, FlexAttention
with all scores in memory. A run with towers of different head counts, evaluations and `train.micro_batch: auto` needs
more than eight.

Guarantee: up to MOST_GRAPHS graphs of one function are compiled. One more graph, or a graph break, raises an error.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

MOST_GRAPHS = 64
_LIMIT = "recompile_limit"


def compile_options(backend: str = "inductor") -> dict[str, Any]:
    """Return the keyword arguments for torch.compile: static shapes, no graph breaks, at most MOST_GRAPHS graphs."""
    options = {"backend": backend, "dynamic": False, "fullgraph": True}
    if _LIMIT in inspect.signature(torch.compile).parameters:
        # The argument also holds in autograd's threads, which recompute layers. Dynamo's settings do not.
        return {**options, _LIMIT: MOST_GRAPHS}
    torch._dynamo.config.recompile_limit = max(MOST_GRAPHS, torch._dynamo.config.recompile_limit)
    return options
