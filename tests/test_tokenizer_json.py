"""Check vocabularies of a tokenizer.json: ids, roles of special tokens, texts that contain them, and refused files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from support.byte_level import TEXTS, byte_level_vocabulary

from electra_dist.corpus.vocabulary import train_byte_level_bpe
from electra_dist.errors import ManifestMismatch, UserError
from electra_dist.store.atomic_files import NamedDigest
from electra_dist.tokenizer import SPECIAL_TOKENS, Vocabulary, new_tokenizer

VOCABULARY = byte_level_vocabulary()


def changed(change: Callable[[dict[str, Any]], object]) -> str:
    """Return a copy of the tokenizer.json of VOCABULARY, as a string, to whose parsed content `change` was applied."""
    content = json.loads(VOCABULARY.text)
    change(content)
    return json.dumps(content)


def renamed(names: dict[str, str]) -> str:
    """Return a copy of the tokenizer.json of VOCABULARY, as a string, with special tokens renamed: old -> new name."""
    text = VOCABULARY.text
    for old, new in names.items():
        text = text.replace(json.dumps(old)[1:-1], new)
    return text


def test_two_trainings_give_the_same_bytes_and_every_text_is_encoded_without_unk() -> None:
    again = train_byte_level_bpe(TEXTS, VOCABULARY.size)
    assert again.text == VOCABULARY.text
    assert again.kind == "bpe"
    assert VOCABULARY.special == {token: number for number, token in enumerate(SPECIAL_TOKENS)}
    ids = new_tokenizer(VOCABULARY, lowercase=True).encode(["\u00c4rger \U0001f600 \x07", ""])
    assert VOCABULARY.special["[UNK]"] not in ids[0]
    assert ids[1] == []


pieces = st.one_of(st.sampled_from([*SPECIAL_TOKENS, "the", " ", "  ", "[sep]", "<s>", "\u00a0"]), st.text(max_size=6))


@settings(deadline=None, max_examples=100)
@given(line=st.lists(pieces, max_size=12).map("".join))
def test_no_text_gives_a_special_id_and_its_ids_are_decoded_to_it(line: str) -> None:
    tokenizer = new_tokenizer(VOCABULARY, lowercase=True)
    (ids,) = tokenizer.encode([line])
    assert not set(ids) & set(VOCABULARY.special.values())
    stock = tokenizers.Tokenizer.from_str(VOCABULARY.text)
    assert stock.decode(ids, skip_special_tokens=False) == line
    ids_with_offsets, offsets = tokenizer.encode_with_offsets(line)
    assert ids_with_offsets == ids
    assert all(0 <= start <= end <= len(line) for start, end in offsets)


def test_ordinary_text_has_the_ids_of_the_library_and_offsets_leave_out_the_space_before_a_word() -> None:
    text = "the dog saw a bird"
    stock = tokenizers.Tokenizer.from_str(VOCABULARY.text)
    tokenizer = new_tokenizer(VOCABULARY, lowercase=True)
    assert tokenizer.encode([text]) == [stock.encode(text, add_special_tokens=False).ids]
    assert stock.encode(text).ids == [2, *tokenizer.encode([text])[0], 3]
    ids, offsets = tokenizer.encode_with_offsets("the dog")
    words = [VOCABULARY.shown_tokens[token_id] for token_id in ids]
    assert ["the dog"[start:end] for start, end in offsets] == [word.removeprefix("##") for word in words]


def test_shown_tokens_mark_what_continues_a_word() -> None:
    (ids,) = new_tokenizer(VOCABULARY, lowercase=False).encode([" the d\u00f6g"])
    shown = [VOCABULARY.shown_tokens[token_id] for token_id in ids]
    assert shown[0] == "the"
    assert shown[1] == "d"
    assert all(token.startswith("##") for token in shown[2:])
    assert VOCABULARY.shown_tokens[2] == "[CLS]"


def test_special_tokens_are_found_by_their_role() -> None:
    names = {"[PAD]": "<pad>", "[UNK]": "<unk>", "[CLS]": "<s>", "[SEP]": "</s>", "[MASK]": "<mask>"}
    by_name = Vocabulary(renamed(names), "roberta")
    assert by_name.special == VOCABULARY.special
    by_post_processor = Vocabulary(renamed({**names, "[CLS]": "<begin>", "[SEP]": "<end>"}), "other names")
    assert by_post_processor.special == VOCABULARY.special


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (renamed({"[MASK]": "<other>"}), r"no token has the role of \[MASK\]"),
        ('{"model": {"type": "BPE"}}', "cannot be loaded as a tokenizer.json"),
        (changed(lambda content: content["model"].update(ignore_merges=True)), None),
    ],
)
def test_files_that_are_no_tokenizer_are_refused_in_one_line(text: str, message: str | None) -> None:
    if message is None:  # Whole words are looked up in the vocabulary, but none is a special token: accepted.
        assert Vocabulary(text, "a.json").special == VOCABULARY.special
        return
    with pytest.raises(UserError, match=message) as error:
        Vocabulary(text, "a.json")
    assert "\n" not in str(error.value)


def test_a_model_that_reaches_its_special_tokens_from_text_is_refused() -> None:
    def reach(content: dict[str, Any]) -> None:
        """Make whole texts be looked up in the vocabulary, which has the special tokens."""
        content["model"]["ignore_merges"] = True
        content["pre_tokenizer"]["use_regex"] = False

    with pytest.raises(UserError, match=r"the characters \[PAD\] in a text are encoded as the special token"):
        Vocabulary(changed(reach), "a.json")


def test_the_digest_is_that_of_the_file_and_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(VOCABULARY.text)
    read = Vocabulary.read(tmp_path / "tokenizer.json")
    assert (read.text, read.sha256) == (VOCABULARY.text, VOCABULARY.sha256)
    expected = NamedDigest(VOCABULARY.sha256, "corpus.json", "restore it")
    assert Vocabulary.parse(VOCABULARY.text.encode(), "a", expected).tokens == VOCABULARY.tokens
    damaged = VOCABULARY.text.replace("[MASK]", "[MUSK]")
    with pytest.raises(ManifestMismatch):
        Vocabulary.parse(damaged.encode(), "a", expected)
