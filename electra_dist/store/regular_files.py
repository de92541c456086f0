"""Open and read files that another program, or a stranger, may have written.

Guarantee: only regular files are opened, so that a named pipe never blocks a reader, and a device never feeds it
without end. A file that is read as a whole has a limit of size.

Limits: neither the content of a file nor the target of a link is checked. A file that is exchanged for a pipe or a
device between the check and the opening is opened.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path

from electra_dist.errors import StoreError

MOST_BYTES = 1 << 28  # of a configuration, a vocabulary or a record; the largest tokenizer.json has a tenth of it
MOST_DATA_BYTES = 1 << 32  # of a data set that is held in memory as a whole


def open_regular(path: Path | str) -> io.BufferedReader:
    """Open a regular file, or one that a link leads to; raise StoreError for a pipe, socket or device."""
    status = os.stat(path)  # first, because opening a named pipe waits, and opening a device may have an effect
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise StoreError(f"{path}: is a named pipe, a socket or a device; give a regular file")
    return open(path, "rb")


def check_regular(path: Path | str) -> None:
    """Raise what `open_regular` raises for a path; call this before a library opens the path by itself."""
    open_regular(path).close()


def read_regular(path: Path | str, most_bytes: int = MOST_BYTES) -> bytes:
    """Return the bytes of a file; raise StoreError if it has more than `most_bytes` or is a pipe, socket or device."""
    with open_regular(path) as file:
        has_too_many = os.fstat(file.fileno()).st_size > most_bytes
        data = b"" if has_too_many else file.read(most_bytes + 1)  # it may have grown since
    if has_too_many or len(data) > most_bytes:
        raise StoreError(f"{path}: has more than the {most_bytes:,} bytes that are read of such a file; replace it")
    return data
