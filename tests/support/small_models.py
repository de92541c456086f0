"""Fixtures of small models with no parameter at its default, of rows of any layout, and of Hugging Face's models."""

from collections.abc import Callable

import pytest
import torch
from electra_kernels.operation_types import SpecialIds
from support.float64_truth import shaken
from transformers import ElectraConfig, ElectraForMaskedLM, ElectraForPreTraining

from electra_dist.config import ModelConfig, TowerConfig
from electra_dist.model.towers import ElectraTowers, build_towers
from electra_dist.pretrained.hf import to_hf

SIZES = [  # embedding width, discriminator width, generator width, layers
    pytest.param((32, 32, 32, 2), id="no-projection"),
    pytest.param((64, 64, 16, 3), id="generator-projected-as-large"),
    pytest.param((32, 64, 16, 2), id="both-projected-as-small"),
    pytest.param((48, 48, 48, 1), id="odd-heads"),
]
SPECIAL = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)


def frozen_weights(model: ModelConfig) -> dict[str, torch.Tensor]:
    """Return weights for a frozen generator of `model`, none of them at its initial value."""
    separate = build_towers(model.model_copy(update={"sharing": "none"}), seed=4)
    state = shaken(separate).state_dict()
    return {name: value for name, value in state.items() if name.startswith(("embeddings.", "generator"))}


@pytest.fixture
def special() -> SpecialIds:
    """The ids of the special tokens in rows of `make_rows`."""
    return SPECIAL


@pytest.fixture
def make_config() -> Callable[..., ModelConfig]:
    """A function that returns a model config: widths of embedding, discriminator and generator, and layers."""

    def make(
        embedding: int = 32, hidden: int = 32, generator: int = 32, layers: int = 2, **extra: object
    ) -> ModelConfig:
        def tower(width: int) -> TowerConfig:
            return TowerConfig(
                hidden_size=width, num_layers=layers, num_heads=max(1, width // 16), intermediate_size=4 * width
            )

        fields = {"vocab_size": 300, "max_positions": 48, "hidden_dropout": 0.0, "attention_dropout": 0.0, **extra}
        return ModelConfig(embedding_size=embedding, discriminator=tower(hidden), generator=tower(generator), **fields)

    return make


@pytest.fixture
def make_towers() -> Callable[[ModelConfig], ElectraTowers]:
    """A function that returns towers with random biases and LayerNorms, so that a test fails if one is ignored."""

    def make(model: ModelConfig) -> ElectraTowers:
        torch.manual_seed(0)
        towers = ElectraTowers(model).eval()
        with torch.no_grad():
            for name, parameter in towers.named_parameters():
                is_norm_weight = "norm" in name and name.endswith("weight")
                parameter.copy_(torch.randn(parameter.shape) * 0.1 + (1.0 if is_norm_weight else 0.0))
        return towers

    return make


@pytest.fixture
def hf_twins() -> Callable[[ElectraTowers, ModelConfig], tuple[ElectraForMaskedLM, ElectraForPreTraining]]:
    """A function that returns Hugging Face's generator and discriminator with given weights and eager attention."""

    def make(towers: ElectraTowers, model: ModelConfig) -> tuple[ElectraForMaskedLM, ElectraForPreTraining]:
        twins = []
        for tower, classes, state in (
            (model.generator, ElectraForMaskedLM, to_hf(towers.state_dict(), model, "generator")),
            (model.discriminator, ElectraForPreTraining, to_hf(towers.state_dict(), model, "discriminator")),
        ):
            config = ElectraConfig(
                vocab_size=model.vocab_size,
                embedding_size=model.embedding_size,
                hidden_size=tower.hidden_size,
                num_hidden_layers=tower.num_layers,
                num_attention_heads=tower.num_heads,
                intermediate_size=tower.intermediate_size,
                max_position_embeddings=model.max_positions,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
                attn_implementation="eager",
            )
            twin = classes(config).eval()
            missing = twin.load_state_dict(state, strict=False)
            assert not missing.unexpected_keys
            assert set(missing.missing_keys) <= {"generator_lm_head.weight"}  # tied
            twins.append(twin)
        return tuple(twins)

    return make


@pytest.fixture
def make_rows() -> Callable[..., torch.Tensor]:
    """A function that returns random rows, [len(lengths), seq_len] int64.

    `lengths[b]` lists the text lengths (A, B) of the examples of row b; B = 0 makes an example of one segment.
    """

    def make(lengths: list[list[tuple[int, int]]], seq_len: int, vocab_size: int = 300) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        rows = torch.full((len(lengths), seq_len), SPECIAL.pad)
        for b, examples in enumerate(lengths):
            at = 0
            for first, second in examples:
                text = torch.randint(5, vocab_size, (first + second,), generator=generator).tolist()
                example = [SPECIAL.cls, *text[:first], SPECIAL.sep]
                if second:
                    example += [*text[first:], SPECIAL.sep]
                rows[b, at : at + len(example)] = torch.tensor(example)
                at += len(example)
        return rows

    return make
