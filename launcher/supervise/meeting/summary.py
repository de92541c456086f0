"""Pass what node 0 knows of a session to the other nodes in one file, RUN/meeting/SESSION/summary.json.

Guarantee: the summary holds the newest start, its port, and the reports of all nodes on this start and the one before.
Node 0 writes it when something changes, and touches it at each look. A node that has seen no change of the file's time
for `STALE_S` seconds does not rely on it, and reads the other files of the folder itself. A thread writes, so a folder
that does not answer delays node 0 by a second at most.

Cost: one open file per node and second, whatever the number of nodes. Without the summary each node would open the
reports of all nodes, which is their number squared.

Limits: a report takes up to two seconds longer, because node 0 has to read it first.
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
from launcher.supervise.meeting.reports import End

SUMMARY_NAME = "summary.json"
STALE_S = 10.0  # how long a summary that is not touched is relied on
_ANSWER_S = 1.0  # how long node 0 waits for a write


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What node 0 knows: the newest start, the port at which its ranks meet, and the reports of nodes that ended."""

    start: Annotated[int, Field(ge=0)]
    port: Annotated[int, Field(ge=0, lt=1 << 16)]  # 0: unknown, so the file that announces the start has it
    ends: tuple[End, ...]  # of this start and the one before


_SUMMARY = TypeAdapter(Summary)


class SummaryWriter:
    """Writer of the summary; only node 0 of a session has one."""

    def __init__(self, folder: Path) -> None:
        """Remember the folder of the session; nothing is written."""
        self._file = folder / SUMMARY_NAME
        self._written: Summary | None = None
        self._thread: threading.Thread | None = None

    def write(self, summary: Summary) -> None:
        """Write the summary by an atomic replacement if it has changed; otherwise set the file's time to now.

        If the disk refuses that, nothing is raised: the other nodes then read the reports themselves. If it does not
        answer for a second, the write goes on in its thread, and further calls do nothing until it is over.
        """
        if self._thread is not None and self._thread.is_alive():
            return
        self._thread = threading.Thread(target=self._write_out, args=(summary,), name="summary", daemon=True)
        self._thread.start()
        self._thread.join(_ANSWER_S)

    def _write_out(self, summary: Summary) -> None:
        """Write the summary, or set the file's time. The body of the thread."""
        with contextlib.suppress(OSError, StoreError):
            if summary == self._written:
                os.utime(self._file)
                return
            with replacing(self._file) as out:
                out.write(json.dumps(dataclasses.asdict(summary)).encode() + b"\n")
            self._written = summary


class SummaryReader:
    """Reader of the summary on a node other than 0."""

    def __init__(self, folder: Path) -> None:
        """Remember the folder of the session; nothing is read."""
        self._file = folder / SUMMARY_NAME
        self._changed_ns = 0
        self._seen = 0.0  # when this node has noticed the last change, by `time.monotonic`

    def read(self) -> Summary | None:
        """Return the summary; None if there is none, it is damaged, or node 0 has not touched it for `STALE_S`.

        The clocks of two nodes are never compared: the reader remembers by its own clock when it saw the file change.
        """
        try:
            with self._file.open("rb") as file:
                changed_ns = os.fstat(file.fileno()).st_mtime_ns
                content = file.read()
            summary = validate_json(_SUMMARY, parse_json_object(content))
        except (OSError, DamagedJson):
            return None
        now = time.monotonic()
        if changed_ns != self._changed_ns:
            self._changed_ns = changed_ns
            self._seen = now
        return summary if now - self._seen < STALE_S else None
