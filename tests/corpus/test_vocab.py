"""Training a vocabulary: it repeats exactly, and says what is missing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from electra_dist.corpus.vocab import train_vocabulary
from electra_dist.errors import UserError
from electra_dist.tokenizer import SPECIAL_TOKENS, WordPieceTokenizer


def test_training_repeats_exactly(prose: Callable[[int, int], list[str]]) -> None:
    texts = [*prose(300, 1), "naïve café, 中文 42"] * 3
    runs = [train_vocabulary(lambda: iter(texts), 150, lowercase=True) for _ in range(4)]
    assert {run.sha256 for run in runs} == {runs[0].sha256}
    assert tuple(runs[0].tokens[:5]) == SPECIAL_TOKENS
    assert {"the", "with", "中", "##s"} <= set(runs[0].tokens)
    assert not {"##,", "##中"} & set(runs[0].tokens), "what never continues a word needs no entry"
    unk = runs[0].special["[UNK]"]
    assert all(unk not in ids for ids in WordPieceTokenizer(runs[0], True).encode(texts))


def test_training_on_nothing_or_into_too_few_entries_is_refused() -> None:
    with pytest.raises(UserError, match="no text"):
        train_vocabulary(lambda: iter([" \n"]), 100, lowercase=True)
    with pytest.raises(UserError, match="at least 57 are needed"):
        train_vocabulary(lambda: iter(["abcdefghijklmnopqrstuvwxyz"]), 20, lowercase=True)
