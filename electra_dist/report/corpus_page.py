"""Write one page about a corpus: its sources, lengths, padding, what was left out, and samples of its text.

Guarantee: the page needs no other file and no network, and it is written atomically. A source is named by the last
folders of its path, as few as make the names differ; a document is named as the build recorded it. The page names no
user or host. Every count is a sum over all rows, so none depends on the order of the shards. All shards are read once,
and so are their origin files, if any. The memory is that of one shard's rows.

Limits: without build.json (the corpus was indexed), the page has no figures of sources and documents. Without origin
files, which record the documents of each row, it does not name the samples' documents.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from numpy.typing import NDArray

from electra_dist.corpus.build_console import plural
from electra_dist.corpus.build_report import BuildReport, PreparedText, read_report
from electra_dist.corpus.counts import SKIP_REASONS
from electra_dist.corpus.inputs.text_decoding import SKIPPED_KINDS
from electra_dist.corpus.origins import Origins, RowDocument, documents_of_rows, open_origins
from electra_dist.data.corpora import Corpora
from electra_dist.data.manifest import CorpusManifest, place_of, read_corpus_vocabulary, read_manifest
from electra_dist.data.shard_cache import rows_of_shards
from electra_dist.report.pages import Tile, percent, render, write_page
from electra_dist.report.report_page import shortest_endings
from electra_dist.run.number_formats import format_count
from electra_dist.store.interface import Store
from electra_dist.tokenizer import Vocabulary

NUM_BINS = 16  # bars of a histogram of lengths from 0 to seq_len tokens
_NUM_SAMPLES = 12  # rows whose text is shown
_CONTINUATION = "##"  # begins a word-piece that continues a word
_NOT_STATED = "not stated"
_SAMPLE_CHARACTERS = 700  # characters of a sample example that are shown
# Lengths of bars are logarithmic if the median bar would be shorter than this share of the longest one.
_HIDDEN_SHARE = 0.03


@dataclass
class RowSample:
    """One row of a corpus for people to read: the text of each training example in it, and their documents."""

    shard: str  # name of the row's shard
    row: int  # number of the row in the shard, from 0
    texts: list[str]  # text of each example, from left to right
    documents: list[RowDocument]  # document of each example, from left to right; empty without origin files


@dataclass
class RowFigures:
    """Counts over all rows of a corpus, and some sample rows.

    The histograms have `NUM_BINS` bins each; a length in tokens falls into bin length * NUM_BINS // (seq_len + 1).
    """

    tokens: int = 0  # tokens that are not [PAD]
    unk_tokens: int = 0  # tokens that are [UNK]
    # [NUM_BINS] each: number of rows by their padding in tokens, and number of examples by their length in tokens
    rows_by_padding: NDArray[np.int64] = field(default_factory=lambda: np.zeros(NUM_BINS, np.int64))
    examples_by_length: NDArray[np.int64] = field(default_factory=lambda: np.zeros(NUM_BINS, np.int64))
    rows_by_examples: Counter[int] = field(default_factory=Counter)  # number of examples in a row -> number of rows
    # (source of the file, source in the record or None) -> tokens with [CLS] and [SEP]; empty without origin files
    tokens_by_source: Counter[tuple[str, str | None]] = field(default_factory=Counter)
    samples: list[RowSample] = field(default_factory=list)


def read_row_figures(
    store: Store,
    manifest: CorpusManifest,
    vocabulary: Vocabulary,
    origins: Origins | None,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> RowFigures:
    """Return the counts over all rows of a corpus, with the text of `_NUM_SAMPLES` evenly spaced rows.

    `origins` reads each shard's origin file, which names the documents of its rows; None if there are none. `progress`
    wraps the indices of the shards, for a progress bar. Raises ManifestMismatch for a damaged shard or origin file.
    """
    figures = RowFigures()
    sampled = _sampled_rows(manifest)
    for shard, rows in rows_of_shards(Corpora.of(store, manifest), progress(range(len(manifest.shards)))):
        name = manifest.shards[shard].name
        table = None if origins is None else origins.table(name)
        tokens_of_rows = _add_rows(figures, rows, vocabulary)
        if table is not None:
            _add_sources(figures, table, tokens_of_rows)
        for row in sampled.get(shard, []):
            documents = [] if table is None else documents_of_rows(table, np.array([row])).get(row, [])
            figures.samples.append(RowSample(name, row, _texts(rows[row], vocabulary), documents))
    return figures


def _sampled_rows(manifest: CorpusManifest) -> dict[int, list[int]]:
    """Return the evenly spaced rows whose text is shown: index of a shard -> row numbers within the shard."""
    counts = [shard.rows for shard in manifest.shards]
    num_samples = min(_NUM_SAMPLES, manifest.num_rows)
    row_ids = (np.arange(num_samples) * 2 + 1) * manifest.num_rows // (2 * num_samples)
    sampled: dict[int, list[int]] = {}
    for row_id in row_ids.tolist():
        shard, row = place_of(row_id, counts)
        sampled.setdefault(shard, []).append(row)
    return sampled


def _add_rows(figures: RowFigures, rows: NDArray[np.integer], vocabulary: Vocabulary) -> NDArray[np.int64]:
    """Add a shard's rows, [rows, seq_len], to the counts; return each row's number of tokens without [PAD], [rows]."""
    special = vocabulary.special
    seq_len = rows.shape[1]
    num_tokens = np.count_nonzero(rows != special["[PAD]"], axis=1)
    figures.tokens += int(num_tokens.sum())
    figures.unk_tokens += int(np.count_nonzero(rows == special["[UNK]"]))
    figures.rows_by_padding += _binned(seq_len - num_tokens, seq_len)
    row_of_example, start_of_example = np.nonzero(rows == special["[CLS]"])
    lengths = _lengths_of_examples(row_of_example, start_of_example, num_tokens)
    figures.examples_by_length += _binned(lengths, seq_len)
    examples_of_row = np.bincount(row_of_example, minlength=len(rows))
    for num_examples, num_rows in zip(*np.unique(examples_of_row, return_counts=True), strict=True):
        figures.rows_by_examples[int(num_examples)] += int(num_rows)
    return num_tokens


def _binned(lengths: NDArray[np.integer], seq_len: int) -> NDArray[np.int64]:
    """Return how many of the lengths, each in [0, seq_len], fall into each of `NUM_BINS` equally wide bins."""
    bins = lengths.astype(np.int64) * NUM_BINS // (seq_len + 1)
    return np.bincount(bins, minlength=NUM_BINS)


def _lengths_of_examples(
    rows: NDArray[np.integer], starts: NDArray[np.integer], num_tokens: NDArray[np.integer]
) -> NDArray[np.int64]:
    """Return the length in tokens of each training example, [examples]; rows hold one example or several.

    An example begins in row `rows[i]` (ascending) at position `starts[i]`; `num_tokens` is that of each row, [rows].
    """
    ends = num_tokens[rows].astype(np.int64)
    has_next_in_row = rows[:-1] == rows[1:]
    ends[:-1][has_next_in_row] = starts[1:][has_next_in_row]
    return ends - starts


def _add_sources(figures: RowFigures, table: pyarrow.Table, num_tokens: NDArray[np.int64]) -> None:
    """Count the tokens of each training example for its source.

    `table` has a line for each example of a shard, with its source. `num_tokens` has the tokens of each row, [rows].
    """
    rows = table.column("row").to_numpy()
    lengths = _lengths_of_examples(rows, table.column("start").to_numpy(), num_tokens)
    counts = table.select(["source", "record_source"]).append_column("tokens", pyarrow.array(lengths))
    # Without threads of Arrow's: one that still held the array when the interpreter ends would abort the process.
    sums = counts.group_by(["source", "record_source"], use_threads=False).aggregate([("tokens", "sum")])
    for line in sums.to_pylist():
        figures.tokens_by_source[line["source"], line["record_source"]] += line["tokens_sum"]


def _texts(row: NDArray[np.integer], vocabulary: Vocabulary) -> list[str]:
    """Return the text of each example in a row, [seq_len]: joined word-pieces without [CLS], [SEP] and [PAD]."""
    special = vocabulary.special
    texts: list[str] = []
    for token_id in row.tolist():
        token = vocabulary.shown_tokens[token_id]
        if token_id == special["[CLS]"]:
            texts.append("")
        elif token_id in (special["[SEP]"], special["[PAD]"]):
            continue
        elif token.startswith(_CONTINUATION):
            texts[-1] += token.removeprefix(_CONTINUATION)
        else:
            texts[-1] += f" {token}" if texts[-1] else token
    return texts


@dataclass(frozen=True)
class BarChart:
    """Diagram of the page: numbers, each with a label and a bar whose length is a percentage of the width."""

    title: str
    bars: list[tuple[str, str, float]]  # label, number, length in percent
    is_logarithmic: bool


def write_stats_page(
    store: Store, name: str, path: Path, progress: Callable[[Iterable[int]], Iterable[int]] = iter
) -> Path:
    """Write the HTML page about a corpus to `path`, create missing folders, and return `path`.

    `progress` wraps the indices of the shards, so that it can show a progress bar. Raises UserError if a file of
    the corpus is missing or damaged, or the page cannot be written.
    """
    manifest = read_manifest(store)
    vocabulary = read_corpus_vocabulary(store, manifest.tokenizer)
    report = read_report(store)
    figures = read_row_figures(store, manifest, vocabulary, open_origins(store, manifest), progress)
    text = stats_page(name, manifest, report, figures)
    write_page(path, text)
    return path


def stats_page(name: str, manifest: CorpusManifest, report: BuildReport | None, figures: RowFigures) -> str:
    """Return the HTML text of the page about a corpus. `report` is its build.json, or None if there is none."""
    short_names = _short_names(report)
    return render(
        "corpus.html",
        name=name,
        fingerprint=manifest.fingerprint,
        tiles=_tiles(manifest, report, figures),
        build=None if report is None else _build_tables(report, short_names),
        record_sources=_record_sources(figures, report, short_names),
        charts=_charts(manifest, report, figures),
        samples=[_sample(sample, short_names) for sample in figures.samples],
    )


def _build_tables(report: BuildReport, short_names: Mapping[str, str]) -> dict[str, list[Any]]:
    return {
        "preparations": [_preparation(text) for text in report.prepared.values()],
        "inputs_skipped": _inputs_skipped(report),
        "documents_skipped": _documents_skipped(report),
        "files_with_losses": _files_with_losses(report),
        "sources": _sources(report, short_names),
    }


def _tiles(manifest: CorpusManifest, report: BuildReport | None, figures: RowFigures) -> list[Tile]:
    """Return the key figures at the top of the page, such as tokens and padding, each as (title, figure, remark)."""
    num_positions = manifest.num_rows * manifest.seq_len
    num_examples = sum(number * rows for number, rows in figures.rows_by_examples.items())
    tiles = [
        ("Tokens", format_count(figures.tokens), "with [CLS] and [SEP], without [PAD]"),
        (
            "Rows",
            f"{manifest.num_rows:,}",
            f"of {manifest.seq_len} tokens, in {plural(len(manifest.shards), 'shard')}",
        ),
        ("Padding", f"{100 * (1 - figures.tokens / num_positions):.2f} %", "share of all positions in rows"),
        ("[UNK]", f"{100 * figures.unk_tokens / max(figures.tokens, 1):.3f} %", f"{figures.unk_tokens:,} tokens"),
        ("Examples", f"{num_examples:,}", f"{num_examples / manifest.num_rows:.2f} in a row"),
    ]
    if report is not None:
        num_left_out = sum(skipped.documents for skipped in report.documents_skipped.values())
        remark = f"{report.documents_heldout:,} held out, {num_left_out:,} left out"
        tiles.insert(1, ("Documents", f"{report.documents_used:,}", remark))
    return tiles


def _short_names(report: BuildReport | None) -> dict[str, str]:
    """Return source -> its name on the page: the last folders of its path, as few as make all names differ."""
    if report is None or not report.sources:
        return {}
    endings = shortest_endings([source.split("/") for source in report.sources])
    return dict(zip(report.sources, endings, strict=True))


def _sources(report: BuildReport, short_names: Mapping[str, str]) -> list[list[str]]:
    """Return the rows of the table of sources, with licence, documents, tokens and share of [UNK] of each."""
    return [
        [
            short_names[source],
            counts.licence or _NOT_STATED,
            f"{counts.files:,}",
            f"{counts.documents:,}",
            f"{counts.documents_skipped:,}",
            f"{counts.tokens:,}",
            percent(counts.tokens / max(report.text.tokens, 1)),
            f"{counts.tokens_per_document:,.0f}",
            f"{100 * counts.unk_rate:.3f} %",
        ]
        for source, counts in report.sources.items()
    ]


def _record_sources(
    figures: RowFigures, report: BuildReport | None, short_names: Mapping[str, str]
) -> list[list[str]]:
    """Return the tokens of each source that documents name in their records (`metadata.source`); [] if none does.

    A licence is shown only for text that `corpus prepare` made.
    """
    prepared = {} if report is None else report.prepared
    rows = []
    by_name = sorted(figures.tokens_by_source.items(), key=lambda item: (item[0][0], item[0][1] or ""))
    for (source, record_source), tokens in by_name:
        if record_source is None:
            continue
        counts = prepared[source].sources.get(record_source) if source in prepared else None
        licence = _NOT_STATED if counts is None else counts.license
        share = percent(tokens / max(figures.tokens, 1))
        rows.append([record_source, licence, short_names.get(source, source), f"{tokens:,}", share])
    return rows


def _charts(manifest: CorpusManifest, report: BuildReport | None, figures: RowFigures) -> list[BarChart]:
    """Return the histograms: lengths of documents (if there is a report), padding, examples and their lengths."""
    # Bin b holds the lengths from ceil(b * (seq_len + 1) / NUM_BINS) to before that of the next bin.
    firsts = [-(-number * (manifest.seq_len + 1) // NUM_BINS) for number in range(NUM_BINS + 1)]
    bins = [_range(first, after) for first, after in pairwise(firsts)]
    examples = range(1, max(figures.rows_by_examples) + 1)
    charts = [
        bar_chart("Rows by padding in tokens", bins, figures.rows_by_padding.tolist()),
        bar_chart("Examples by length in tokens", bins, figures.examples_by_length.tolist()),
        bar_chart(
            "Rows by number of examples",
            [str(number) for number in examples],
            [figures.rows_by_examples[number] for number in examples],
        ),
    ]
    if report is not None and report.document_lengths:
        lengths = report.document_lengths
        labels = [_range(int(first), 2 * int(first)) for first in lengths]
        charts.insert(0, bar_chart("Documents by length in tokens", labels, list(lengths.values())))
    return charts


def _range(first: int, after: int) -> str:
    return f"{first:,}" if after <= first + 1 else f"{first:,} to {after - 1:,}"


def bar_chart(title: str, labels: Sequence[str], numbers: Sequence[int]) -> BarChart:
    """Return a chart without the bars of 0 at both ends, so without any bar if all numbers are 0.

    The lengths of the bars are logarithmic if one bar would otherwise hide the others.
    """
    filled = [place for place, number in enumerate(numbers) if number]
    if not filled:
        return BarChart(title, [], False)
    shown = slice(filled[0], filled[-1] + 1)
    most = max(numbers)
    is_logarithmic = statistics.median(numbers[place] for place in filled) < _HIDDEN_SHARE * most
    bars = []
    for label, number in zip(labels[shown], numbers[shown], strict=True):
        share = math.log1p(number) / math.log1p(most) if is_logarithmic else number / most
        bars.append((label, f"{number:,}", round(100 * share, 1)))
    return BarChart(title, bars, is_logarithmic)


def _inputs_skipped(report: BuildReport) -> list[list[str]]:
    return [
        [SKIP_REASONS[reason], ending, f"{number:,}"]
        for reason, numbers in report.inputs_skipped.items()
        for ending, number in numbers.items()
    ]


def _documents_skipped(report: BuildReport) -> list[list[str]]:
    return [
        [SKIPPED_KINDS[kind], f"{skipped.documents:,}", f"{skipped.bytes:,}", f"{skipped.files:,}"]
        for kind, skipped in report.documents_skipped.items()
        if skipped.documents
    ]


def _files_with_losses(report: BuildReport) -> list[list[str]]:
    """Return the files with most documents left out: (reason, file with as few folders as needed, number)."""
    found = [
        (kind, file, number)
        for kind, skipped in report.documents_skipped.items()
        for file, number in skipped.worst_files.items()
    ]
    if not found:
        return []
    files = sorted({file for _, file, _ in found})
    names = dict(zip(files, shortest_endings([file.split("/") for file in files]), strict=True))
    return [[SKIPPED_KINDS[kind], names[file], f"{number:,}"] for kind, file, number in found]


def _preparation(text: PreparedText) -> tuple[list[list[str]], list[list[str]], list[str]]:
    """Return the rows of two tables on a preparation (documents by source, drops by reason), and its source names."""
    names = list(text.sources)
    kept = [
        [
            name,
            counts.license,
            f"{counts.documents_in:,}",
            f"{counts.documents_dropped:,}",
            f"{counts.documents_out:,}",
        ]
        for name, counts in text.sources.items()
    ]
    dropped = []
    for step, reasons in text.dropped.items():
        for reason, by_source in sorted(reasons.items(), key=lambda item: -_total(item[1])):
            numbers = [f"{by_source.get(name, 0):,}" for name in names]
            dropped.append([step, reason, f"{_total(by_source):,}", *numbers])
    return kept, dropped, names


def _total(numbers: Mapping[str, int]) -> int:
    return sum(numbers.values())


def _sample(sample: RowSample, short_names: Mapping[str, str]) -> dict[str, Any]:
    """Return a sample row for the page: for each example, the name of its document ("" if not known) and its text."""
    examples = []
    for number, text in enumerate(sample.texts):
        origin = ""
        if number < len(sample.documents):
            document = sample.documents[number]
            origin = f"{short_names.get(document.source, document.source)}: {document.document}"
        shown = text if len(text) <= _SAMPLE_CHARACTERS else text[:_SAMPLE_CHARACTERS] + " ..."
        examples.append((origin, shown))
    return {"shard": sample.shard, "row": sample.row, "examples": examples}
