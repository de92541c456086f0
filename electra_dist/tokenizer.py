"""WordPiece: text to ids that are text only.

Guarantee: encoding never yields [PAD], [CLS], [SEP] or [MASK], whatever the text says. `[SEP]` typed in a text is the
word-pieces of `[`, `sep` and `]`. The tokenizer is told of no special tokens, so there is nothing to match, and BERT's
pre-tokenizer cuts at brackets, so no word can equal one. [UNK] is what an unknown word becomes, as in BERT.

How: Hugging Face `tokenizers` (BertNormalizer, BertPreTokenizer, WordPiece, words of more than 100 characters are
[UNK]) on the lines of a vocab.txt; `vocab.py` trains one. A space always ends a word and nothing that BERT does to a
character looks across one, so the ids of a line are those of its space-separated words, and words repeat: the ids of
words that were seen are kept in a dictionary, and the library is asked about new ones only.

Cost: 1 to 2 million tokens a second and core, where the library alone does 0.5; the dictionary holds at most 100 MB.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import tokenizers

from electra_dist.errors import UserError

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
VOCAB_FILE = "vocab.txt"  # beside corpus.json
MAX_WORD_CHARS = 100
_MAX_KNOWN_WORDS = 1 << 19


class Vocabulary:
    """The lines of a vocab.txt; the line number is the id."""

    def __init__(self, text: str, name: str) -> None:
        """Checks the text of a vocab.txt; `name` is for errors.

        Raises:
            UserError: a special token is missing, or a token comes twice.
        """
        self.tokens = text.removesuffix("\n").split("\n")
        self._ids = {token: number for number, token in enumerate(self.tokens)}
        missing = [token for token in SPECIAL_TOKENS if token not in self._ids]
        if missing:
            raise UserError(f"{name}: not a WordPiece vocabulary: no line {' '.join(missing)}; give BERT's vocab.txt")
        if len(self._ids) < len(self.tokens):
            twice = next(token for number, token in enumerate(self.tokens) if self._ids[token] != number)
            raise UserError(f"{name}: line {self.tokens.index(twice) + 1} `{twice}` comes twice")

    @classmethod
    def read(cls, path: str | Path) -> Vocabulary:
        """The vocabulary in a file; `\\r\\n` counts as a line end.

        Raises:
            UserError: the file is missing or no vocabulary.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except FileNotFoundError:
            raise UserError(f"{path}: no such vocabulary; `electra-dist corpus vocab` trains one") from None
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: cannot be read as a vocabulary: {error}") from None
        return cls(text, str(path))

    @property
    def text(self) -> str:
        """The vocab.txt, one token a line, as it is stored beside a corpus."""
        return "\n".join(self.tokens) + "\n"

    @property
    def size(self) -> int:
        """Number of tokens."""
        return len(self.tokens)

    @property
    def special(self) -> dict[str, int]:
        """Ids of the five special tokens."""
        return {token: self._ids[token] for token in SPECIAL_TOKENS}

    @cached_property
    def sha256(self) -> str:
        """Digest of `text`."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def ids(self) -> dict[str, int]:
        """Token -> id."""
        return dict(self._ids)


class WordPieceTokenizer:
    """Encodes lines of text with a vocabulary."""

    def __init__(self, vocabulary: Vocabulary, lowercase: bool) -> None:
        """Builds the tokenizer; `lowercase` also strips accents (BERT uncased)."""
        model = tokenizers.models.WordPiece(
            vocabulary.ids, unk_token="[UNK]", max_input_chars_per_word=MAX_WORD_CHARS, continuing_subword_prefix="##"
        )
        self._tokenizer = tokenizers.Tokenizer(model)
        self._tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=lowercase)
        self._tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
        self._known: dict[str, tuple[int, ...]] = {}
        self._shared_ids = list(range(vocabulary.size))  # one object an id keeps the dictionary in the CPU's cache

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """The ids of each line; [] for a line without tokens."""
        words_of = [line.split(" ") for line in lines]
        new = list(set(itertools.chain.from_iterable(words_of)).difference(self._known))
        encodings = self._tokenizer.encode_batch_fast(new, add_special_tokens=False)
        shared = self._shared_ids.__getitem__
        self._known.update((word, tuple(map(shared, encoding.ids))) for word, encoding in zip(new, encodings))
        ids = [list(itertools.chain.from_iterable(map(self._known.__getitem__, words))) for words in words_of]
        if len(self._known) > _MAX_KNOWN_WORDS:
            self._known.clear()
        for word in new:
            if len(word) > MAX_WORD_CHARS:
                self._known.pop(word, None)
        return ids

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The ids of `encode([text])[0]`, and for each the characters [start, end) of `text` that it stands for."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets
