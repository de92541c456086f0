"""Text tasks, of GLUE and custom ones: columns, labels, development sets, limits and errors."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from electra_dist.errors import UserError
from electra_dist.finetune.finetune_config import FinetuneConfig
from electra_dist.finetune.labelled_texts import GLUE, TextSpec
from electra_dist.finetune.tagging_task import TaggingTask
from electra_dist.finetune.text_task import TextTask
from electra_dist.pretrained.encoder import Pretrained

CUSTOM = TextSpec(name="custom", text_a="text", text_b=None, label="kind")
REGRESSION = dataclasses.replace(CUSTOM, kind="regression", metric="spearman")


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def write_train_and_dev(folder: Path, text: str, suffix: str = "tsv") -> None:
    """Write the same text as the training file and as the development file."""
    for stem in ("train", "dev"):
        write(folder / f"{stem}.{suffix}", text)


def test_cola_is_read_without_a_header_and_quotes_are_part_of_the_text(tmp_path: Path) -> None:
    write_train_and_dev(tmp_path / "CoLA", 'gj04\t1\t\tHe said "no.\r\ngj04\t0\t*\tHim said.\n')

    task = TextTask(GLUE["cola"], tmp_path)

    assert task.train.a == ['He said "no.', "Him said."]
    assert task.train_target.tolist() == [[1], [0]]


def test_mrpc_is_found_in_the_folder_glue_read_without_its_byte_order_mark_and_trained_in_both_orders(
    tmp_path: Path, encoder: Pretrained
) -> None:
    header = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
    pairs = "1\t5\t6\tthe boy\tthe girl\n0\t7\t8\tthe old\tthe sea\n"
    write_train_and_dev(tmp_path / "glue" / "MRPC", header + pairs)
    task = TextTask(GLUE["mrpc"], tmp_path)

    examples = task.examples(encoder, FinetuneConfig(max_length=32))
    one_order = task.examples(encoder, FinetuneConfig(both_orders=False))

    boy, girl = encoder.tokenizer.encode(["the boy", "the girl"])
    cls, sep = encoder.special.cls, encoder.special.sep
    assert len(examples.ids) == 4  # both pairs, then both pairs with the texts swapped
    assert examples.ids[0] == [cls, *boy, sep, *girl, sep]
    assert examples.ids[2] == [cls, *girl, sep, *boy, sep]
    assert examples.target_NK[:, 0].tolist() == [1, 0, 1, 0]
    assert len(task.dev_ids("", encoder, FinetuneConfig())) == 2
    assert len(one_order.ids) == 2


def test_a_limit_selects_the_same_random_training_examples_each_time_and_keeps_their_order(tmp_path: Path) -> None:
    label_of = ["ab"[number % 2] for number in range(40)]
    lines = [f"text {number}\t{label}\n" for number, label in enumerate(label_of)]
    write_train_and_dev(tmp_path, "text\tkind\n" + "".join(lines))

    whole = TextTask(CUSTOM, tmp_path)
    limited = TextTask(CUSTOM, tmp_path, 10)
    limited_again = TextTask(CUSTOM, tmp_path, 10)
    limited_to_all = TextTask(CUSTOM, tmp_path, 40)

    numbers = [int(text.split()[1]) for text in limited.train.a]
    assert numbers == sorted(set(numbers))
    assert len(numbers) == 10
    assert len(limited.train_target) == 10
    assert numbers != list(range(10))  # not simply the first ones
    assert limited.train.a == limited_again.train.a
    assert limited.train.line == [number + 2 for number in numbers]  # line 1 of the file is the header
    assert limited.train.label == [label_of[number] for number in numbers]
    assert len(limited.dev[""].a) == 40
    # The digest of the task identifies the examples.
    assert limited.digest == limited_again.digest
    assert limited.digest != whole.digest
    assert whole.digest == TextTask(CUSTOM, tmp_path).digest
    assert limited_to_all.train.a == whole.train.a


def test_sts_scores_from_0_to_5_become_targets_from_0_to_1(tmp_path: Path) -> None:
    write_train_and_dev(tmp_path / "STS-B", "sentence1\tsentence2\tscore\nx\ty\t5.000\nx\tz\t1.25\n")

    task = TextTask(GLUE["stsb"], tmp_path)

    assert task.train_target[:, 0].tolist() == [1.0, 0.25]


def test_mnli_has_a_matched_and_a_mismatched_development_set(tmp_path: Path) -> None:
    text = "index\tsentence1\tsentence2\tgold_label\n0\tx\ty\tneutral\n1\tx\ty\tentailment\n"
    for stem in ("train", "dev_matched", "dev_mismatched"):
        write(tmp_path / "MNLI" / f"{stem}.tsv", text)

    task = TextTask(GLUE["mnli"], tmp_path)

    assert list(task.dev) == ["", "mismatched_"]  # prefixes of the metrics


def test_a_custom_task_reads_jsonl_and_its_labels_are_those_of_the_training_data(tmp_path: Path) -> None:
    """A label may be a number; the file has no newline at its end."""
    examples = [{"text": "one", "kind": 7}, {"text": "two", "kind": "b"}, {"text": "six", "kind": 7}]
    lines = [json.dumps(example) for example in examples]
    write_train_and_dev(tmp_path, "\n".join(lines), "jsonl")

    task = TextTask(CUSTOM, tmp_path)

    assert task.labels == ("7", "b")
    assert task.train_target[:, 0].tolist() == [0, 1, 0]


def test_the_targets_of_a_custom_regression_are_scaled_by_the_range_of_the_training_data(tmp_path: Path) -> None:
    """The training values -2 and 2 become 0 and 1; a development value may lie outside."""
    write(tmp_path / "train.tsv", "text\tkind\nx\t-2\ny\t2\n")
    write(tmp_path / "dev.tsv", "text\tkind\nx\t1\ny\t4\n")

    task = TextTask(REGRESSION, tmp_path)

    assert task.train_target[:, 0].tolist() == [0.0, 1.0]
    assert task.dev_target[""][:, 0].tolist() == [0.75, 1.5]


def test_equal_numbers_of_the_development_data_are_named(tmp_path: Path) -> None:
    write(tmp_path / "train.tsv", "text\tkind\nA.\t3\nB.\t4\n")
    write(tmp_path / "dev.tsv", "text\tkind\nA.\t3\nB.\t3\n")
    remark = f"{tmp_path}/dev.tsv: all labels to score by are equal (`3` 2), so there is no correlation with them, "
    assert TextTask(REGRESSION, tmp_path).notes == [f"{remark}which counts as 0"]
    write(tmp_path / "dev.tsv", "text\tkind\nA.\t3\nB.\t5\n")
    assert TextTask(REGRESSION, tmp_path).notes == []


@pytest.mark.parametrize("label", ["nan", "inf", "-inf"])
def test_a_label_of_a_regression_that_is_not_finite_is_an_error_with_its_line(tmp_path: Path, label: str) -> None:
    write_train_and_dev(tmp_path, f"text\tkind\nA.\t1\nB.\t{label}\nC.\tx\nD.\tx\n")
    with pytest.raises(UserError, match=rf"train\.tsv:3: `x` 2, `{label}` 1: labels that are no finite numbers"):
        TextTask(REGRESSION, tmp_path)


def test_a_classification_with_one_label_is_refused(tmp_path: Path) -> None:
    write_train_and_dev(tmp_path, "text\tkind\nA.\tyes\nB.\tyes\n")
    with pytest.raises(UserError, match=r"train\.tsv: every example has the label `yes`"):
        TextTask(CUSTOM, tmp_path)


def test_large_labels_of_a_regression_that_differ_little_keep_their_distances(tmp_path: Path) -> None:
    write_train_and_dev(tmp_path, "text\tkind\nA.\t1700000000\nB.\t1700000050\nC.\t1700000100\n")
    task = TextTask(REGRESSION, tmp_path)
    assert task.train_target.dtype == np.float32
    assert task.train_target[:, 0].tolist() == [0.0, 0.5, 1.0]


@pytest.mark.parametrize("label", ["0", "1e8", "-1e30"])
def test_equal_labels_of_a_regression_have_finite_targets_and_are_predicted_unchanged(
    tmp_path: Path, label: str
) -> None:
    write_train_and_dev(tmp_path, f"text\tkind\nA.\t{label}\nB.\t{label}\n")
    task = TextTask(REGRESSION, tmp_path)
    assert task.train_target.tolist() == [[0.0], [0.0]]
    assert float(task._label_targets.predicted_labels(np.zeros((1, 1)))[0]) == float(label)


def test_labels_are_those_of_the_whole_training_file_also_if_few_examples_are_used(tmp_path: Path) -> None:
    lines = "".join(f"Text {number}.\t{'rare' if number == 7 else 'usual'}\n" for number in range(20))
    write_train_and_dev(tmp_path, f"text\tkind\n{lines}")
    task = TextTask(CUSTOM, tmp_path, max_train=2)
    assert task.train.label == ["usual", "usual"]
    assert task.labels == ("rare", "usual")


def test_lines_with_too_few_columns_are_left_out_and_their_number_is_noted(tmp_path: Path) -> None:
    write_train_and_dev(tmp_path, "text\tkind\nx\ta\nbroken\ny\tb\n")

    task = TextTask(CUSTOM, tmp_path)

    assert task.train.a == ["x", "y"]
    assert task.notes[0] == f"{tmp_path / 'train.tsv'}: 1 lines with too few columns are left out"


def test_a_missing_file_is_an_error_with_both_searched_paths(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"RTE/train\.tsv: no such file \(nor .*glue/RTE/train\.tsv\)"):
        TextTask(GLUE["rte"], tmp_path)


def test_all_unknown_labels_are_named_at_once_with_their_numbers_at_most_ten(tmp_path: Path) -> None:
    unknown = ["maybe", "perhaps", "maybe", *"abcdefghi"]
    lines = "".join(f"gj04\t{label}\t\tNo.\n" for label in unknown)
    write_train_and_dev(tmp_path / "CoLA", "gj04\t1\t\tYes.\n" + lines)
    with pytest.raises(UserError) as error:
        TextTask(GLUE["cola"], tmp_path)
    assert (
        "CoLA/train.tsv:2: `maybe` 2, `a` 1, `b` 1, `c` 1, `d` 1, `e` 1, `f` 1, `g` 1, `h` 1, `i` 1 and 1 more label: "
        "unknown labels (and how often each occurs); the labels that are known are 0, 1:"
    ) in str(error.value)


def test_the_mean_of_the_states_is_refused_where_it_has_no_effect_and_where_transformers_has_no_class_for_it(
    encoder: Pretrained, modern_encoder: Pretrained, tmp_path: Path
) -> None:
    write_train_and_dev(tmp_path, "text\tkind\nthe dog\t1\nthe bird\t2\n")
    write_train_and_dev(tmp_path / "words", "the O\nking B-PER\n", "txt")
    mean = FinetuneConfig(pooling="mean")
    with pytest.raises(UserError, match=r"^--set pooling: ner has no choice of the states that are read; leave"):
        TaggingTask("ner", tmp_path / "words").check(mean)
    for spec in (CUSTOM, REGRESSION):
        task = TextTask(spec, tmp_path)
        task.check(mean)
        with pytest.raises(UserError, match=r"^--set pooling=mean: .* ELECTRA reads \[CLS\] only; .* head=paper"):
            task.model(encoder, mean, seed=0)
        task.model(modern_encoder, mean, seed=0)
    with pytest.raises(UserError, match=r"^--set class_weights: custom has no classes; leave it out$"):
        TextTask(REGRESSION, tmp_path).check(FinetuneConfig(class_weights="balanced"))


def test_labels_that_look_alike_are_named(tmp_path: Path) -> None:
    """Two of the four labels are `café`, in one of which the accent is a character of its own."""
    labels = ("Very good", "very  good", "bad", " very  good ", "caf\u00e9", "cafe\u0301")
    write_train_and_dev(tmp_path, "text\tkind\n" + "".join(f"a {label.strip()}\t{label}\n" for label in labels))

    task = TextTask(CUSTOM, tmp_path)

    alike = ["`Very good` and `very  good`", "`cafe\u0301` and `caf\u00e9`"]
    remarks = [f"{both} differ only in case, spaces or encoding, and are learnt as 2 labels; " for both in alike]
    assert [note[: len(remark)] for note, remark in zip(task.notes, remarks, strict=True)] == remarks
    assert task.labels == ("Very good", "bad", "cafe\u0301", "caf\u00e9", "very  good")


def test_the_score_of_a_guess_is_that_of_the_most_frequent_label_of_the_training(tmp_path: Path) -> None:
    write(tmp_path / "train.tsv", "text\tkind\na\t1\nb\t2\nc\t1\n")
    write(tmp_path / "dev.tsv", "text\tkind\na\t1\nb\t2\nc\t2\nd\t2\n")

    assert TextTask(CUSTOM, tmp_path).constant_guess() == "always to predict `1` has accuracy 0.2500"
    assert TextTask(REGRESSION, tmp_path).constant_guess() == "always to predict the mean has spearman 0.0000"
