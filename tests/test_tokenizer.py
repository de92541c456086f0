"""Tokenizer and vocabulary: text is text, the shortcut changes nothing, what is no vocabulary is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from support.corpus_texts import make_vocabulary

from electra_dist.errors import UserError
from electra_dist.tokenizer import SPECIAL_TOKENS, Vocabulary, WordPieceTokenizer


@pytest.fixture(scope="session")
def vocabulary() -> Vocabulary:
    """A small vocabulary with everything that a tokenizer must tell apart."""
    return make_vocabulary()


pieces = st.one_of(
    st.sampled_from(
        [*SPECIAL_TOKENS, "[sep]", "[ MASK ]", "##s", "the", "of", " ", "  ", "\t", "\u00a0", "\u200b", "\x1f"]
    ),
    st.text(max_size=6),
)
lines = st.lists(pieces, max_size=12).map("".join)


@given(st.lists(lines, max_size=8), st.booleans())
@settings(max_examples=100, deadline=None)
def test_ids_of_a_line_are_the_librarys(vocabulary: Vocabulary, texts: list[str], lowercase: bool) -> None:
    """Word by word through the dictionary = the whole line at once, twice (unknown words, then known ones)."""
    library = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary.ids, unk_token="[UNK]"))
    library.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=lowercase)
    library.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    ours = WordPieceTokenizer(vocabulary.ids, lowercase)
    expected = [library.encode(text, add_special_tokens=False).ids for text in texts]
    assert ours.encode(texts) == expected
    assert ours.encode(texts) == expected


@given(st.lists(lines, max_size=8), st.booleans())
@settings(max_examples=100, deadline=None)
def test_text_never_yields_special_ids(vocabulary: Vocabulary, texts: list[str], lowercase: bool) -> None:
    ids = {number for line in WordPieceTokenizer(vocabulary.ids, lowercase).encode(texts) for number in line}
    assert not ids & {vocabulary.special[token] for token in SPECIAL_TOKENS if token != "[UNK]"}


def test_literal_special_tokens_are_words(vocabulary: Vocabulary) -> None:
    encoded = WordPieceTokenizer(vocabulary.ids, True).encode(["[SEP] x[MASK]y"])[0]
    assert [vocabulary.tokens[number] for number in encoded] == ["[", "sep", "]", "x", "[", "mask", "]", "y"]


def test_the_dictionary_stays_small(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("electra_dist.tokenizer._MAX_KNOWN_WORDS", 10)
    tokenizer = WordPieceTokenizer(vocabulary.ids, True)
    many = [f"w{number}" for number in range(40)]
    once = tokenizer.encode(many)
    assert len(tokenizer._known) <= 10
    assert tokenizer.encode(["a" * 5000]) == [[vocabulary.special["[UNK]"]]]
    assert "a" * 5000 not in tokenizer._known
    assert tokenizer.encode(many) == once


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\nb\n", r"no line \[PAD\] \[UNK\] \[CLS\] \[SEP\] \[MASK\]"),
        ("[PAD]\n[UNK]\n[CLS]\n[MASK]\na\n", r"no line \[SEP\]"),
    ],
)
def test_what_is_no_vocabulary_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "vocab.txt"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as error:
        Vocabulary.read(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("end", ["", " ", "\t", "\u00a0", "\r", " \r"])
def test_white_space_at_line_ends_and_a_byte_order_mark_are_no_part_of_a_token(tmp_path: Path, end: str) -> None:
    tokens = [*SPECIAL_TOKENS, "the", "dog", "##s"]
    text = "\ufeff" + "".join(f"{token}{end}\n" for token in tokens)
    (tmp_path / "vocab.txt").write_text(text, "utf-8", newline="")
    vocabulary = Vocabulary.read(tmp_path / "vocab.txt")
    assert vocabulary.tokens == tokens
    assert WordPieceTokenizer(vocabulary.ids, True).encode(["The dogs"]) == [[5, 6, 7]]
    again = Vocabulary(vocabulary.text, "again")
    assert (again.tokens, again.sha256) == (vocabulary.tokens, vocabulary.sha256)


def test_the_last_of_several_lines_with_one_token_counts(tmp_path: Path) -> None:
    lines = ["[UNK]", *SPECIAL_TOKENS, "the", "", "", "dog", "the", "##s", "dog"]
    (tmp_path / "vocab.txt").write_text("\n".join(lines) + "\n")
    vocabulary = Vocabulary.read(tmp_path / "vocab.txt")
    assert vocabulary.size == len(lines)
    assert vocabulary.special == {token: number for number, token in enumerate(SPECIAL_TOKENS, start=1)}
    assert WordPieceTokenizer(vocabulary.ids, True).encode(["the dogs", "x"]) == [[10, 12, 11], [2]]


def test_unreadable_vocabularies_are_refused(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name in ("missing", "binary", "."):
        with pytest.raises(UserError, match="vocabulary"):
            Vocabulary.read(tmp_path / name)


def test_a_vocabulary_is_stored_as_it_was_read(tmp_path: Path) -> None:
    text = "\n".join([*SPECIAL_TOKENS, "a", "\u2028", "##b"])  # U+2028 is a line end to str.splitlines, not here
    (tmp_path / "unix.txt").write_text(text + "\n", encoding="utf-8", newline="\n")
    (tmp_path / "dos.txt").write_text(text, encoding="utf-8", newline="\r\n")
    unix, dos = Vocabulary.read(tmp_path / "unix.txt"), Vocabulary.read(tmp_path / "dos.txt")
    assert unix.size == 8
    assert unix.sha256 == dos.sha256
    assert Vocabulary(unix.text, "again").tokens == unix.tokens
