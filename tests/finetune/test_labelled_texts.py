"""Files of texts: layouts, what is said about broken ones, and how texts become rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from electra_dist.errors import UserError
from electra_dist.finetune.labelled_texts import encode_texts, read_texts, truncate_pair
from electra_dist.pretrained.load_encoder import Pretrained


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.tsv", "a\tb\nq\tr\n", r"x\.tsv: no column `text`; the header has a, b"),
        ("x.jsonl", '{"text": "t"}\n', r"x\.jsonl:1: no key `kind`; it has text"),
        ("x.jsonl", "[1]\n", r"x\.jsonl:1: not a JSON object"),
        ("x.tsv", "text\tkind\n", r"x\.tsv: no examples"),
    ],
)
def test_a_broken_file_is_one_line_with_its_name(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=message) as caught:
        read_texts(tmp_path / name, "text", None, "kind")
    assert "\n" not in str(caught.value)


def test_the_longer_text_loses_its_end_first() -> None:
    assert truncate_pair([1, 2, 3, 4, 5], [6, 7], 4) == ([1, 2], [6, 7])
    assert truncate_pair([1, 2, 3], [4, 5, 6], 5) == ([1, 2, 3], [4, 5])
    assert truncate_pair([1], [4, 5, 6], 9) == ([1], [4, 5, 6])


def test_rows_never_exceed_the_length_and_special_tokens_in_texts_are_text(encoder: Pretrained) -> None:
    long, tricky = "the boy " * 50, "[SEP] the [CLS]"
    for row in encode_texts([long, tricky], [long, ""], encoder.tokenizer, encoder.special, 20):
        assert len(row) <= 20
        assert (row[0], row[-1]) == (encoder.special.cls, encoder.special.sep)
        assert row.count(encoder.special.cls) == 1
    assert encode_texts([tricky], [""], encoder.tokenizer, encoder.special, 60)[0].count(encoder.special.sep) == 1
