"""Fixtures of a tiny encoder with random weights and a vocabulary of common words, and the head of a tuned model."""

from __future__ import annotations

import pytest
from torch import nn

from electra_dist.config import ModelConfig
from electra_dist.finetune.models import TaskModel
from electra_dist.model.towers import build_towers
from electra_dist.pretrained.encoder import Pretrained
from electra_dist.scoring.number_agreement import ADJECTIVES, NOUNS, THINGS
from electra_dist.tokenizer import Vocabulary

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PIECES = [*"abcdefghijklmnopqrstuvwxyz0123456789", *(f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz0123456789")]
FUNCTION_WORDS = "is are was were has have who the near behind saw knew this these that those they many one come"


@pytest.fixture(scope="session")
def vocabulary() -> Vocabulary:
    """Special tokens, punctuation, letters, digits and the words of the agreement templates."""
    nouns = [form for forms in (*NOUNS, *THINGS) for form in forms]
    tokens = dict.fromkeys([*SPECIAL, *".,!?'()-$%`", *PIECES, *FUNCTION_WORDS.split(), *nouns, *ADJECTIVES])
    return Vocabulary("\n".join(tokens) + "\n", "test vocabulary")


@pytest.fixture(scope="session")
def model(vocabulary: Vocabulary) -> ModelConfig:
    """Two layers of width 32, with narrower embeddings, so that the model has a projection."""
    tower = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "intermediate_size": 64}
    return ModelConfig.model_validate(
        {
            "vocab_size": vocabulary.size,
            "embedding_size": 24,
            "max_positions": 64,
            "initializer_range": 0.1,
            "discriminator": tower,
            "generator": {**tower, "hidden_size": 16, "num_heads": 1},
        }
    )


@pytest.fixture(scope="session")
def modern_model(vocabulary: Vocabulary) -> ModelConfig:
    """A small model config of the architecture `modern`: four layers, and windows shorter than the texts of the tests.

    Local attention therefore leaves out tokens, which a test would not notice with longer windows.
    """
    tower = {"hidden_size": 32, "num_layers": 4, "num_heads": 2, "intermediate_size": 48}
    return ModelConfig.model_validate(
        {
            "architecture": "modern",
            "vocab_size": vocabulary.size,
            "embedding_size": 32,
            "max_positions": 64,
            "local_window": 4,
            "initializer_range": 0.1,
            "discriminator": tower,
            "generator": {**tower, "num_layers": 2},
        }
    )


@pytest.fixture(scope="session")
def modern_encoder(modern_model: ModelConfig, vocabulary: Vocabulary) -> Pretrained:
    """The discriminator of `modern_model` with random weights, as a loaded encoder."""
    state = build_towers(modern_model, 3).state_dict()
    return Pretrained.from_state("tiny modern", state, modern_model, vocabulary, lowercase=True)


@pytest.fixture(scope="session")
def encoder(model: ModelConfig, vocabulary: Vocabulary) -> Pretrained:
    """The discriminator of `model` with random weights."""
    return Pretrained.from_state("tiny", build_towers(model, 3).state_dict(), model, vocabulary, lowercase=True)


def head_parameters(model: TaskModel) -> list[nn.Parameter]:
    """Return the parameters of a model's head; the last two are weight and bias of its output layer."""
    return [value for name, value in model.named_parameters() if not name.startswith(model.encoder_prefix)]
