"""Read vocabularies, either a vocab.txt of WordPiece or a tokenizer.json, and encode text with them, as BERT does.

Guarantee: encoding never yields [PAD], [CLS], [SEP] or [MASK], whatever the text holds. The characters `[SEP]` in a
text become the word-pieces of `[`, `sep` and `]`, because BERT's pre-tokenizer cuts at brackets and the encoder knows
no special tokens. An unknown word becomes [UNK], as in BERT.

How: a vocab.txt is read as transformers reads it: white space at the end of a line is no part of its token, and of
several lines with one token the last one counts. With its tokens, Hugging Face's library `tokenizers` (BertNormalizer,
BertPreTokenizer, WordPiece) encodes words. Words of more than 100 characters become [UNK]. BERT ends a word at every
space and encodes each word independently of the others, so the ids of a line are those of its space-separated words,
one after another. A dictionary of at most 100 MB keeps the ids of words that were encoded before, which makes encoding
two to four times as fast. With a tokenizer.json (`tokenizer_json.py`), whole lines are encoded.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from electra_dist.errors import UserError
from electra_dist.store.atomic_files import NamedDigest, check_digest, read_regular
from electra_dist.tokenizer_json import TokenizerJson, one_text_error

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


SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
VOCAB_FILE = "vocab.txt"  # Name of the file beside corpus.json, also if its content is a tokenizer.json.
BYTE_ORDER_MARK = "\ufeff"  # some editors put it at the beginning of a file in UTF-8

TextTokenizer = WordPieceTokenizer | TokenizerJson


class Vocabulary:
    """Vocabulary of a tokenizer: its tokens with their ids, and its five special tokens.
    In a vocab.txt of WordPiece, the line number, counted from 0, is the token's id. The id of a blank line, or of a
    line whose token comes again later, is never used. Any other tokenizer has a tokenizer.json of Hugging Face.
    """

    def __init__(self, text: str, name: str) -> None:
        """Index the content of a vocab.txt or a tokenizer.json; raise UserError if a special token is missing."""
        # The content of the vocabulary's file: one token per line, or the JSON of a tokenizer.json.
        self.text = text.removesuffix("\n") + "\n"
        content = text.removeprefix(BYTE_ORDER_MARK)
        self.tokenizer_json: TokenizerJson | None = None  # None for WordPiece
        if _is_tokenizer_json(content):
            self.tokenizer_json = TokenizerJson(content, name)  # checks its special tokens itself
            self.kind = "bpe"  # value of the key `corpus.tokenizer`
            self.tokens = self.tokenizer_json.tokens
            self._ids = self.tokenizer_json.ids
            self._special = self.tokenizer_json.special
        else:
            self.kind = "wordpiece"
            self.tokens = [line.rstrip() for line in content.removesuffix("\n").split("\n")]
            self._ids = {token: token_id for token_id, token in enumerate(self.tokens)}
            missing = [token for token in SPECIAL_TOKENS if token not in self._ids]
            if missing:
                raise UserError(
                    f"{name}: not a WordPiece vocabulary: it has no line {' '.join(missing)}; give the vocab.txt of a "
                    f"BERT or ELECTRA model or a tokenizer.json, or train one with `electra-dist corpus vocab`"
                )
            self._special = {token: self._ids[token] for token in SPECIAL_TOKENS}

    @classmethod
    def read(cls, path: str | Path) -> Vocabulary:
        r"""Read a vocabulary from a UTF-8 file; lines may end with `\r\n`. Raises UserError for any other file."""
        try:
            data = read_regular(path)
        except FileNotFoundError:
            raise UserError(
                f"{path}: no such vocabulary; check the path, or train one with `electra-dist corpus vocab`"
            ) from None
        except OSError as error:
            raise UserError(
                f"{path}: cannot be read as a vocabulary ({error}); give a readable vocab.txt in UTF-8"
            ) from None
        return cls.parse(data, str(path))

    @classmethod
    def parse(cls, data: bytes, name: str, expected: NamedDigest | None = None) -> Vocabulary:
        r"""Parse the UTF-8 bytes of a vocab.txt or tokenizer.json; with `expected`, check their digest first.
        The bytes, or the text with `\n` line ends, must have this digest, because copying may change line ends. Raises
        ManifestMismatch for another digest, UserError if the bytes are not a vocabulary with all special tokens.
        """
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            if expected is not None:
                check_digest(data, name, expected)
            raise UserError(
                f"{name}: cannot be read as a vocabulary ({error}); give a readable vocab.txt in UTF-8"
            ) from None
        text = text.replace("\r\n", "\n").replace("\r", "\n").removesuffix("\n") + "\n"
        if expected is None:
            text = text.removeprefix(BYTE_ORDER_MARK)  # with a digest it stays, because it is part of the digest
        elif _sha256_of_text(text) != expected.sha256:
            check_digest(data, name, expected)
        return cls(text, name)

    def __reduce__(self) -> tuple[type[Vocabulary], tuple[str, str]]:
        """Pickle the text alone: a pickled tokenizer of the library would forget how it encodes special tokens."""
        return Vocabulary, (self.text, VOCAB_FILE)

    @cached_property
    def shown_tokens(self) -> list[str]:
        """Return readable tokens in order of ids: bytes are decoded, and "##" marks a token that continues a word."""
        return self.tokens if self.tokenizer_json is None else self.tokenizer_json.shown_tokens()

    @property
    def size(self) -> int:
        """Return the number of tokens, special tokens included; the ids are 0 to `size` - 1."""
        return len(self.tokens)

    @property
    def special(self) -> dict[str, int]:
        """Return the id of each special token by its name in BERT, such as "[CLS]"; the file may use other names."""
        return dict(self._special)

    @cached_property
    def sha256(self) -> str:
        """Return the SHA-256 of `text` in hexadecimal; equal digests mean equal vocabularies."""
        return _sha256_of_text(self.text)

    @property
    def ids(self) -> dict[str, int]:
        """Return a dictionary from every token to its id, which the caller may change."""
        return dict(self._ids)


def new_tokenizer(vocabulary: Vocabulary, lowercase: bool) -> TextTokenizer:
    """Return the tokenizer for a vocabulary. A tokenizer.json has its own rules for case and ignores `lowercase`."""
    if vocabulary.tokenizer_json is not None:
        return vocabulary.tokenizer_json
    return WordPieceTokenizer(vocabulary.ids, lowercase)


def _is_tokenizer_json(text: str) -> bool:
    """Tell a tokenizer.json (a JSON object with the key "model") from a vocab.txt by the content of the file."""
    if not text.lstrip().startswith("{"):
        return False
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(content, dict) and "model" in content


def _sha256_of_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
