"""Describe and read the files of tasks on texts, and turn their labels into targets and outputs back into labels.

Guarantee: callers name a column by its title in the header, or by its index, from 0, if the file has no header (CoLA).
Lines of a .tsv file with too few columns (QQP has some) are left out and counted; google-research/electra leaves them
out, too. Examples that are held out for development are a function of the labels, the share and a seed.

`GLUE` has the nine tasks of the benchmark, with the columns, labels, metrics and folders of the standard download, as
google-research/electra reads them.
The metric that counts as a task's score is that of the ELECTRA paper's tables of development results: Matthews
correlation for CoLA, Spearman for STS, accuracy for all others. MNLI is scored on the matched set; metrics of the
mismatched set have the prefix `mismatched_`. WNLI, which the reference leaves out, is read like the others.

A label of a classification becomes its number in the list of labels. A label of a regression is scaled linearly, so
that the lowest possible label becomes 0 and the highest 1; if the task does not define these two, the lowest and the
highest label of the training data are taken.
"""

from __future__ import annotations

import dataclasses
import math
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from electra_dist.corpus.counts import most_frequent, remarks_on_texts
from electra_dist.errors import UserError
from electra_dist.tables import (
    SAVED_STATE,
    TABLE_SUFFIXES,
    Column,
    Table,
    check_name_once,
    list_places,
    number_in,
    read_table,
)

_NAMED = 10  # labels in a message
_NAMES_OF_SPLIT = {"train": ("train",), "dev": ("dev", "valid", "validation"), "test": ("test",)}


class Texts(NamedTuple):
    """Texts of a file with their labels; all lists have one entry for each example, in the order of the file."""

    a: list[str]
    b: list[str] | None  # None for a task on single texts
    label: list[str]  # as written in the file, without surrounding white space
    line: list[int]  # line of each example in the file, counted from 1
    skipped: int  # number of lines that were left out because they have too few columns
    file: Path
    sha256: str  # of the file, as `Table` has it

    def remarks(self) -> list[str]:
        """Return a line on lines that were left out, and one on first or second texts that look like no text."""
        lines = []
        if self.skipped:
            lines.append(f"{self.file}: {self.skipped} lines with too few columns are left out")
        if self.b is None:
            return lines + remarks_on_texts(str(self.file), self.a)
        lines += remarks_on_texts(f"{self.file}, first texts,", self.a)
        return lines + remarks_on_texts(f"{self.file}, second texts,", self.b)

    def remarks_on_empty(self, places: Sequence[int], unit: str, consequence: str) -> list[str]:
        """Return a line about the examples whose first text is empty; [] if there are none.

        It names the first ones by their number in `places`, which `unit` describes, such as "line", and ends with
        "and" and `consequence`.
        """
        empty = [place for place, text in zip(places, self.a, strict=True) if not text.strip()]
        if not empty:
            return []
        shown = list_places(empty, unit)
        return [f"{self.file}: {len(empty)} of {len(self.a)} texts are empty ({shown}), and {consequence}"]

    def sample(self, size: int) -> Texts:
        """Return a fixed random sample of at most `size` examples, in the order of the file."""
        num_examples = len(self.a)
        if size >= num_examples:
            return self
        shuffled_rows = np.random.default_rng(seed=0).permutation(num_examples)
        return self.rows(np.sort(shuffled_rows[:size]).tolist())

    def rows(self, rows: Sequence[int]) -> Texts:
        """Return the examples with these row numbers, in the order of `rows`."""
        return self._replace(
            a=[self.a[row] for row in rows],
            b=None if self.b is None else [self.b[row] for row in rows],
            label=[self.label[row] for row in rows],
            line=[self.line[row] for row in rows],
        )


def find_file(places: Sequence[Path]) -> Path:
    """Return the first of `places` that is an existing file; raise UserError, which lists them all, if none is."""
    for place in places:
        if place.is_file():
            return place
    first_place = places[0]
    other_places = ", ".join(map(str, places[1:]))
    other_places_text = f" (nor {other_places})" if other_places else ""
    raise UserError(
        f"{first_place}: no such file{other_places_text}; pass the folder that contains it "
        f"(--data, or --glue of a comparison)"
    )


def read_texts(
    file: Path, text_a: Column, text_b: Column | None, label: Column, delimiter: str | None = None
) -> Texts:
    """Read the texts and labels of a file of any kind that `read_table` reads.

    `text_a`, `text_b` and `label` name columns; `text_b` is None for a task on single texts. Blank lines are ignored.
    Raises UserError if there is no example, a column is missing, or a value is no text.
    """
    table = read_table(file, delimiter, has_header=not isinstance(text_a, int))
    return texts_of(table, text_a, text_b, label)


def texts_of(table: Table, text_a: Column, text_b: Column | None, label: Column) -> Texts:
    """Return the texts and labels of a table; see `read_texts` for arguments and errors."""
    file = table.file
    columns = [text_a, label] if text_b is None else [text_a, text_b, label]
    for column in columns:
        check_name_once(file, column, table.columns)
    missing = [column for column in columns if column not in table.columns]
    if missing and table.columns and file.suffix.lower() != ".jsonl":
        raise UserError(
            f"{file}: no column `{missing[0]}`; the header has {', '.join(table.columns)}: "
            f"name one of these, or correct the header"
        )
    texts = Texts([], None if text_b is None else [], [], [], 0, file, table.sha256)
    skipped = 0
    for number, line in table.lines():
        missing = [column for column in columns if column not in line.record]
        if missing and table.may_be_short:
            skipped += 1
            continue
        if missing:
            raise UserError(
                f"{file}:{number}: no key `{missing[0]}`; it has {', '.join(line.record)}: "
                f"name one of these, or add the key"
            )
        if label != text_a and (line.record[text_a], line.record[label]) == (text_a, label):
            raise UserError(
                f"{file}:{number}: the names of the columns stand here again, as where files are put together; remove "
                f"the line"
            )
        texts.a.append(line.text(text_a))
        if texts.b is not None and text_b is not None:
            texts.b.append(line.text(text_b))
        texts.label.append(line.name(label).strip())
        texts.line.append(number)
    if not texts.a:
        column_names = ", ".join(dict.fromkeys(map(str, columns)))  # without labels, the label's column is the text's
        raise UserError(f"{file}: no examples; add at least one line with all columns ({column_names})")
    return texts._replace(skipped=skipped)


def find_split(data: Path, split: str) -> Path | None:
    """Return the table for `split` (train, dev or test) in the folder `data`; None if there is none.

    If `data` is itself a table, it is the training table. Raises UserError if the folder has several tables for
    `split`.
    """
    if data.is_file() or (data / SAVED_STATE).is_file():
        return data if split == "train" else None
    names = _NAMES_OF_SPLIT[split]
    files = [data / f"{name}{suffix}" for name in names for suffix in TABLE_SUFFIXES]
    saved_datasets = [data / name for name in names]  # folders of `datasets.save_to_disk`
    found = [file for file in files if file.is_file()]
    found += [folder for folder in saved_datasets if (folder / SAVED_STATE).is_file()]
    if len(found) > 1:
        raise UserError(f"{data}: {' and '.join(file.name for file in found)} are all {split} files; keep one of them")
    return found[0] if found else None


def split_off(texts: Texts, share: float, seed: int, is_regression: bool) -> tuple[Texts, Texts]:
    """Return (training, development) examples; `held_out_rows` chooses the development examples."""
    keys: list[str] | list[float] = [float(label) for label in texts.label] if is_regression else texts.label
    held_out = held_out_rows(texts.file, keys, share, seed)
    kept = sorted(set(range(len(keys))) - set(held_out))
    return texts.rows(kept), texts.rows(held_out)


def held_out_rows(
    file: Path,
    keys: Sequence[str] | Sequence[float],
    share: float,
    seed: int,
    instead: str = "name a file with --dev",
) -> list[int]:
    """Choose rows to hold out: about a `share`, but never all, of the rows with each key; return their numbers.

    The choice depends on keys and seed only. A key is a label; a label (not a number) that occurs once stays in
    training. Raises UserError, which names `file` and says what to do `instead`, if no row would be held out.
    """
    num_of = Counter(keys)
    rank = np.random.default_rng(seed).permutation(len(keys))
    rows = [row for row, key in enumerate(keys) if isinstance(key, float) or num_of[key] > 1]
    rows.sort(key=lambda row: (keys[row], rank[row]))
    held_out = [row for place, row in enumerate(rows) if int((place + 1) * share) > int(place * share)]
    if not rows:
        raise UserError(
            f"{file}: the label has another value in each row, so nothing can be held out; name the column of the "
            f"label with --label, pass --kind regression for numbers, or name a file of the same labels with --dev"
        )
    if not held_out:
        raise UserError(
            f"{file}: {len(keys)} examples are too few to hold out {share:.0%} of them for development; {instead}, or "
            f"raise --dev-share"
        )
    return sorted(held_out)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextSpec:
    """Description of a task on texts: names of its files, their columns, its labels and its metric.

    A column is a title in the header, a key of the JSON objects, or an index from 0 in a file without header.
    """

    name: str
    text_a: Column  # "" to find the column in the user's file; the label, too
    text_b: Column | None  # None for a task on single texts
    label: Column
    labels: tuple[str, ...] = ()  # empty for a regression, or to use the sorted labels of the training data
    kind: Literal["classification", "regression"] = "classification"
    span: tuple[float, float] | None = None  # (lowest, highest) label of a regression; None: of the training data
    metric: str = "accuracy"  # the score: a key of `classification_metrics` or `regression_metrics`
    symmetric: bool = False  # whether the two texts may change places: (B, A) has the label of (A, B)
    folder: str = ""  # folder within the GLUE download; empty for a custom task
    dev_files: tuple[tuple[str, str], ...] = (("", "dev"),)  # (prefix of the metrics, file name without suffix)

    @property
    def columns(self) -> tuple[Column, Column | None, Column]:
        """Return the columns of first text, second text and label."""
        return self.text_a, self.text_b, self.label


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


@dataclasses.dataclass(frozen=True)
class LabelTargets:
    """Conversion of a task's labels into training targets, and of a model's outputs back into labels."""

    labels: tuple[str, ...] = ()  # in the order of their numbers; empty for a regression
    span: tuple[float, float] = (0.0, 1.0)  # labels of a regression that become the targets 0 and 1
    has_limits: bool = False  # whether no label of the regression may lie outside of `span`

    @classmethod
    def of(cls, spec: TextSpec, train: Texts) -> LabelTargets:
        """Take the labels, or the lowest and highest label of a regression, from `spec` or else from `train`.

        `train` has the training examples. Raises UserError if they have only one label, or one that cannot be used.
        """
        if spec.kind == "regression":
            return cls((), spec.span or _range_of(label_values(train)), spec.span is not None)
        labels = spec.labels or _labels_of(train)
        if len(labels) == 1:
            raise UserError(
                f"{train.file}: every example has the label `{labels[0]}`; a classification needs two labels or more: "
                f"add examples of another label"
            )
        return cls(labels)

    def shown_metric(self, name: str) -> str:
        """Return the name of a metric for people: of an F1, it says of which label it is, or that it is a mean."""
        if name != "f1" or not self.labels:
            return name
        return f"f1 of {self.labels[1]}" if len(self.labels) == 2 else "mean f1"

    @property
    def num_outputs(self) -> int:
        """Return the number of outputs of a head: one per label, or 1 for a regression."""
        return len(self.labels) or 1

    def targets(self, texts: Texts) -> np.ndarray:
        """Return the targets of a file's examples, [N, 1]: int64 numbers of labels, or fp32 numbers of a regression.

        A number of a regression is scaled so that the lowest label becomes 0 and the highest 1. Both are the task's
        or, if it defines none, those of the training file; targets of other files may then lie outside [0, 1].
        """
        if self.labels:
            return np.array(_label_numbers(texts, self.labels))[:, None]
        value_N = np.array(label_values(texts))  # fp32 cannot tell large labels apart
        low, high = self.span
        return ((value_N - low) / (high - low))[:, None].astype(np.float32)

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
        if self.has_limits:
            value_N = value_N.clip(low, high)
        return [f"{value:.6g}" for value in value_N]


def _labels_of(train: Texts) -> tuple[str, ...]:
    """Return a file's different labels, sorted; refuse an empty label, a tab, and two spellings of one number."""
    _check_no_label_is_empty(train)
    labels = tuple(sorted(set(train.label)))
    label_of: dict[Decimal, str] = {}
    for label in labels:
        place = f"{train.file}:{train.line[train.label.index(label)]}"
        if set(label) & set("\t\r\n"):
            raise UserError(f"{place}: the label has a tab or a line end in it, which tables cannot hold; remove it")
        number = _number_in(label)
        if number is not None and label_of.setdefault(number, label) != label:
            raise UserError(
                f"{place}: the label `{label}` is the same number as the label `{label_of[number]}` of other lines; "
                f"write it in one way, or name the labels by words"
            )
    return labels


def remarks_on_labels(labels: Sequence[str]) -> list[str]:
    """Return a line for each group of labels that look alike or differ only in case, and so may be meant as one."""
    alike: dict[str, list[str]] = defaultdict(list)
    for label in labels:
        alike[" ".join(unicodedata.normalize("NFKC", label).casefold().split())].append(label)
    return [
        f"{' and '.join(f'`{label}`' for label in group)} differ only in case, spaces or encoding, and are learnt as "
        f"{len(group)} labels; write them in one way if they mean the same"
        for group in alike.values()
        if len(group) > 1
    ]


def _number_in(label: str) -> Decimal | None:
    """Return a label as a number; None if it is not a finite number."""
    try:
        number = Decimal(label)
    except InvalidOperation:
        return None
    return number if number.is_finite() and "_" not in label else None  # Python reads 1_1 as 11


def _label_numbers(texts: Texts, labels: tuple[str, ...]) -> list[int]:
    """Return the index in `labels` of each text's label; UserError names all other labels and the first line."""
    _check_no_label_is_empty(texts)
    number_of = {label: number for number, label in enumerate(labels)}
    unknown = [row for row, label in enumerate(texts.label) if label not in number_of]
    if len(unknown) == len(set(texts.label)) == len(texts.label) > _NAMED:
        raise UserError(
            f"{texts.file}: every row has another label, such as `{texts.label[0]}`, and none of them is known; "
            f"correct --label"
        )
    if unknown:
        raise UserError(
            f"{texts.file}:{texts.line[unknown[0]]}: {count_names(texts.label[row] for row in unknown)}: unknown "
            f"labels (and how often each occurs); the labels that are known are {list_names(labels)}: correct them"
        )
    return [number_of[label] for label in texts.label]


def _check_no_label_is_empty(texts: Texts) -> None:
    empty = [line for line, label in zip(texts.line, texts.label, strict=True) if not label]
    if empty:
        more = f" in {len(empty):,} rows ({list_places(empty, 'line')})" if len(empty) > 1 else ""
        raise UserError(
            f"{texts.file}:{empty[0]}: the label is empty{more}; write a label, or remove the line"
            f"{'s (docs/finetune.md)' if more else ''}"
        )


def count_names(names: Iterable[str]) -> str:
    """Return how often each of some labels occurs, the most frequent first: "`b` 4, `c` 2 and 3 more labels"."""
    counts = Counter(names)
    shown = [f"`{name}` {count:,}" for name, count in most_frequent(counts, _NAMED)]
    more = len(counts) - len(shown)
    return ", ".join(shown) + (f" and {more} more label{'s' * (more > 1)}" if more else "")


def list_names(names: Sequence[str]) -> str:
    """Return the first ten of some labels, and how many more there are."""
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def label_values(texts: Texts) -> list[float]:
    """Return the labels of a regression as numbers; raise UserError if one is not a finite number."""
    _check_no_label_is_empty(texts)
    values = [number_in(label) for label in texts.label]
    wrong = [row for row, value in enumerate(values) if not math.isfinite(value)]
    if wrong:
        raise UserError(
            f"{texts.file}:{texts.line[wrong[0]]}: {count_names(texts.label[row] for row in wrong)}: labels that are "
            f"no finite numbers (and how often each occurs); correct the lines, or fine-tune for classification "
            f"(--kind classification)"
        )
    return values


def _range_of(values: list[float]) -> tuple[float, float]:
    """Return the lowest and the highest of `values`.

    If both are equal, the second result is a larger number, because callers divide by the difference.
    """
    low = min(values)
    high = max(values)
    if high == low:
        high = low + max(1.0, abs(low))  # callers divide by the difference; a smaller one may be lost in rounding
    return low, high


def remarks_on_equal_numbers(texts: Texts) -> list[str]:
    """Return a line if all labels of a regression by which predictions are scored are equal; otherwise []."""
    if len(set(label_values(texts))) != 1:
        return []
    return [
        f"{texts.file}: all labels to score by are equal ({count_names(texts.label)}), so there is no correlation "
        f"with them, which counts as 0"
    ]
