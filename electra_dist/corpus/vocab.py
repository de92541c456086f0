"""Trains a WordPiece vocabulary: the same texts give the same vocab.txt, on any machine, at any time.

How: Hugging Face's `WordPieceTrainer` numbers the continuation characters (`##a`) in the order of a randomly seeded
hash map, and breaks ties between equally frequent pairs by those numbers; so two trainings on one text differ. Here
the alphabet is counted first, and characters and continuations are given to the trainer in a fixed order, which
leaves it nothing to decide.

Cost: about 2 MB of text a second; two passes over the texts. For a corpus of many GB give a part of it: some hundred
MB decide the first 30,000 entries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import tokenizers

from electra_dist.errors import UserError
from electra_dist.tokenizer import SPECIAL_TOKENS, Vocabulary

MAX_ALPHABET = 1000
_NUM_CODE_POINTS = 0x110000


def train_vocabulary(
    texts: Callable[[], Iterable[str]], vocab_size: int, lowercase: bool, max_alphabet: int = MAX_ALPHABET
) -> Vocabulary:
    """A vocabulary of at most `vocab_size` tokens, special tokens first.

    Args:
        texts: gives the texts, anew at each call; called twice.
        vocab_size: tokens wanted; a small text may not yield as many.
        lowercase: lower-case and strip accents first (BERT uncased).
        max_alphabet: most frequent characters that are kept; the others become [UNK].

    Raises:
        UserError: no text, or a vocabulary smaller than its alphabet.
    """
    normalizer = tokenizers.normalizers.BertNormalizer(lowercase=lowercase)
    pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    alphabet = _alphabet(texts(), normalizer, max_alphabet)
    continuing = [
        "##" + char
        for char in alphabet
        if len(pre_tokenizer.pre_tokenize_str(normalizer.normalize_str("a" + char))) == 1
    ]
    fixed = [*SPECIAL_TOKENS, *continuing]
    if not alphabet:
        raise UserError("a vocabulary cannot be trained: the input has no text")
    if vocab_size < len(fixed) + len(alphabet):
        raise UserError(
            f"vocab_size {vocab_size} has no room for the alphabet; at least {len(fixed) + len(alphabet)} are needed"
        )
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=fixed,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_lines(texts()), trainer)
    ids: dict[str, int] = tokenizer.get_vocab()
    return Vocabulary("\n".join(sorted(ids, key=ids.__getitem__)) + "\n", "trained vocabulary")


def _alphabet(texts: Iterable[str], normalizer: tokenizers.normalizers.Normalizer, limit: int) -> list[str]:
    """The most frequent characters of the normalised texts, in code-point order."""
    counts = np.zeros(_NUM_CODE_POINTS, np.int64)
    for text in texts:
        codes = np.frombuffer(normalizer.normalize_str(text).encode("utf-32-le"), np.uint32)
        found, times = np.unique(codes, return_counts=True)
        counts[found] += times
    present = np.flatnonzero(counts)
    frequent = present[np.lexsort((present, -counts[present]))]
    kept = [char for char in map(chr, frequent) if not char.isspace()][:limit]
    return sorted(kept)


def _lines(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        yield from text.splitlines()
