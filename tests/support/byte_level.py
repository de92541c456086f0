"""A small byte-level BPE vocabulary that is trained on a few sentences."""

from __future__ import annotations

import functools

from electra_dist.corpus.byte_level_bpe import train_byte_level_bpe
from electra_dist.tokenizer import Vocabulary

TEXTS = [
    "the dog saw a bird\nthe king knew the girl near a house",
    "many old trees grow near the house where the dog saw the king",
    "Who saw the bird? The girl did, and the dog, too.",
]


@functools.cache
def byte_level_vocabulary() -> Vocabulary:
    """Return a vocabulary of the special tokens, the 256 bytes and 39 merges."""
    return train_byte_level_bpe(TEXTS, 300)
