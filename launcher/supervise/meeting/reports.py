"""Read the files of a session's folder: which start is the newest, and how the ranks of each node ended in it.

How: one listing of the folder. A report is opened only if its start is asked for, and again only after it has changed,
so files of earlier starts are never opened.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pydantic import TypeAdapter

from electra_dist.store.json_file import DamagedJson, parse_json_object, validate_json

# Of the files in the meeting folder: start-000007.json, end-000007-node-1.json.
_FILE_NAME = re.compile(r"(?:start|end)-(?P<start>[0-9]{6,})(?:-node-(?P<node>[0-9]+))?\.json")


@dataclass(frozen=True, kw_only=True)
class End:
    """Report of one node that its ranks have ended in one start: the content of one file end-START-node-NODE.json."""

    number: int  # of the start
    node: int
    code: int
    final: bool  # whether the node's supervisor ended, too


_END = TypeAdapter(End)


class _FileVersion(NamedTuple):
    """What changes when a file is replaced: another inode, time of the change, or size in bytes."""

    inode: int
    changed_ns: int
    size_bytes: int


class MeetingFolder:
    """Folder of one session in RUN/meeting, as one node reads it."""

    def __init__(self, folder: Path) -> None:
        """Remember the folder, which need not exist; nothing is read."""
        self._folder = folder
        self._reports: dict[str, tuple[_FileVersion, End | None]] = {}  # by file name; None: a damaged report

    def newest_start(self) -> int:
        """Return the number of the newest start that node 0 has announced; 0 before the first one.

        The number is read from the names of the files, for example 7 from start-000007.json. Files of other names are
        passed over.
        """
        names = [_FILE_NAME.fullmatch(entry.name) for entry in self._list() if entry.name.startswith("start-")]
        return max((int(name["start"]) for name in names if name is not None and name["node"] is None), default=0)

    def ends(self, since: int) -> list[End]:
        """Return the reports of all nodes, including this one, that their ranks have ended; in no particular order.

        A damaged report, or one that the file system cannot read now, counts as none: the ranks that wait for that
        node are then found hung.

        Args:
            since: number of the oldest start whose reports are returned; those of earlier starts are not opened.
        """
        reports: dict[str, tuple[_FileVersion, End | None]] = {}
        for entry in self._list():
            name = _FILE_NAME.fullmatch(entry.name)
            if name is None or name["node"] is None or int(name["start"]) < since:
                continue
            with contextlib.suppress(OSError):  # Node 0 may have deleted the file since it was listed.
                reports[entry.name] = self._report(entry, int(name["start"]), int(name["node"]))
        self._reports = reports
        return [end for _, end in reports.values() if end is not None]

    def delete_starts(self, newest_deleted: int) -> None:
        """Delete the announcements and reports of all starts up to the one with this number."""
        for entry in self._list():
            name = _FILE_NAME.fullmatch(entry.name)
            if name is not None and int(name["start"]) <= newest_deleted:
                Path(entry.path).unlink(missing_ok=True)

    def _list(self) -> list[os.DirEntry[str]]:
        """Return the entries of the folder; none if it does not exist yet, or cannot be read now."""
        with contextlib.suppress(OSError), os.scandir(self._folder) as entries:
            return list(entries)
        return []

    def _report(self, entry: os.DirEntry[str], number: int, node: int) -> tuple[_FileVersion, End | None]:
        """Return the version of a report and its content, which is read only if the version is a new one.

        Raises:
            OSError: the file has been deleted, or cannot be read now.
        """
        status = entry.stat()
        version = _FileVersion(status.st_ino, status.st_mtime_ns, status.st_size)
        known = self._reports.get(entry.name)
        if known is not None and known[0] == version:
            return known
        end = None
        with contextlib.suppress(IsADirectoryError, DamagedJson):
            content = parse_json_object(Path(entry.path).read_bytes())
            end = validate_json(_END, content | {"number": number, "node": node})
        return version, end
