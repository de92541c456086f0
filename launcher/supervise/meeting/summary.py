"""Summarize all files of RUN/meeting/SESSION/ in one, summary.json: node 0 writes it, the other nodes read it.

The supervisors of a job agree by files on each start of the ranks (rendezvous.py). The summary holds the number of the
newest start, its port, and the reports of all nodes on the end of their ranks in that start and the one before.

Guarantee: node 0 writes the summary when its content changes, and otherwise updates its modification time about once
per second. A node that has seen no new modification time for `STALE_S` seconds does not use the summary, and reads the
files of the other nodes itself. Node 0 writes in a thread, so a folder that does not answer delays its supervisor by a
second at most.

Cost: each node opens one file per second, whatever the number of nodes. Without the summary each node would open the
reports of all nodes, so the number of opened files would grow with the square of the number of nodes.

Limits: a report reaches the other nodes up to two seconds later, because node 0 must read it first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from electra_dist.errors import StoreError
from electra_dist.store.atomic_files import replacing
from electra_dist.store.json_file import DamagedJson, parse_json_object, validate_json
from electra_dist.store.regular_files import read_regular
from launcher.supervise.meeting.reports import End

SUMMARY_NAME = "summary.json"
STALE_S = 10.0  # how long the other nodes use a summary whose modification time does not change
_ANSWER_S = 1.0  # how long node 0 waits until the summary is written


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Content of summary.json: number and port of the newest start of the ranks, and the nodes' reports on its end."""

    start: Annotated[int, Field(ge=0)]  # number of the newest start; 0: none yet
    port: Annotated[int, Field(ge=0, lt=1 << 16)]  # where the ranks meet; 0: unknown, read it from the announcement
    ends: tuple[End, ...]  # reports on this start and on the one before


_SUMMARY = TypeAdapter(Summary)


class SummaryWriter:
    """Writer of summary.json, which the supervisor of node 0 uses."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / SUMMARY_NAME
        self._written: Summary | None = None  # content of the file
        self._thread: threading.Thread | None = None  # of the newest write

    def write(self, summary: Summary) -> None:
        """Write the summary if it has changed, otherwise update its file's time. A failure raises no exception."""
        if self._thread is not None and self._thread.is_alive():
            return
        self._thread = threading.Thread(target=self._write_out, args=(summary,), name="summary", daemon=True)
        self._thread.start()
        self._thread.join(_ANSWER_S)

    def _write_out(self, summary: Summary) -> None:
        with contextlib.suppress(OSError, StoreError):
            if summary == self._written:
                os.utime(self._file)
                return
            with replacing(self._file) as out:
                out.write(json.dumps(dataclasses.asdict(summary)).encode() + b"\n")
            self._written = summary


class SummaryReader:
    """Reader of summary.json, which the supervisors of all nodes except node 0 use."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / SUMMARY_NAME
        self._changed_ns = 0  # newest modification time of the file that this reader has seen
        self._seen = 0.0  # when this reader first saw that modification time, by `time.monotonic` in seconds

    def read(self) -> Summary | None:
        """Return the newest summary; None if it is missing, damaged or out of date. Then read all reports instead."""
        try:
            changed_ns = self._file.stat().st_mtime_ns
            summary = validate_json(_SUMMARY, parse_json_object(read_regular(self._file)))
        except (OSError, StoreError, DamagedJson):
            return None
        now = time.monotonic()
        if changed_ns != self._changed_ns:
            self._changed_ns = changed_ns
            self._seen = now
        return summary if now - self._seen < STALE_S else None
