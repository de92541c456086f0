"""Audit which corpus rows a run was trained on, from its records; used by the command `electra-dist verify RUN`.

A receipt is the number of rows that a run has used so far, and the sum of the hashes of their ids. The run records its
receipt in metrics.jsonl and in every checkpoint. A mark is one recorded receipt together with its step.

Guarantee: the receipt of each mark is compared with the one that the run's row order gives after that many steps, over
all restarts and without the skipped steps. If the last mark is right, it proves how often each row was used. If a mark
is wrong, the audit reports the first range of steps that deviates. If in this range one row is missing, one is too
many, or one replaces another, it also names these rows.

How: `prescribed_receipts.py` computes the receipts that the run should have. If a run used more than
`_ALL_MARKS_ROWS` rows, only evenly spaced marks are checked, and the first wrong mark is found by bisection.

Cost: 3 us for each row that is looked up: seconds for a run of millions of rows, some minutes for ELECTRA-Large's 819
million.

Limits: it proves which rows were used, not what was computed from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from electra_dist.analysis.prescribed_receipts import PhaseReceipts
from electra_dist.data.corpus_manifest import CorpusManifest
from electra_dist.data.row_order import RowSequence
from electra_dist.data.row_receipt import Receipt, row_hash

_SEARCH_CHUNK = 1 << 22  # rows hashed together in a search
_ALL_MARKS_ROWS = 20_000_000  # up to so many rows every mark is checked
_NUM_MARKS = 200  # marks that are checked in a longer run


@dataclass(frozen=True, order=True, slots=True)
class Mark:
    """Receipt that a run recorded after `step` optimizer steps, and the place where it is recorded.

    A receipt is the number of rows that the run has used since its first step, and the sum of the hashes of their ids.
    Marks sort by step.
    """

    step: int  # optimizer steps done, from the start of the run
    source: str  # where it is recorded, for messages
    receipt: Receipt


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """First range of optimizer steps in which a run did not use the rows that its row order gives.

    The steps are first_step to end_step - 1. The receipt (number and digest of the rows used so far) that the run
    recorded at `first_step` is right, and the next one, recorded at `end_step`, is wrong.
    """

    first_step: int
    end_step: int
    source: str  # where the first wrong receipt is recorded
    text: str  # what is wrong with the rows


@dataclass(frozen=True, kw_only=True)
class AuditResult:
    """Result of an audit of the rows that a run used: how many receipts were checked, and the first deviation.

    A receipt is a recorded number and digest of the rows used so far. The run is good if `deviation` is None.
    """

    num_marks: int  # marks that were checked
    last: Mark | None  # None if the run has no mark
    deviation: Deviation | None


class Expected:
    """Calculator of the receipt that a run must have after a number of steps, from the run's row order.

    A receipt is the number of the rows used so far and the sum of the hashes of their ids. It is the sum of the
    receipts of the run's phases (`prescribed_receipts.py`); a run that reads a single corpus has one phase.
    """

    def __init__(self, order: RowSequence, global_batch: int, skipped: Iterable[int]) -> None:
        """Compute the receipt (number and digest of row ids) of each whole shard and of a whole epoch.

        `after` builds its results from them. Cost: every row id of the corpora is hashed once.

        Args:
            order: the order in which the run uses the rows of its corpora.
            global_batch: rows of an optimizer step, over all ranks.
            skipped: steps that the run skipped, which made no update; their rows do not count.
        """
        self.order = order
        self.global_batch = global_batch
        self.skipped = sorted(skipped)
        self.num_rows = sum(phase.order.rows_per_epoch for phase in order.phases)  # rows of all corpora
        self._phases = [PhaseReceipts(phase) for phase in order.phases]

    def after(self, step: int) -> Receipt:
        """Return the receipt (number and digest) of the rows of steps 0 to `step` - 1, without those of skipped steps.

        Cost: call it with ascending steps, because then only the rows since the previous call are added.
        """
        receipt = sum((phase.before(step * self.global_batch) for phase in self._phases), Receipt())
        for skipped_step in self.skipped:
            if skipped_step < step:
                receipt -= Receipt.of(self.row_ids(skipped_step, skipped_step + 1))
        return receipt

    def row_ids(self, first_step: int, end_step: int) -> NDArray[np.int64]:
        """Return the ids of the rows of steps [first_step, end_step), in the order of use, skipped steps included."""
        return self._row_ids_at(first_step * self.global_batch, end_step * self.global_batch)

    def _row_ids_at(self, first: int, end: int) -> NDArray[np.int64]:
        """Return the ids of the rows at positions [first, end) of the run's row order, int64 [end - first].

        Positions count the rows that the run uses, from 0 at its first step, over all epochs.
        """
        _, shards, rows = self.order.locate(np.arange(first, end))
        return self.order.row_ids(shards, rows)


def _no_progress(num_checked: int, num_to_check: int) -> None:
    """Do nothing; the default of the argument `advance` of `verify`, for callers that show no progress."""


def verify(
    marks: Sequence[Mark],
    expected: Expected,
    corpus: CorpusManifest,
    advance: Callable[[int, int], None] = _no_progress,
) -> AuditResult:
    """Check the receipts that a run recorded, in the order of their steps, up to the first wrong one.

    A receipt is the number of rows used so far and a digest of their ids. If the run used more than 20 million rows,
    200 evenly spaced receipts are checked instead of all. If one of these is wrong, the first wrong receipt since the
    last right one is found by bisection.

    Args:
        marks: the recorded receipts with their steps, sorted by step; may be empty.
        expected: calculator of the receipts that the run must have.
        corpus: manifest of the corpus; it gives the names of wrong rows for the description.
        advance: called with (receipts checked, receipts to check) after every right receipt.

    Returns:
        The result; its `deviation` describes the first range of steps whose rows are wrong, or is None.
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
        deviation = _deviation(good_mark, marks[first_bad], expected, corpus)
        return AuditResult(num_marks=num_checked, last=last_mark, deviation=deviation)
    return AuditResult(num_marks=len(indexes), last=last_mark, deviation=None)


def _is_good(mark: Mark, expected: Expected) -> bool:
    """Return whether a recorded receipt (number and digest of the rows used) is the one that the row order gives.

    Args:
        mark: the recorded receipt, with the number of steps after which it was recorded.
        expected: calculator of the receipt that the run must have after that many steps.
    """
    return mark.receipt == expected.after(mark.step)


def _indexes_to_check(marks: Sequence[Mark], global_batch: int) -> list[int]:
    """Return the indexes of the recorded receipts to check: all, or 200 evenly spaced ones of a long run.

    A mark is a receipt that the run recorded (number of rows used so far, and a digest of their ids), with its step. A
    run is long if it used more than 20 million rows. The first and the last mark are always checked.

    Args:
        marks: the recorded receipts, sorted by step.
        global_batch: rows of a step, from which the number of rows used is computed.
    """
    if not marks:
        return []
    num_rows = marks[-1].step * global_batch
    if num_rows <= _ALL_MARKS_ROWS or len(marks) <= _NUM_MARKS:
        return list(range(len(marks)))
    evenly_spaced = np.linspace(0, len(marks) - 1, _NUM_MARKS)
    return sorted({round(index) for index in evenly_spaced})


def _first_bad_index(marks: Sequence[Mark], expected: Expected, good: int, bad: int) -> int:
    """Find a wrong receipt whose predecessor is right, by bisection between a right and a wrong one; return its index.

    A receipt is the number and digest of all rows used up to its step. Once one is wrong, the later ones are wrong,
    too, unless a second error cancels the first; without that coincidence the result is the first wrong receipt.

    Args:
        marks: the recorded receipts with their steps, sorted by step.
        expected: calculator of the receipts that the run must have.
        good: index of a receipt that is right, or -1 for the start of the run.
        bad: index of a later receipt that is wrong.
    """
    while bad - good > 1:
        middle = (good + bad) // 2
        if _is_good(marks[middle], expected):
            good = middle
        else:
            bad = middle
    return bad


def _deviation(good: Mark, bad: Mark, expected: Expected, corpus: CorpusManifest) -> Deviation:
    """Describe how the rows that a run used between two recorded receipts differ from those that its row order gives.

    A receipt is the number and digest of all rows used up to its step. The difference of two receipts is therefore the
    receipt of the rows that were used between them.

    Args:
        good: the last right receipt, with its step.
        bad: the next receipt, which is wrong.
        expected: calculator of the receipts that the run must have.
        corpus: manifest of the corpus; it gives the names of rows.
    """
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
            corpus=corpus,
        ),
    )


def _describe_surplus(surplus: Receipt, due: NDArray[np.int64], num_rows: int, corpus: CorpusManifest) -> str:
    """Describe in words which rows a run used too many or too few, by their names if there is at most one of each.

    The digest in a receipt is the sum of the hashes of row ids. Different ids have different hashes, so the digest of
    a single row identifies this row. Of several wrong rows only the number is known.

    Args:
        surplus: receipt (count and digest) of the rows that were used minus that of the rows that were due.
        due: ids of the rows that were due, [k].
        num_rows: rows of all corpora of the run.
        corpus: manifest of the corpus; it gives the names of rows.
    """
    if surplus.rows == -1:
        missing = _find_missing_row(surplus, due)
        if missing is not None:
            return f"{corpus.row_name(missing)} is missing"
    elif surplus.rows == 1:
        extra = _first_row_with_hash(np.array([surplus.digest], np.uint64), num_rows)
        if extra is not None:
            return f"{corpus.row_name(extra)} was taken once too often"
    elif surplus.rows == 0:
        replaced = _find_replaced_row(surplus, due, num_rows)
        if replaced is not None:
            missing, extra = replaced
            return f"{corpus.row_name(missing)} is missing, {corpus.row_name(extra)} was taken once too often"

    # More than one row is wrong: only their number is known.
    if surplus.rows == 0:
        return "the number of rows is right, but some are not the rows that the order gives"
    if surplus.rows > 0:
        return f"{surplus.rows} rows too many"
    return f"{-surplus.rows} rows too few"


def _find_missing_row(surplus: Receipt, due: NDArray[np.int64]) -> int | None:
    """Return the id of the one row that was due and not used; None if no single row explains the receipt.

    The receipt of a missing row has the digest -hash(id), modulo 2**64, so the row is found by its hash among those
    due.

    Args:
        surplus: receipt of the rows that were used minus that of the rows that were due; its count is -1.
        due: ids of the rows that were due, [k].
    """
    missing_hash = np.uint64((Receipt() - surplus).digest)
    hits = np.flatnonzero(row_hash(due) == missing_hash)
    if hits.size == 0:
        return None
    return int(due[hits[0]])


def _find_replaced_row(surplus: Receipt, due: NDArray[np.int64], num_rows: int) -> tuple[int, int] | None:
    """Return (id of the missing row, id of the row used in its place); None if no such pair explains the receipt.

    The digest in a receipt is the sum of the hashes of row ids. If one row replaces another, the digest of `surplus`
    is hash(extra) - hash(missing), modulo 2**64. Each row that was due is tried as the missing one: hash(missing) plus
    the digest is then the hash of the extra row, which must be the hash of some row of the corpus.

    Args:
        surplus: receipt of the rows that were used minus that of the rows that were due; its count is 0.
        due: ids of the rows that were due, [k].
        num_rows: rows of all corpora of the run.
    """
    extra_hash_if_missing = row_hash(due) + np.uint64(surplus.digest)  # [k]; uint64 wraps at 2**64, as digests do
    extra = _first_row_with_hash(extra_hash_if_missing, num_rows)
    if extra is None:
        return None
    extra_hash = row_hash(np.array([extra]))[0]
    hits = np.flatnonzero(extra_hash_if_missing == extra_hash)
    return int(due[hits[0]]), extra


def _first_row_with_hash(hashes: NDArray[np.uint64], num_rows: int) -> int | None:
    """Return the first row id in [0, num_rows) whose hash is one of `hashes`; None if there is none.

    The ids are hashed and compared 4 million at a time, which bounds the memory.
    """
    for first in range(0, num_rows, _SEARCH_CHUNK):
        rows = np.arange(first, min(num_rows, first + _SEARCH_CHUNK))
        hits = np.flatnonzero(np.isin(row_hash(rows), hashes))
        if hits.size:
            return int(rows[hits[0]])
    return None
