"""Describe tasks on texts by their files, columns, labels and metric; `GLUE` has the nine tasks of the benchmark.

Guarantee: columns, labels, metrics and folders are those of the standard GLUE download, as google-research/electra
reads them.

The metric that counts as a task's score is that of the ELECTRA paper's tables of development results: Matthews
correlation for CoLA, Spearman for STS, accuracy for all others. MNLI is scored on the matched set; metrics of the
mismatched set have the prefix `mismatched_`. WNLI, which the reference leaves out, is read like the others.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from electra_dist.finetune.texts.labelled_texts import Column


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextSpec:
    """Description of a task on texts: names of its files, their columns, its labels and its metric.

    A column is a title in the header, a key of the JSON objects, or an index from 0 in a file without header.
    """

    name: str
    text_a: Column
    text_b: Column | None  # None for a task on single texts
    label: Column
    labels: tuple[str, ...] = ()  # empty for a regression, or to use the sorted labels of the training data
    kind: Literal["classification", "regression"] = "classification"
    span: tuple[float, float] | None = None  # (lowest, highest) label of a regression; None: of the training data
    metric: str = "accuracy"  # the score: a key of `classification_metrics` or `regression_metrics`
    symmetric: bool = False  # whether the two texts may change places: (B, A) has the label of (A, B)
    folder: str = ""  # folder within the GLUE download; empty for a custom task
    dev_files: tuple[tuple[str, str], ...] = (("", "dev"),)  # (prefix of the metrics, file name without suffix)


_BINARY = ("0", "1")
_NLI = ("entailment", "not_entailment")
GLUE = {
    spec.name: spec
    for spec in (
        TextSpec(name="cola", text_a=3, text_b=None, label=1, labels=_BINARY, metric="mcc", folder="CoLA"),
        TextSpec(name="sst2", text_a="sentence", text_b=None, label="label", labels=_BINARY, folder="SST-2"),
        TextSpec(
            name="mrpc",
            text_a="#1 String",
            text_b="#2 String",
            label="Quality",
            labels=_BINARY,
            symmetric=True,
            folder="MRPC",
        ),
        TextSpec(
            name="stsb",
            text_a="sentence1",
            text_b="sentence2",
            label="score",
            kind="regression",
            span=(0.0, 5.0),
            metric="spearman",
            symmetric=True,
            folder="STS-B",
        ),
        TextSpec(name="rte", text_a="sentence1", text_b="sentence2", label="label", labels=_NLI, folder="RTE"),
        TextSpec(name="qnli", text_a="question", text_b="sentence", label="label", labels=_NLI, folder="QNLI"),
        TextSpec(
            name="qqp", text_a="question1", text_b="question2", label="is_duplicate", labels=_BINARY, folder="QQP"
        ),
        TextSpec(
            name="mnli",
            text_a="sentence1",
            text_b="sentence2",
            label="gold_label",
            labels=("contradiction", "entailment", "neutral"),
            folder="MNLI",
            dev_files=(("", "dev_matched"), ("mismatched_", "dev_mismatched")),
        ),
        TextSpec(name="wnli", text_a="sentence1", text_b="sentence2", label="label", labels=_BINARY, folder="WNLI"),
    )
}
