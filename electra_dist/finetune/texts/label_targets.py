"""Translate the labels of a task on texts into targets of training, and a model's outputs into labels.

A label of a classification becomes its number in the list of labels. A label of a regression is scaled linearly, so
that the lowest possible label becomes 0 and the highest 1; if the task does not define these two, the lowest and the
highest label of the training data are taken.
"""

from __future__ import annotations

import math
from decimal import Decimal, InvalidOperation

import numpy as np
import torch

from electra_dist.errors import UserError
from electra_dist.finetune.texts.labelled_texts import Texts
from electra_dist.finetune.texts.text_specs import TextSpec


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
