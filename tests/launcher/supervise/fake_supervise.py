"""Runs electra_launcher.supervise with fake_rank.py in place of the training."""

from __future__ import annotations

import sys
from pathlib import Path

from electra_launcher.entry import outlive_the_reader
from electra_launcher.supervise import __main__ as supervise
from electra_launcher.supervise import hangs, rank_processes, supervisor

if __name__ == "__main__":
    outlive_the_reader()
    hangs._LEAVE_S = 3.0
    supervisor._LEDGER_S = 3.0
    rank_processes.RANK_PROGRAM = (str(Path(__file__).with_name("fake_rank.py")),)
    sys.exit(supervise.main())
