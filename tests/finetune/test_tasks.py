"""Tasks of texts: GLUE's and a user's own, their columns, labels and development sets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from electra_dist.errors import UserError
from electra_dist.finetune.finetune_config import FinetuneConfig
from electra_dist.finetune.tasks import GLUE, TextSpec, TextTask
from electra_dist.pretrained.load_encoder import Pretrained

CUSTOM = TextSpec(name="custom", text_a="text", text_b=None, label="kind")


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def both(folder: Path, text: str, suffix: str = "tsv") -> Path:
    for stem in ("train", "dev"):
        write(folder / f"{stem}.{suffix}", text)
    return folder


def test_cola_has_no_header_and_quotes_are_text(tmp_path: Path) -> None:
    both(tmp_path / "CoLA", 'gj04\t1\t\tHe said "no.\r\ngj04\t0\t*\tHim said.\n')
    task = TextTask(GLUE["cola"], tmp_path)
    assert task.train.a == ['He said "no.', "Him said."]
    assert task.train_target.tolist() == [[1], [0]]


def test_mrpc_is_found_below_glue_without_its_byte_order_mark_and_trained_in_both_orders(
    tmp_path: Path, encoder: Pretrained
) -> None:
    text = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t5\t6\tthe boy\tthe girl\n0\t7\t8\tthe old\tthe sea\n"
    both(tmp_path / "glue" / "MRPC", text)
    task = TextTask(GLUE["mrpc"], tmp_path)
    examples = task.examples(encoder, FinetuneConfig(max_length=32))
    boy, girl = encoder.tokenizer.encode(["the boy", "the girl"])
    cls, sep = encoder.special.cls, encoder.special.sep
    assert len(examples.ids) == 4
    assert examples.ids[0] == [cls, *boy, sep, *girl, sep]
    assert examples.ids[2] == [cls, *girl, sep, *boy, sep]
    assert examples.target_NK[:, 0].tolist() == [1, 0, 1, 0]
    assert len(task.dev_ids("", encoder, FinetuneConfig())) == 2
    assert len(task.examples(encoder, FinetuneConfig(both_orders=False)).ids) == 2


def test_a_limit_takes_always_the_same_training_examples_in_their_order(tmp_path: Path) -> None:
    lines = "".join(f"text {number}\t{'ab'[number % 2]}\n" for number in range(40))
    both(tmp_path, f"text\tkind\n{lines}")
    whole, some, same = (TextTask(CUSTOM, tmp_path, limit) for limit in (None, 10, 10))
    numbers = [int(text.split()[1]) for text in some.train.a]
    assert numbers == sorted(set(numbers)) and len(numbers) == len(some.train_target) == 10
    assert numbers != list(range(10)) and some.train.a == same.train.a
    assert [line - 2 for line in some.train.line] == numbers
    assert some.train.label == ["ab"[number % 2] for number in numbers]
    assert len(some.dev[""].a) == 40
    assert some.digest == same.digest != whole.digest == TextTask(CUSTOM, tmp_path).digest
    assert TextTask(CUSTOM, tmp_path, 40).train.a == whole.train.a


def test_sts_labels_are_scaled_to_the_unit_interval(tmp_path: Path) -> None:
    both(tmp_path / "STS-B", "sentence1\tsentence2\tscore\nx\ty\t5.000\nx\tz\t1.25\n")
    assert TextTask(GLUE["stsb"], tmp_path).train_target[:, 0].tolist() == [1.0, 0.25]


def test_mnli_is_scored_on_both_development_sets(tmp_path: Path) -> None:
    text = "index\tsentence1\tsentence2\tgold_label\n0\tx\ty\tneutral\n1\tx\ty\tentailment\n"
    for stem in ("train", "dev_matched", "dev_mismatched"):
        write(tmp_path / "MNLI" / f"{stem}.tsv", text)
    assert list(TextTask(GLUE["mnli"], tmp_path).dev) == ["", "mismatched_"]


def test_a_task_of_ones_own_reads_jsonl_and_takes_its_labels_from_the_training_data(tmp_path: Path) -> None:
    lines = [{"text": "one", "kind": 7}, {"text": "two", "kind": "b"}, {"text": "six", "kind": 7}]
    both(tmp_path, "\n".join(map(json.dumps, lines)), "jsonl")  # without a last newline
    task = TextTask(CUSTOM, tmp_path)
    assert task.labels == ("7", "b")
    assert task.train_target[:, 0].tolist() == [0, 1, 0]


def test_a_regression_of_ones_own_is_scaled_by_the_training_data(tmp_path: Path) -> None:
    write(tmp_path / "train.tsv", "text\tkind\nx\t-2\ny\t2\n")
    write(tmp_path / "dev.tsv", "text\tkind\nx\t1\ny\t4\n")
    spec = TextSpec(name="custom", text_a="text", text_b=None, label="kind", kind="regression", metric="spearman")
    task = TextTask(spec, tmp_path)
    assert task.train_target[:, 0].tolist() == [0.0, 1.0]
    assert task.dev_target[""][:, 0].tolist() == [0.75, 1.5]


def test_lines_with_too_few_columns_are_left_out_and_counted(tmp_path: Path) -> None:
    both(tmp_path, "text\tkind\nx\ta\nbroken\ny\tb\n")
    task = TextTask(CUSTOM, tmp_path)
    assert task.train.a == ["x", "y"]
    assert task.notes[0] == f"{tmp_path / 'train.tsv'}: 1 lines with too few columns are left out"


def test_a_missing_file_and_an_unknown_label_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"RTE/train\.tsv: no such file \(nor .*glue/RTE/train\.tsv\)"):
        TextTask(GLUE["rte"], tmp_path)
    both(tmp_path / "CoLA", "gj04\t1\t\tYes.\ngj04\tmaybe\t\tNo.\n")
    with pytest.raises(UserError, match=r"CoLA/train\.tsv:2: unknown label `maybe`; one of 0, 1"):
        TextTask(GLUE["cola"], tmp_path)
