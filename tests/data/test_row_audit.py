"""The audit of the rows that a run used: it finds every deviation in its range of steps, and accuses no good run.

A receipt is the number of the rows used so far and a digest of their ids; a mark is a receipt with its step.
"""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from electra_dist.data import row_audit
from electra_dist.data.manifest import CorpusManifest, ShardEntry, TokenizerEntry
from electra_dist.data.order import CorpusOrder, RowOrder
from electra_dist.data.receipt import Receipt
from electra_dist.data.row_audit import Expected, Mark, verify

ROWS_PER_SHARD = [70, 33, 48, 90, 15]
GLOBAL_BATCH = 16  # rows of a step
SEED = 7


def corpus() -> CorpusManifest:
    """Return the manifest of a corpus of five shards; its digests are those of empty files."""
    digest = hashlib.sha256(b"").hexdigest()
    special = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4}
    shards = [
        ShardEntry(name=f"shard-{number}.tar", rows=rows, tokens=1, bytes=4096, sha256=digest)
        for number, rows in enumerate(ROWS_PER_SHARD)
    ]
    return CorpusManifest(
        seq_len=8,
        dtype="uint16",
        tokenizer=TokenizerEntry(sha256=digest, vocab_size=10, lowercase=True, special=special),
        shards=tuple(shards),
    )


def row_order() -> RowOrder:
    """Return the order in which the run uses the rows of the corpus."""
    return RowOrder([CorpusOrder(ROWS_PER_SHARD, SEED, 2)])


def row_ids_of_steps(num_steps: int, skipped: set[int]) -> list[list[int]]:
    """Return the row ids of each step, from the row order alone; a skipped step has none."""
    _, shards, rows = row_order().locate(np.arange(num_steps * GLOBAL_BATCH))
    first_ids = np.concatenate([[0], np.cumsum(ROWS_PER_SHARD)])  # id of the first row of each shard
    ids = (first_ids[shards] + rows).reshape(num_steps, GLOBAL_BATCH).tolist()
    return [[] if step in skipped else ids[step] for step in range(num_steps)]


def marks_of_run(steps: list[list[int]], every: int) -> list[Mark]:
    """Return the marks that a run records if it uses these rows in its steps; one mark every `every` steps."""
    marks = []
    receipt = Receipt()
    for num_steps, row_ids in enumerate(steps, start=1):
        receipt += Receipt.of(np.array(row_ids, np.int64))
        if num_steps % every == 0:
            marks.append(Mark(num_steps, "metrics.jsonl", receipt))
    return marks


def expected_receipts(skipped: set[int]) -> Expected:
    """Return the calculator of the receipts that a run must have if it skips these steps."""
    return Expected(row_order(), GLOBAL_BATCH, skipped)


@settings(deadline=None, max_examples=40)
@given(
    num_steps=st.integers(1, 80),
    skipped=st.sets(st.integers(0, 79), max_size=6),
    every=st.integers(1, 7),
    data=st.data(),
)
def test_one_wrong_row_is_found_between_the_marks_around_it_and_named(
    num_steps: int, skipped: set[int], every: int, data: st.DataObject
) -> None:
    """A run without a wrong row passes. Then one row of one step is left out, added or replaced.

    Args:
        num_steps: steps of the run.
        skipped: steps that the run skipped, of which the audit knows; they use no rows.
        every: steps between two marks.
        data: draws the wrong row.
    """
    steps = row_ids_of_steps(num_steps, skipped)
    assert verify(marks_of_run(steps, every), expected_receipts(skipped), corpus()).deviation is None

    num_marked_steps = (num_steps // every) * every  # no mark covers later steps
    steps_with_rows = [step for step in range(num_marked_steps) if steps[step]]
    if not steps_with_rows:
        return
    step = data.draw(st.sampled_from(steps_with_rows))
    place = data.draw(st.integers(0, GLOBAL_BATCH - 1))
    other_row = data.draw(st.integers(0, sum(ROWS_PER_SHARD) - 1))
    fault = data.draw(st.sampled_from(["row left out", "row added", "row replaced"]))
    right_row = steps[step][place]
    missing = f"{corpus().row_name(right_row)} is missing"
    extra = f"{corpus().row_name(other_row)} was taken once too often"
    if fault == "row left out":
        del steps[step][place]
        expected_text = missing
    elif fault == "row added":
        steps[step].append(other_row)
        expected_text = extra
    else:
        if other_row == right_row:
            return
        steps[step][place] = other_row
        expected_text = f"{missing}, {extra}"

    deviation = verify(marks_of_run(steps, every), expected_receipts(skipped), corpus()).deviation

    assert deviation is not None
    assert deviation.first_step <= step
    assert step < deviation.end_step
    assert deviation.end_step <= deviation.first_step + every
    assert deviation.text == expected_text


def test_a_long_run_is_checked_at_few_marks_and_its_first_wrong_step_found_by_bisection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The limits of a long run are lowered, so that 5 of 200 marks are checked. Step 123 lacks one row."""
    monkeypatch.setattr(row_audit, "_ALL_MARKS_ROWS", 100)
    monkeypatch.setattr(row_audit, "_NUM_MARKS", 5)
    steps = row_ids_of_steps(200, skipped=set())
    steps[123].pop()

    audit = verify(marks_of_run(steps, every=1), expected_receipts(skipped=set()), corpus())

    assert audit.deviation is not None
    assert audit.deviation.first_step == 123
    assert audit.deviation.end_step == 124
    assert audit.num_marks <= 5


def test_two_missing_rows_are_counted_because_a_digest_can_name_only_one() -> None:
    steps = row_ids_of_steps(40, skipped=set())
    steps[20] = steps[20][2:]

    deviation = verify(marks_of_run(steps, every=10), expected_receipts(skipped=set()), corpus()).deviation

    assert deviation is not None
    assert deviation.first_step == 20
    assert deviation.end_step == 30
    assert deviation.text == "2 rows too few"
