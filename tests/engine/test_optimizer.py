"""Building the optimizer: which parameters have weight decay, and how NVIDIA's apex is recognized."""

from __future__ import annotations

import importlib.machinery
import importlib.util

import pytest
from torch import nn

from electra_dist.engine import optimizer as module_under_test
from electra_dist.engine.optimizer import has_nvidia_apex, parameter_groups


def test_embeddings_and_weights_have_decay_and_layer_norms_and_biases_have_none() -> None:
    module = nn.ModuleDict({"word": nn.Embedding(4, 3), "norm": nn.LayerNorm(3), "dense": nn.Linear(3, 3)})
    decayed, plain = parameter_groups(module, 0.01)
    assert {id(p) for p in decayed["params"]} == {id(module["word"].weight), id(module["dense"].weight)}
    assert {id(p) for p in plain["params"]} == {
        id(module["norm"].weight),
        id(module["norm"].bias),
        id(module["dense"].bias),
    }
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.01, 0.0)


def test_another_package_named_apex_is_not_mistaken_for_nvidias(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec

    def only_the_name(name: str) -> importlib.machinery.ModuleSpec | None:
        if name == "apex":
            return importlib.machinery.ModuleSpec("apex", None)
        return real(name)

    monkeypatch.setattr(module_under_test.importlib.util, "find_spec", only_the_name)
    assert not has_nvidia_apex()
