"""Show the rows of a corpus that a search has found, and the steps of a run that use them: as text or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from electra_dist.corpus.origins.document_search import RowDocument
from electra_dist.corpus.report.report_tables import plural
from electra_dist.data.corpus_manifest import CorpusManifest

_MAX_SHOWN = 50  # rows that the table lists
_MAX_DOCUMENTS = 3  # documents of a row that the table lists


class Hit(NamedTuple):
    """A row that contains what was searched for."""

    shard: int  # index of its shard in the manifest
    row: int  # number within the shard
    num_tokens: int | None  # consecutive tokens of the text in the row, at most; None without a text
    documents: list[RowDocument] | None  # those searched for, or with a text all of the row; None without side files


class RowUse(NamedTuple):
    """A use of a row by a run."""

    epoch: int
    step: int  # number of the step, from 0
    is_skipped: bool  # the step is one of those that make no update
    is_done: bool  # the run has passed the step


class SearchResult(NamedTuple):
    """Rows that were found, with what is known about the search."""

    manifest: CorpusManifest
    hits: list[Hit]
    sought: str  # what was searched for, for people
    num_tokens: int | None = None  # of the text; None for a source or a document
    heldout_rows: int = 0  # rows of the held-out corpus with the source or document
    sources: Sequence[str] = ()  # all sources of the corpus, if no row of the given one was found
    uses: list[list[RowUse]] | None = None  # for each row the steps of a run that use it; None without a run
    num_steps: int = 0  # steps of the whole run


def step_counts(result: SearchResult) -> dict[str, int]:
    """Return how many steps have read a row that was found (read), will (to_come), or are skipped (skipped)."""
    all_uses = [use for uses in result.uses or [] for use in uses]
    skipped = {use.step for use in all_uses if use.is_skipped}
    read = {use.step for use in all_uses if use.is_done} - skipped
    to_come = {use.step for use in all_uses} - read - skipped
    return {"read": len(read), "to_come": len(to_come), "skipped": len(skipped)}


def json_tree(result: SearchResult) -> dict[str, Any]:
    """Return the result as a JSON object; `uses` of a row and `steps` are null without a run."""
    rows = []
    for place, hit in enumerate(result.hits):
        rows.append(
            {
                "shard": result.manifest.shards[hit.shard].name,
                "row": hit.row,
                "tokens": hit.num_tokens,
                "documents": None if hit.documents is None else [document._asdict() for document in hit.documents],
                "uses": None if result.uses is None else [use._asdict() for use in result.uses[place]],
            }
        )
    return {
        "corpus": result.manifest.fingerprint,
        "tokens": result.num_tokens,
        "heldout_rows": result.heldout_rows,
        "steps": None if result.uses is None else step_counts(result),
        "rows": rows,
    }


def print_result(result: SearchResult, out: Console) -> None:
    """Print the rows, and the steps that use them if there is a run."""
    num_rows = result.manifest.num_rows
    if not result.hits:
        out.print(f"no row of {num_rows:,} contains {result.sought}")
        if result.sources:
            out.print(f"the sources are {', '.join(result.sources)}")
    else:
        out.print(_hit_table(result))
        if len(result.hits) > _MAX_SHOWN:
            out.print(f"and {len(result.hits) - _MAX_SHOWN:,} more rows; --json lists all")
        shards = plural(len({hit.shard for hit in result.hits}), "shard")
        out.print(f"{len(result.hits):,} of {num_rows:,} rows, in {shards}, contain {result.sought}")
    if result.hits and result.uses is not None:
        counts = step_counts(result)
        out.print(
            f"of the {result.num_steps:,} steps of the run, {counts['read']:,} have read one of them, "
            f"{counts['to_come']:,} will, and {counts['skipped']:,} are skipped"
        )
    if result.heldout_rows:
        rows = plural(result.heldout_rows, "row")
        out.print(f"{rows} of the held-out corpus contain {result.sought}; no step trains on them")


def _hit_table(result: SearchResult) -> Table:
    """Return the table of the first rows that were found."""
    table = Table("shard", "row")
    if result.num_tokens is not None:
        table.add_column("tokens of the text")
    has_documents = result.hits[0].documents is not None
    if has_documents:
        table.add_column("documents", overflow="fold")
    if result.uses is not None:
        table.add_column("steps that use the row")
    for place, hit in enumerate(result.hits[:_MAX_SHOWN]):
        cells = [result.manifest.shards[hit.shard].name, str(hit.row)]
        if result.num_tokens is not None:
            cells.append(f"{hit.num_tokens} of {result.num_tokens}")
        if has_documents:
            cells.append(_documents_text(hit.documents or []))
        if result.uses is not None:
            cells.append("; ".join(_use_text(use) for use in result.uses[place]) or "none")
        table.add_row(*cells)
    return table


def _documents_text(documents: list[RowDocument]) -> str:
    """Return the documents of a row for people, such as "texts/wiki: a.jsonl#17", each once."""
    names = list(dict.fromkeys(f"{document.source}: {document.document}" for document in documents))
    shown = "; ".join(names[:_MAX_DOCUMENTS])
    return shown if len(names) <= _MAX_DOCUMENTS else f"{shown}; and {len(names) - _MAX_DOCUMENTS} more"


def _use_text(use: RowUse) -> str:
    """Return a use of a row for people, such as "12 (epoch 0, read)"."""
    state = "read" if use.is_done else "to come"
    if use.is_skipped:
        state = "skipped"
    return f"{use.step} (epoch {use.epoch}, {state})"
