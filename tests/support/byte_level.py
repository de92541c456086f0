"""Train a small byte-level BPE vocabulary on a few sentences, for tests."""

from __future__ import annotations

import functools

from electra_dist.corpus.vocabulary import train_byte_level_bpe
from electra_dist.tokenizer import Vocabulary

TEXTS = [
    "the dog saw a bird\nthe king knew the girl near a house",
    "many old trees grow near the house where the dog saw the king",
    "Who saw the bird? The girl did, and the dog, too.",
]


@functools.cache
def byte_level_vocabulary() -> Vocabulary:
    """Return a vocabulary of 300 entries: the special tokens, the 256 bytes, and merges trained on TEXTS.

    It is trained once per process.
    """
    return train_byte_level_bpe(TEXTS, 300)
