"""Random prose and a small vocabulary of its words, for tests of the tokenizer, of corpora and of corpus commands."""

from __future__ import annotations

import random
import string
from collections.abc import Callable

import pytest

from electra_dist.tokenizer import SPECIAL_TOKENS, Vocabulary

WORDS = ["the", "of", "and", "a", "to", "in", "he", "was", "that", "it", "his", "her", "as", "had", "with", "for"]
# Config of a corpus of small shards, for the command `corpus build`; `vocab_size` is to be filled in.
BUILD_CONFIG = """
run_dir: unused
model:
  vocab_size: {vocab_size}
  max_positions: 64
  discriminator: {{hidden_size: 8, num_layers: 1, num_heads: 1, intermediate_size: 8}}
  generator: {{hidden_size: 8, num_layers: 1, num_heads: 1, intermediate_size: 8}}
data: {{corpus: unused, seq_len: 64}}
train: {{num_steps: 1, global_batch: 1, micro_batch: 1}}
corpus: {{shard_size_mb: 0.06, heldout_fraction: 0.05}}
"""


def make_vocabulary() -> Vocabulary:
    """Return a vocabulary of special tokens, letters, digits, punctuation and some of WORDS.

    The special tokens are not at the front, so that code with hard-coded ids fails.
    """
    chars = string.ascii_lowercase + string.digits
    tokens = [
        *string.punctuation,
        *SPECIAL_TOKENS,
        *chars,
        *("##" + char for char in chars),
        *WORDS[4:],
        "sep",
        "mask",
    ]
    return Vocabulary("\n".join(dict.fromkeys(tokens)) + "\n", "test vocabulary")


@pytest.fixture(scope="session")
def vocabulary() -> Vocabulary:
    """The vocabulary of `make_vocabulary`."""
    return make_vocabulary()


def make_prose(num_documents: int, seed: int) -> list[str]:
    """Return documents of 1 to 12 lines of 1 to 40 words; one line in twenty is a paragraph of 300 words."""
    draw = random.Random(seed)
    documents = []
    for number in range(num_documents):
        sizes = [300 if draw.random() < 0.05 else draw.randint(1, 40) for _ in range(draw.randint(1, 12))]
        lines = [" ".join(draw.choice(WORDS) + draw.choice(["", "", "s", ","]) for _ in range(n)) for n in sizes]
        documents.append("\n".join([f"document {number}", *lines]))
    return documents


@pytest.fixture(scope="session")
def prose() -> Callable[[int, int], list[str]]:
    """The function `make_prose(num_documents, seed)`."""
    return make_prose
