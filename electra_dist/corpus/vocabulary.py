"""Train a vocabulary reproducibly, on all texts or on a bounded sample of them.

Guarantee: the same texts give the same vocab.txt or tokenizer.json, on any machine. A sample depends on the inputs,
the seed and the limit alone. Every document has the same chance, whatever its source and place. The sample holds at
most `limit_bytes` of documents. If the documents exceed the limit, it holds about half of the limit or more, unless
its documents are few and large. With byte-level BPE every text can be encoded without [UNK], because all 256 bytes are
tokens; case, accents and spaces are kept.

How: a WordPiece vocabulary contains each character c and its continuation, the token `##c` for c within a word.
Hugging Face's `WordPieceTrainer` numbers the continuations in the order of a randomly seeded hash map, and breaks ties
between equally frequent pairs by those numbers, so two trainings on one text differ. This module counts the characters
first and passes characters and continuations to the trainer in a fixed order, so that nothing depends on the hash map.
`BpeTrainer` has no such order: the ids follow from the counts, the special tokens and the bytes.

Limits: WordPiece reads the texts twice, at about 2 MB a second. For many GB, take a sample.

Source: Radford et al., "Language models are unsupervised multitask learners", 2019, section 2.2 (byte-level BPE).
"""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import tokenizers
import zstandard
from tokenizers.implementations import BertWordPieceTokenizer

from electra_dist.corpus.builder.shuffle import document_key
from electra_dist.errors import UserError
from electra_dist.store.atomic_files import open_regular
from electra_dist.tokenizer import SPECIAL_TOKENS, Vocabulary, new_tokenizer

_LEAST_ALPHABET = 1000  # characters that a vocabulary has, if the text has them
_COVERAGE = 0.9995  # of the text's characters, by those of the vocabulary; Chinese needs more than 1,000 for it
_MEASURED_CHARS = 200_000
_NUM_CODE_POINTS = 0x110000
TokenizerKind = Literal["wordpiece", "bpe"]
_NUM_BYTES = 256
_KEY_BITS = 64
_MANY_MARKS = 0.02  # share of the characters from which their loss by lower-casing is named
_MANY_ACCENTED_WORDS = 0.01  # share of the words from which the loss of their accents is named


def train_vocabulary(
    texts: Callable[[], Iterable[str]], vocab_size: int, lowercase: bool, keep_accents: bool = False
) -> Vocabulary:
    """Train a WordPiece vocabulary of at most `vocab_size` tokens, special tokens first; a small text may yield fewer.

    `texts` is called twice, and each call must yield all texts from the first one. `lowercase` also strips accents
    (BERT uncased). With `keep_accents` it does not; the vocabulary is then a tokenizer.json, as no vocab.txt can
    say so. The most frequent characters are kept (`_alphabet`); a word with any other one becomes [UNK].
    Raises UserError if the texts are empty, or if `vocab_size` is smaller than the special tokens and the
    alphabet together.
    """
    strip_accents = False if keep_accents else None  # None: as `lowercase`
    normalizer = tokenizers.normalizers.BertNormalizer(lowercase=lowercase, strip_accents=strip_accents)
    pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    alphabet = _alphabet(texts(), normalizer, vocab_size)
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
    text = "\n".join(tokens) + "\n"
    if keep_accents:
        ids = {token: number for number, token in enumerate(tokens)}
        text = BertWordPieceTokenizer(ids, lowercase=lowercase, strip_accents=False).to_str(pretty=True)
    return Vocabulary(text, "trained vocabulary")


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


def _alphabet(texts: Iterable[str], normalizer: tokenizers.normalizers.Normalizer, vocab_size: int) -> list[str]:
    """Return the most frequent characters of the texts except white space, sorted by code point.

    They are 1,000 or, if these cover less than 99.95 % of the text, as many as do, up to a quarter of `vocab_size`. Of
    equally frequent characters, those of lower code point are taken.
    """
    counts = np.zeros(_NUM_CODE_POINTS, np.int64)  # occurrences of each code point
    for text in texts:
        code_points = np.frombuffer(normalizer.normalize_str(text).encode("utf-32-le"), np.uint32)
        text_points, text_counts = np.unique(code_points, return_counts=True)
        counts[text_points] += text_counts
    present = np.flatnonzero(counts)
    # lexsort takes the main key last: by falling count, then by code point.
    most_frequent_first = present[np.lexsort((present, -counts[present]))]
    visible = [point for point in most_frequent_first.tolist() if not chr(point).isspace()]
    covered = np.cumsum(counts[visible])
    num_covering = int(np.searchsorted(covered, _COVERAGE * covered[-1])) + 1 if visible else 0
    num_kept = max(_LEAST_ALPHABET, min(num_covering, vocab_size // 4))
    return sorted(chr(point) for point in visible[:num_kept])


def _lines(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        yield from text.splitlines()


def train_kind(
    kind: TokenizerKind,
    texts: Callable[[], Iterable[str]],
    vocab_size: int,
    lowercase: bool,
    keep_accents: bool = False,
) -> Vocabulary:
    """Train a WordPiece or a byte-level BPE vocabulary, as `kind` (the config key `corpus.tokenizer`) says.

    Each call of `texts` must yield all texts from the first one; WordPiece calls it twice. Few or short texts may give
    fewer tokens than `vocab_size`. `lowercase` and `keep_accents` affect WordPiece only. Raises UserError
    if the texts are empty or `vocab_size` is too small.
    """
    if kind == "bpe":
        return train_byte_level_bpe(texts(), vocab_size)
    return train_vocabulary(texts, vocab_size, lowercase, keep_accents)


class TextFit(NamedTuple):
    """Counts of the words, tokens and characters of a text that a vocabulary has divided into tokens."""

    words: int  # separated by white space
    tokens: int
    unknown: int  # of the tokens, [UNK]
    letters: int  # characters that are no white space
    marks: int  # of the letters, marks such as vowel signs, which belong to no single character of Unicode
    accented: int  # of the words, those with an accent or another mark

    @property
    def remark(self) -> str:
        """Return the mean number of tokens per word and the share of [UNK] as a phrase for the user."""
        return (
            f"{self.tokens / max(1, self.words):.2f} pieces per word, {self.unknown / max(1, self.tokens):.2%} [UNK]"
        )

    @property
    def lost_by_lowercase(self) -> str:
        """Return what BERT's lower-casing strips from the text, as a phrase for the user; "" if it is little."""
        share_of_marks = self.marks / max(1, self.letters)
        share_of_words = self.accented / max(1, self.words)
        if share_of_marks >= _MANY_MARKS:
            return f"{share_of_marks:.0%} of the characters, such as vowel signs"
        if share_of_words >= _MANY_ACCENTED_WORDS:
            return f"the accents and other marks of {share_of_words:.0%} of the words"
        return ""


def measure_fit(vocabulary: Vocabulary, lowercase: bool, texts: Iterable[str]) -> TextFit:
    """Count into how many tokens a vocabulary divides the beginning of some texts, about 200,000 characters."""
    tokenizer = new_tokenizer(vocabulary, lowercase)
    unknown_id = vocabulary.special["[UNK]"]
    num_words = tokens = unknown = letters = marks = accented = 0
    for text in texts:
        text = text[: _MEASURED_CHARS - letters]
        ids_of_lines = tokenizer.encode(tokenizer.split_lines(text))
        ids = list(itertools.chain.from_iterable(ids_of_lines))
        words = text.split()
        num_words += len(words)
        tokens += len(ids)
        unknown += ids.count(unknown_id)
        letters += sum(not letter.isspace() for letter in text)
        marks += _num_marks(unicodedata.normalize("NFC", text))
        accented += sum(not word.isascii() and _num_marks(unicodedata.normalize("NFD", word)) > 0 for word in words)
        if letters >= _MEASURED_CHARS * 0.9:
            break
    return TextFit(num_words, tokens, unknown, letters, marks, accented)


def _num_marks(text: str) -> int:
    """Count the characters of a text that BERT's lower-casing strips, which come after the letter they belong to."""
    return sum(unicodedata.category(char) == "Mn" for char in text)


def train_byte_level_bpe(texts: Iterable[str], vocab_size: int) -> Vocabulary:
    """Train a byte-level BPE tokenizer of at most `vocab_size` tokens: special tokens, the 256 bytes, merged pairs.

    The vocabulary's text is a tokenizer.json that Hugging Face's libraries can load. Raises UserError if the texts are
    empty or `vocab_size` is too small.
    """
    smallest_size = len(SPECIAL_TOKENS) + _NUM_BYTES
    if vocab_size < smallest_size:
        raise UserError(
            f"a byte-level vocabulary of {vocab_size} entries has no room for the special tokens and the bytes: at "
            f"least {smallest_size} are needed; raise --size (`corpus vocab`) or model.vocab_size (`corpus build`)"
        )
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    lines = _lines_after_spaces(texts)
    first_line = next(lines, None)
    if first_line is None:
        raise UserError("a vocabulary cannot be trained: the input has no text; correct --input or --text-field")
    tokenizer.train_from_iterator(itertools.chain([first_line], lines), trainer)
    ids_of_template = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=ids_of_template
    )
    return Vocabulary(tokenizer.to_str(pretty=False) + "\n", "trained vocabulary")


def _lines_after_spaces(texts: Iterable[str]) -> Iterator[str]:
    """Yield the lines of texts; each but a text's first begins with a space, which replaces the line end before it."""
    for text in texts:
        for number, line in enumerate(text.splitlines()):
            yield line if number == 0 else " " + line


class VocabularySample:
    """Random sample of a corpus's documents, in the files of a folder.

    Each document has a level: 0 with probability 1/2, 1 with probability 1/4, and so on, by a keyed hash. Its text is
    appended to the file of its level. Whenever the files together exceed the limit, the file of the lowest level is
    deleted, and documents of that level are left out from then on.
    """

    def __init__(self, folder: Path, limit_bytes: int, seed: int) -> None:
        """Prepare a sample of at most `limit_bytes` of documents, drawn by `seed`, in the caller's empty folder."""
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._seed = seed
        self._levels: dict[int, _LevelFile] = {}

    def take(self, texts: Iterable[tuple[int, int, str]], progress: Callable[[int], None]) -> None:
        """Read all documents, and write a random sample of them to the folder.

        `texts` gives (position of the file among the inputs, position of the document in the file, text). `progress`
        is called for each document with the position of its file.
        """
        levels = self._levels
        lowest = 0
        for file, number, text in texts:
            progress(file)
            level = _KEY_BITS - document_key(self._seed, file, number).bit_length()
            if level < lowest:
                continue
            if level not in levels:
                levels[level] = _LevelFile(self._folder / f"{level:02d}.zst")
            levels[level].add(text)
            while self.num_bytes > self._limit_bytes:
                if lowest in levels:
                    levels.pop(lowest).delete()
                lowest += 1
        for part in levels.values():
            part.close()

    @property
    def num_bytes(self) -> int:
        """Return the total size of the sample's texts, in bytes of UTF-8."""
        return sum(part.num_bytes for part in self._levels.values())

    def texts(self) -> Iterator[str]:
        """Yield the texts of the sample, always in the same order."""
        for _, part in sorted(self._levels.items()):
            yield from part.texts()


class _LevelFile:
    """Compressed file of sampled texts, in which each text is its length in bytes (4 bytes) and its UTF-8."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_bytes = 0  # size of the texts, uncompressed
        self._raw = path.open("wb")
        self._stream = zstandard.ZstdCompressor(level=1).stream_writer(self._raw)

    def add(self, text: str) -> None:
        data = text.encode()
        self._stream.write(len(data).to_bytes(4, "little"))
        self._stream.write(data)
        self.num_bytes += len(data)

    def close(self) -> None:
        self._stream.close()  # closes the raw file, too

    def texts(self) -> Iterator[str]:
        with open_regular(self.path) as raw, zstandard.ZstdDecompressor().stream_reader(raw) as stream:
            while head := stream.read(4):
                yield stream.read(int.from_bytes(head, "little")).decode()

    def delete(self) -> None:
        self.close()
        self.path.unlink()
