"""Read, and delete when they are old, the files in RUN/meeting/SESSION/ by which supervisors agree on starts.

The starts of the ranks during a job are numbered, and the files about a start have its number in their names
(rendezvous.py lists the files).

How: each call lists the folder once. A report is opened only if the caller needs the start that it is about, and
opened again only if the file has changed since.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pydantic import TypeAdapter

from electra_dist.errors import StoreError
from electra_dist.store.json_file import DamagedJson, parse_json_object, validate_json
from electra_dist.store.regular_files import read_regular

# Names of an announcement and of a report, for example start-000007.json and end-000007-node-1.json.
_FILE_NAME = re.compile(r"(?:start|end)-(?P<start>[0-9]{6,})(?:-node-(?P<node>[0-9]+))?\.json")


@dataclass(frozen=True, kw_only=True)
class End:
    """Report of one node that its ranks have ended: name and content of one file end-START-node-NODE.json."""

    number: int  # number of the start of the ranks that has ended; START in the file's name
    node: int  # number of the node, from 0; NODE in the file's name
    code: int  # exit code for the node as a whole, from electra_dist/errors.py
    final: bool  # whether the node's supervisor ended, too, and joins no further start


_END = TypeAdapter(End)


class _FileVersion(NamedTuple):
    """Version of a file. At least one of these values changes when the file is replaced."""

    inode: int
    changed_ns: int  # modification time
    size_bytes: int


class MeetingFolder:
    """Reader of one session's folder RUN/meeting/SESSION, which holds announcements of starts and reports of ends."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reports: dict[str, tuple[_FileVersion, End | None]] = {}  # by file name; None: a damaged report

    def newest_start(self) -> int:
        """Return the number of the newest start that node 0 has announced; 0 if none can be read."""
        newest = 0
        for entry in self._list():
            name = _FILE_NAME.fullmatch(entry.name)
            if name is None or name["node"] is not None or not entry.name.startswith("start-"):
                continue  # a report, or no file of a start
            newest = max(newest, int(name["start"]))
        return newest

    def ends(self, since: int) -> list[End]:
        """Return the reports of all nodes, this one included, on start number `since` and later ones, in any order.

        A report that is damaged or cannot be read now is left out. The other nodes then do not know that these ranks
        have ended, and end their own ranks only later, when they find them hung.
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
        """Delete the announcements and reports of all starts whose number is at most `newest_deleted`."""
        for entry in self._list():
            name = _FILE_NAME.fullmatch(entry.name)
            if name is not None and int(name["start"]) <= newest_deleted:
                Path(entry.path).unlink(missing_ok=True)

    def _list(self) -> list[os.DirEntry[str]]:
        """Return the entries of the folder; [] if the folder does not exist yet, or cannot be read now."""
        with contextlib.suppress(OSError), os.scandir(self._folder) as entries:
            return list(entries)
        return []

    def _report(self, entry: os.DirEntry[str], number: int, node: int) -> tuple[_FileVersion, End | None]:
        """Return a report's file version and content (None: damaged). An unchanged file is not read again."""
        status = entry.stat()
        version = _FileVersion(status.st_ino, status.st_mtime_ns, status.st_size)
        known = self._reports.get(entry.name)
        if known is not None and known[0] == version:
            return known
        end = None
        with contextlib.suppress(IsADirectoryError, StoreError, DamagedJson):
            content = parse_json_object(read_regular(entry.path))
            end = validate_json(_END, content | {"number": number, "node": node})
        return version, end
