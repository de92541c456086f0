"""Weights of Hugging Face folders in the towers: parameters that a folder holds are loaded, the others are noted."""

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
from electra_dist.model.towers import build_towers
from electra_dist.pretrained.hf_folders import read_weights
from electra_dist.pretrained.weights import load_tower_folders

MOMENTS_NOTE = "optimizer: a Hugging Face folder holds no moments; they start at zero"
WORD_TABLE = "electra.embeddings.word_embeddings.weight"  # a parameter of Hugging Face's models
POSITION_TABLE = "electra.embeddings.position_embeddings.weight"


@pytest.fixture
def model(make_config: Callable[..., ModelConfig]) -> ModelConfig:
    """Widths: embeddings 32, discriminator 64, generator 16; 300 words, 48 positions, 2 layers."""
    return make_config(32, 64, 16)


@pytest.fixture
def released(tmp_path: Path, model: ModelConfig) -> tuple[Path, Path]:
    """Folders of a discriminator and a generator that Hugging Face wrote, with 64 positions, more than `model` has."""
    folders = []
    for seed, hf_class, tower in (
        (0, ElectraForPreTraining, model.discriminator),
        (1, ElectraForMaskedLM, model.generator),
    ):
        config = ElectraConfig(
            vocab_size=model.vocab_size,
            embedding_size=model.embedding_size,
            hidden_size=tower.hidden_size,
            num_hidden_layers=tower.num_layers,
            num_attention_heads=tower.num_heads,
            intermediate_size=tower.intermediate_size,
            max_position_embeddings=64,
        )
        torch.manual_seed(seed)
        folder = tmp_path / hf_class.__name__
        hf_class(config).save_pretrained(folder)
        folders.append(folder)
    return folders[0], folders[1]


def num_parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_from_a_discriminator_alone_everything_except_the_generator_is_loaded(
    released: tuple[Path, Path], model: ModelConfig
) -> None:
    discriminator_dir, _ = released
    towers = build_towers(model, 1)
    random_towers = build_towers(model, 1)

    notes = load_tower_folders(towers, discriminator_dir, None)

    hf_state = ElectraForPreTraining.from_pretrained(discriminator_dir).state_dict()
    # The towers pad the word table beyond its 300 words, and have 48 of the folder's 64 positions.
    assert torch.equal(towers.embeddings.word.weight[:300], hf_state[WORD_TABLE])
    assert torch.equal(towers.embeddings.position.weight, hf_state[POSITION_TABLE][:48])
    # Query, key and value, of width 64 each, are one matrix in the towers.
    value_weight = towers.discriminator.layers[1].attention.qkv.weight[128:]
    assert torch.equal(value_weight, hf_state["electra.encoder.layer.1.attention.self.value.weight"])
    head_bias = hf_state["discriminator_predictions.dense_prediction.bias"]
    assert torch.equal(towers.discriminator_head.out.bias, head_bias)
    generator_weight = towers.generator.layers[0].expand.weight
    assert torch.equal(generator_weight, random_towers.generator.layers[0].expand.weight)

    generator_size = num_parameters(towers.generator)
    head_size = num_parameters(towers.generator_head)
    assert notes == [
        f"generator: not in {discriminator_dir}; its {generator_size:,} parameters start with random values",
        f"generator_head: not in {discriminator_dir}; its {head_size:,} parameters start with random values",
        MOMENTS_NOTE,
    ]


def test_shared_embeddings_are_those_of_the_discriminators_folder_and_a_difference_is_noted(
    released: tuple[Path, Path], model: ModelConfig
) -> None:
    _, generator_dir = released
    towers = build_towers(model, 1)

    notes = load_tower_folders(towers, *released)

    assert notes == [
        "embeddings: those of the two folders differ; the discriminator's are used for both towers",
        MOMENTS_NOTE,
    ]
    hf_generator = ElectraForMaskedLM.from_pretrained(generator_dir).state_dict()
    assert torch.equal(towers.generator_head.bias, hf_generator["generator_lm_head.bias"])
    assert torch.equal(towers.generator_head.dense.weight, hf_generator["generator_predictions.dense.weight"])


@pytest.mark.parametrize("sharing", ["none", "gdes"])
def test_towers_with_separate_word_tables_get_the_tables_of_their_own_folders(
    sharing: Any, released: tuple[Path, Path], model: ModelConfig
) -> None:
    discriminator_dir, generator_dir = released
    towers = build_towers(model.model_copy(update={"sharing": sharing}), 1)

    notes = load_tower_folders(towers, discriminator_dir, generator_dir)

    assert notes == [MOMENTS_NOTE]
    generator_table = ElectraForMaskedLM.from_pretrained(generator_dir).state_dict()[WORD_TABLE]
    discriminator_table = ElectraForPreTraining.from_pretrained(discriminator_dir).state_dict()[WORD_TABLE]
    assert torch.equal(towers.embeddings.word.weight[:300], generator_table)
    # With gdes the discriminator's table is the generator's plus a difference, which costs a rounding.
    torch.testing.assert_close(towers.discriminator_table()[:300], discriminator_table, rtol=0, atol=1e-7)


def test_pickled_weights_of_a_model_without_a_head_are_loaded_and_the_head_is_noted(
    tmp_path: Path, released: tuple[Path, Path], model: ModelConfig
) -> None:
    """Some conversions are like this: no discriminator head, `pytorch_model.bin`, parameter names without a prefix."""
    discriminator_dir, _ = released
    hf_body = ElectraModel.from_pretrained(discriminator_dir)
    body_dir = tmp_path / "body"
    body_dir.mkdir()
    torch.save(hf_body.state_dict(), body_dir / "pytorch_model.bin")
    (body_dir / "config.json").write_text((discriminator_dir / "config.json").read_text())
    towers = build_towers(model, 1, ObjectiveConfig(generator="uniform"))

    notes = load_tower_folders(towers, body_dir, None)

    head_size = num_parameters(towers.discriminator_head)
    assert notes == [
        f"discriminator_head: not in {body_dir}; its {head_size:,} parameters start with random values",
        MOMENTS_NOTE,
    ]
    expected = hf_body.state_dict()["encoder.layer.0.intermediate.dense.weight"]
    assert torch.equal(towers.discriminator.layers[0].expand.weight, expected)


@pytest.mark.parametrize(
    ("change", "expected_message"),
    [
        ({"vocab_size": 400}, "vocab_size is 300, but the config's discriminator has 400"),
        ({"embedding_size": 16}, "embedding_size is 32, but the config's discriminator has 16"),
        ({"max_positions": 128}, "fewer positions than model.max_positions 128"),
    ],
)
def test_a_folder_of_another_shape_is_refused_with_the_difference(
    change: Any, expected_message: str, released: tuple[Path, Path], model: ModelConfig
) -> None:
    discriminator_dir, _ = released
    towers = build_towers(ModelConfig(**{**model.model_dump(), **change}), 1)

    with pytest.raises(UserError, match=expected_message):
        load_tower_folders(towers, discriminator_dir, None)


def test_a_folder_without_a_config_or_of_another_model_type_is_refused(tmp_path: Path, model: ModelConfig) -> None:
    towers = build_towers(model, 1)

    with pytest.raises(UserError, match=r"no config.json"):
        load_tower_folders(towers, tmp_path, None)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(UserError, match="model_type is bert"):
        load_tower_folders(towers, tmp_path, None)


def test_weights_in_several_files_are_those_of_one_file_and_a_missing_file_is_named(
    released: tuple[Path, Path], tmp_path: Path
) -> None:
    discriminator, _ = released
    ElectraForPreTraining.from_pretrained(discriminator).save_pretrained(tmp_path / "cut", max_shard_size="20KB")
    files = sorted((tmp_path / "cut").glob("*.safetensors"))
    assert len(files) > 1
    expected = read_weights(discriminator)
    found = read_weights(tmp_path / "cut")
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    files[0].unlink()
    with pytest.raises(UserError, match=f"{files[0].name}: .* copy the model's whole folder"):
        read_weights(tmp_path / "cut")
