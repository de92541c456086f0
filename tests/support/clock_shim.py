"""Sets the wall clock of a test's own processes forward or back while they run, by a library that they preload."""

from __future__ import annotations

import mmap
import shutil
import struct
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("clock_shim.c")
HOUR_FORWARD = 3600
DAY_BACK = -86400


def has_compiler() -> bool:
    """Return whether this machine has the C compiler that the library needs."""
    return shutil.which("cc") is not None


class ClockShim:
    """The wall clock of processes that are started with the variables of `environment`; at first it is not shifted."""

    def __init__(self, folder: Path, ranks: str) -> None:
        """Compile the library into `folder`, where the file of shifts lies, too.

        A process whose command line contains the text `ranks` counts as a rank.
        """
        library = folder / "clock_shim.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(SOURCE)], check=True)
        shifts = folder / "clock_shifts"
        shifts.write_bytes(struct.pack("<qq", 0, 0))
        with shifts.open("r+b") as file:
            self._shifts = mmap.mmap(file.fileno(), 16)
        self.environment = {
            "LD_PRELOAD": str(library),
            "CLOCK_SHIM_FILE": str(shifts),
            "CLOCK_SHIM_RANKS": ranks,
        }

    def set(self, *, ranks_s: int = 0, others_s: int = 0) -> None:
        """Shift the clock of the ranks, and that of all other processes, against the machine's clock, in seconds."""
        self._shifts[:] = struct.pack("<qq", ranks_s, others_s)
