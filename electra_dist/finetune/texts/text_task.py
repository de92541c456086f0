"""Implement classification and regression on single texts or pairs, as a fine-tuning task.

Guarantee: with the setting `both_orders` (the default), the pairs (A, B) of MRPC and STS, whose order has no meaning,
are used in training as (B, A), too. The `digest` of a task covers the bytes of its files and the way in which they are
read. Labels that the task does not define are those of the whole training file, also if few of its examples are used.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import torch
from typing_extensions import override

from electra_dist.finetune.finetune_config import FinetuneConfig
from electra_dist.finetune.output.hf_heads import classifier_head, has_too_many_labels
from electra_dist.finetune.output.text_files import TextFile, tsv_file
from electra_dist.finetune.task import Task, TaskOutcome
from electra_dist.finetune.task_heads import Classifier, TaskModel, new_features
from electra_dist.finetune.task_metrics import (
    classification_metrics,
    degenerate,
    metric_standard_error,
    regression_metrics,
)
from electra_dist.finetune.texts.label_targets import LabelTargets
from electra_dist.finetune.texts.labelled_texts import Texts, encode_texts, find_file, read_texts
from electra_dist.finetune.texts.text_specs import TextSpec
from electra_dist.finetune.texts.unlabelled_sets import UnlabelledSet, predictions_file, read_test_sets
from electra_dist.finetune.training_loop import Examples, Ids, Progress, predict
from electra_dist.pretrained.encoder import Pretrained
from electra_dist.pretrained.export import TaskHead


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
        backbone = encoder.backbone(settings.hidden_dropout, settings.attention_dropout)
        features = new_features(encoder, seed)
        return Classifier(
            backbone, encoder.tower.hidden_size, self._label_targets.num_outputs, settings, seed, features
        )

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

    def hf_head(self, model: TaskModel, settings: FinetuneConfig) -> TaskHead:
        """Return the head under Hugging Face's names; a regression's output is rescaled to the units of the labels."""
        assert isinstance(model.head, torch.nn.Sequential)
        return classifier_head(model.head, self.labels, self._label_targets.span, settings.head_dropout)

    @override
    def saving_obstacle(self, encoder: Pretrained, settings: FinetuneConfig) -> str:
        if encoder.model.architecture == "modern":
            if settings.head == "reference":
                return ""
            return (
                f"--task {self.name}: --set head=dense adds a layer to the one that ModernBERT's heads have, which "
                f"cannot be saved in Hugging Face's format; leave it out, or pass --no-save for scores only"
            )
        width = encoder.tower.hidden_size
        num_outputs = self._label_targets.num_outputs
        if not has_too_many_labels(num_outputs, width, settings):
            return ""
        return (
            f"--task {self.name}: a linear head for {num_outputs} labels on states of width {width} cannot be saved "
            f"in Hugging Face's format; pass --set head=dense, or --no-save for scores only"
        )

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
