"""Run programs in Python's UTF-8 mode, whatever the locale is.

In a locale of another encoding, such as C with the UTF-8 mode off (PYTHONUTF8=0), Python cannot name a file whose name
is not ASCII, and libraries that open text files without an encoding fail, as torch's compiler does.
"""

from __future__ import annotations

import os
import sys


def start_in_utf8_mode() -> None:
    """Replace this process by the same program in UTF-8 mode if the locale has another encoding. Call it first."""
    if sys.flags.utf8_mode or sys.getfilesystemencoding() == "utf-8":
        return
    arguments = [sys.executable, "-X", "utf8", *sys.orig_argv[1:]]
    os.execve(sys.executable, arguments, {**os.environ, "PYTHONUTF8": "1"})
