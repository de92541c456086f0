"""Sources of a frozen generator: which are refused, and the digest that binds a run to the weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from electra_kernels.operation_types import SpecialIds
from support.small_models import frozen_weights

from electra_dist.config import Config, ObjectiveConfig
from electra_dist.config.load import load_config
from electra_dist.errors import UserError
from electra_dist.model.counts import frozen_generator_parameters, parameter_counts, token_flops
from electra_dist.objectives.build_objective import build_objective
from electra_dist.pretrained.export import export_tower
from electra_dist.pretrained.weights import read_frozen_generator, weights_sha256, with_generator_digest
from electra_dist.tokenizer import Vocabulary

SPECIAL = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)


@pytest.fixture
def config(tiny_config: Callable[..., Path], tiny_corpus: Path, tmp_path: Path) -> Config:
    """A config whose frozen generator is a Hugging Face folder with known weights."""
    settings = {"objective.generator": "frozen", "train.init_generator_from": str(tmp_path / "generator")}
    config = load_config(tiny_config(**settings), [])
    weights = frozen_weights(config.model)
    export_tower(
        weights, config.model, "generator", Vocabulary.read(tiny_corpus / "vocab.txt"), True, tmp_path / "generator"
    )
    return config


def with_source(config: Config, folder: Path) -> Config:
    """Return the config with another folder of the generator."""
    return config.model_copy(update={"train": config.train.model_copy(update={"init_generator_from": str(folder)})})


def test_weights_of_a_hugging_face_folder_are_those_that_were_exported(config: Config) -> None:
    expected = frozen_weights(config.model)
    read = read_frozen_generator(config)
    assert read.keys() == expected.keys()
    for name, value in expected.items():
        if name == "embeddings.word.weight":  # its pad rows are not exported
            value, read_rows = value[: config.model.vocab_size], read[name][: config.model.vocab_size]
            assert torch.equal(read_rows, value)
        else:
            assert torch.equal(read[name], value)


def test_the_digest_depends_on_every_weight_and_is_part_of_the_identity(config: Config) -> None:
    pinned = with_generator_digest(config)
    digest = pinned.objective.generator_sha256
    assert pinned.identity()["objective"]["generator_sha256"] == digest
    assert with_generator_digest(pinned) == pinned
    weights = dict(read_frozen_generator(config))
    name = "generator_head.bias"
    weights[name] = weights[name].clone()
    weights[name][7] += 1e-6
    assert weights_sha256(weights) != digest


def test_weights_with_another_digest_than_the_config_sets_are_refused(config: Config) -> None:
    objective = config.objective.model_copy(update={"generator_sha256": "0" * 64})
    with pytest.raises(UserError, match=r"sha256 of the weights is .*, but objective\.generator_sha256 is 0000"):
        read_frozen_generator(config.model_copy(update={"objective": objective}))


def test_a_missing_folder_and_one_without_a_model_are_refused(config: Config, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "missing", tmp_path / "empty"):
        with pytest.raises(UserError, match=r"train\.init_generator_from .*: neither a run") as error:
            read_frozen_generator(with_source(config, folder))
        assert "\n" not in str(error.value)


def test_a_generator_of_another_shape_and_one_without_a_head_are_refused(config: Config, tmp_path: Path) -> None:
    tower = config.model.generator.model_copy(update={"num_layers": 1})
    model = config.model.model_copy(update={"generator": tower})
    with pytest.raises(UserError, match="num_hidden_layers is 2, but the config's generator has 1"):
        read_frozen_generator(config.model_copy(update={"model": model}))

    weights = {name: value for name, value in frozen_weights(config.model).items() if "head" not in name}
    vocab_file = tmp_path / "generator" / "vocab.txt"
    export_tower(weights, config.model, "generator", Vocabulary.read(vocab_file), True, tmp_path / "headless")
    with pytest.raises(UserError, match="the weights lack generator_head"):
        read_frozen_generator(with_source(config, tmp_path / "headless"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"objective.generator": "frozen"}, "frozen needs train.init_generator_from"),
        ({"objective.generator_sha256": "0" * 64}, "generator_sha256 needs generator `frozen`"),
        ({"train.init_generator_from": "folder"}, "init_generator_from needs init_from"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(
    tiny_config: Callable[..., Path], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        load_config(tiny_config(**settings), [])


@pytest.mark.parametrize("sharing", ["gdes", "all"])
def test_shared_weights_of_a_frozen_generator_are_refused(tiny_config: Callable[..., Path], sharing: str) -> None:
    settings: dict[str, Any] = {"objective.generator": "frozen", "train.init_generator_from": "x"}
    settings["model.sharing"] = sharing
    settings["model.generator"] = load_config(tiny_config()).model.discriminator.model_dump()
    with pytest.raises(UserError, match="a frozen generator has tables and layers of its own"):
        load_config(tiny_config(**settings), [])


def test_a_frozen_generator_costs_its_forward_pass_and_has_no_trained_parameters(config: Config) -> None:
    trained = ObjectiveConfig()
    frozen_flops = token_flops(config.model, 32, config.objective)
    trained_flops = token_flops(config.model, 32, trained)
    assert frozen_flops.generator == pytest.approx(trained_flops.generator / 3)
    assert frozen_flops.discriminator == trained_flops.discriminator

    module = build_objective(config.model, config.objective, SPECIAL, 3)
    num_pad_values = (config.model.padded_vocab_size - config.model.vocab_size) * config.model.embedding_size
    num_trained = sum(parameter.numel() for parameter in module.parameters())
    num_frozen = sum(value.numel() for value in frozen_weights(config.model).values())
    assert parameter_counts(config.model, config.objective).total == num_trained - num_pad_values
    assert frozen_generator_parameters(config.model, config.objective) == num_frozen - num_pad_values
