"""Checkpoints of others into our towers: what they hold is taken, what they lack is said."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import ElectraConfig, ElectraForMaskedLM, ElectraForPreTraining, ElectraModel

from electra_dist.config import ModelConfig, ObjectiveConfig
from electra_dist.errors import UserError
from electra_dist.model.initial_weights import build_towers
from electra_dist.pretrained.load_towers import load_pretrained

MOMENTS = "optimizer: a Hugging Face folder holds no moments; they start at zero"


@pytest.fixture
def model(make_config: Callable[..., ModelConfig]) -> ModelConfig:
    return make_config(32, 64, 16)


@pytest.fixture
def released(tmp_path: Path, model: ModelConfig) -> tuple[Path, Path]:
    """A discriminator and a generator that Hugging Face wrote; longer positions than ours."""
    folders = []
    for kind, tower in ((ElectraForPreTraining, model.discriminator), (ElectraForMaskedLM, model.generator)):
        config = ElectraConfig(
            vocab_size=model.vocab_size,
            embedding_size=model.embedding_size,
            hidden_size=tower.hidden_size,
            num_hidden_layers=tower.num_layers,
            num_attention_heads=tower.num_heads,
            intermediate_size=tower.intermediate_size,
            max_position_embeddings=64,
        )
        torch.manual_seed(len(folders))
        folders.append(tmp_path / kind.__name__)
        kind(config).save_pretrained(folders[-1])
    return folders[0], folders[1]


def test_discriminator_alone(released: tuple[Path, Path], model: ModelConfig) -> None:
    towers, untouched = build_towers(model, 1), build_towers(model, 1)
    notes = load_pretrained(towers, released[0], None)
    theirs = ElectraForPreTraining.from_pretrained(released[0]).state_dict()
    assert torch.equal(towers.embeddings.word.weight[:300], theirs["electra.embeddings.word_embeddings.weight"])
    assert torch.equal(towers.embeddings.position.weight, theirs["electra.embeddings.position_embeddings.weight"][:48])
    value = theirs["electra.encoder.layer.1.attention.self.value.weight"]
    assert torch.equal(towers.discriminator.layers[1].attention.qkv.weight[128:], value)
    assert torch.equal(towers.discriminator_head.out.bias, theirs["discriminator_predictions.dense_prediction.bias"])
    assert torch.equal(towers.generator.layers[0].expand.weight, untouched.generator.layers[0].expand.weight)
    generator = sum(p.numel() for p in towers.generator.parameters())
    head = sum(p.numel() for p in towers.generator_head.parameters())
    assert notes == [
        f"generator: not in {released[0]}; its {generator:,} parameters start with random values",
        f"generator_head: not in {released[0]}; its {head:,} parameters start with random values",
        MOMENTS,
    ]


def test_both_with_embeddings_that_differ(released: tuple[Path, Path], model: ModelConfig) -> None:
    towers = build_towers(model, 1)
    notes = load_pretrained(towers, *released)
    assert notes == [
        "embeddings: those of the two folders differ; the discriminator's are used for both towers",
        MOMENTS,
    ]
    theirs = ElectraForMaskedLM.from_pretrained(released[1]).state_dict()
    assert torch.equal(towers.generator_head.bias, theirs["generator_lm_head.bias"])
    assert torch.equal(towers.generator_head.dense.weight, theirs["generator_predictions.dense.weight"])


@pytest.mark.parametrize("sharing", ["none", "gdes"])
def test_both_towers_keep_their_own_tables_where_they_have_them(
    sharing: Any, released: tuple[Path, Path], model: ModelConfig
) -> None:
    towers = build_towers(model.model_copy(update={"sharing": sharing}), 1)
    assert load_pretrained(towers, *released) == [MOMENTS]
    tables = []
    for kind, folder in zip((ElectraForPreTraining, ElectraForMaskedLM), released):
        tables.append(kind.from_pretrained(folder).state_dict()["electra.embeddings.word_embeddings.weight"])
    assert torch.equal(towers.embeddings.word.weight[:300], tables[1])
    torch.testing.assert_close(towers.discriminator_table()[:300], tables[0], rtol=0, atol=1e-7)


def test_a_model_without_a_head_and_pickled_weights(tmp_path: Path, released: Any, model: ModelConfig) -> None:
    """As some conversions are: no discriminator head, `pytorch_model.bin`, names without a prefix."""
    body = ElectraModel.from_pretrained(released[0])
    (tmp_path / "body").mkdir()
    torch.save(body.state_dict(), tmp_path / "body" / "pytorch_model.bin")
    (tmp_path / "body" / "config.json").write_text((released[0] / "config.json").read_text())
    towers = build_towers(model, 1, ObjectiveConfig(generator="uniform"))
    notes = load_pretrained(towers, tmp_path / "body", None)
    count = sum(p.numel() for p in towers.discriminator_head.parameters())
    assert notes == [
        f"discriminator_head: not in {tmp_path / 'body'}; its {count:,} parameters start with random values",
        MOMENTS,
    ]
    expected = body.state_dict()["encoder.layer.0.intermediate.dense.weight"]
    assert torch.equal(towers.discriminator.layers[0].expand.weight, expected)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"vocab_size": 400}, "vocab_size is 300, but the config's discriminator has 400"),
        ({"embedding_size": 16}, "embedding_size is 32, but the config's discriminator has 16"),
        ({"max_positions": 128}, "fewer positions than model.max_positions 128"),
    ],
)
def test_another_shape_is_refused(change: Any, said: str, released: Any, model: ModelConfig) -> None:
    towers = build_towers(ModelConfig(**{**model.model_dump(), **change}), 1)
    with pytest.raises(UserError, match=said):
        load_pretrained(towers, released[0], None)


def test_what_is_no_model_is_refused(tmp_path: Path, model: ModelConfig) -> None:
    towers = build_towers(model, 1)
    with pytest.raises(UserError, match=r"no config.json"):
        load_pretrained(towers, tmp_path, None)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(UserError, match="model_type is bert"):
        load_pretrained(towers, tmp_path, None)
