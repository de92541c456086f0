"""Implement classification and regression on single texts or pairs, as a fine-tuning task.

Guarantee: with the setting `both_orders` (the default), the pairs (A, B) of MRPC and STS, whose order has no meaning,
are used in training as (B, A), too. The `digest` of a task covers the bytes of its files and the way in which they are
read. Labels that the task does not define are those of the whole training file, also if few of its examples are used.

A label of a classification becomes its number in the list of labels. A label of a regression is scaled linearly, so
that the lowest possible label becomes 0 and the highest 1; if the task does not define these two, the lowest and the
highest label of the training data are taken.
"""

from __future__ import annotations

import hashlib
import math
from decimal import Decimal, InvalidOperation
from pathlib import Path

import numpy as np
import torch
from typing_extensions import override

from electra_dist.errors import UserError
from electra_dist.finetune.finetune_config import FinetuneConfig
from electra_dist.finetune.labelled_texts import (
    Texts,
    TextSpec,
    UnlabelledSet,
    encode_texts,
    find_file,
    predictions_file,
    read_test_sets,
    read_texts,
)
from electra_dist.finetune.models import Classifier, Network, StockNetwork, TaskModel, labels_config
from electra_dist.finetune.paper_heads import PaperClassifier
from electra_dist.finetune.task import Task, TaskOutcome, TextFile, tsv_file
from electra_dist.finetune.task_metrics import (
    classification_metrics,
    degenerate,
    metric_standard_error,
    regression_metrics,
)
from electra_dist.finetune.training_loop import Examples, Ids, Progress, predict
from electra_dist.pretrained.encoder import Pretrained


class LabelTargets:
    """Conversion of a task's labels into training targets, and of a model's outputs back into labels."""

    def __init__(self, spec: TextSpec, train: Texts) -> None:
        """Take the labels (of a regression, their range) from `spec` or else from the whole training file `train`."""
        self.labels: tuple[str, ...] = ()  # in the order of their numbers; empty for a regression
        self.span = (0.0, 1.0)  # labels of a regression that become the targets 0 and 1
        if spec.kind == "classification":
            self.labels = spec.labels or _labels_of(train)
            if len(self.labels) == 1:
                raise UserError(
                    f"{train.file}: every example has the label `{self.labels[0]}`; a classification needs two labels "
                    f"or more: add examples of another label"
                )
        else:
            self.span = spec.span or _range_of(_label_values(train))
        self.num_outputs = len(self.labels) or 1  # of the head: one per label, or 1 for a regression
        self._has_limits = spec.span is not None

    def targets(self, texts: Texts) -> torch.Tensor:
        """Return the targets of a file's examples, [N, 1]: int64 label numbers, or fp32 numbers for a regression.

        If the range of a regression was taken from the training file, targets of other files may lie outside [0, 1].
        """
        if self.labels:
            number_N = torch.tensor(_label_numbers(texts, self.labels))
            return number_N[:, None]
        value_N = torch.tensor(_label_values(texts), dtype=torch.float64)  # fp32 cannot tell large labels apart
        low, high = self.span
        scaled_N = (value_N - low) / (high - low)
        return scaled_N[:, None].float()

    def predictions(self, output_NL: np.ndarray) -> np.ndarray:
        """Return a prediction for each row of outputs [N, L]: the best label's number, or a regression's value."""
        return output_NL.argmax(1) if self.labels else output_NL[:, 0]

    def predicted_labels(self, output_NL: np.ndarray) -> list[str]:
        """Convert outputs [N, L] to the predicted label of each example, written as in a file.

        Numbers of a regression are in the units of the labels, and clipped to the range that the task defines, if any.
        """
        predicted_N = self.predictions(output_NL)
        if self.labels:
            return [self.labels[number] for number in predicted_N]
        low, high = self.span
        value_N = low + (high - low) * predicted_N.astype(np.float64)
        if self._has_limits:
            value_N = value_N.clip(low, high)
        return [f"{value:.6g}" for value in value_N]


def _labels_of(train: Texts) -> tuple[str, ...]:
    """Return a file's different labels, sorted; refuse an empty label, a tab, and two spellings of one number."""
    labels = tuple(sorted(set(train.label)))
    label_of: dict[Decimal, str] = {}
    for label in labels:
        place = f"{train.file}:{train.line[train.label.index(label)]}"
        if not label:
            raise UserError(f"{place}: the label is empty; write a label, or remove the line")
        if set(label) & set("\t\r\n"):
            raise UserError(f"{place}: the label has a tab or a line end in it, which tables cannot hold; remove it")
        number = _number_in(label)
        if number is not None and label_of.setdefault(number, label) != label:
            raise UserError(
                f"{place}: the label `{label}` is the same number as the label `{label_of[number]}` of other lines; "
                f"write it in one way, or name the labels by words"
            )
    return labels


def _number_in(label: str) -> Decimal | None:
    """Return a label as a number; None if it is not a finite number."""
    try:
        number = Decimal(label)
    except InvalidOperation:
        return None
    return number if number.is_finite() and "_" not in label else None  # Python reads 1_1 as 11


def _label_numbers(texts: Texts, labels: tuple[str, ...]) -> list[int]:
    number_of = {label: number for number, label in enumerate(labels)}
    numbers = []
    for label, line in zip(texts.label, texts.line, strict=True):
        if label not in number_of:
            raise UserError(
                f"{texts.file}:{line}: unknown label `{label}`; one of {', '.join(labels)} is expected: "
                f"correct the line"
            )
        numbers.append(number_of[label])
    return numbers


def _label_values(texts: Texts) -> list[float]:
    values = []
    for label, line in zip(texts.label, texts.line, strict=True):
        try:
            value = float(label)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise UserError(
                f"{texts.file}:{line}: the label `{label}` is not a finite number; correct the line, or use "
                f"classification (--kind classification)"
            )
        values.append(value)
    return values


def _range_of(values: list[float]) -> tuple[float, float]:
    """Return the lowest and the highest of `values`; if both are equal, a larger number stands for the highest."""
    low = min(values)
    high = max(values)
    if high == low:
        high = low + max(1.0, abs(low))  # callers divide by the difference; a smaller one may be lost in rounding
    return low, high


class TextTask(Task):
    """Classification or regression task on single texts or pairs, read from files as its `TextSpec` describes."""

    def __init__(self, spec: TextSpec, data: Path, max_train: int | None = None, with_test: bool = False) -> None:
        """Read the task's files in the folder `data`; `max_train` limits the training examples to a fixed sample."""
        self.spec = spec
        self.name = spec.name
        self.metric = spec.metric
        self.train = self._read(data, "train")
        self.dev = {prefix: self._read(data, stem) for prefix, stem in spec.dev_files}
        self.test_sets: list[UnlabelledSet] = []
        if with_test:
            self.test_sets = read_test_sets(spec.name, data, spec.text_a, spec.text_b)
        files = [self.train, *self.dev.values()]

        self._label_targets = LabelTargets(spec, self.train)
        self.labels = self._label_targets.labels  # empty for a regression

        # The digest covers the bytes of the files and the way in which they are read.
        digested = "".join(texts.sha256 for texts in files) + repr(spec)
        if max_train is not None:
            self.train = self.train.sample(max_train)
            digested += f", {max_train} training examples"
        if self.test_sets:
            digested += ", test sets " + "".join(test_set.texts.sha256 for test_set in self.test_sets)
        self.digest = hashlib.sha256(digested.encode()).hexdigest()

        self.notes = []
        for texts in files:
            if texts.skipped > 0:
                self.notes.append(f"{texts.file}: {texts.skipped} lines with too few columns are left out")

        self.train_target = self._label_targets.targets(self.train)
        self.dev_target = {prefix: self._label_targets.targets(texts) for prefix, texts in self.dev.items()}

    def examples(self, encoder: Pretrained, settings: FinetuneConfig) -> Examples:
        """Return the training examples as rows of token ids with their targets.

        If each of N pairs (A, B) is also used as (B, A), rows i and i + N are the two orders of pair i.
        """
        first_texts = self.train.a
        second_texts = self.train.b
        target_N1 = self.train_target
        if second_texts is not None and self.spec.symmetric and settings.both_orders:
            first_texts = [*self.train.a, *second_texts]
            second_texts = [*second_texts, *self.train.a]
            target_N1 = torch.cat([target_N1, target_N1])
        ids = encode_texts(first_texts, second_texts, encoder.tokenizer, encoder.special, settings.max_length)
        return Examples(ids=ids, target_NK=target_N1)

    def dev_ids(self, prefix: str, encoder: Pretrained, settings: FinetuneConfig) -> list[list[int]]:
        """Return a development file's examples as rows of token ids; `prefix` ("mismatched_" or "") names the file."""
        texts = self.dev[prefix]
        return encode_texts(texts.a, texts.b, encoder.tokenizer, encoder.special, settings.max_length)

    @override
    def model(self, encoder: Pretrained, settings: FinetuneConfig, seed: int) -> Classifier:
        if settings.head == "paper":
            network: Network = PaperClassifier(encoder, self._label_targets.num_outputs, settings, seed)
        else:
            config = {
                "classifier_dropout": settings.head_dropout,
                "problem_type": "single_label_classification" if self.labels else "regression",
                **labels_config(self.labels or ["LABEL_0"]),
            }
            if encoder.model.architecture == "modern":
                config["classifier_pooling"] = "cls"
            network = StockNetwork(encoder, "SequenceClassification", config, settings, seed)
        return Classifier(network, encoder.special, None if self.labels else self._label_targets.span)

    def evaluate(
        self, model: TaskModel, encoder: Pretrained, settings: FinetuneConfig, progress: Progress
    ) -> TaskOutcome:
        """Predict the labels of every development file, and score them; `progress` starts again with each file."""
        outputs = {}
        for prefix in self.dev:
            ids = self.dev_ids(prefix, encoder, settings)
            outputs[prefix] = self._outputs(model, ids, encoder, settings, progress)
        return self.score(outputs)._replace(predictions=self._dev_predictions(outputs))

    @override
    def predict_test_sets(
        self, model: TaskModel, encoder: Pretrained, settings: FinetuneConfig, progress: Progress
    ) -> tuple[TextFile, ...]:
        files = []
        for test_set in self.test_sets:
            texts = test_set.texts
            ids = encode_texts(texts.a, texts.b, encoder.tokenizer, encoder.special, settings.max_length)
            output_NL = self._outputs(model, ids, encoder, settings, progress)
            files.append(predictions_file(test_set, self._label_targets.predicted_labels(output_NL)))
        return tuple(files)

    def _outputs(
        self, model: TaskModel, ids: Ids, encoder: Pretrained, settings: FinetuneConfig, progress: Progress
    ) -> np.ndarray:
        """Return a model's outputs for rows of token ids, fp32 [N, L] in the order of the rows."""
        assert isinstance(model, Classifier)
        device = next(model.parameters()).device
        output_NL = np.zeros((len(ids), self._label_targets.num_outputs), np.float32)
        # Batches come in order of length; the row numbers put their outputs back in the order of the file.
        for rows, output_BL in predict(model.predict, ids, encoder.special.pad, settings.batch, device, progress):
            output_NL[rows] = output_BL.cpu().numpy()
        return output_NL

    def _dev_predictions(self, outputs: dict[str, np.ndarray]) -> tuple[TextFile, ...]:
        """Return a table of predictions and labels for each development file, such as dev_predictions.tsv."""
        files = []
        for prefix, stem in self.spec.dev_files:
            answers = self._label_targets.predicted_labels(outputs[prefix])
            numbers = map(str, range(len(answers)))
            rows = zip(numbers, answers, self.dev[prefix].label, strict=True)
            files.append(tsv_file(f"{stem}_predictions.tsv", ("index", "prediction", "label"), rows))
        return tuple(files)

    def score(self, outputs: dict[str, np.ndarray]) -> TaskOutcome:
        """Compute the metrics of a model's outputs on the development files.

        `outputs` maps the prefix of a file's metrics ("", for MNLI also "mismatched_") to the outputs: for a
        classification one number per label, [N, L], for a regression the predicted number, [N, 1]. The outcome counts
        as failed if all predictions for a file are equal.
        """
        metrics: dict[str, float] = {}
        failures = []
        for prefix, output_NL in outputs.items():
            true_N = self.dev_target[prefix][:, 0].numpy()
            predicted_N = self._label_targets.predictions(output_NL)
            if self.labels:
                file_metrics = classification_metrics(predicted_N, true_N, len(self.labels))
            else:
                file_metrics = regression_metrics(predicted_N, true_N)
            for name, value in file_metrics.items():
                metrics[f"{prefix}{name}"] = value
            file_failure = degenerate(predicted_N, self.labels)
            if file_failure:
                failures.append(file_failure)
        return TaskOutcome(metrics=metrics, failures=tuple(failures))

    def standard_error(self, outputs: dict[str, np.ndarray]) -> float:
        """Return the score's standard error over the choice of development examples; for MNLI, of the matched ones."""
        predicted_N = self._label_targets.predictions(outputs[""])
        true_N = self.dev_target[""][:, 0].numpy()
        return metric_standard_error(predicted_N, true_N, len(self.labels), self.metric)

    def _read(self, data: Path, stem: str) -> Texts:
        """Read the task's file `stem`, such as "train"; GLUE tasks have their folders in `data` or in `data`/glue."""
        spec = self.spec
        is_glue = spec.folder != ""
        if is_glue:
            candidates = [data / spec.folder / f"{stem}.tsv", data / "glue" / spec.folder / f"{stem}.tsv"]
        else:
            candidates = [data / f"{stem}.tsv", data / f"{stem}.jsonl"]
        file = find_file(candidates)
        return read_texts(file, spec.text_a, spec.text_b, spec.label)
