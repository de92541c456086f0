"""Compute which steps of a run use the rows or texts that a search has found, and print both, for people or as JSON.

How: the order in which a run uses rows is a function of its config. `data/order.py` also inverts this function.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from electra_dist.config import Config
from electra_dist.console import Console
from electra_dist.corpus.build_console import plural
from electra_dist.corpus.evaluation_texts import EvaluationText, EvaluationTexts
from electra_dist.corpus.find.row_search import FoundRows, Hit, Query
from electra_dist.corpus.origins import RowDocument
from electra_dist.data.corpora import Corpora
from electra_dist.run.folder import METRICS_FILE
from electra_dist.run.metrics import parse_metric
from electra_dist.run.records import read_records
from electra_dist.train.guard import SkipList

_BLOCK_ROWS = 1 << 18  # rows whose uses are computed together
MAX_SHOWN = 50  # rows that the table lists
_MAX_DOCUMENTS = 3  # documents of a row that the table lists
_SHOWN_CHARS = 60  # of a text, in the table
_SHOWN_STEPS = 3  # of a text, in the table

UseState = Literal["read", "to come", "skipped"]


class RowUse(NamedTuple):
    """One use of a row by a run: the step whose batch contains the row."""

    epoch: int  # epoch of the corpus in which the step uses the row, from 0
    step: int  # number of the step, from 0
    is_skipped: bool  # whether the run skips the step, so that the row is not trained on
    is_done: bool  # whether the run has already passed the step

    @property
    def state(self) -> UseState:
        """Return whether the step has read the row, is to come or, done or not, is skipped."""
        if self.is_skipped:
            return "skipped"
        return "read" if self.is_done else "to come"


def count_steps(uses: Iterable[RowUse]) -> dict[str, int]:
    """Return how many steps have read one of some rows (`read`), will read one (`to_come`), or are `skipped`.

    `uses` are those of all rows; a step that uses several of them counts once.
    """
    steps: dict[UseState, set[int]] = {"read": set(), "to come": set(), "skipped": set()}
    for use in uses:
        steps[use.state].add(use.step)
    return {state.replace(" ", "_"): len(numbers) for state, numbers in steps.items()}


def uses_of_found_rows(
    found: FoundRows, num_listed: int, corpora: Corpora, config: Config, run: Path
) -> tuple[list[list[RowUse]], dict[str, int]]:
    """Return the uses of each of the first `num_listed` rows, and counts of the steps that use any found row.

    The uses of a row ascend by step; `count_steps` names the counts. Rows are processed in blocks to save memory.
    """
    listed: list[list[RowUse]] = []

    def all_uses() -> Iterator[RowUse]:
        for start in range(0, len(found.rows), _BLOCK_ROWS):
            block = slice(start, start + _BLOCK_ROWS)
            uses = uses_of_rows(found.shards[block], found.rows[block], corpora, config, run)
            listed.extend(uses[: max(0, num_listed - start)])
            yield from itertools.chain.from_iterable(uses)

    counts = count_steps(all_uses())
    return listed, counts


def uses_of_rows(
    shards: NDArray[np.int64], rows: NDArray[np.int64], corpora: Corpora, config: Config, run: Path
) -> list[list[RowUse]]:
    """Return the uses of each row by the whole run, in ascending order of steps.

    `shards` has the shard number of each row, over all corpora of the run. The run folder `run` tells which step was
    the last one done, and which steps are skipped.
    """
    global_batch = config.train.global_batch
    order = corpora.row_order(config.seed, config.data.shuffle_window_shards, global_batch)
    skipped = SkipList(run, config.train.skip_steps).steps
    newest = next(read_records(run / METRICS_FILE, parse_metric, reverse=True), None)
    steps_done = newest.step if newest else 0
    uses = []
    for positions in order.uses_of_rows(shards, rows, config.train.num_steps * global_batch):
        steps = [(use.epoch, use.position // global_batch) for use in positions]
        uses.append([RowUse(epoch, step, step in skipped, step < steps_done) for epoch, step in steps])
    return uses


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
    uses: list[list[RowUse]] | None = None  # of each listed row by a run; None without a run
    step_counts: dict[str, int] | None = None  # `count_steps` of all found rows; None without a run
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
            uses = [f"{use.step} (epoch {use.epoch}, {use.state})" for use in result.uses[index]]
            cells.append("; ".join(uses) or "none")
        table.add_row(*cells)
    return table


def _documents_text(documents: list[RowDocument]) -> str:
    """Return the first documents of a row in words, such as "texts/wiki: a.jsonl#17", each named once."""
    names = list(dict.fromkeys(f"{document.source}: {document.document}" for document in documents))
    shown = "; ".join(names[:_MAX_DOCUMENTS])
    return shown if len(names) <= _MAX_DOCUMENTS else f"{shown}; and {len(names) - _MAX_DOCUMENTS} more"


class FoundText(NamedTuple):
    """Text of an evaluation file that some rows of a corpus hold, with these rows and the steps that use them."""

    text: EvaluationText
    num_tokens: int
    rows: FoundRows
    uses: list[list[RowUse]] | None  # of each row by a run; None without a run


def found_texts(
    sought: EvaluationTexts,
    forms: Sequence[Sequence[list[int]]],
    found: Sequence[FoundRows],
    corpora: Corpora,
    run: tuple[Config, Path] | None,
) -> list[FoundText]:
    """Return the texts that occur in at least one row, in the order of `sought`.

    `found` has the rows of each text. `forms` has the token ids of each text, in one or two forms. `run`, if there is
    one, is the config and the folder of a run that reads the corpora.
    """
    places = [index for index, one in enumerate(found) if len(one.rows)]
    uses: list[list[RowUse]] = []
    if run is not None and places:
        shards = np.concatenate([found[index].shards for index in places])
        rows = np.concatenate([found[index].rows for index in places])
        uses = uses_of_rows(shards, rows, corpora, *run)
    texts = []
    first = 0
    for index in places:
        last = first + len(found[index].rows)
        uses_of_text = None if run is None else uses[first:last]
        texts.append(FoundText(sought.texts[index], max(map(len, forms[index])), found[index], uses_of_text))
        first = last
    return texts


def tree_of_texts(texts: Sequence[FoundText], sought: EvaluationTexts, corpora: Corpora) -> dict[str, Any]:
    """Return the found texts and their share of all as a JSON object; without a run, `uses` and `steps` are null."""
    trees = []
    for one in texts:
        rows = _rows_as_json(one, corpora)
        trees.append({"place": one.text.place, "text": one.text.text, "tokens": one.num_tokens, "rows": rows})
    return {
        "corpus": corpora.fingerprint,
        "texts_sought": len(sought.texts),
        "texts_too_short": sought.num_short,
        "texts_found": len(texts),
        "steps": None if not texts or texts[0].uses is None else _step_counts(texts),
        "texts": trees,
    }


def _rows_as_json(one: FoundText, corpora: Corpora) -> list[dict[str, Any]]:
    """Return a JSON object for each row with the text; its `uses` are None without a run."""
    assert one.rows.num_tokens is not None  # a search for texts counts them
    trees = []
    lines = zip(one.rows.shards.tolist(), one.rows.rows.tolist(), one.rows.num_tokens.tolist(), strict=True)
    for index, (shard, row, num_tokens) in enumerate(lines):
        uses = None if one.uses is None else [use._asdict() for use in one.uses[index]]
        trees.append({"shard": corpora.shard_name(shard), "row": row, "tokens": num_tokens, "uses": uses})
    return trees


def print_texts(texts: Sequence[FoundText], sought: EvaluationTexts, corpora: Corpora, out: Console) -> None:
    """Print a table of the found texts, their share of all texts and, for a run, how many steps use them."""
    has_run = any(one.uses is not None for one in texts)
    if texts:
        out.print(_table_of_texts(texts[:MAX_SHOWN], has_run))
    if len(texts) > MAX_SHOWN:
        out.print(f"and {len(texts) - MAX_SHOWN:,} more texts; --json lists all")
    short = f"; {sought.num_short:,} texts have fewer words than --min-words" if sought.num_short else ""
    out.print(
        f"{len(texts):,} of {len(sought.texts):,} texts are in the corpus, in {_num_rows(texts):,} of "
        f"{corpora.num_rows:,} rows{short}"
    )
    if has_run:
        out.print(_line_on_steps(texts))


def _num_rows(texts: Sequence[FoundText]) -> int:
    rows: set[tuple[int, int]] = set()  # (shard, row): one row may have several texts
    for one in texts:
        rows.update(zip(one.rows.shards.tolist(), one.rows.rows.tolist(), strict=True))
    return len(rows)


def _line_on_steps(texts: Sequence[FoundText]) -> str:
    counts = _step_counts(texts)
    num_read = sum(_is_read(one) for one in texts)
    return (
        f"the run has read {num_read:,} of these texts, in {counts['read']:,} steps; {counts['to_come']:,} steps "
        f"to come will read one, and {counts['skipped']:,} are skipped"
    )


def _table_of_texts(texts: Sequence[FoundText], has_run: bool) -> Table:
    """Return a table with a line for each text; if there is a run, with the first steps that use the text."""
    table = Table("text", "begins with", "rows", *(["steps that use them"] if has_run else []))
    for one in texts:
        beginning = one.text.text
        if len(beginning) > _SHOWN_CHARS:
            beginning = f"{beginning[:_SHOWN_CHARS]}..."
        cells = [one.text.place, beginning, f"{len(one.rows.rows):,}"]
        if has_run:
            cells.append(_steps_text(one))
        table.add_row(*cells)
    return table


def _is_read(one: FoundText) -> bool:
    """Return whether a step that is done, and was not skipped, has read a row with the text."""
    uses = itertools.chain.from_iterable(one.uses or ())
    return any(use.state == "read" for use in uses)


def _step_counts(texts: Sequence[FoundText]) -> dict[str, int]:
    uses_of_rows_of_texts = itertools.chain.from_iterable(one.uses or () for one in texts)
    return count_steps(itertools.chain.from_iterable(uses_of_rows_of_texts))


def _steps_text(one: FoundText) -> str:
    """List the first steps that use a row of the text, such as "12, 340 (to come), and 5 more"."""
    uses = sorted({use for uses in one.uses or () for use in uses}, key=lambda use: use.step)
    words = []
    for use in uses[:_SHOWN_STEPS]:
        words.append(f"{use.step:,}" if use.state == "read" else f"{use.step:,} ({use.state})")
    if len(uses) > _SHOWN_STEPS:
        words.append(f"and {len(uses) - _SHOWN_STEPS:,} more")
    return ", ".join(words) or "none"
