"""What the checksums of rows cost the loader: making them when a shard is opened, and comparing each copy of a row.

A part of `loader.py`.

How: one shuffled epoch is read with and without checksums, in turn, from opening the shards to the last batch. Without
them, the SHA-256 of each shard is still verified, and rows are copied by the same function. The least CPU times of all
rounds are compared, over all threads of the process: an epoch takes a tenth of a second, and other processes on the
machine only ever make it longer.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from first_batch import SEQ_LEN
from loader_rivals import VARIANTS
from measure import RESULTS, Json, ResultLine, alternate, print_table, ratio

from electra_dist.data import shard as shard_module
from electra_dist.data import verified_shards
from electra_dist.data.corpus_manifest import read_manifest
from electra_dist.data.shard import Shard
from electra_dist.store.interface import Store


@contextlib.contextmanager
def without_checksums() -> Iterator[None]:
    """Let shards be opened without checksums, which are then neither made nor compared."""

    def open_unchecked(*arguments: Any, **options: Any) -> Shard:
        """Open a shard without the checksums that the caller passes."""
        return Shard(*arguments, **{**options, "checksums": None})

    def make_none(rows: np.ndarray) -> np.ndarray:
        """Return no checksum."""
        return np.empty(0, np.uint64)

    with (
        mock.patch.object(verified_shards, "Shard", open_unchecked),
        mock.patch.object(shard_module, "row_checksums", make_none),
    ):
        yield


def measure_checksums(store: Store, folder: Path, rounds: int) -> Json:
    """Time an epoch with and without checksums, in turn.

    Args:
        store: Local corpus of rows of 512 tokens.
        folder: Folder of the reader; it stays empty.
        rounds: Timed epochs of each.

    Returns:
        CPU seconds of each epoch, the ratio of the least ones, their difference per row in microseconds, and the share
        of one core that this takes beside ELECTRA-Small's fastest recorded step on a CPU (None without a record). Also
        the ratios round by round.
    """

    def read_epoch() -> float:
        """Read one epoch and return its CPU seconds."""
        begin = time.process_time()
        for _ in VARIANTS["ours"].read(store, folder):
            pass
        return time.process_time() - begin

    def read_unchecked_epoch() -> float:
        """Read one epoch without checksums and return its CPU seconds."""
        with without_checksums():
            return read_epoch()

    ways: dict[str, Callable[[], float]] = {"with": read_epoch, "without": read_unchecked_epoch}
    cpu_s = alternate(ways, rounds)
    num_rows = read_manifest(store).num_rows
    least = {name: min(seconds) for name, seconds in cpu_s.items()}
    extra_us = 1e6 * (least["with"] - least["without"]) / num_rows
    tokens_per_s = fastest_small_step()
    share = None if tokens_per_s is None else extra_us / SEQ_LEN * tokens_per_s / 1e6
    return {
        "cpu_s": cpu_s,
        "ratio_of_least": least["with"] / least["without"],
        "ratio": ratio(cpu_s["with"], cpu_s["without"]),
        "extra_us_per_row": extra_us,
        "small_step_tokens_per_s": tokens_per_s,
        "share_of_small_step": share,
        "rows": num_rows,
    }


def fastest_small_step() -> float | None:
    """Return the tokens per second of ELECTRA-Small's fastest step in the records of `step.py`; None without one."""
    speeds = []
    for path in RESULTS.glob("step-2*.json"):
        for line in json.loads(path.read_text())["lines"]:
            if line["what"].startswith("joint step of ELECTRA-Small"):
                speeds.append(float(line["value"].removesuffix(" tokens/s").replace(",", "")))
    return max(speeds, default=None)


def report_checksums(found: Json) -> ResultLine:
    """Print the table of the checksums' cost and return its row for docs/results.md.

    Args:
        found: Result of `measure_checksums`.
    """
    rows = []
    for name, seconds in found["cpu_s"].items():
        least_s = min(seconds)
        rows.append([name, f"{1e6 * least_s / found['rows']:.2f}", f"{found['rows'] / least_s:,.0f}"])
    print_table(["checksums", "CPU us a row", "rows / s core"], rows)
    num_rounds = len(found["cpu_s"]["with"])
    against = f"{found['ratio_of_least']:.3f} x the CPU time without them, least of {num_rounds} rounds each"
    share = found["share_of_small_step"]
    if share is not None:
        against += (
            f"; {100 * share:.5f} % of one core beside ELECTRA-Small's fastest recorded step on this kind of machine "
            f"({found['small_step_tokens_per_s']:,.0f} tokens/s)"
        )
    value = f"{found['extra_us_per_row']:.2f} us CPU a row"
    return ResultLine("checksums of rows of 512: made at opening, compared at every use, warm loader", value, against)
