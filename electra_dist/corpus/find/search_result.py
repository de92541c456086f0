"""Tell which steps of a run use the rows that a search has found, and print rows and steps as text or as JSON.

How: the order in which a run uses rows is a function of its config. `data/order.py` also inverts this function.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from electra_dist.config import Config
from electra_dist.console import Console
from electra_dist.corpus.build_console import plural
from electra_dist.corpus.find.row_search import FoundRows, Hit, Query
from electra_dist.corpus.origins import RowDocument
from electra_dist.data.corpora import Corpora
from electra_dist.run.folder import METRICS_FILE
from electra_dist.run.metrics import parse_metric
from electra_dist.run.records import read_records
from electra_dist.train.guard import SkipList

MAX_SHOWN = 50  # rows that the table lists
_MAX_DOCUMENTS = 3  # documents of a row that the table lists
_BLOCK_ROWS = 1 << 18  # rows whose steps are computed together


class RowUse(NamedTuple):
    """One use of a row by a run: the step whose batch contains the row."""

    epoch: int  # epoch of the corpus in which the step uses the row, from 0
    step: int  # number of the step, from 0
    is_skipped: bool  # whether the run skips the step, so that the row is not trained on
    is_done: bool  # whether the run has already passed the step


class StepsOfRows:
    """Counter of the steps of a run that use found rows; a step that uses several found rows counts once."""

    def __init__(self) -> None:
        self._read: set[int] = set()
        self._to_come: set[int] = set()
        self._skipped: set[int] = set()

    def add(self, uses: Sequence[RowUse]) -> None:
        """Take the uses of one found row; a step that was counted for an earlier row is not counted again."""
        for use in uses:
            if use.is_skipped:
                self._skipped.add(use.step)
            elif use.is_done:
                self._read.add(use.step)
            else:
                self._to_come.add(use.step)

    def counts(self) -> dict[str, int]:
        """Return how many steps have read one of the rows (`read`), will read one (`to_come`), or are `skipped`."""
        return {"read": len(self._read), "to_come": len(self._to_come), "skipped": len(self._skipped)}


def uses_of_found_rows(
    found: FoundRows, num_listed: int, corpora: Corpora, config: Config, run: Path
) -> tuple[list[list[RowUse]], dict[str, int]]:
    """Return the steps that use each of the first `num_listed` rows, and counts of the steps that use any found row.

    The steps of a row ascend; `StepsOfRows.counts` names the counts. Rows are processed in blocks to save memory.
    """
    listed: list[list[RowUse]] = []
    steps = StepsOfRows()
    for start in range(0, len(found.rows), _BLOCK_ROWS):
        block = slice(start, start + _BLOCK_ROWS)
        uses = steps_of_rows(found.shards[block], found.rows[block], corpora, config, run)
        for uses_of_row in uses:
            steps.add(uses_of_row)
        listed += uses[: max(0, num_listed - start)]
    return listed, steps.counts()


def steps_of_rows(
    shards: NDArray[np.int64], rows: NDArray[np.int64], corpora: Corpora, config: Config, run: Path
) -> list[list[RowUse]]:
    """Return the steps of the whole run that use each row, in ascending order.

    `shards` has the shard number of each row, over all corpora of the run. The run folder `run` tells which step was
    the last one done, and which steps are skipped.
    """
    global_batch = config.train.global_batch
    order = corpora.row_order(config.seed, config.data.shuffle_window_shards, global_batch)
    skipped = SkipList(run, config.train.skip_steps).steps
    newest = next(read_records(run / METRICS_FILE, parse_metric, reverse=True), None)
    steps_done = newest.step if newest else 0
    uses_of_run = []
    for positions in order.uses_of_rows(shards, rows, config.train.num_steps * global_batch):
        steps = [(use.epoch, use.position // global_batch) for use in positions]
        uses_of_run.append([RowUse(epoch, step, step in skipped, step < steps_done) for epoch, step in steps])
    return uses_of_run


class SearchResult(NamedTuple):
    """Result of a search: counts over all found rows, and the first found rows one by one."""

    corpora: Corpora
    query: Query  # the text, source or document that was searched for
    num_rows: int  # number of found rows
    num_shards: int  # number of shards with a found row
    hits: list[Hit]  # the found rows that are listed: all of them, or the first ones
    num_tokens: int | None = None  # tokens of the text; None for a source or a document
    heldout_rows: int = 0  # rows of the held-out corpus with the source or document
    sources: Sequence[str] = ()  # names of all sources of the corpus; set only if no row of the given source was found
    uses: list[list[RowUse]] | None = None  # steps of a run that use each listed row; None without a run
    step_counts: dict[str, int] | None = None  # `StepsOfRows.counts` of all rows; None without a run
    num_steps: int = 0  # steps of the whole run

    @property
    def sought(self) -> str:
        """Return the query in words, such as "the source wiki"."""
        if self.query.source is not None:
            return f"the source {self.query.source}"
        if self.query.document is not None:
            return f"the document {self.query.document}"
        return f"the text ({self.num_tokens} tokens)"


def json_tree(result: SearchResult) -> dict[str, Any]:
    """Return the result as a JSON object; if no run was given, `steps` and the `uses` of each row are null."""
    rows = []
    for index, hit in enumerate(result.hits):
        rows.append(
            {
                "shard": result.corpora.shard_name(hit.shard),
                "row": hit.row,
                "tokens": hit.num_tokens,
                "documents": None if hit.documents is None else [document._asdict() for document in hit.documents],
                "uses": None if result.uses is None else [use._asdict() for use in result.uses[index]],
            }
        )
    return {
        "corpus": result.corpora.fingerprint,
        "tokens": result.num_tokens,
        "heldout_rows": result.heldout_rows,
        "steps": result.step_counts,
        "rows": rows,
    }


def print_result(result: SearchResult, out: Console) -> None:
    """Print the found rows for people and, if a run was given, the steps that use these rows."""
    all_rows = result.corpora.num_rows
    if not result.num_rows:
        out.print(f"no row of {all_rows:,} contains {result.sought}")
        if result.sources:
            out.print(f"the sources are {', '.join(result.sources)}")
    else:
        out.print(_hit_table(result))
        if result.num_rows > len(result.hits):
            out.print(f"and {result.num_rows - len(result.hits):,} more rows; --json lists all")
        shards = plural(result.num_shards, "shard")
        out.print(f"{result.num_rows:,} of {all_rows:,} rows, in {shards}, contain {result.sought}")
    if result.num_rows and result.step_counts is not None:
        counts = result.step_counts
        out.print(
            f"of the {result.num_steps:,} steps of the run, {counts['read']:,} have read one of them, "
            f"{counts['to_come']:,} will, and {counts['skipped']:,} are skipped"
        )
    if result.heldout_rows:
        rows = plural(result.heldout_rows, "row")
        out.print(f"{rows} of the held-out corpus contain {result.sought}; no step trains on them")


def _hit_table(result: SearchResult) -> Table:
    """Return a table with one line for each listed row; at least one row must be listed."""
    table = Table("shard", "row")
    if result.num_tokens is not None:
        table.add_column("tokens of the text")
    has_documents = result.hits[0].documents is not None
    if has_documents:
        table.add_column("documents", overflow="fold")
    if result.uses is not None:
        table.add_column("steps that use the row")
    for index, hit in enumerate(result.hits):
        cells = [result.corpora.shard_name(hit.shard), str(hit.row)]
        if result.num_tokens is not None:
            cells.append(f"{hit.num_tokens} of {result.num_tokens}")
        if has_documents:
            cells.append(_documents_text(hit.documents or []))
        if result.uses is not None:
            cells.append("; ".join(_use_text(use) for use in result.uses[index]) or "none")
        table.add_row(*cells)
    return table


def _documents_text(documents: list[RowDocument]) -> str:
    """Return the first documents of a row in words, such as "texts/wiki: a.jsonl#17", each named once."""
    names = list(dict.fromkeys(f"{document.source}: {document.document}" for document in documents))
    shown = "; ".join(names[:_MAX_DOCUMENTS])
    return shown if len(names) <= _MAX_DOCUMENTS else f"{shown}; and {len(names) - _MAX_DOCUMENTS} more"


def _use_text(use: RowUse) -> str:
    """Return a use of a row in words: step, epoch and state, such as "12 (epoch 0, read)"."""
    state = "read" if use.is_done else "to come"
    if use.is_skipped:
        state = "skipped"
    return f"{use.step} (epoch {use.epoch}, {state})"
