"""`verify` against runs made up row by row: every deviation is found in its place, no good run is accused."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from electra_dist.analysis import row_audit as module
from electra_dist.analysis.row_audit import Expected, Mark, verify
from electra_dist.data.corpus_manifest import CorpusManifest, ShardEntry, TokenizerEntry
from electra_dist.data.row_order import RowOrder
from electra_dist.data.row_receipt import Receipt

ROWS = [70, 33, 48, 90, 15]
BATCH = 16
SEED = 7


def corpus() -> CorpusManifest:
    digest = hashlib.sha256(b"").hexdigest()
    special = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4}
    return CorpusManifest(
        seq_len=8,
        dtype="uint16",
        tokenizer=TokenizerEntry(sha256=digest, vocab_size=10, lowercase=True, special=special),
        shards=tuple(
            ShardEntry(name=f"shard-{i}.tar", rows=rows, tokens=1, bytes=1, sha256=digest)
            for i, rows in enumerate(ROWS)
        ),
    )


def rows_of_steps(num_steps: int, skipped: set[int]) -> list[list[int]]:
    """Row ids of each step, by the order alone; [] for a skipped one."""
    order = RowOrder(ROWS, SEED, 2)
    starts = np.concatenate([[0], np.cumsum(ROWS)])
    _, shards, rows = order.locate(np.arange(num_steps * BATCH))
    ids = (starts[shards] + rows).reshape(num_steps, BATCH).tolist()
    return [[] if step in skipped else ids[step] for step in range(num_steps)]


def marks_of(steps: list[list[int]], every: int) -> list[Mark]:
    marks, receipt = [], Receipt()
    for number, ids in enumerate(steps, 1):
        receipt += Receipt.of(np.array(ids, np.int64))
        if number % every == 0:
            marks.append(Mark(number, "metrics.jsonl", receipt))
    return marks


def expected(skipped: set[int]) -> Expected:
    return Expected(RowOrder(ROWS, SEED, 2), ROWS, BATCH, skipped)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 80), st.sets(st.integers(0, 79), max_size=6), st.integers(1, 7), st.data())
def test_every_deviation_is_found_in_its_stretch_and_named(
    num_steps: int, skipped: set[int], every: int, data: st.DataObject
) -> None:
    steps = rows_of_steps(num_steps, skipped)
    assert verify(marks_of(steps, every), expected(skipped), corpus()).deviation is None
    checked = (num_steps // every) * every
    taken = [step for step in range(checked) if steps[step]]
    if not taken:
        return
    step = data.draw(st.sampled_from(taken))
    place = data.draw(st.integers(0, BATCH - 1))
    other = data.draw(st.integers(0, sum(ROWS) - 1))
    kind = data.draw(st.sampled_from(["skipped", "repeated", "replaced"]))
    victim = steps[step][place]
    if kind == "replaced" and other == victim:
        return
    steps[step] = {
        "skipped": steps[step][:place] + steps[step][place + 1 :],
        "repeated": [*steps[step], other],
        "replaced": [*steps[step][:place], other, *steps[step][place + 1 :]],
    }[kind]
    deviation = verify(marks_of(steps, every), expected(skipped), corpus()).deviation
    assert deviation is not None
    assert deviation.first_step <= step < deviation.end_step <= deviation.first_step + every
    missing = f"{corpus().row_name(victim)} is missing"
    extra = f"{corpus().row_name(other)} was taken once too often"
    assert deviation.text == {"skipped": missing, "repeated": extra, "replaced": f"{missing}, {extra}"}[kind]


def test_sampled_marks_are_bisected_to_the_first_bad_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ALL_MARKS_ROWS", 100)
    monkeypatch.setattr(module, "_NUM_MARKS", 5)
    steps = rows_of_steps(200, set())
    steps[123].pop()
    verdict = verify(marks_of(steps, 1), expected(set()), corpus())
    assert verdict.deviation is not None
    assert (verdict.deviation.first_step, verdict.deviation.end_step) == (123, 124)
    assert verdict.num_marks <= 5


def test_two_wrong_rows_are_counted_where_they_cannot_be_named() -> None:
    steps = rows_of_steps(40, set())
    steps[20] = steps[20][2:]
    deviation = verify(marks_of(steps, 10), expected(set()), corpus()).deviation
    assert deviation is not None
    assert (deviation.first_step, deviation.end_step, deviation.text) == (20, 30, "2 rows too few")
