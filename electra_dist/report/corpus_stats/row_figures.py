"""Count what is in the rows of a corpus: tokens, padding, [UNK], examples, tokens by source; and take samples.

Guarantee: all counts are sums over all rows, so they do not depend on the order of the shards.

Cost: one pass over the shards, and one over the side files where the corpus has them. Memory: the rows of one shard.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import pyarrow
from numpy.typing import NDArray

from electra_dist.analysis.corpus_rows import rows_of_shards
from electra_dist.corpus.origins.document_search import RowDocument, documents_of_rows
from electra_dist.corpus.origins.origin_files import Origins
from electra_dist.data.corpus_manifest import CorpusManifest
from electra_dist.store.interface import Store
from electra_dist.tokenizer import Vocabulary

NUM_BINS = 32  # bars of a histogram over the length of a row
_NUM_SAMPLES = 12
_CONTINUATION = "##"  # begins a word-piece that continues a word


@dataclass
class RowSample:
    """A row of the corpus as text."""

    shard: str
    row: int
    texts: list[str]  # of the examples, from left to right
    documents: list[RowDocument]  # of the examples, from left to right; empty without side files


@dataclass
class RowFigures:
    """Counts over all rows of a corpus. The bin of a length is length * NUM_BINS // (seq_len + 1)."""

    tokens: int = 0  # ids that are not [PAD]
    unk_tokens: int = 0
    rows_by_padding: NDArray[np.int64] = field(default_factory=lambda: np.zeros(NUM_BINS, np.int64))
    examples_by_length: NDArray[np.int64] = field(default_factory=lambda: np.zeros(NUM_BINS, np.int64))
    rows_by_examples: Counter[int] = field(default_factory=Counter)  # examples in a row -> rows
    # (source of the file, source in the record or None) -> ids with [CLS] and [SEP]; empty without side files
    tokens_by_source: Counter[tuple[str, str | None]] = field(default_factory=Counter)
    samples: list[RowSample] = field(default_factory=list)


def read_row_figures(
    store: Store,
    manifest: CorpusManifest,
    vocabulary: Vocabulary,
    origins: Origins | None,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> RowFigures:
    """Return the counts over all rows of a corpus, and the text of some rows at even distances.

    Args:
        store: the corpus.
        manifest: its manifest.
        vocabulary: its vocabulary.
        origins: its side files; None if it has none.
        progress: wraps the indices of the shards, for a progress bar.

    Raises:
        StoreError: a shard or side file cannot be read.
        ManifestMismatch: a shard or side file is damaged.
    """
    figures = RowFigures()
    sampled = _sampled_rows(manifest)
    for shard, rows in rows_of_shards(store, manifest, progress(range(len(manifest.shards)))):
        name = manifest.shards[shard].name
        table = None if origins is None else origins.table(name)
        ends = _add_rows(figures, rows, vocabulary)
        if table is not None:
            _add_sources(figures, table, ends)
        for row in sampled.get(shard, []):
            documents = [] if table is None else documents_of_rows(table, np.array([row])).get(row, [])
            figures.samples.append(RowSample(name, row, _texts(rows[row], vocabulary), documents))
    return figures


def _sampled_rows(manifest: CorpusManifest) -> dict[int, list[int]]:
    """Return the rows whose text is shown, at even distances in the corpus: index of the shard -> rows."""
    counts = np.array([shard.rows for shard in manifest.shards])
    num_samples = min(_NUM_SAMPLES, manifest.num_rows)
    row_ids = (np.arange(num_samples) * 2 + 1) * manifest.num_rows // (2 * num_samples)
    ends = np.cumsum(counts)
    sampled: dict[int, list[int]] = {}
    for row_id in row_ids:
        shard = int(np.searchsorted(ends, row_id, side="right"))
        sampled.setdefault(shard, []).append(int(row_id - ends[shard] + counts[shard]))
    return sampled


def _add_rows(figures: RowFigures, rows: NDArray[np.integer], vocabulary: Vocabulary) -> NDArray[np.int64]:
    """Add the rows of a shard to the counts; return the tokens of each row, int64 [rows]."""
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
    """Return how many lengths, in [0, seq_len], are in each of `NUM_BINS` bins of equal width."""
    bins = lengths.astype(np.int64) * NUM_BINS // (seq_len + 1)
    return np.bincount(bins, minlength=NUM_BINS)


def _lengths_of_examples(
    rows: NDArray[np.integer], starts: NDArray[np.integer], num_tokens: NDArray[np.integer]
) -> NDArray[np.int64]:
    """Return the number of tokens of each example, which ends where the next one of its row begins, or with the row.

    Args:
        rows: [examples] row of each example, ascending.
        starts: [examples] position of its first token in the row, ascending within a row.
        num_tokens: [rows] tokens of each row, without [PAD].
    """
    ends = num_tokens[rows].astype(np.int64)
    has_next = rows[:-1] == rows[1:]
    ends[:-1][has_next] = starts[1:][has_next]
    return ends - starts


def _add_sources(figures: RowFigures, table: pyarrow.Table, num_tokens: NDArray[np.int64]) -> None:
    """Add the ids of each example to the counts of its source."""
    rows = table.column("row").to_numpy()
    lengths = _lengths_of_examples(rows, table.column("start").to_numpy(), num_tokens)
    counts = table.select(["source", "record_source"]).append_column("tokens", pyarrow.array(lengths))
    sums = counts.group_by(["source", "record_source"]).aggregate([("tokens", "sum")])
    for line in sums.to_pylist():
        figures.tokens_by_source[line["source"], line["record_source"]] += line["tokens_sum"]


def _texts(row: NDArray[np.integer], vocabulary: Vocabulary) -> list[str]:
    """Return the text of each example of a row; word-pieces are joined, [CLS], [SEP] and [PAD] are left out."""
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
