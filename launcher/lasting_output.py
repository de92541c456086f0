"""Let a process run on when nobody reads its output: its terminal was closed, or the reader of its pipe has ended.

Without this, the next line that a run prints would end it. What a run prints is in its log file, too.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any, TextIO, cast

_STANDARD_FILES = (0, 1, 2)  # descriptors of stdin, stdout and stderr


class LastingStream:
    """A text stream that discards its output after the first failed write; otherwise it acts as the wrapped stream."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write `text`, or discard it if writing fails; return its length in both cases."""
        try:
            self._stream.write(text)
        except (OSError, ValueError):  # ValueError: the stream was closed in this process
            self._silence()
        return len(text)

    def flush(self) -> None:
        """Flush the stream; a failure is ignored."""
        try:
            self._stream.flush()
        except (OSError, ValueError):
            self._silence()

    def _silence(self) -> None:
        self._stream = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (kept until the process ends)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def outlive_the_reader() -> None:
    """Make failed writes to stdout and stderr of this process harmless. Call this first, before any file is opened.

    If stdin, stdout or stderr was closed when the process started, as by `>&-`, it is opened on the null device.
    Otherwise the next opened file would get the free descriptor, and receive output that is meant for stdout.
    """
    for descriptor in _STANDARD_FILES:
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # Python found the file closed
            stream = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (kept until the process ends)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a file name that is not UTF-8 is printed with escapes
        if not isinstance(stream, LastingStream):
            setattr(sys, name, cast(TextIO, LastingStream(stream)))
