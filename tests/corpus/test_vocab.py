"""Training of a vocabulary: it is deterministic, and its errors name what is missing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from electra_dist.corpus.vocabulary import train_vocabulary
from electra_dist.errors import UserError
from electra_dist.tokenizer import SPECIAL_TOKENS, WordPieceTokenizer


def test_training_gives_the_same_vocabulary_each_time_and_it_covers_its_text(
    prose: Callable[[int, int], list[str]],
) -> None:
    """The vocabulary begins with the special tokens, and no word of the text that it was trained on is [UNK]."""
    texts = [*prose(300, 1), "naïve café, 中文 42"] * 3

    vocabularies = [train_vocabulary(lambda: iter(texts), 150, lowercase=True) for _ in range(4)]

    assert len({vocabulary.sha256 for vocabulary in vocabularies}) == 1
    vocabulary = vocabularies[0]
    tokens = set(vocabulary.tokens)
    assert tuple(vocabulary.tokens[:5]) == SPECIAL_TOKENS
    assert {"the", "with", "中", "##s"} <= tokens
    assert tokens.isdisjoint({"##,", "##中"}), "an entry for a character that never continues a word"
    unk_id = vocabulary.special["[UNK]"]
    for text_ids in WordPieceTokenizer(vocabulary.ids, True).encode(texts):
        assert unk_id not in text_ids


def test_training_on_an_empty_text_or_with_fewer_entries_than_the_alphabet_needs_is_refused() -> None:
    """26 letters need 57 entries: 5 special tokens, and each letter at the start and in the middle of a word."""
    with pytest.raises(UserError, match="no text"):
        train_vocabulary(lambda: iter([" \n"]), 100, lowercase=True)

    alphabet = "abcdefghijklmnopqrstuvwxyz"
    with pytest.raises(UserError, match="at least 57 are needed"):
        train_vocabulary(lambda: iter([alphabet]), 20, lowercase=True)
