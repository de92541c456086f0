"""Describe and read the files of tasks on texts, encode their examples as ids, and write predictions for test sets.

Guarantee: a TSV file is split at tabs only, because GLUE contains unbalanced quotes; a byte order mark is dropped.
Callers name a column by its title in the header, or by its index, from 0, if the file has no header (CoLA). Lines with
too few columns (QQP has some) are left out and counted; google-research/electra leaves them out, too. A pair of texts
that is too long loses the last token of its longer text, again and again, until it fits, as in BERT.

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
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from electra_kernels.operation_types import SpecialIds

from electra_dist.errors import UserError
from electra_dist.finetune.input_files import parse_json_line, split_lines
from electra_dist.finetune.task import TextFile, tsv_file
from electra_dist.store.atomic_files import MOST_DATA_BYTES, read_regular, readable
from electra_dist.tokenizer import TextTokenizer

Column = str | int  # name in the header of a file, or index (from 0) in a file without a header


class Texts(NamedTuple):
    """Examples of one file as parallel lists: first texts, second texts (if any), labels and line numbers."""

    a: list[str]
    b: list[str] | None  # None for a task on single texts
    label: list[str]  # as written in the file, without surrounding white space
    line: list[int]  # line of each example in the file, counted from 1
    skipped: int  # number of lines that were left out because they have too few columns
    file: Path
    sha256: str  # of the bytes of the file

    def sample(self, size: int) -> Texts:
        """Return a fixed random sample of at most `size` examples, in the order of the file."""
        num_examples = len(self.a)
        if size >= num_examples:
            return self
        shuffled_rows = np.random.default_rng(seed=0).permutation(num_examples)
        rows = np.sort(shuffled_rows[:size]).tolist()
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


def read_texts(file: Path, text_a: Column, text_b: Column | None, label: Column) -> Texts:
    """Read the texts and labels of a .jsonl file, or of a .tsv file (any other suffix is read as TSV).

    `text_a`, `text_b` and `label` name columns; `text_b` is None for a task on single texts. Blank lines are ignored.
    Raises UserError if there is no example, a column is missing, a TSV line has text beyond the columns of the header,
    or a JSONL line is not an object with text in these columns.
    """
    with readable(file):
        raw = read_regular(file, MOST_DATA_BYTES)
    lines = split_lines(raw, file)
    numbered_lines = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]

    # The cells of a row are those of the requested columns: first text, second text if there is one, label.
    columns = [text_a, label] if text_b is None else [text_a, text_b, label]
    if file.suffix == ".jsonl":
        rows = _jsonl_rows(file, numbered_lines, columns)
    else:
        rows = _tsv_rows(file, numbered_lines, columns)
    complete_rows = [(number, cells) for number, cells in rows if cells is not None]
    if not complete_rows:
        column_names = ", ".join(map(str, columns))
        raise UserError(f"{file}: no examples; add at least one line with all columns ({column_names})")

    return Texts(
        a=[cells[0] for _, cells in complete_rows],
        b=None if text_b is None else [cells[1] for _, cells in complete_rows],
        label=[cells[-1].strip() for _, cells in complete_rows],
        line=[number for number, _ in complete_rows],
        skipped=len(rows) - len(complete_rows),
        file=file,
        sha256=hashlib.sha256(raw).hexdigest(),
    )


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


Row = tuple[int, list[str] | None]  # line number, and the requested columns; None if the line has too few columns


def _tsv_rows(file: Path, lines: Sequence[tuple[int, str]], columns: Sequence[Column]) -> list[Row]:
    """Split the lines of a TSV file at tabs, and select columns by title or, in a file without header, by index."""
    has_header = not isinstance(columns[0], int)
    if has_header:
        header_line = lines[0][1] if lines else ""
        indices = _header_indices(file, header_line, columns)
        example_lines = lines[1:]
        _check_widths(file, len(header_line.split("\t")), example_lines)
    else:
        indices = [int(column) for column in columns]
        example_lines = lines
    rows: list[Row] = []
    for number, line in example_lines:
        cells = line.split("\t")
        if len(cells) > max(indices):
            rows.append((number, [cells[index] for index in indices]))
        else:
            rows.append((number, None))
    return rows


def _check_widths(file: Path, num_columns: int, lines: Sequence[tuple[int, str]]) -> None:
    """Raise UserError for a line with text beyond the header's columns: a tab within a text has shifted its cells."""
    for number, line in lines:
        cells = line.split("\t")
        if any(cell.strip() for cell in cells[num_columns:]):
            raise UserError(
                f"{file}:{number}: {len(cells)} columns where the header has {num_columns}; replace the tabs within "
                f"texts by spaces, or use a .jsonl file"
            )


def _header_indices(file: Path, header_line: str, columns: Sequence[Column]) -> list[int]:
    """Return the index of each of `columns` in a header line, without spaces around titles; the first match counts."""
    header = [name.strip() for name in header_line.split("\t")]
    missing = [column for column in columns if column not in header]
    if missing:
        raise UserError(
            f"{file}: no column `{missing[0]}`; the header has {', '.join(header)}: "
            f"name one of these, or correct the header"
        )
    return [header.index(str(column)) for column in columns]


def _jsonl_rows(file: Path, lines: Sequence[tuple[int, str]], columns: Sequence[Column]) -> list[Row]:
    """Return the values of the keys `columns` of each numbered JSON line; the last one, the label, may be a number."""
    *text_keys, label_key = map(str, columns)
    rows: list[Row] = []
    for number, line in lines:
        json_line = parse_json_line(file, number, line)
        missing = [column for column in columns if column not in json_line.record]
        if missing:
            raise UserError(
                f"{file}:{number}: no key `{missing[0]}`; it has {', '.join(json_line.record)}: "
                f"name one of these, or add the key"
            )
        rows.append((number, [*map(json_line.text, text_keys), json_line.name(label_key)]))
    return rows


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


def read_test_sets(task: str, data: Path, text_a: Column, text_b: Column | None) -> list[UnlabelledSet]:
    """Read those test files of a task that exist; a missing file is no error.

    The folders of GLUE are in `data` or in its folder glue/. The test file of a custom task is test.tsv or, without
    that, test.jsonl, with the columns `text_a` and `text_b`. Raises UserError if a line has too few columns, because a
    submission needs a prediction for every example.
    """
    if task not in GLUE_TEST_SETS:
        for name in ("test.tsv", "test.jsonl"):
            if (data / name).is_file():
                return [_read(data / name, UnlabelledSpec(name, text_a, text_b, None, "test_predictions.tsv"))]
        return []
    test_sets = []
    for spec in GLUE_TEST_SETS[task]:
        files = [folder / spec.path for folder in (data, data / "glue") if (folder / spec.path).is_file()]
        if files:
            test_sets.append(_read(files[0], spec))
    return test_sets


def _read(file: Path, spec: UnlabelledSpec) -> UnlabelledSet:
    # `read_texts` needs a label column, which a test set lacks: the index column, or else the first text, stands in.
    index_column = spec.text_a if spec.index_column is None else spec.index_column
    texts = read_texts(file, spec.text_a, spec.text_b, label=index_column)
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
