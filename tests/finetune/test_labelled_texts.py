"""Files of labelled texts: errors of broken files, truncation of pairs, and rows of ids."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from electra_dist.errors import UserError
from electra_dist.finetune.labelled_texts import LabelTargets, Texts, TextSpec, read_texts
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


def test_development_files_without_labels_or_with_a_label_for_each_row_are_named_as_such(tmp_path: Path) -> None:
    def targets(labels: list[str], kind: Literal["classification", "regression"]) -> None:
        (tmp_path / "x.csv").write_text("text,label\n" + "".join(f"the dog,{label}\n" for label in labels))
        spec = TextSpec(name="custom", text_a="text", text_b=None, label="label", kind=kind)
        train = Texts(["a", "b"], None, ["0", "1"], [2, 3], 0, tmp_path / "train.csv", "")
        LabelTargets.of(spec, train).targets(read_texts(tmp_path / "x.csv", "text", None, "label"))

    kinds: list[Literal["classification", "regression"]] = ["classification", "regression"]
    for kind in kinds:
        with pytest.raises(UserError, match=r"x\.csv:3: the label is empty in 2 rows \(line 3, 4\); write a label"):
            targets(["1", "", ""], kind)
    numbers = [f"T-{number}" for number in range(20)]
    with pytest.raises(UserError, match=r"x\.csv: every row has another label, such as `T-0`, .*; correct --label"):
        targets(numbers, "classification")
    with pytest.raises(UserError, match="unknown labels"):
        targets([*numbers, "1"], "classification")


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
