"""Print the rows that a search has found, and the steps of a run that use them, for people or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.table import Table

from electra_dist.console import Console
from electra_dist.corpus.build_console import plural
from electra_dist.corpus.find.row_search import Hit, Query
from electra_dist.corpus.find.row_uses import RowUse
from electra_dist.corpus.origins import RowDocument
from electra_dist.data.corpora import Corpora

MAX_SHOWN = 50  # rows that the table lists
_MAX_DOCUMENTS = 3  # documents of a row that the table lists


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
    step_counts: dict[str, int] | None = None  # `StepCounter.counts` of all found rows; None without a run
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
