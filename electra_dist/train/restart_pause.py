"""Record that a start of a run has ended for lack of storage, and let the next start wait before it begins.

Guarantee: after a start that ended because storage stayed full or away (ledger event `storage`), the next one begins
no sooner than ten minutes later, whoever starts it: a supervisor, Slurm or a person. So the jobs of a Slurm chain are
not all spent while storage is away.

Limits: if the ledger cannot be written, there is no event and no pause; the next start then waits for storage itself,
at most `cluster.storage_patience_s`. The age of the event is taken by the wall clock, but even if the clock was set
back, no pause is longer than ten minutes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from electra_dist.collectives import from_rank_0, gather
from electra_dist.errors import UserError
from electra_dist.run.folder import is_run_folder
from electra_dist.run.ledger import Ledger, LedgerEvent, read_ledger
from electra_dist.store.patience import print_line
from electra_dist.train.health.stop_request import StopRequest

PAUSE_S = 600.0
_POLL_S = 1.0  # seconds between two checks for a request to stop


def record_lost_storage(run_dir: Path, why: str) -> None:
    """Append the event `storage` to a run's ledger, unless the ledger ends with this event already.

    Errors are ignored, because the ledger may be on the disk that cannot be reached.
    """
    with contextlib.suppress(UserError, OSError):
        if not is_run_folder(run_dir):
            return
        events = read_ledger(run_dir)
        if events and events[-1].event == "storage":
            return
        ledger = Ledger(run_dir)
        try:
            ledger.append("storage", events[-1].step if events else 0, why=why)
        finally:
            ledger.discard()  # This closes the file, and does not try again to write an event that was refused.


def remaining_pause_s(ledger: Sequence[LedgerEvent], now: float) -> float:
    """Return the seconds to wait from Unix time `now`; 0 unless the last start ended for lack of storage."""
    if not ledger or ledger[-1].event != "storage":
        return 0.0
    return min(PAUSE_S, max(0.0, ledger[-1].unix_s + PAUSE_S - now))


def pause_after_lost_storage(run_dir: Path, stop: StopRequest) -> bool:
    """If the last start ended for lack of storage, wait until ten minutes after its end. Collective.

    Returns True if the run was asked to stop meanwhile.
    """
    pause_s = from_rank_0(lambda: _read_pause_s(run_dir))
    end = time.monotonic() + pause_s
    while time.monotonic() < end:
        time.sleep(min(_POLL_S, max(0.0, end - time.monotonic())))
        if any(gather(stop.wants_stop())):
            return True
    return False


def _read_pause_s(run_dir: Path) -> float:
    """Return how many seconds this start must wait for its turn; print a line unless it is 0. Rank 0 only."""
    ledger = []
    with contextlib.suppress(UserError, OSError):  # A damaged or silent ledger is reported where it is needed.
        ledger = read_ledger(run_dir)
    pause_s = remaining_pause_s(ledger, datetime.now(UTC).timestamp())
    if pause_s > 0:
        print_line(
            f"the last start ended because storage stayed away ({ledger[-1].why}); this one begins in "
            f"{pause_s:.0f} s, send SIGTERM to end it"
        )
    return pause_s
