"""Encode text as the ids of word-pieces, as BERT does.

Guarantee: encoding never yields [PAD], [CLS], [SEP] or [MASK], whatever the text holds. The characters `[SEP]` in a
text become the word-pieces of `[`, `sep` and `]`, because BERT's pre-tokenizer cuts at brackets and the encoder knows
no special tokens. An unknown word becomes [UNK], as in BERT.

How: Hugging Face's library `tokenizers` (BertNormalizer, BertPreTokenizer, WordPiece) encodes words. Words of more
than 100 characters become [UNK]. BERT ends a word at every space and encodes each word independently of the others, so
the ids of a line are those of its space-separated words, one after another. A dictionary of at most 100 MB keeps the
ids of words that were encoded before, which makes encoding two to four times as fast.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from electra_dist.tokenizer_json import one_text_error

MAX_WORD_CHARS = 100
_MAX_KNOWN_WORDS = 1 << 19  # Keeps the dictionary of known words below 100 MB.


class WordPieceTokenizer:
    """Encoder of text to BERT's WordPiece ids, without special tokens. It has a cache, so it is not thread-safe."""

    def __init__(self, ids: dict[str, int], lowercase: bool) -> None:
        """Take a vocab.txt's token ids; with `lowercase`, text is lower-cased and stripped of accents, as in BERT."""
        import tokenizers  # not where only the vocabulary is read

        self.lowercase = lowercase
        model = tokenizers.models.WordPiece(
            ids, unk_token="[UNK]", max_input_chars_per_word=MAX_WORD_CHARS, continuing_subword_prefix="##"
        )
        self._tokenizer = tokenizers.Tokenizer(model)
        self._tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=lowercase)
        self._tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
        self._continuing = {token_id for token, token_id in ids.items() if token.startswith("##")}
        self._known: dict[str, tuple[int, ...]] = {}  # word -> its ids
        # One int object for each id, used by all entries of `_known`, keeps the dictionary small enough for the CPU's
        # cache.
        self._shared_ids = list(range(max(ids.values()) + 1))

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each line, without [CLS] and [SEP]; a line without tokens gives []."""
        if isinstance(lines, str):
            raise one_text_error(lines)
        words_of_lines = [line.split(" ") for line in lines]
        all_words = set(itertools.chain.from_iterable(words_of_lines))
        new_words = list(all_words.difference(self._known))

        # Encode the new words.
        encodings = self._tokenizer.encode_batch_fast(new_words, add_special_tokens=False)
        shared_id = self._shared_ids.__getitem__
        for word, encoding in zip(new_words, encodings):
            self._known[word] = tuple(map(shared_id, encoding.ids))

        # Join the ids of the words of each line. `map` and `chain` run in C: this inner loop decides the speed.
        ids_of_word = self._known.__getitem__
        ids_of_lines = [list(itertools.chain.from_iterable(map(ids_of_word, words))) for words in words_of_lines]
        self._limit_memory(new_words)
        return ids_of_lines

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of a text and, for each id, the range [start, end) of characters that it was made from.
        The ids equal `encode([text])[0]`. This method is slower, because it cannot use the cache.
        """
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def encode_words(self, words: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each word of one text; WordPiece encodes a word without regard to its neighbours."""
        return self.encode(words)

    def continues_word(self, lines: Sequence[str]) -> list[list[bool]]:
        """Return for each token of each line whether it belongs to the same word as the token before it."""
        return [[token_id in self._continuing for token_id in ids] for ids in self.encode(lines)]

    def split_lines(self, text: str) -> list[str]:
        """Split a text into lines whose ids, one after another, are the ids of the whole text."""
        return text.splitlines()

    def _limit_memory(self, new_words: list[str]) -> None:
        """Empty the cache if it has too many words, and remove very long new words, which rarely repeat."""
        if len(self._known) > _MAX_KNOWN_WORDS:
            self._known.clear()
        for word in new_words:
            if len(word) > MAX_WORD_CHARS:
                self._known.pop(word, None)
