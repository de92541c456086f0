"""Describe and read the files of tasks on texts, find their columns, and write predictions for test sets.

Guarantee: callers name a column by its title in the header, or by its index, from 0, if the file has no header (CoLA).
Lines of a .tsv file with too few columns (QQP has some) are left out and counted; google-research/electra leaves them
out, too. Examples that are held out for development are a function of the labels, the share and a seed.

`GLUE` has the nine tasks of the benchmark, with the columns, labels, metrics and folders of the standard download, as
google-research/electra reads them.
The metric that counts as a task's score is that of the ELECTRA paper's tables of development results: Matthews
correlation for CoLA, Spearman for STS, accuracy for all others. MNLI is scored on the matched set; metrics of the
mismatched set have the prefix `mismatched_`. WNLI, which the reference leaves out, is read like the others.

A submission has one line for each example of the test file, in its order, with the columns `index` and `prediction`;
names of files and forms of labels are those that gluebenchmark.com asks for. Labels of the tasks on inference are
words, those of STS-B numbers from 0 to 5, and all others 0 or 1.

Source: https://gluebenchmark.com/faq, question 3, and its sample_submission.zip.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from electra_dist.corpus.text_shape import remarks_on_texts
from electra_dist.errors import UserError
from electra_dist.finetune.task import TextFile, tsv_file
from electra_dist.tables import SAVED_STATE, TABLE_SUFFIXES, Column, Table, check_name_once, read_table

_NAMES_OF_SPLIT = {"train": ("train",), "dev": ("dev", "valid", "validation"), "test": ("test",)}
_ROWS_OF_SAMPLE = 1000  # lines by which the columns are found
_TEXT_TITLES = [
    "text",
    "sentence",
    "content",
    "review",
    "comment",
    "tweet",
    "document",
    "body",
    "message",
    "utterance",
]
_LABEL_TITLES = ["label", "labels", "class", "category", "target", "intent", "sentiment"]


class Texts(NamedTuple):
    """Examples of one file as parallel lists: first texts, second texts (if any), labels and line numbers."""

    a: list[str]
    b: list[str] | None  # None for a task on single texts
    label: list[str]  # as written in the file, without surrounding white space
    line: list[int]  # line of each example in the file, counted from 1
    skipped: int  # number of lines that were left out because they have too few columns
    file: Path
    sha256: str  # of the bytes of the file

    def remarks(self) -> list[str]:
        """Return a line on the first texts and one on the second texts, if they look like no text."""
        if self.b is None:
            return remarks_on_texts(str(self.file), self.a)
        return [
            *remarks_on_texts(f"{self.file}, first texts,", self.a),
            *remarks_on_texts(f"{self.file}, second texts,", self.b),
        ]

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


def find_columns(
    table: Table, text_a: Column, text_b: Column | None, label: Column, is_regression: bool
) -> tuple[Column, Column]:
    """Return the columns of text and label; a given name is kept, and for "" the only candidate is found.

    Columns with a usual title are candidates. If there are none, any column of repeating values may be the label (of a
    regression: any column of numbers), and any column of mostly several words the text. Raises UserError if there is
    not exactly one candidate.
    """
    taken = (text_a, text_b, label)
    if len(table.columns) == 1:
        raise UserError(
            f"{table.file}: only one column, `{table.columns[0][:40]}`, where texts and labels are needed; if another "
            "character separates the columns, pass it as --delimiter"
        )
    if label == "":
        free = [column for column in table.columns if column not in taken]
        label = _find_label_column(table, free, is_regression)
    return text_a or find_text_column(table, [*taken, label]), label


def _find_label_column(table: Table, free: Sequence[str], is_regression: bool) -> str:
    """Return the column of the label among the columns `free`, by its title or else by its values."""
    found = [column for column in free if column.lower() in _LABEL_TITLES]
    if not found:
        fits = _are_numbers if is_regression else _repeat
        others = [column for column in free if column.lower() not in _TEXT_TITLES]
        found = [column for column in others if fits(_sample(table, column))]
        if len(found) == 1 and found[0] in _sample(table, found[0]):
            raise UserError(
                f"{table.file}: the first line seems to hold an example, `{found[0]}` being a label further down; "
                "put a line before it with the names of the columns, such as text and label"
            )
    return _only_candidate(table, found, "label", "--label")


def find_text_column(table: Table, taken: Collection[Column | None]) -> str:
    """Return the only column of texts that is not in `taken`; raise UserError if there is not exactly one."""
    free = [column for column in table.columns if column not in taken]
    found = [column for column in free if column.lower() in _TEXT_TITLES]
    found = found or [column for column in free if _have_words(_sample(table, column))]
    found = found or (free if len(free) == 1 else [])
    return _only_candidate(table, found, "text", "--text-a (and --text-b for pairs)")


def _sample(table: Table, column: str) -> list[str]:
    lines = itertools.islice(table.lines(), _ROWS_OF_SAMPLE)
    return [str(line.record[column]) for _, line in lines if column in line.record]


def _only_candidate(table: Table, found: Sequence[str], what: str, option: str) -> str:
    if not table.columns:
        raise UserError(f"{table.file}: is empty; its first line must name the columns")
    if len(set(found)) == 1:
        return found[0]
    which = f"{' and '.join(found)} may each be the {what}" if found else f"no column is clearly the {what}"
    raise UserError(f"{table.file}: {which}; name one of {', '.join(table.columns)} with {option}")


def _repeat(values: list[str]) -> bool:
    return 0 < len(set(values)) <= len(values) / 2


def number_in(text: str) -> float:
    """Return a text as a number; NaN if it is none. Python alone would read 2019_12 as 201912."""
    try:
        return math.nan if "_" in text else float(text)
    except ValueError:
        return math.nan


def _are_numbers(values: list[str]) -> bool:
    return all(math.isfinite(number_in(value)) for value in values)


def _have_words(values: list[str]) -> bool:
    return sum(" " in value.strip() for value in values) > len(values) / 2


def split_off(texts: Texts, share: float, seed: int, is_regression: bool) -> tuple[Texts, Texts]:
    """Return (training, development) examples; `held_out_rows` chooses the development examples."""
    keys: list[str] | list[float] = [float(label) for label in texts.label] if is_regression else texts.label
    held_out = held_out_rows(texts.file, keys, share, seed)
    kept = sorted(set(range(len(keys))) - set(held_out))
    return texts.rows(kept), texts.rows(held_out)


def held_out_rows(file: Path, keys: Sequence[str] | Sequence[float], share: float, seed: int) -> list[int]:
    """Choose rows to hold out: about a `share`, at most a half, of the rows with each key; return their numbers.

    The choice depends on keys and seed only. A key is a label; a label (not a number) that occurs once stays in
    training. Raises UserError, which names `file`, if no row would be held out.
    """
    num_of = Counter(keys)
    rank = np.random.default_rng(seed).permutation(len(keys))
    rows = [row for row, key in enumerate(keys) if isinstance(key, float) or num_of[key] > 1]
    rows.sort(key=lambda row: (keys[row], rank[row]))
    held_out = [row for place, row in enumerate(rows) if int((place + 1) * share) > int(place * share)]
    if not rows:
        raise UserError(
            f"{file}: no label has more than one example, so nothing can be held out; name a file with --dev, the "
            f"column of the label with --label or, for numbers, --kind regression"
        )
    if not held_out:
        raise UserError(
            f"{file}: {len(keys)} examples are too few to hold out {share:.0%} of them for development; name a file "
            f"with --dev, or raise --dev-share"
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
    """Read the texts of a test set without labels, and the index under which each prediction is written."""
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
