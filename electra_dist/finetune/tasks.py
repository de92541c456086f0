"""What a task is, and the nine of GLUE and any of the user's that classify or grade one text or a pair.

Guarantee: columns, labels, metrics and folders of the standard GLUE download, as google-research/electra reads them;
MRPC and STS are trained on both orders of a pair. A task's `digest` is of the bytes of its files.

Scores are those of the paper's development tables: CoLA Matthews, STS Spearman, everything else accuracy (MNLI: on
the matched set; the mismatched one's have the prefix `mismatched_`).

Where it stops: one task a model. WNLI, which the reference leaves out, is read like the others.
"""

from __future__ import annotations

import abc
import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch

from electra_dist.errors import UserError
from electra_dist.finetune.config import FinetuneConfig
from electra_dist.finetune.fit import Examples, Progress, predict
from electra_dist.finetune.heads import Classifier, TaskModel
from electra_dist.finetune.metrics import classification_metrics, degenerate, regression_metrics
from electra_dist.finetune.texts import Column, Texts, encode_texts, find_file, read_texts
from electra_dist.pretrained.encoder import Pretrained


class TaskOutcome(NamedTuple):
    """What an evaluation says."""

    metrics: dict[str, float]
    failure: str  # empty, or why the run counts as failed


class Task(abc.ABC):
    """Data and what to do with them. `metric` names the score among the metrics."""

    name: str
    metric: str
    digest: str  # sha256 of the data and of how they are read
    notes: list[str]  # what a user should know about the data

    @abc.abstractmethod
    def examples(self, encoder: Pretrained, settings: FinetuneConfig) -> Examples:
        """The training examples as ids."""

    @abc.abstractmethod
    def model(self, encoder: Pretrained, settings: FinetuneConfig, seed: int) -> TaskModel:
        """A fresh encoder with a new head."""

    @abc.abstractmethod
    def evaluate(
        self, model: TaskModel, encoder: Pretrained, settings: FinetuneConfig, progress: Progress
    ) -> TaskOutcome:
        """Scores of a trained model on the development data."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextSpec:
    """Where the examples of a task on texts are and what they mean."""

    name: str
    text_a: Column
    text_b: Column | None
    label: Column
    labels: tuple[str, ...] = ()  # empty: those of the training data, sorted; or a regression
    kind: Literal["classification", "regression"] = "classification"
    span: tuple[float, float] | None = None  # of a regression's labels; none: that of the training data
    metric: str = "accuracy"
    symmetric: bool = False  # (A, B) means the same as (B, A)
    folder: str = ""
    dev_files: tuple[tuple[str, str], ...] = (("", "dev"),)  # (prefix of the metrics, name without suffix)


_BINARY, _NLI = ("0", "1"), ("entailment", "not_entailment")
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


class TextTask(Task):
    """Classification or regression of one text or a pair; see `TextSpec`."""

    def __init__(self, spec: TextSpec, data: Path, max_train: int | None = None) -> None:
        """Reads all files of the task below `data`; of the training examples at most `max_train` are taken."""
        self.spec, self.name, self.metric = spec, spec.name, spec.metric
        self.train = self._read(data, "train")
        self.dev = {prefix: self._read(data, stem) for prefix, stem in spec.dev_files}
        files = [self.train, *self.dev.values()]
        content = "".join(texts.sha256 for texts in files) + repr(spec)
        if max_train is not None:
            self.train = self.train.sample(max_train)
            content += f", {max_train} training examples"
        self.digest = hashlib.sha256(content.encode()).hexdigest()
        self.notes = [
            f"{texts.file}: {texts.skipped} lines with too few columns are left out"
            for texts in files
            if texts.skipped
        ]
        self.labels: tuple[str, ...] = ()
        if spec.kind == "classification":
            self.labels = spec.labels or tuple(sorted(set(self.train.label)))
        self.train_target = self._targets(self.train)
        self.dev_target = {prefix: self._targets(texts) for prefix, texts in self.dev.items()}

    def examples(self, encoder: Pretrained, settings: FinetuneConfig) -> Examples:
        """Training examples; a symmetric pair twice where `both_orders`."""
        a, b, target = self.train.a, self.train.b, self.train_target
        if self.spec.symmetric and settings.both_orders and b is not None:
            a, b, target = [*a, *b], [*b, *a], torch.cat([target, target])
        return Examples(encode_texts(a, b, encoder.tokenizer, encoder.special, settings.max_length), target)

    def dev_ids(self, prefix: str, encoder: Pretrained, settings: FinetuneConfig) -> list[list[int]]:
        """The development examples of `prefix`."""
        texts = self.dev[prefix]
        return encode_texts(texts.a, texts.b, encoder.tokenizer, encoder.special, settings.max_length)

    def model(self, encoder: Pretrained, settings: FinetuneConfig, seed: int) -> Classifier:
        """A classifier; with one output for a regression."""
        backbone = encoder.backbone(settings.hidden_dropout, settings.attention_dropout)
        return Classifier(backbone, encoder.tower.hidden_size, len(self.labels) or 1, settings, seed)

    def evaluate(
        self, model: TaskModel, encoder: Pretrained, settings: FinetuneConfig, progress: Progress
    ) -> TaskOutcome:
        """Metrics on every development file."""
        assert isinstance(model, Classifier)
        device = next(model.parameters()).device
        outputs = {}
        for prefix in self.dev:
            ids = self.dev_ids(prefix, encoder, settings)
            output_NL = np.zeros((len(ids), len(self.labels) or 1), np.float32)
            batches = predict(model.predict, ids, encoder.special.pad, settings.batch, device, progress)
            for rows, output in batches:
                output_NL[rows] = output.cpu().numpy()
            outputs[prefix] = output_NL
        return self.score(outputs)

    def score(self, outputs: dict[str, np.ndarray]) -> TaskOutcome:
        """Metrics of outputs [N, L] (logits, or [N, 1] numbers) for each prefix of the development files."""
        metrics: dict[str, float] = {}
        failures = []
        for prefix, output_NL in outputs.items():
            true = self.dev_target[prefix][:, 0].numpy()
            predicted = output_NL.argmax(1) if self.labels else output_NL[:, 0]
            if self.labels:
                found = classification_metrics(predicted, true, len(self.labels))
            else:
                found = regression_metrics(predicted, true)
            metrics |= {f"{prefix}{name}": value for name, value in found.items()}
            failures.append(degenerate(predicted, self.labels))
        return TaskOutcome(metrics, next(filter(None, failures), ""))

    def _read(self, data: Path, stem: str) -> Texts:
        spec = self.spec
        folders = [data / spec.folder, data / "glue" / spec.folder] if spec.folder else [data]
        suffixes = [".tsv"] if spec.folder else [".tsv", ".jsonl"]
        file = find_file([folder / f"{stem}{suffix}" for folder in folders for suffix in suffixes])
        return read_texts(file, spec.text_a, spec.text_b, spec.label)

    def _targets(self, texts: Texts) -> torch.Tensor:
        """[N, 1]: int64 numbers of the labels, or fp32 in [0, 1]."""
        if self.labels:
            numbers = {label: number for number, label in enumerate(self.labels)}
            for label, line in zip(texts.label, texts.line):
                if label not in numbers:
                    raise UserError(f"{texts.file}:{line}: unknown label `{label}`; one of {', '.join(self.labels)}")
            return torch.tensor([numbers[label] for label in texts.label])[:, None]
        values = _numbers(texts)
        low, high = self.spec.span or _range(_numbers(self.train))
        return ((torch.tensor(values) - low) / (high - low))[:, None]


def _numbers(texts: Texts) -> list[float]:
    values = []
    for label, line in zip(texts.label, texts.line):
        try:
            values.append(float(label))
        except ValueError:
            raise UserError(f"{texts.file}:{line}: `{label}` is no number; use --kind classification") from None
    return values


def _range(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(max(values), min(values) + 1e-9)
