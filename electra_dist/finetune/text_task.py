"""Implement classification and regression on single texts or pairs, as a fine-tuning task.

Guarantee: with the setting `both_orders` (the default), the pairs (A, B) of MRPC and STS, whose order has no meaning,
are used in training as (B, A), too. The `digest` of a task covers the bytes of its files and the way in which they are
read. Labels that the task does not define are those of the whole training file, also if few of its examples are used.
A pair of texts that is too long loses the last token of its longer text, again and again, until it fits, as in BERT.
The files are read and checked before torch or transformers is imported.

A submission to GLUE has one line for each example of the test file, in its order, with the columns `index` and
`prediction`; names of files and forms of labels are those that gluebenchmark.com asks for. Labels of the tasks on
inference are words, those of STS-B numbers from 0 to 5, and all others 0 or 1.

Source: https://gluebenchmark.com/faq, question 3, and its sample_submission.zip.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from typing_extensions import override

from electra_dist.errors import UserError
from electra_dist.finetune.finetune_config import FinetuneConfig
from electra_dist.finetune.labelled_texts import (
    LabelTargets,
    Texts,
    TextSpec,
    find_file,
    find_split,
    list_names,
    read_texts,
    remarks_on_equal_numbers,
    remarks_on_labels,
    split_off,
    texts_of,
)
from electra_dist.finetune.task import Task, TaskOutcome, TextFile, label_weights, tsv_file
from electra_dist.store.atomic_files import did_you_mean
from electra_dist.tables import TABLE_SUFFIXES, Column, find_columns, read_table

if TYPE_CHECKING:
    from electra_kernels.operation_types import SpecialIds

    from electra_dist.finetune.models import Classifier, Network, TaskModel
    from electra_dist.finetune.stored_scores import ItemResults
    from electra_dist.finetune.training_loop import Examples, Ids, Progress
    from electra_dist.pretrained.encoder import Pretrained
    from electra_dist.tokenizer import TextTokenizer


def encode_texts(
    a: Sequence[str], b: Sequence[str] | None, tokenizer: TextTokenizer, special: SpecialIds, max_length: int
) -> list[list[int]]:
    """Return one row of token ids per example: `[CLS] A [SEP]` for single texts, `[CLS] A [SEP] B [SEP]` for pairs.

    `b` is None for single texts; an empty second text is left out with its [SEP]. `max_length` counts the special
    tokens. A longer single text is cut at its end, a longer pair by `truncate_pair`.
    """
    all_first_ids = tokenizer.encode(a)
    if b is None:
        max_text_length = max_length - 2  # without [CLS] and [SEP]
        return [[special.cls, *ids[:max_text_length], special.sep] for ids in all_first_ids]
    max_pair_length = max_length - 3  # without [CLS] and two [SEP]
    all_second_ids = tokenizer.encode(b)
    rows = []
    for first_ids, second_ids in zip(all_first_ids, all_second_ids, strict=True):
        first_kept, second_kept = truncate_pair(first_ids, second_ids, max_pair_length)
        row = [special.cls, *first_kept, special.sep]
        if second_kept:
            row += [*second_kept, special.sep]
        rows.append(row)
    return rows


def truncate_pair(first: list[int], second: list[int], max_total: int) -> tuple[list[int], list[int]]:
    """Cut the ends of two texts so that together they have at most `max_total` ids, as BERT does.

    As long as they have more, the longer text loses its last id; if both are equally long, the second one does.
    """
    first_length = len(first)
    second_length = len(second)
    while first_length + second_length > max_total:
        if first_length > second_length:
            first_length -= 1
        else:
            second_length -= 1
    return first[:first_length], second[:second_length]


SUBMISSION_DIR = "submission"  # folder of the files for the benchmark, within the folder of a model


class UnlabelledSpec(NamedTuple):
    """Where a test set is, which columns it has, and the name of the file with the predictions for it."""

    path: str  # relative to the folder of the GLUE download, or to that of a custom task
    text_a: Column
    text_b: Column | None
    index_column: Column | None  # column of the example's number; None to number the examples from 0
    output: str  # relative to the folder of a model


class UnlabelledSet(NamedTuple):
    """Texts of a test set, the ids of its examples, and the name of the file for the predictions."""

    texts: Texts
    indices: list[str]
    output: str


def _glue(path: str, output: str, text_a: str, text_b: str | None = None, index: str = "index") -> UnlabelledSpec:
    return UnlabelledSpec(path, text_a, text_b, index, f"{SUBMISSION_DIR}/{output}")


GLUE_TEST_SETS = {
    "cola": (_glue("CoLA/test.tsv", "CoLA.tsv", "sentence"),),  # the test file has a header, unlike the others of CoLA
    "sst2": (_glue("SST-2/test.tsv", "SST-2.tsv", "sentence"),),
    "mrpc": (_glue("MRPC/test.tsv", "MRPC.tsv", "#1 String", "#2 String"),),
    "stsb": (_glue("STS-B/test.tsv", "STS-B.tsv", "sentence1", "sentence2"),),
    "qqp": (_glue("QQP/test.tsv", "QQP.tsv", "question1", "question2", index="id"),),
    "mnli": (
        _glue("MNLI/test_matched.tsv", "MNLI-m.tsv", "sentence1", "sentence2"),
        _glue("MNLI/test_mismatched.tsv", "MNLI-mm.tsv", "sentence1", "sentence2"),
        _glue("diagnostic/diagnostic.tsv", "AX.tsv", "sentence1", "sentence2"),  # predicted by the model for MNLI
    ),
    "qnli": (_glue("QNLI/test.tsv", "QNLI.tsv", "question", "sentence"),),
    "rte": (_glue("RTE/test.tsv", "RTE.tsv", "sentence1", "sentence2"),),
    "wnli": (_glue("WNLI/test.tsv", "WNLI.tsv", "sentence1", "sentence2"),),
}


def read_test_sets(
    task: str, data: Path, text_a: Column, text_b: Column | None, delimiter: str | None = None
) -> list[UnlabelledSet]:
    """Read those test files of a task that exist; a missing file is no error.

    The folders of GLUE are in `data` or in its folder glue/. The test file of a custom task is the table `test` with
    the columns `text_a` and `text_b`, and its `delimiter` if that is given. Raises UserError if a line has too few
    columns, because a submission needs a prediction for every example.
    """
    if task not in GLUE_TEST_SETS:
        file = find_split(data, "test")
        spec = UnlabelledSpec("", text_a, text_b, None, "test_predictions.tsv")
        return [_read(file, spec, delimiter)] if file else []
    test_sets = []
    for spec in GLUE_TEST_SETS[task]:
        files = [folder / spec.path for folder in (data, data / "glue") if (folder / spec.path).is_file()]
        if files:
            test_sets.append(_read(files[0], spec))
    return test_sets


def _read(file: Path, spec: UnlabelledSpec, delimiter: str | None = None) -> UnlabelledSet:
    """Read a test set, which has no labels, and the number under which each prediction will be written."""
    # `read_texts` needs a label column, which a test set lacks: the index column, or else the first text, stands in.
    index_column = spec.text_a if spec.index_column is None else spec.index_column
    texts = read_texts(file, spec.text_a, spec.text_b, index_column, delimiter)
    if texts.skipped > 0:
        raise UserError(
            f"{file}: {texts.skipped} lines have too few columns, but predictions are needed for all examples; "
            f"download the file again, or rename it to go on without its predictions"
        )
    indices = texts.label
    if spec.index_column is None:
        indices = [str(number) for number in range(len(texts.a))]
    return UnlabelledSet(texts=texts, indices=indices, output=spec.output)


def predictions_file(test_set: UnlabelledSet, predictions: Sequence[str]) -> TextFile:
    """Return the file for the predictions of a test set; `predictions` are in the order of its examples."""
    rows = zip(test_set.indices, predictions, strict=True)
    return tsv_file(test_set.output, ("index", "prediction"), rows)


class TextTask(Task):
    """Classification or regression task on single texts or pairs, read from files as its `TextSpec` describes."""

    def __init__(
        self,
        spec: TextSpec,
        data: Path,
        max_train: int | None = None,
        with_test: bool = False,
        dev: Path | None = None,
        delimiter: str | None = None,
        dev_share: float = 0.1,
        split_seed: int = 0,
    ) -> None:
        """Read the task's files in the folder `data`; `max_train` limits the training examples to a fixed sample.

        For the user's own files, `data` may be the training file itself, and the columns of `spec` may be "". `dev`
        is the development file; without one, a share of the training examples is held out.
        """
        self.name = spec.name
        self.metric = spec.metric
        self.notes = []
        if spec.folder:
            self.train = _read_glue(spec, data, "train")
            self.dev = {prefix: _read_glue(spec, data, stem) for prefix, stem in spec.dev_files}
        else:
            spec, self.train = self._read_own(spec, data, delimiter)
            dev = dev or find_split(data, "dev")
            self.dev = {} if dev is None else {"": read_texts(dev, *spec.columns, delimiter=delimiter)}
        self.spec = spec
        files = [self.train, *self.dev.values()]

        self._label_targets = LabelTargets.of(spec, self.train)
        self.labels = self._label_targets.labels  # empty for a regression
        self.optional_settings = ("pooling", "class_weights") if self.labels else ("pooling",)

        # The digest covers the bytes of the files and the way in which they are read.
        digested = "".join(texts.sha256 for texts in files) + repr(spec)
        split: dict[str, Any] | None = None
        if not self.dev:
            self._hold_out(dev_share, split_seed)
            split = {"dev_share": dev_share, "split_seed": split_seed, "dev_lines": self.dev[""].line}
            digested += f", {dev_share} held out by the seed {split_seed}"
        self.test_sets: list[UnlabelledSet] = []
        if with_test:
            self.test_sets = read_test_sets(spec.name, data, spec.text_a, spec.text_b, delimiter)
        if max_train is not None:
            self.train = self.train.sample(max_train)
            digested += f", {max_train} training examples"
        if self.test_sets:
            digested += ", test sets " + "".join(test_set.texts.sha256 for test_set in self.test_sets)
        self.digest = hashlib.sha256(digested.encode()).hexdigest()

        self.data = {
            "columns": {"text_a": spec.text_a, "text_b": spec.text_b, "label": spec.label},
            "limits": spec.span,
            "split": split,
        }
        for texts in files:
            self.notes += texts.remarks()
            self.notes += texts.remarks_on_empty(texts.line, "line", "are learnt and scored like the others")

        if not spec.labels:
            self.notes += remarks_on_labels(self.labels)
        if not self.labels:
            self.notes += itertools.chain.from_iterable(map(remarks_on_equal_numbers, self.dev.values()))
        self.train_target = self._label_targets.targets(self.train)
        self.dev_target = {prefix: self._label_targets.targets(texts) for prefix, texts in self.dev.items()}

    def _read_own(self, spec: TextSpec, data: Path, delimiter: str | None) -> tuple[TextSpec, Texts]:
        """Return the user's training examples, and `spec` with the columns that it leaves open."""
        file = find_split(data, "train")
        if file is None:
            what = "no table for training" if data.exists() else f"no such file or folder{did_you_mean(data)}"
            tables = sorted(path.name for path in data.glob("*") if path.suffix.lower() in TABLE_SUFFIXES)
            among = f" among {list_names(tables)}" if tables else ""
            raise UserError(
                f"{data}: {what}{among}; name a {', '.join(TABLE_SUFFIXES)} file with --data, or a folder "
                f"with train{TABLE_SUFFIXES[0]} and so on, or one of datasets.save_to_disk"
            )
        table = read_table(file, delimiter)
        if "" in (spec.text_a, spec.label):
            text_a, label = find_columns(table, *spec.columns, is_regression=spec.kind == "regression")
            spec = dataclasses.replace(spec, text_a=text_a, label=label)
            self.notes.append(f"{file}: the text is the column `{text_a}`, and the label `{label}`")
        columns = [column for column in spec.columns if column is not None]
        if len(set(columns)) < len(columns):
            raise UserError(
                f"{file}: {' and '.join(map(str, columns))} are taken for texts and label, one column for two; "
                f"correct --text-a, --text-b or --label"
            )
        texts = texts_of(table, *spec.columns)
        if table.may_be_short and any(text[0] == text[-1] == '"' and '""' in text[1:-1] for text in texts.a if text):
            self.notes.append(
                f"{file}: some texts are in quotes, with quotes in them doubled, and are read so; if the program that "
                f"wrote the file has added these quotes, pass --delimiter '\\t'"
            )
        return spec, texts

    def _hold_out(self, share: float, seed: int) -> None:
        """Move a share of the examples of each label from `train` to `dev`, and say so in a note."""
        num_examples = len(self.train.a)
        self.train, self.dev[""] = split_off(self.train, share, seed, not self.labels)
        self.notes.append(
            f"{self.train.file}: no development file, so {len(self.dev[''].a)} of {num_examples} examples are held "
            f"out, the same share of every label (--dev-share {share}, --split-seed {seed}); finetune.json has their "
            f"lines"
        )
        not_held_out = sorted(set(self.train.label) - set(self.dev[""].label)) if self.labels else []
        if not_held_out:
            self.notes.append(
                f"{self.train.file}: {len(not_held_out)} of {len(self.labels)} labels are too rare to be held out, so "
                f"the score says nothing of them: {list_names(not_held_out)}; raise --dev-share, or give --dev"
            )

    def examples(self, encoder: Pretrained, settings: FinetuneConfig) -> Examples:
        """Return the training examples as rows of token ids with their targets.

        If each of N pairs (A, B) is also used as (B, A), rows i and i + N are the two orders of pair i.
        """
        import torch

        from electra_dist.finetune.training_loop import Examples

        first_texts = self.train.a
        second_texts = self.train.b
        target_N1 = self.train_target
        if second_texts is not None and self.spec.symmetric and settings.both_orders:
            first_texts = [*self.train.a, *second_texts]
            second_texts = [*second_texts, *self.train.a]
            target_N1 = np.concatenate([target_N1, target_N1])
        ids = encode_texts(first_texts, second_texts, encoder.tokenizer, encoder.special, settings.max_length)
        return Examples(ids=ids, target_NK=torch.from_numpy(target_N1))

    def dev_ids(self, prefix: str, encoder: Pretrained, settings: FinetuneConfig) -> list[list[int]]:
        """Return a development file's examples as rows of token ids; `prefix` ("mismatched_" or "") names the file."""
        texts = self.dev[prefix]
        return encode_texts(texts.a, texts.b, encoder.tokenizer, encoder.special, settings.max_length)

    @override
    def check(self, settings: FinetuneConfig) -> None:
        super().check(settings)
        if self.labels:
            self._weights(settings)

    def _weights(self, settings: FinetuneConfig) -> list[float] | None:
        return label_weights(Counter(self.train.label), self.labels, settings.class_weights)

    @override
    def model(self, encoder: Pretrained, settings: FinetuneConfig, seed: int) -> Classifier:
        from electra_dist.finetune.models import Classifier, StockNetwork, labels_config

        if settings.head == "paper":
            from electra_dist.finetune.paper_heads import PaperClassifier

            network: Network = PaperClassifier(encoder, self._label_targets.num_outputs, settings, seed)
        else:
            config = {
                "classifier_dropout": settings.head_dropout,
                "problem_type": "single_label_classification" if self.labels else "regression",
                **labels_config(self.labels or ["LABEL_0"]),
            }
            if encoder.model.architecture == "modern":
                config["classifier_pooling"] = settings.pooling
            elif settings.pooling == "mean":
                raise UserError(
                    "--set pooling=mean: transformers' class for ELECTRA reads [CLS] only; leave it out, or add "
                    "--set head=paper, which writes predictions but no model"
                )
            network = StockNetwork(encoder, "SequenceClassification", config, settings, seed)
        span = None if self.labels else self._label_targets.span
        return Classifier(network, encoder.special, span, self._weights(settings))

    def evaluate(
        self, model: TaskModel, encoder: Pretrained, settings: FinetuneConfig, progress: Progress
    ) -> TaskOutcome:
        """Predict the labels of every development file, and score them; `progress` starts again with each file."""
        outputs = {}
        for prefix in self.dev:
            ids = self.dev_ids(prefix, encoder, settings)
            outputs[prefix] = row_outputs(model, ids, self._label_targets.num_outputs, settings.batch, progress)
        standard_error, items = self.standard_error(outputs)
        return self.score(outputs)._replace(
            predictions=self._dev_predictions(outputs), standard_error=standard_error, items=items
        )

    @override
    def predict_test_sets(
        self, model: TaskModel, encoder: Pretrained, settings: FinetuneConfig, progress: Progress
    ) -> tuple[TextFile, ...]:
        files = []
        for test_set in self.test_sets:
            texts = test_set.texts
            ids = encode_texts(texts.a, texts.b, encoder.tokenizer, encoder.special, settings.max_length)
            output_NL = row_outputs(model, ids, self._label_targets.num_outputs, settings.batch, progress)
            files.append(predictions_file(test_set, self._label_targets.predicted_labels(output_NL)))
        return tuple(files)

    def _dev_predictions(self, outputs: dict[str, np.ndarray]) -> tuple[TextFile, ...]:
        """Return for each development file a table with the prediction and the label of each of its examples."""
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
        from electra_dist.finetune.task_metrics import degenerate

        metrics: dict[str, float] = {}
        failures = []
        for prefix, output_NL in outputs.items():
            file_metrics = text_metrics(self._label_targets, output_NL, self.dev_target[prefix])
            for name, value in file_metrics.items():
                metrics[f"{prefix}{name}"] = value
            failure = degenerate(self._label_targets.predictions(output_NL), self.labels)
            if failure:
                failures.append(failure)
        return TaskOutcome(metrics=metrics, failures=tuple(failures))

    @override
    def shown_metric(self, name: str) -> str:
        return self._label_targets.shown_metric(name)

    @override
    def constant_guess(self) -> str:
        targets = self._label_targets
        if targets.labels:
            [(label, _)] = Counter(self.train.label).most_common(1)
            guess, output_L = f"`{label}`", np.eye(targets.num_outputs)[targets.labels.index(label)]
        else:
            guess, output_L = "the mean", self.train_target.mean(0)
        target_N1 = self.dev_target[""]
        metrics = text_metrics(targets, np.tile(output_L, (len(target_N1), 1)), target_N1)
        return f"always to predict {guess} has {self.metric} {metrics[self.metric]:.4f}"

    def standard_error(self, outputs: dict[str, np.ndarray]) -> tuple[float, ItemResults]:
        """Return the score's standard error over the choice of development examples, and the results behind it.

        For MNLI, both are those of the matched examples.
        """
        from electra_dist.finetune.task_metrics import metric_with_error

        predicted_N = self._label_targets.predictions(outputs[""])
        true_N = self.dev_target[""][:, 0]
        return metric_with_error(predicted_N, true_N, len(self.labels), self.metric)


def _read_glue(spec: TextSpec, data: Path, stem: str) -> Texts:
    """Read a file of GLUE, whose folders are in `data` or in `data`/glue."""
    file = find_file([folder / spec.folder / f"{stem}.tsv" for folder in (data, data / "glue")])
    return read_texts(file, *spec.columns)


def row_outputs(model: TaskModel, ids: Ids, num_outputs: int, batch: int, progress: Progress) -> np.ndarray:
    """Return a model's outputs for rows of token ids, fp32 [N, num_outputs] in the order of the rows."""
    from electra_dist.finetune.training_loop import predict

    device = next(model.parameters()).device
    output_NL = np.zeros((len(ids), num_outputs), np.float32)
    # Batches come in order of length; the row numbers put their outputs back in the order of the file.
    for rows, output_BL in predict(model.predict, ids, model.special.pad, batch, device, progress):
        output_NL[rows] = output_BL.cpu().numpy()
    return output_NL


def text_metrics(targets: LabelTargets, output_NL: np.ndarray, target_N1: np.ndarray) -> dict[str, float]:
    """Return the metrics of a model's outputs, `classification_metrics` or `regression_metrics`."""
    from electra_dist.finetune.task_metrics import classification_metrics, regression_metrics

    predicted_N = targets.predictions(output_NL)
    if targets.labels:
        return classification_metrics(predicted_N, target_N1[:, 0], len(targets.labels))
    return regression_metrics(predicted_N, target_N1[:, 0])
