"""Audit which corpus rows a run was trained on, from its records; used by the command `electra-dist verify RUN`.

A mark is a receipt (`data/receipt.py`) that a run has recorded in metrics.jsonl or a checkpoint, with its step.

Guarantee: the receipt of each mark is compared with the one that the run's row order gives after that many steps, over
all restarts and without the skipped steps. If the last mark is right, it proves how often each row was used. If a mark
is wrong, the audit reports the first range of steps that deviates. If in this range one row is missing, one is too
many, or one replaces another, it also names these rows.

How: a receipt does not depend on the order of the rows. Receipts of a whole epoch, and of a whole shuffle window, are
therefore sums of the receipts of their shards. Only in a window that is used in part are the rows looked up one by
one, which takes 3 us each. If a run used more than `_ALL_MARKS_ROWS` rows, only evenly spaced marks are checked, and
the first wrong mark is found by bisection.

Limits: it proves which rows were used, not what was computed from them.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from electra_dist.data.corpora import Corpora
from electra_dist.data.order import OrderPhase, RowOrder
from electra_dist.data.receipt import Receipt, row_hash

_LOOKUP_CHUNK = 1 << 16  # positions whose rows are looked up together
_SEARCH_CHUNK = 1 << 22  # rows hashed together in a search
_ALL_MARKS_ROWS = 20_000_000  # up to so many rows every mark is checked
_NUM_MARKS = 200  # marks that are checked in a longer run


@dataclass(frozen=True, order=True, slots=True)
class Mark:
    """Receipt (checksum of the rows used so far) that a run recorded after `step` steps. Marks sort by step."""

    step: int  # optimizer steps done, from the start of the run
    source: str  # where it is recorded, for messages
    receipt: Receipt


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """First range of steps, [first_step, end_step), in which a run did not use the rows that its row order gives."""

    first_step: int
    end_step: int
    source: str  # where the first wrong receipt is recorded
    text: str  # what is wrong with the rows


@dataclass(frozen=True, kw_only=True)
class AuditResult:
    """Result of an audit; the run is good if `deviation` is None."""

    num_marks: int  # marks that were checked
    last: Mark | None  # None if the run has no mark
    deviation: Deviation | None


class PhaseReceipts:
    """Calculator of the receipts (checksums of the used rows) that a run must have for one phase.

    It hashes every row id of the phase's corpus once.
    """

    def __init__(self, phase: OrderPhase) -> None:
        self._phase = phase
        self._order = phase.order
        # Id of the first row of each shard, and the id after the last row.
        self._shard_starts = phase.first_row_id + np.concatenate([[0], np.cumsum(phase.order.rows_per_shard)])
        self._shard_receipts = [
            Receipt.of(np.arange(start, end)) for start, end in itertools.pairwise(self._shard_starts)
        ]
        self._epoch_receipt = sum(self._shard_receipts, Receipt())
        self._newest_query = (0, Receipt())  # position in the phase, receipt of all rows of the phase before it

    def before(self, position: int) -> Receipt:
        """Return the receipt of this phase's rows among the run's first `position` rows, skipped steps included.

        Calls with ascending positions are fast: each continues from the last result. A lower position begins anew.
        """
        if self._phase.end_position is not None:
            position = min(position, self._phase.end_position)
        end_of_query = max(0, position - self._phase.first_position)
        reached, receipt = self._newest_query  # `receipt` is always that of the first `reached` rows
        if end_of_query < reached:
            reached = 0
            receipt = Receipt()

        # Every epoch uses each row of the corpus once, so all epochs have the same receipt.
        rows_per_epoch = self._order.rows_per_epoch
        num_whole_epochs = end_of_query // rows_per_epoch
        if num_whole_epochs > reached // rows_per_epoch:
            reached = num_whole_epochs * rows_per_epoch
            receipt = self._epoch_receipt.times(num_whole_epochs)

        while reached < end_of_query:
            window = self._order.window_at(reached)
            whole_window_is_due = reached == window.first_position and window.end_position <= end_of_query
            if whole_window_is_due:
                # Rows are shuffled within a window only, so a window has exactly the rows of its shards.
                receipt = sum((self._shard_receipts[shard] for shard in window.shards), receipt)
                reached = window.end_position
            else:
                end = min(end_of_query, window.end_position, reached + _LOOKUP_CHUNK)
                _, shards, rows = self._order.locate(np.arange(reached, end))
                receipt += Receipt.of(self._shard_starts[shards] + rows)
                reached = end
        self._newest_query = (reached, receipt)
        return receipt


class Expected:
    """Calculator of the receipt (checksum of the used rows) that a run must have after a number of steps."""

    def __init__(self, order: RowOrder, global_batch: int, skipped: Iterable[int]) -> None:
        self.order = order
        self.global_batch = global_batch
        self.skipped = sorted(skipped)
        self.num_rows = order.num_rows  # of all corpora
        self._phases = [PhaseReceipts(phase) for phase in order.phases]

    def after(self, step: int) -> Receipt:
        """Return the receipt of the rows of all unskipped steps in [0, step). Calls with ascending steps are fast."""
        receipt = sum((phase.before(step * self.global_batch) for phase in self._phases), Receipt())
        for skipped_step in self.skipped:
            if skipped_step < step:
                receipt -= Receipt.of(self.row_ids(skipped_step, skipped_step + 1))
        return receipt

    def row_ids(self, first_step: int, end_step: int) -> NDArray[np.int64]:
        """Return the ids of the rows of steps [first_step, end_step), in the order of use, skipped steps included."""
        positions = np.arange(first_step * self.global_batch, end_step * self.global_batch)
        _, shards, rows = self.order.locate(positions)
        return self.order.row_ids(shards, rows)


def verify(
    marks: Sequence[Mark],
    expected: Expected,
    corpora: Corpora,
    advance: Callable[[int, int], None] = lambda num_checked, num_to_check: None,
) -> AuditResult:
    """Compare recorded receipts, sorted by step, with the expected ones, up to the first wrong one.

    `advance(num_checked, num_to_check)` is called after each right one.
    """
    last_mark = marks[-1] if marks else None
    indexes = _indexes_to_check(marks, expected.global_batch)
    last_good = -1  # index of the newest mark that was found right
    for num_checked, index in enumerate(indexes, start=1):
        if _is_good(marks[index], expected):
            last_good = index
            advance(num_checked, len(indexes))
            continue
        # Between the two checked marks there may be others: the first wrong one gives the smallest range of steps.
        first_bad = _first_bad_index(marks, expected, last_good, index)
        good_mark = marks[first_bad - 1] if first_bad > 0 else Mark(step=0, source="start", receipt=Receipt())
        deviation = _deviation(good_mark, marks[first_bad], expected, corpora)
        return AuditResult(num_marks=num_checked, last=last_mark, deviation=deviation)
    return AuditResult(num_marks=len(indexes), last=last_mark, deviation=None)


def _is_good(mark: Mark, expected: Expected) -> bool:
    return mark.receipt == expected.after(mark.step)


def _indexes_to_check(marks: Sequence[Mark], global_batch: int) -> list[int]:
    """Return the indexes of the marks to check: all, or in a long run about 200, evenly spaced from first to last."""
    if not marks:
        return []
    num_rows = marks[-1].step * global_batch
    if num_rows <= _ALL_MARKS_ROWS or len(marks) <= _NUM_MARKS:
        return list(range(len(marks)))
    evenly_spaced = np.linspace(0, len(marks) - 1, _NUM_MARKS)
    return sorted({round(index) for index in evenly_spaced})


def _first_bad_index(marks: Sequence[Mark], expected: Expected, good: int, bad: int) -> int:
    """Find by bisection the first wrong mark after index `good` (-1: none is good), up to `bad`; return its index."""
    # Receipts after a wrong one are wrong, too, unless a second error cancels the first.
    return bisect.bisect_left(range(bad), True, lo=good + 1, key=lambda index: not _is_good(marks[index], expected))


def _deviation(good: Mark, bad: Mark, expected: Expected, corpora: Corpora) -> Deviation:
    """Describe what is wrong with the rows that were used between a right recorded receipt and the next, wrong one."""
    used_receipt = bad.receipt - good.receipt
    due_receipt = expected.after(bad.step) - expected.after(good.step)
    skipped = set(expected.skipped)
    due_ids = [expected.row_ids(step, step + 1) for step in range(good.step, bad.step) if step not in skipped]
    return Deviation(
        first_step=good.step,
        end_step=bad.step,
        source=bad.source,
        text=_describe_surplus(
            surplus=used_receipt - due_receipt,
            due=np.concatenate([np.empty(0, np.int64), *due_ids]),
            num_rows=expected.num_rows,
            corpora=corpora,
        ),
    )


def _describe_surplus(surplus: Receipt, due: NDArray[np.int64], num_rows: int, corpora: Corpora) -> str:
    """Say how the used rows differ from those that were due, whose ids are `due`.

    `surplus` is the receipt of the used rows minus that of the due rows. It tells which row is missing or was used in
    place of another, if only one was; otherwise the number of rows is given.
    """
    if surplus.rows == -1:
        missing = _find_missing_row(surplus, due)
        if missing is not None:
            return f"{corpora.row_name(missing)} is missing"
    elif surplus.rows == 1:
        extra = _first_row_with_hash(np.array([surplus.digest], np.uint64), num_rows)
        if extra is not None:
            return f"{corpora.row_name(extra)} was taken once too often"
    elif surplus.rows == 0:
        replaced = _find_replaced_row(surplus, due, num_rows)
        if replaced is not None:
            missing, extra = replaced
            return f"{corpora.row_name(missing)} is missing, {corpora.row_name(extra)} was taken once too often"

    # More than one row is wrong: only their number is known.
    if surplus.rows == 0:
        return "the number of rows is right, but some are not the rows that the order gives"
    if surplus.rows > 0:
        return f"{surplus.rows} rows too many"
    return f"{-surplus.rows} rows too few"


def _find_missing_row(surplus: Receipt, due: NDArray[np.int64]) -> int | None:
    """Return the id of the only row of `due` [k] that was not used, or None if no row explains `surplus`.

    The hash of the missing row is minus the digest of `surplus`, modulo 2**64.
    """
    missing_hash = np.uint64((Receipt() - surplus).digest)
    hits = np.flatnonzero(row_hash(due) == missing_hash)
    if hits.size == 0:
        return None
    return int(due[hits[0]])


def _find_replaced_row(surplus: Receipt, due: NDArray[np.int64], num_rows: int) -> tuple[int, int] | None:
    """Return the ids of the row of `due` [k] that is missing and of the row used instead; None if no pair explains it.

    The hashes of the two rows differ by the digest of `surplus`, modulo 2**64.
    """
    extra_hash_if_missing = row_hash(due) + np.uint64(surplus.digest)  # [k]; uint64 wraps at 2**64, as digests do
    extra = _first_row_with_hash(extra_hash_if_missing, num_rows)
    if extra is None:
        return None
    extra_hash = row_hash(np.array([extra]))[0]
    hits = np.flatnonzero(extra_hash_if_missing == extra_hash)
    return int(due[hits[0]]), extra


def _first_row_with_hash(hashes: NDArray[np.uint64], num_rows: int) -> int | None:
    """Return the first row id in [0, num_rows) whose hash is one of `hashes`; None if there is none."""
    for first in range(0, num_rows, _SEARCH_CHUNK):
        rows = np.arange(first, min(num_rows, first + _SEARCH_CHUNK))
        hits = np.flatnonzero(np.isin(row_hash(rows), hashes))
        if hits.size:
            return int(rows[hits[0]])
    return None
