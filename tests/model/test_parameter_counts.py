"""Parameter counts against the paper and against models that are built."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from electra_dist.config import ModelConfig, TowerConfig
from electra_dist.config.load import load_config
from electra_dist.model.counts import parameter_counts
from electra_dist.model.towers import ElectraTowers

CONFIGS = Path(__file__).parents[2] / "configs"


def test_electra_large_has_the_papers_parameters() -> None:
    count = parameter_counts(ModelConfig(**yaml.safe_load((CONFIGS / "large_25pct_mask.yaml").read_text())["model"]))
    assert f"{count.discriminator / 1e6:.2f}" == "335.14"
    assert f"{count.generator_only / 1e6:.2f}" == "19.51"
    assert f"{count.total / 1e6:.2f}" == "354.66"


@pytest.mark.parametrize("size", [(32, 32, 32, 2), (64, 64, 16, 3), (32, 64, 16, 2)])
def test_count_equals_a_built_model(size: tuple[int, int, int, int], make_config: Callable[..., Any]) -> None:
    model = make_config(*size)
    count, towers = parameter_counts(model), ElectraTowers(model)
    sizes = {name: sum(p.numel() for p in child.parameters()) for name, child in towers.named_children()}
    padding = (model.padded_vocab_size - model.vocab_size) * model.embedding_size
    kept = sizes["embeddings"] - padding + sizes["discriminator"] + sizes["discriminator_head"]
    assert count.discriminator == kept
    assert count.generator_only == sizes["generator"] + sizes["generator_head"]


def test_large_has_the_papers_parameters():
    counts = parameter_counts(load_config(CONFIGS / "large_25pct_mask.yaml").model)
    assert (round(counts.discriminator / 1e6, 2), round(counts.generator_only / 1e6, 2)) == (335.14, 19.51)
    assert round(counts.total / 1e6, 2) == 354.66


@pytest.mark.parametrize("embedding_size", [24, 32])
def test_counts_are_those_of_the_built_model_without_padding(embedding_size: int):
    model = ModelConfig(
        vocab_size=200,
        embedding_size=embedding_size,
        max_positions=40,
        discriminator=TowerConfig(hidden_size=32, num_layers=2, num_heads=2, intermediate_size=80),
        generator=TowerConfig(hidden_size=16, num_layers=3, num_heads=1, intermediate_size=48),
    )
    built = dict(ElectraTowers(model).named_parameters())
    padding = (model.padded_vocab_size - model.vocab_size) * embedding_size
    only = sum(p.numel() for name, p in built.items() if name.startswith(("generator.", "generator_head.")))
    counts = parameter_counts(model)
    assert counts.total == sum(p.numel() for p in built.values()) - padding
    assert counts.generator_only == only
