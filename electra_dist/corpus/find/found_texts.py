"""Print which of many texts, such as those of test sets, are in a corpus, and the steps of a run that use them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from electra_dist.config import Config
from electra_dist.console import Console
from electra_dist.corpus.evaluation_texts import EvaluationText, EvaluationTexts
from electra_dist.corpus.find.row_search import FoundRows
from electra_dist.corpus.find.row_uses import RowUse, StepCounter, uses_of_rows
from electra_dist.corpus.find.search_result import MAX_SHOWN
from electra_dist.data.corpora import Corpora

_SHOWN_CHARS = 60  # of a text, in the table
_SHOWN_STEPS = 3  # of a text, in the table


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
    counter = StepCounter()
    for one in texts:
        for uses in one.uses or ():
            counter.add(uses)
    return counter.counts()


def _steps_text(one: FoundText) -> str:
    """List the first steps that use a row of the text, such as "12, 340 (to come), and 5 more"."""
    uses = sorted({use for uses in one.uses or () for use in uses}, key=lambda use: use.step)
    words = []
    for use in uses[:_SHOWN_STEPS]:
        words.append(f"{use.step:,}" if use.state == "read" else f"{use.step:,} ({use.state})")
    if len(uses) > _SHOWN_STEPS:
        words.append(f"and {len(uses) - _SHOWN_STEPS:,} more")
    return ", ".join(words) or "none"
