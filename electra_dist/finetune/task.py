"""Define the interface of fine-tuning tasks, which the tasks on texts, on questions and on tagged words implement.

A model is trained on one task. Training is the same for all tasks (`training_loop.py`); a task provides the examples,
the model with its head, and the scores. A task is made, and its data are checked, without torch.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from electra_dist.errors import UserError
from electra_dist.finetune.labelled_texts import list_names

if TYPE_CHECKING:
    from electra_dist.finetune.finetune_config import FinetuneConfig
    from electra_dist.finetune.models import TaskModel
    from electra_dist.finetune.stored_scores import ItemResults
    from electra_dist.finetune.training_loop import Examples, Progress
    from electra_dist.pretrained.encoder import Pretrained


_OF_SOME_TASKS = {"class_weights": "has no classes", "pooling": "has no choice of the states that are read"}


class TextFile(NamedTuple):
    """File with predictions: its name, relative to the folder of the model, and its content."""

    name: str
    text: str


def tsv_file(name: str, titles: Sequence[str], rows: Iterable[Sequence[str]]) -> TextFile:
    """Return a tab-separated file with `titles` as its first line; no cell may contain a tab or a line feed."""
    lines = ["\t".join(cells) for cells in (titles, *rows)]
    return TextFile(name=name, text="\n".join(lines) + "\n")


class TaskOutcome(NamedTuple):
    """Metrics and predictions of a model on the development data, and the reasons if its result counts as failed."""

    metrics: dict[str, float]  # fractions; per cent for SQuAD
    failures: tuple[str, ...] = ()  # why the result counts as failed, one line each; empty for a good one
    predictions: tuple[TextFile, ...] = ()  # files with the predictions for the development data
    standard_error: float | None = None  # of the score over the choice of the development data; None if not known
    items: ItemResults | None = None  # results on single items, for the error of a difference; None if not kept


class Task(abc.ABC):
    """Interface of a fine-tuning task: it makes training examples and a model, and scores the trained model."""

    name: str  # as on the command line
    metric: str  # name of the score among the metrics
    unit = 1.0  # of the metrics, as a fraction: 0.01 if they are in per cent
    digest: str  # sha256 of the data and of how they are read
    notes: list[str]  # remarks about the data for the user, one line each
    data: dict[str, Any]  # how the data were read, as JSON for finetune.json
    optional_settings: Sequence[str] = ()  # those of `_OF_SOME_TASKS` that this task obeys

    def check(self, settings: FinetuneConfig) -> None:
        """Raise UserError if the settings do not fit the task, such as one that would have no effect."""
        for key, reason in _OF_SOME_TASKS.items():
            is_changed = getattr(settings, key) != type(settings).model_fields[key].default
            if is_changed and key not in self.optional_settings:
                raise UserError(f"--set {key}: {self.name} {reason}; leave it out")

    @abc.abstractmethod
    def examples(self, encoder: Pretrained, settings: FinetuneConfig) -> Examples:
        """Return the training examples: rows of token ids, without padding, and the targets to predict."""

    @abc.abstractmethod
    def model(self, encoder: Pretrained, settings: FinetuneConfig, seed: int) -> TaskModel:
        """Build a model on the host: a copy of the encoder with a new head, whose initial weights depend on `seed`."""

    @abc.abstractmethod
    def evaluate(
        self, model: TaskModel, encoder: Pretrained, settings: FinetuneConfig, progress: Progress
    ) -> TaskOutcome:
        """Score a trained model on the development data; the model must be in evaluation mode, on any device.

        `progress` is called after each batch with ("predict", rows done, rows in total).
        """

    def shown_metric(self, name: str) -> str:
        """Return the name of a metric for people, which may say more than its name in files."""
        return name

    def constant_guess(self) -> str:
        """Return a line with the score of a guess that is the same for all development examples; "" if not known."""
        return ""

    def predict_test_sets(
        self, model: TaskModel, encoder: Pretrained, settings: FinetuneConfig, progress: Progress
    ) -> tuple[TextFile, ...]:
        """Return files with predictions for the task's test sets, which have no labels; empty for most tasks."""
        return ()

    def model_files(self, encoder: Pretrained, settings: FinetuneConfig) -> tuple[TextFile, ...]:
        """Return files beside the model by which another library than transformers loads it; empty for most tasks."""
        return ()


def label_weights(
    counts: Mapping[str, int], labels: Sequence[str], setting: str | Mapping[str, float]
) -> list[float] | None:
    """Return the factor of each label in the loss, or None for equal ones; `counts` has the examples of each label.

    Raises UserError if the setting `class_weights` names another label.
    """
    if setting == "none":
        return None
    if isinstance(setting, str):
        total = sum(counts.values())
        return [total / (len(labels) * max(1, counts.get(label, 0))) for label in labels]
    unknown = sorted(set(setting) - set(labels))
    if unknown:
        raise UserError(
            f"--set class_weights: unknown labels: {list_names([f'`{name}`' for name in unknown])}; the labels are "
            f"{list_names(labels)}: correct the names"
        )
    return [setting.get(label, 1.0) for label in labels]
