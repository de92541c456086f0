"""Files of labelled texts: errors of broken files, truncation of pairs, and rows of ids."""

from __future__ import annotations

from pathlib import Path

import pytest

from electra_dist.errors import UserError
from electra_dist.finetune.labelled_texts import read_texts
from electra_dist.finetune.text_task import encode_texts, truncate_pair
from electra_dist.pretrained.encoder import Pretrained


@pytest.mark.parametrize(
    ("name", "content", "expected_message"),
    [
        ("x.tsv", "a\tb\nq\tr\n", r"x\.tsv: no column `text`; the header has a, b"),
        ("x.jsonl", '{"text": "t"}\n', r"x\.jsonl:1: no key `kind`; it has text"),
        ("x.jsonl", "[1]\n", r"x\.jsonl:1: not a JSON object"),
        ("x.tsv", "text\tkind\n", r"x\.tsv: no examples"),
    ],
)
def test_a_broken_file_is_a_one_line_error_with_the_name_of_the_file(
    tmp_path: Path, name: str, content: str, expected_message: str
) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")

    with pytest.raises(UserError, match=expected_message) as caught:
        read_texts(tmp_path / name, "text", None, "kind")

    assert "\n" not in str(caught.value)


def test_a_pair_that_is_too_long_loses_the_last_tokens_of_the_longer_text() -> None:
    assert truncate_pair([1, 2, 3, 4, 5], [6, 7], 4) == ([1, 2], [6, 7])
    # The second of two equally long texts is cut first.
    assert truncate_pair([1, 2, 3], [4, 5, 6], 5) == ([1, 2, 3], [4, 5])
    assert truncate_pair([1], [4, 5, 6], 9) == ([1], [4, 5, 6])


def test_rows_have_at_most_the_maximum_length_and_special_tokens_in_texts_are_plain_text(encoder: Pretrained) -> None:
    cls, sep = encoder.special.cls, encoder.special.sep
    long_text = "the boy " * 50
    special_names = "[SEP] the [CLS]"

    rows = encode_texts([long_text, special_names], [long_text, ""], encoder.tokenizer, encoder.special, 20)
    [whole_row] = encode_texts([special_names], [""], encoder.tokenizer, encoder.special, 60)

    for row in rows:
        assert len(row) <= 20
        assert row[0] == cls
        assert row[-1] == sep
        assert row.count(cls) == 1
    assert whole_row.count(sep) == 1  # the one at the end
