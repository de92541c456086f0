"""Train a WordPiece vocabulary reproducibly: the same texts give the same vocab.txt, on any machine.

How: a vocabulary contains each character c and its continuation, the token `##c` for c within a word. Hugging Face's
`WordPieceTrainer` numbers the continuations in the order of a randomly seeded hash map, and breaks ties between
equally frequent pairs by those numbers, so two trainings on one text differ. This module counts the characters first
and passes characters and continuations to the trainer in a fixed order, so that nothing depends on the hash map.

Limits: the texts are read twice, at about 2 MB a second. For many GB, take a sample (`vocabulary_sample.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import tokenizers

from electra_dist.errors import UserError
from electra_dist.tokenizer import SPECIAL_TOKENS, Vocabulary

MAX_ALPHABET = 1000  # characters that a vocabulary may have; words with other characters become [UNK]
_NUM_CODE_POINTS = 0x110000


def train_vocabulary(
    texts: Callable[[], Iterable[str]], vocab_size: int, lowercase: bool, max_alphabet: int = MAX_ALPHABET
) -> Vocabulary:
    """Train a WordPiece vocabulary of at most `vocab_size` tokens, special tokens first; a small text may yield fewer.

    `texts` is called twice, and each call must yield all texts from the first one. `lowercase` also strips accents
    (BERT uncased). The `max_alphabet` most frequent characters are kept; a word with any other character becomes
    [UNK]. Raises UserError if the texts are empty, or if `vocab_size` is smaller than the special tokens and the
    alphabet together.
    """
    normalizer = tokenizers.normalizers.BertNormalizer(lowercase=lowercase)
    pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    alphabet = _alphabet(texts(), normalizer, max_alphabet)
    if not alphabet:
        raise UserError("a vocabulary cannot be trained: the input has no text; correct --input or --text-field")
    # The trainer gives special tokens the first ids, in the order of the list: that fixes the ids of continuations.
    special_tokens = [*SPECIAL_TOKENS, *_continuations(alphabet, normalizer, pre_tokenizer)]
    smallest_size = len(special_tokens) + len(alphabet)
    if vocab_size < smallest_size:
        raise UserError(
            f"a vocabulary of {vocab_size} entries has no room for the alphabet of the input: at least "
            f"{smallest_size} are needed; raise --size (`corpus vocab`) or model.vocab_size (`corpus build`)"
        )
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=special_tokens,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_lines(texts()), trainer)
    id_of_token: dict[str, int] = tokenizer.get_vocab()
    tokens = sorted(id_of_token, key=id_of_token.__getitem__)
    return Vocabulary("\n".join(tokens) + "\n", "trained vocabulary")


def _continuations(
    alphabet: Sequence[str],
    normalizer: tokenizers.normalizers.Normalizer,
    pre_tokenizer: tokenizers.pre_tokenizers.PreTokenizer,
) -> list[str]:
    """Return the token `##c` for each character c that can continue a word. A comma cannot: "a," is two words."""
    continuations = []
    for char in alphabet:
        words = pre_tokenizer.pre_tokenize_str(normalizer.normalize_str("a" + char))
        if len(words) == 1:
            continuations.append("##" + char)
    return continuations


def _alphabet(texts: Iterable[str], normalizer: tokenizers.normalizers.Normalizer, limit: int) -> list[str]:
    """Return the `limit` most frequent characters except white space, sorted; a tie goes to the lower code point."""
    counts = np.zeros(_NUM_CODE_POINTS, np.int64)  # occurrences of each code point
    for text in texts:
        code_points = np.frombuffer(normalizer.normalize_str(text).encode("utf-32-le"), np.uint32)
        text_points, text_counts = np.unique(code_points, return_counts=True)
        counts[text_points] += text_counts
    present = np.flatnonzero(counts)
    # lexsort takes the main key last: by falling count, then by code point.
    most_frequent_first = present[np.lexsort((present, -counts[present]))]
    characters = [chr(code_point) for code_point in most_frequent_first]
    visible_characters = [char for char in characters if not char.isspace()]
    return sorted(visible_characters[:limit])


def _lines(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        yield from text.splitlines()
