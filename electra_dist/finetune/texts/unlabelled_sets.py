"""Read test sets without labels, and write predictions for them as the GLUE benchmark wants them.

Guarantee: a submission has one line for each example of the test file, in its order, with the columns `index` and
`prediction`; names of files and forms of labels are those that gluebenchmark.com asks for. Labels of the tasks on
inference are words, those of STS-B numbers from 0 to 5, and all others 0 or 1.

Source: https://gluebenchmark.com/faq, question 3, and its sample_submission.zip.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from electra_dist.errors import UserError
from electra_dist.finetune.output.text_files import TextFile, tsv_file
from electra_dist.finetune.texts.labelled_texts import Column, Texts, read_texts

SUBMISSION_DIR = "submission"  # folder of the files for the benchmark, within the folder of a model


class UnlabelledSpec(NamedTuple):
    """Where a test set is, which columns it has, and the name of the file with the predictions for it."""

    path: str  # relative to the folder of the GLUE download, or to that of a custom task
    text_a: Column
    text_b: Column | None
    index_column: Column | None  # column of the example's number; None to number the examples from 0
    output: str  # relative to the folder of a model


class UnlabelledSet(NamedTuple):
    """Texts of a test set, the numbers of its examples, and the name of the file for the predictions."""

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
