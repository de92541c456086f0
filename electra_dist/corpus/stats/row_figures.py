"""Count tokens, padding, [UNK] and examples in the rows of a corpus, count tokens by source, and take sample rows.

Guarantee: every count is a sum over all rows, so no count depends on the order of the shards. All shards are read
once, and so are their origin files, if any, which name the documents of each row. The memory is that of one shard's
rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import pyarrow
from numpy.typing import NDArray

from electra_dist.corpus.origins import Origins, RowDocument, documents_of_rows
from electra_dist.data.corpora import Corpora
from electra_dist.data.manifest import CorpusManifest, place_of
from electra_dist.data.shard_cache import rows_of_shards
from electra_dist.store.interface import Store
from electra_dist.tokenizer import Vocabulary

NUM_BINS = 16  # bars of a histogram of lengths from 0 to seq_len tokens
_NUM_SAMPLES = 12  # rows whose text is shown
_CONTINUATION = "##"  # begins a word-piece that continues a word


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
