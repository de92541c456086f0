"""Read vocabularies, either a vocab.txt of WordPiece or a tokenizer.json, and choose the tokenizer for each.

How: a vocab.txt is read as transformers reads it: white space at the end of a line is no part of its token, and of
several lines with one token the last one counts. Words are encoded one by one with its tokens (`wordpiece.py`), whole
lines with a tokenizer.json (`tokenizer_json.py`).
"""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from pathlib import Path

from electra_dist.errors import UserError
from electra_dist.store.atomic_files import NamedDigest, check_digest, read_regular
from electra_dist.tokenizer_json import TokenizerJson
from electra_dist.wordpiece import WordPieceTokenizer

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
