"""Compiled functions keep a graph for every combination of shapes and modes of a run, or say that they cannot."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._dynamo.utils import counters

from electra_dist.model import compile_options as module
from electra_dist.model.compile_options import MOST_GRAPHS, compile_options

MORE_THAN_TORCHS_LIMIT = 12


@pytest.fixture(autouse=True)
def _forget_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(recompile_limit=8):  # torch's own, which torch 2.8 raises to MOST_GRAPHS
        yield
    torch._dynamo.reset()


def graphs_of(function: Callable[[torch.Tensor], torch.Tensor], sizes: int) -> int:
    """Call a function with tensors of `sizes` sizes, and return how many graphs were compiled."""
    for size in range(2, 2 + sizes):
        x = torch.arange(float(size))
        assert torch.equal(function(x), x * 2)
    return counters["stats"]["unique_graphs"]


def doubled() -> Callable[[torch.Tensor], torch.Tensor]:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    return torch.compile(double, **compile_options("eager"))


def test_a_run_with_more_graphs_than_torchs_limit_compiles_them_all():
    assert MOST_GRAPHS > MORE_THAN_TORCHS_LIMIT > torch._dynamo.config.recompile_limit
    assert graphs_of(doubled(), MORE_THAN_TORCHS_LIMIT) == MORE_THAN_TORCHS_LIMIT


def test_they_are_compiled_in_another_thread_too():
    """Autograd recomputes layers in its own threads, which do not have the settings of the main thread."""
    found: list[int] = []
    function = doubled()
    thread = threading.Thread(target=lambda: found.append(graphs_of(function, MORE_THAN_TORCHS_LIMIT)))
    thread.start()
    thread.join()
    assert found == [MORE_THAN_TORCHS_LIMIT]


def test_one_graph_too_many_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MOST_GRAPHS", 9)
    with pytest.raises(FailOnRecompileLimitHit):
        graphs_of(doubled(), 10)


def test_the_same_holds_for_a_compiled_layer():
    class Double(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    layer = Double()
    layer.compile(**compile_options("eager"))
    assert graphs_of(layer, MORE_THAN_TORCHS_LIMIT) == MORE_THAN_TORCHS_LIMIT
