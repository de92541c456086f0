"""Record faults of nodes (strikes) in strikes.jsonl, so that the next submission to Slurm excludes these nodes.

Guarantee: a strike is on the disk (fsync) when `add_strike` returns. Any number of nodes may add strikes at once: each
takes a lock on the file (`records.py`), and appends one line of at most PIPE_BUF bytes by one write. Strikes expire,
so that a repaired node is used again without any action. Imports no torch.

Limits: this module only records and lists nodes; it does not talk to the scheduler. On a shared file system without
locks, a torn line that a killed machine left is not removed and must be deleted by hand.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from electra_dist.run.folder import STRIKES_FILE
from electra_dist.run.records import Number, Record, append_record, read_records
from electra_dist.store.patience import Patience, patient

EXPIRES_S = 24 * 3600.0  # age at which a strike no longer counts
_MOST_AHEAD_S = 48 * 3600.0  # a strike dated further ahead of this node's clock is ignored
# A character takes at most 6 bytes of JSON, so with these limits a line stays within PIPE_BUF (4096 bytes).
_REASON_CHARS = 300
_NAME_CHARS = 64


class Strike(Record):
    """Record of one fault of a node: which device failed, when and why, and which part of the software noticed it."""

    time: Number  # Unix seconds
    node: str  # its name for the scheduler and in the host file
    device: str  # "GPU 3", or "" for the node as a whole
    reason: str
    by: str  # the part that found it: "preflight", "supervise", ...


@patient
def add_strike(run_dir: Path, strike: Strike, *, patience: Patience | None = None) -> None:
    """Append a strike to the run's strikes.jsonl; it is on the disk on return.

    Texts are shortened to one line: 300 characters for the reason, 64 for each other field. If the disk is full or
    away, wait for it as long as `patience` says; None: not at all.
    """
    short = Strike(
        time=strike.time,
        node=_plain(strike.node, _NAME_CHARS),
        device=_plain(strike.device, _NAME_CHARS),
        reason=_plain(strike.reason, _REASON_CHARS),
        by=_plain(strike.by, _NAME_CHARS),
    )
    append_record(Path(run_dir) / STRIKES_FILE, short, shared=True)


@patient
def read_strikes(run_dir: Path, *, patience: Patience | None = None) -> list[Strike]:
    """Return all strikes of a run, oldest first, also expired ones; [] if there is no file.

    If the disk is away, wait for it as long as `patience` says; None: not at all.
    """
    return list(read_records(Path(run_dir) / STRIKES_FILE, Strike.model_validate))


def excluded_nodes(strikes: Iterable[Strike], now: float, *, expires_s: float = EXPIRES_S) -> list[str]:
    """Return the sorted names of the nodes with a strike that is younger than `expires_s` seconds at `now`.

    A strike dated in the future counts, because the clocks of nodes differ. If the date is more than two days ahead,
    the strike does not count: its clock was wrong, and it would exclude the node for too long.
    """
    return sorted({strike.node for strike in strikes if -_MOST_AHEAD_S < now - strike.time < expires_s})


def _plain(text: str, max_chars: int) -> str:
    return " ".join(text.split())[:max_chars]
