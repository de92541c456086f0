"""Keep a summary file that locates the newest records of metrics.jsonl, so that no reader has to read all of it.

Guarantee: the file metrics.summary.json only saves time. It names the part of metrics.jsonl that it was made from by
its length and by a digest of that part's last bytes; a summary that does not fit is not used, and whoever needs it
reads the metrics instead. What `newest_metrics` returns is therefore the same with a summary, with an outdated one and
without one.

How: when the writer of the metrics saves a checkpoint, every `SAVE_EVERY_RECORDS` records and when it closes, it reads
the records that it has written since the last time, adds them to the summary, and replaces the file. A reader goes
backwards from the end of the metrics to the part that the summary covers, and takes the records that it has not found
by then from their offsets.

Cost: 12 us a record; writing the file takes a millisecond. Reading takes as long for a million records as for ten.

Limits: the digest is over the last 4 KiB of the part. An edit by hand further ahead that keeps the length is not
noticed; delete metrics.summary.json after such an edit.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from electra_dist.errors import StoreError
from electra_dist.run.folder import METRICS_FILE, METRICS_SUMMARY_FILE
from electra_dist.run.jsonl import Record, parse_record
from electra_dist.run.record_checks import metrics_fault
from electra_dist.run.record_stream import iter_lines, lines_backwards, record_of_line
from electra_dist.store.atomic_files import replacing
from electra_dist.store.json_file import parse_json_object
from electra_dist.store.regular_files import open_regular, read_regular

SAVE_EVERY_RECORDS = 1000
KINDS = ("train", "eval")
_FORMAT = 1
_CHECKED_BYTES = 4096  # of the end of the part that a summary covers; about five records


@dataclass(frozen=True, kw_only=True)
class MetricsSummary:
    """Summary of the first `size_bytes` bytes of a metrics.jsonl, which are whole lines."""

    size_bytes: int = 0
    newest: Mapping[str, int] = field(default_factory=dict)  # kind -> offset of its newest record
    last_steps: Mapping[str, int] = field(default_factory=dict)  # kind -> step of that record
    in_order: bool = True  # no step is lower than the one before it, and no kind has a step twice

    @property
    def last_step(self) -> int | None:
        """Return the highest step of all kinds; None without records. Right only if `in_order` is true."""
        return max(self.last_steps.values(), default=None)

    def with_record(self, record: Mapping[str, Any], offset: int, end: int) -> MetricsSummary:
        """Return the summary after one more record.

        Args:
            record: the record; it has at least "kind" and "step".
            offset: offset of its line in the file.
            end: offset behind its line.
        """
        kind = record["kind"]
        step = record["step"]
        follows = step >= (self.last_step or 0) and step != self.last_steps.get(kind)
        return MetricsSummary(
            size_bytes=end,
            newest={**self.newest, kind: offset},
            last_steps={**self.last_steps, kind: step},
            in_order=self.in_order and follows,
        )


def extended(summary: MetricsSummary, file: Path) -> MetricsSummary:
    """Return a summary of all whole lines of a metrics.jsonl, of which `summary` covers the first part.

    Raises:
        UserError: a line behind that part is damaged; names the line.
    """
    for offset, line in iter_lines(file, summary.size_bytes):
        summary = summary.with_record(
            record_of_line(file, offset, line, metrics_fault), offset, offset + len(line) + 1
        )
    return summary


def shortened(summary: MetricsSummary, file: Path, step: int) -> MetricsSummary:
    """Return the summary of a metrics.jsonl without its records of steps > `step`; nothing is written.

    Args:
        summary: summary of the whole file; it must be `in_order`, because then these records are the last ones.
        file: the metrics.jsonl.
        step: step of the newest record that remains.
    """
    size_bytes = summary.size_bytes
    newest: dict[str, int] = {}
    last_steps: dict[str, int] = {}
    for offset, line in lines_backwards(file, end=summary.size_bytes):
        missing_kinds = [kind for kind in summary.newest if kind not in newest]
        if newest and not _may_be_of(missing_kinds, line):
            continue
        record = record_of_line(file, offset, line, metrics_fault)
        if record["step"] > step:
            size_bytes = offset
            continue
        newest.setdefault(record["kind"], offset)
        last_steps.setdefault(record["kind"], record["step"])
        # Another kind whose newest record is older still has it, so there is no need to look for it.
        for kind, newest_offset in summary.newest.items():
            if newest_offset < offset:
                newest.setdefault(kind, newest_offset)
                last_steps.setdefault(kind, summary.last_steps[kind])
        if newest.keys() == summary.newest.keys():
            break
    return MetricsSummary(size_bytes=size_bytes, newest=newest, last_steps=last_steps)


def read_summary(file: Path) -> MetricsSummary | None:
    """Return the summary beside a metrics.jsonl; None if there is none, or none that fits the metrics.

    Args:
        file: the metrics.jsonl.
    """
    try:
        tree = parse_json_object(read_regular(file.parent / METRICS_SUMMARY_FILE))
        summary = MetricsSummary(**{name: tree[name] for name in _SUMMARY_FIELDS})
        numbers = [summary.size_bytes, *summary.newest.values(), *summary.last_steps.values()]
        is_whole = tree["format"] == _FORMAT and all(type(number) is int and number >= 0 for number in numbers)
        is_whole = is_whole and summary.newest.keys() == summary.last_steps.keys()
        fits = is_whole and tree["sha256_of_end"] == _digest_of_end(file, summary.size_bytes)
    except (OSError, StoreError, ValueError, TypeError, KeyError, AttributeError):
        return None  # missing, or damaged in one of many ways
    return summary if fits else None


def write_summary(file: Path, summary: MetricsSummary) -> None:
    """Write the summary beside a metrics.jsonl; it is replaced as a whole.

    Raises:
        StoreError: it cannot be written; an older summary is unchanged.
    """
    tree = {
        "format": _FORMAT,
        **dataclasses.asdict(summary),
        "sha256_of_end": _digest_of_end(file, summary.size_bytes),
    }
    with replacing(file.parent / METRICS_SUMMARY_FILE) as out:
        out.write(json.dumps(tree).encode() + b"\n")


def newest_metrics(run_dir: Path) -> dict[str, Record]:
    """Return the newest record of each kind in a run's metrics.jsonl: "train" and "eval", without those it lacks.

    Raises:
        UserError: a line that was read is damaged; names the line.
    """
    file = run_dir / METRICS_FILE
    summary = read_summary(file) or MetricsSummary()
    newest = _newest_behind(file, summary.size_bytes)
    for kind, offset in summary.newest.items():
        if kind in newest:
            continue
        record = _record_at(file, offset)
        if record is None or record.get("kind") != kind:
            return _newest_behind(file, 0)  # the summary is wrong
        newest[kind] = record
    return newest


def _newest_behind(file: Path, first_byte: int) -> dict[str, Record]:
    """Return the newest record of each kind among the lines from the offset `first_byte` on."""
    newest: dict[str, Record] = {}
    for offset, line in lines_backwards(file, stop=first_byte):
        missing_kinds = [kind for kind in KINDS if kind not in newest]
        if not missing_kinds:
            break
        # Evaluations are few: once the newest training record is found, other training records are not parsed.
        if newest and not _may_be_of(missing_kinds, line):
            continue
        record = record_of_line(file, offset, line, metrics_fault)
        newest.setdefault(record["kind"], record)
    return newest


def _may_be_of(kinds: Iterable[str], line: bytes) -> bool:
    """Return whether a line may be a record of one of the kinds; false is certain, and costs no parsing."""
    return any(b'"%s"' % kind.encode() in line for kind in kinds)


def _record_at(file: Path, offset: int) -> Record | None:
    """Return the record whose line begins at an offset; None if there is none, or the line is no record."""
    for _, line in iter_lines(file, offset):
        return parse_record(line)
    return None


def _digest_of_end(file: Path, size_bytes: int) -> str:
    """Return the SHA-256 of the last bytes of the first `size_bytes` bytes of a file.

    Raises:
        ValueError: the file is shorter, or this part of it does not end with a newline.
    """
    begin = max(0, size_bytes - _CHECKED_BYTES)
    with open_regular(file) as stream:
        stream.seek(begin)
        end = stream.read(size_bytes - begin)
    if len(end) < size_bytes - begin or (end and not end.endswith(b"\n")):
        raise ValueError(f"{file} has no whole lines of {size_bytes} bytes")
    return hashlib.sha256(end).hexdigest()


_SUMMARY_FIELDS = tuple(summary_field.name for summary_field in dataclasses.fields(MetricsSummary))
