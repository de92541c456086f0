"""Predict with a tuned model in Hugging Face's format: a class or a number for each text, tags of words, answers.

Guarantee: the predictions equal those that fine-tuning writes for the same examples, and those of the pipelines of
transformers, whose model class computes them. Texts are cut to the `max_length` of the training or, for a model of
another program, to its number of positions, at most 512. The file is read and checked before torch or transformers is
imported.

Predictions are JSON objects, one for each text, sentence or question, or rows of a table, one for each text, word or
question. Where the file has labels that the model knows, they are scored with the metrics of fine-tuning.
"""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from electra_dist.corpus.counts import remarks_on_texts
from electra_dist.errors import UserError
from electra_dist.finetune.labelled_texts import (
    LabelTargets,
    Texts,
    count_names,
    list_names,
    remarks_on_equal_numbers,
    texts_of,
)
from electra_dist.finetune.passage_windows import Question, SquadFile, read_squad
from electra_dist.finetune.squad_task import find_answers, score_answers
from electra_dist.finetune.tagging_task import are_bio_tags, remarks_on_tags, spans_of, tag_metrics, word_outputs
from electra_dist.finetune.text_task import encode_texts, row_outputs, text_metrics
from electra_dist.finetune.word_files import read_words
from electra_dist.scoring.tuned_model import TunedModel
from electra_dist.store.atomic_files import MOST_DATA_BYTES, did_you_mean, read_regular, readable
from electra_dist.tables import (
    TABLE_SUFFIXES,
    JsonLine,
    Table,
    find_text_column,
    is_number,
    read_table,
    refuse_spreadsheet,
    split_lines,
)

if TYPE_CHECKING:
    from electra_dist.finetune.training_loop import Progress
    from electra_dist.pretrained.encoder import Pretrained

Row = dict[str, Any]


class Predictions(NamedTuple):
    """Predictions for the texts, sentences or questions of a file, as records and as a table, with their metrics."""

    objects: list[Row]  # one for each text, sentence or question
    rows: list[Row]  # one for each text, word or question, of plain values
    metrics: dict[str, float]  # empty without labels
    notes: Sequence[str] = ()  # remarks about the file for the user, one line each

    def text(self, suffix: str) -> str:
        """Return the content of a file of predictions: a table for .csv and .tsv, otherwise JSON lines."""
        if suffix not in (".csv", ".tsv"):
            return "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in self.objects)
        out = io.StringIO()
        columns = list(dict.fromkeys(column for row in self.rows for column in row))
        writer = csv.DictWriter(out, columns, delimiter="," if suffix == ".csv" else "\t", lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        return out.getvalue()


Predict = Callable[["Progress"], Predictions]


def open_predictions(
    model: TunedModel,
    file: Path,
    text_a: str | None = None,
    text_b: str | None = None,
    label: str | None = None,
    delimiter: str | None = None,
) -> Predict:
    """Read a file of texts, words or questions, as the model's task needs, and return the function that predicts.

    `text_a`, `text_b` and `label` name columns of a table. If one is None, the column that the training data had is
    used if the file has it; otherwise the column of the text is searched for. With the label "", none is read.
    """
    suffix = file.suffix.lower()
    is_table = suffix in TABLE_SUFFIXES or file.is_dir() or delimiter is not None
    if model.kind == "QuestionAnswering":
        questions = _read_questions(file, delimiter) if is_table else read_squad(file, 2, True, is_marked=True)
        return _noted(questions.remarks(file), lambda progress: _predict_answers(model, questions, progress))
    if model.kind == "TokenClassification" and (not is_table or (suffix == ".tsv" and text_a is None)):
        return _open_words(model, file)
    table = _with_all_keys(read_table(file, delimiter)) if is_table else _read_lines(file)
    columns = _columns_of(model, table, _Columns(text_a, text_b, label))
    texts = _read_texts(table, columns)
    nothing = "what is predicted for them means nothing"
    notes = [*texts.remarks(), *texts.remarks_on_empty(range(len(texts.a)), "index", nothing)]
    if model.kind == "TokenClassification":
        words = [tuple(text.split()) for text in texts.a]
        return _noted(notes, lambda progress: _predict_tags(model, words, None, progress))
    trained_column = model.columns.get("text_a")
    if is_table and text_a is None and trained_column not in (None, columns.text_a):
        notes.append(
            f"{file}: there is no column `{trained_column}`, so the text is the column `{columns.text_a}`; name "
            f"another one with --text-a, or the file .txt if it has no header and one text on each line"
        )
    targets = LabelTargets() if len(model.labels) == 1 else LabelTargets(model.labels)
    labelled, remarks = _labelled_rows(file, texts, columns.label, targets.labels)
    target_N1 = None
    if labelled:
        scored = texts.rows(labelled)
        try:
            target_N1 = targets.targets(scored)
        except UserError as error:
            raise UserError(f"{error}, or pass --label '' to predict without scores") from None
        if not targets.labels:
            notes += remarks_on_equal_numbers(scored)
    return _noted(
        [*notes, *remarks],
        lambda progress: _beside_own_columns(
            table, _predict_texts(model, texts, targets, labelled, target_N1, progress)
        ),
    )


def _noted(notes: Sequence[str], predict: Predict) -> Predict:
    """Return a function that predicts as `predict` does, with `notes` before the remarks of the predictions."""

    def predict_with_notes(progress: Progress) -> Predictions:
        predictions = predict(progress)
        return predictions._replace(notes=[*notes, *predictions.notes])

    return predict_with_notes


def _labelled_rows(
    file: Path, texts: Texts, column: str | None, known: Sequence[str]
) -> tuple[list[int], Sequence[str]]:
    """Return the rows whose labels, in `column`, are scored, and remarks on them for the user.

    `known` are the model's labels, () for a regression. If no label is one of them, or no number, none is scored.
    """
    labelled = [row for row, name in enumerate(texts.label) if column and name]
    fitting = set(texts.label) & set(known) if known else {name for name in texts.label if is_number(name)}
    if labelled and not fitting:
        found = count_names(texts.label[row] for row in labelled)
        needed = f"one of the model's ({list_names(known)})" if known else "a number, as the model predicts"
        return [], [f"{file}: no label in `{column}` ({found}) is {needed}, so none is scored"]
    if 0 < len(labelled) < len(texts.a):
        return labelled, [f"{file}: {len(labelled)} of {len(texts.a)} rows have a label, and are scored"]
    return labelled, []


def _open_words(model: TunedModel, file: Path) -> Predict:
    """Read a file of words, with or without tags, and return the function that predicts."""
    with readable(file):
        words, tags = read_words(file)
    notes = remarks_on_texts(str(file), map(" ".join, words))
    all_tags = list(itertools.chain.from_iterable(tags or ()))
    if all_tags and not set(all_tags) & set(model.labels):
        found, known = count_names(all_tags), list_names(model.labels)
        notes.append(f"{file}: no tag ({found}) is one of the model's ({known}), so none is scored")
        tags = None
    else:
        notes += remarks_on_tags(file, tags or (), model.labels)
    return _noted(notes, lambda progress: _predict_tags(model, words, tags, progress))


class _Columns(NamedTuple):
    """Names of a table's columns; None for a column that is not named or that there is not."""

    text_a: str | None
    text_b: str | None  # of the second text of a pair
    label: str | None


def _columns_of(model: TunedModel, table: Table, named: _Columns) -> _Columns:
    """Return the columns of a table that are read: those that the user has named, or else defaults.

    The defaults are the columns of the training data that the table has. Without one, the column of the text is
    searched for, and the others stay None. Raises UserError if the model needs pairs of texts and there are none.
    """
    known = {name: column for name, column in model.columns.items() if column in table.columns}
    text_a = named.text_a or known.get("text_a")
    text_b = named.text_b or known.get("text_b")
    label = known.get("label") if named.label is None else named.label
    trained_column = model.columns.get("text_b")
    if trained_column is not None and not text_b:
        raise UserError(
            f"{table.file}: the model was tuned on pairs of texts, and the file has no column `{trained_column}`; "
            f"name the column of the second text with --text-b"
        )
    if not text_a:
        other_columns = [column for column in (text_b, label) if column]
        text_a = str(find_text_column(table, other_columns))
    return _Columns(text_a, text_b, label)


def _read_texts(table: Table, columns: _Columns) -> Texts:
    """Read the texts of a table and, if a column of labels is named, their labels.

    Raises UserError if a line has too few columns.
    """
    assert columns.text_a is not None
    if columns.label:
        table = _with_empty_labels(table, columns.label)
    texts = texts_of(table, columns.text_a, columns.text_b, columns.label or columns.text_a)
    if texts.skipped:
        raise UserError(
            f"{table.file}: {texts.skipped} lines have too few columns, but all are predicted; complete them"
        )
    return texts


def _with_all_keys(table: Table) -> Table:
    """Return a table whose columns are the keys of all objects, if these are JSON: some may lack that of the label."""
    if table.file.suffix.lower() != ".jsonl":
        return table
    keys = dict.fromkeys(str(key) for _, line in table.lines() for key in line.record)
    return table._replace(columns=list(keys))


def _with_empty_labels(table: Table, label: str) -> Table:
    """Return a table in which a label that is missing (no key, null, or NaN as pandas writes it) is an empty text."""
    may_lack_key = label in table.columns and not table.may_be_short

    def lines() -> Iterator[tuple[int, JsonLine]]:
        for number, line in table.lines():
            value = line.record.get(label, None if may_lack_key else "")
            is_missing = value is None or value != value  # only NaN is not equal to itself
            yield number, line._replace(record={**line.record, label: ""}) if is_missing else line

    return table._replace(lines=lines)


def _read_lines(file: Path) -> Table:
    """Return a file with one text on each line as a table with the column `text`; a blank line is an empty text."""
    refuse_spreadsheet(file)
    with readable(file, f"check the path{did_you_mean(file)}"):
        raw = read_regular(file, MOST_DATA_BYTES)
    texts = split_lines(raw, file)
    if not texts[-1]:
        texts.pop()  # after the end of the last line

    def lines() -> Iterator[tuple[int, JsonLine]]:
        for number, text in enumerate(texts, start=1):
            yield number, JsonLine(f"{file}:{number}", {"text": text})

    return Table(file, ["text"], lines, hashlib.sha256(raw).hexdigest())


def _read_questions(file: Path, delimiter: str | None) -> SquadFile:
    """Return the questions of a table with the columns question and context and, if there is one, id."""
    table = read_table(file, delimiter)
    missing = [column for column in ("question", "context") if column not in table.columns]
    if missing:
        raise UserError(f"{file}: no column `{missing[0]}`; it has {', '.join(table.columns)}: rename one, or add it")
    questions = SquadFile([], [], {})
    for number, line in table.lines():
        question_id = line.name("id") if "id" in line.record else str(number)
        questions.passages.append(line.text("context"))
        questions.questions.append(
            Question(question_id, line.text("question"), len(questions.questions), answers=(), start=-1)
        )
    return questions


def _probabilities(output_NL: np.ndarray) -> np.ndarray:
    power_NL = np.exp(output_NL - output_NL.max(-1, keepdims=True))
    result: np.ndarray = power_NL / power_NL.sum(-1, keepdims=True)
    return result


def _predict_texts(
    model: TunedModel,
    texts: Texts,
    targets: LabelTargets,
    labelled: Sequence[int],
    target_N1: np.ndarray | None,
    progress: Progress,
) -> Predictions:
    """Predict a class or a number for each text, and score the rows `labelled`, whose true values are `target_N1`."""
    encoder, task_model, settings = model.load()
    ids = encode_texts(texts.a, texts.b, encoder.tokenizer, encoder.special, settings.max_length)
    output_NL = row_outputs(task_model, ids, targets.num_outputs, settings.batch, progress)
    limits = model.data.get("limits")
    if limits and not targets.labels:
        output_NL = output_NL.clip(*limits)
    if not targets.labels and model.config.get("problem_type") != "regression":
        output_NL = 1 / (1 + np.exp(-output_NL))  # as in the pipeline, for cross-encoders
    objects: list[Row] = []
    rows: list[Row] = []
    true = {row: texts.label[row] for row in labelled}
    probability_NL = _probabilities(output_NL).tolist()
    for index, prediction in enumerate(targets.predicted_labels(output_NL)):
        # A number has all of its digits, unlike in the tables of fine-tuning.
        one: Row = {"index": index, "prediction": prediction if targets.labels else float(output_NL[index, 0])}
        if index in true:
            one["label"] = true[index]
        probabilities = dict(zip(targets.labels, probability_NL[index], strict=False))
        objects.append({**one, "probabilities": probabilities} if targets.labels else one)
        rows.append({**one, **{f"p({name})": value for name, value in probabilities.items()}})
    metrics = {} if target_N1 is None else text_metrics(targets, output_NL[labelled], target_N1)
    num_cut = _num_cut(texts, ids, encoder, settings.max_length)
    notes = [f"{num_cut:,} of {len(ids):,} texts were cut to {settings.max_length} tokens"] if num_cut else []
    if num_cut:
        notes.append("transformers' pipeline cuts long texts only if it is called with truncation=True")
    return Predictions(objects, rows, metrics, notes)


def _beside_own_columns(table: Table, predictions: Predictions) -> Predictions:
    """Put the columns of a file of texts, its labels among them, before the predictions in the table of these.

    A column `index` of the file replaces the number of the row, and predictions replace those of an earlier command.
    """
    rows = []
    for (_, line), row in zip(table.lines(), predictions.rows, strict=True):
        predicted = {name: value for name, value in row.items() if name not in ("index", "label")}
        rows.append({"index": row["index"], **line.record, **predicted})
    return predictions._replace(rows=rows)


def _num_cut(texts: Texts, ids: Sequence[Sequence[int]], encoder: Pretrained, max_length: int) -> int:
    """Return how many texts were cut to `max_length` tokens in `ids`, their rows of token ids.

    Only texts whose rows are nearly full are tokenized again.
    """
    full = [index for index, row in enumerate(ids) if len(row) >= max_length - 1]
    second = None if texts.b is None else [texts.b[index] for index in full]
    whole = encode_texts([texts.a[index] for index in full], second, encoder.tokenizer, encoder.special, sys.maxsize)
    return sum(len(row) > len(ids[index]) for index, row in zip(full, whole, strict=True))


def _predict_tags(
    model: TunedModel,
    sentences: Sequence[Sequence[str]],
    true: Sequence[Sequence[str]] | None,
    progress: Progress,
) -> Predictions:
    """Predict a tag for each word of the sentences; score them if their `true` tags are given.

    There is a record for each sentence and a row of the table for each word.
    """
    encoder, task_model, settings = model.load()
    has_spans = are_bio_tags(model.labels)
    objects: list[Row] = []
    rows: list[Row] = []
    outputs = word_outputs(task_model, sentences, encoder, settings, progress)
    for index, (words, output) in enumerate(zip(sentences, outputs, strict=True)):
        probability_WN = _probabilities(output.numpy())
        tags = [model.labels[number] for number in probability_WN.argmax(-1)]
        best = probability_WN.max(-1).tolist()
        one: Row = {"index": index, "words": list(words), "prediction": tags, "probabilities": best}
        if has_spans:
            one["spans"] = [
                {"type": kind, "text": " ".join(words[first : last + 1]), "first": first, "last": last}
                for kind, first, last in spans_of(tags)
            ]
        if true is not None:
            one["label"] = list(true[index])
        objects.append(one)
        for place, word in enumerate(words):
            row: Row = {"sentence": index, "word": word, "prediction": tags[place], "probability": best[place]}
            rows.append(row if true is None else {**row, "label": true[index][place]})
    predicted = [one["prediction"] for one in objects]
    if true is None:
        return Predictions(objects, rows, {})
    true_have_spans = are_bio_tags([*model.labels, *itertools.chain.from_iterable(true)])
    metrics = tag_metrics(true, predicted, has_spans and true_have_spans)
    return Predictions(objects, rows, metrics)


def _predict_answers(model: TunedModel, file: SquadFile, progress: Progress) -> Predictions:
    """Predict an answer for each question, with its place in the passage; score them if the file has answers."""
    encoder, task_model, settings = model.load()
    answers = find_answers(task_model, file, encoder, settings, progress)
    rows: list[Row] = []
    for number, question in enumerate(file.questions):
        text = answers.text(number, question)
        row: Row = {"id": question.id, "prediction": text, "start": None, "end": None}
        if number in answers.best:
            _, first, _ = answers.best[number]
            row["start"], _ = answers.passages[question.passage].offsets[first]
            row["end"] = row["start"] + len(text)
        rows.append({**row, "no_answer": answers.no_answer.get(number, 0.0)})
    has_answers = any(question.answers for question in file.questions)
    version = int(model.data.get("version") or 2)
    metrics = score_answers(version, file, answers).metrics if has_answers else {}
    return Predictions(rows, rows, metrics)
