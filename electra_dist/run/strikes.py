"""Record faults of nodes (strikes) in strikes.jsonl, so that the next submission to Slurm excludes these nodes.

Guarantee: a strike is on the disk (fsync) when `add_strike` returns. Any number of nodes may add strikes at once: each
takes a lock on the file, cuts off a line that a killed writer left unfinished, and appends one line by one write of at
most PIPE_BUF bytes. Strikes expire, so that a repaired node is used again without any action. Imports no torch.

Limits: this module only records and lists nodes; it does not talk to the scheduler. On a shared file system without
locks, a torn line that a killed machine left is not removed and must be deleted by hand.
"""

from __future__ import annotations

import os
import select
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from electra_dist.run.folder import STRIKES_FILE
from electra_dist.run.records import Number, Record, encode, read_records
from electra_dist.store.atomic_files import lock_file, make_folder, sync_folder, writable
from electra_dist.store.patience import Patience, waiting

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


def add_strike(run_dir: Path, strike: Strike, patience: Patience | None = None) -> None:
    """Append a strike to the run's strikes.jsonl; it is on the disk on return.

    Texts are shortened to one line: 300 characters for the reason, 64 for each other field. If the disk is full or
    away, wait for it as long as `patience` says; None: not at all.
    """
    line = _encode_strike(strike)
    waiting(patience, lambda: _append(Path(run_dir) / STRIKES_FILE, line))


def _append(path: Path, line: bytes) -> None:
    with writable(path):
        make_folder(path.parent)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            is_locked = lock_file(descriptor)
            if is_locked:  # Without the lock, a torn line may be one that another node is writing now.
                _cut_torn_line(descriptor)
            os.write(descriptor, line)
            os.fsync(descriptor)
            sync_folder(path.parent)  # which may just have got the file
        finally:
            os.close(descriptor)  # releases the lock


def _encode_strike(strike: Strike) -> bytes:
    """Return a strike as a line of at most PIPE_BUF (4096) bytes, which the system writes in one piece."""
    short = Strike(
        time=strike.time,
        node=_plain(strike.node, _NAME_CHARS),
        device=_plain(strike.device, _NAME_CHARS),
        reason=_plain(strike.reason, _REASON_CHARS),
        by=_plain(strike.by, _NAME_CHARS),
    )
    line = encode(short)
    assert len(line) <= select.PIPE_BUF, len(line)
    return line


def read_strikes(run_dir: Path, patience: Patience | None = None) -> list[Strike]:
    """Return all strikes of a run, oldest first, also expired ones; [] if there is no file.

    If the disk is away, wait for it as long as `patience` says; None: not at all.
    """
    return waiting(patience, lambda: list(read_records(Path(run_dir) / STRIKES_FILE, Strike.model_validate)))


def excluded_nodes(
    strikes: Iterable[Strike], now: float, *, expires_s: float = EXPIRES_S, threshold: int = 1
) -> list[str]:
    """Return the sorted names of nodes with at least `threshold` strikes younger than `expires_s` seconds at `now`.

    A strike dated in the future counts, because the clocks of nodes differ. If the date is more than two days ahead,
    the strike does not count: its clock was wrong, and it would exclude the node for too long.
    """
    strikes_by_node = Counter(strike.node for strike in strikes if -_MOST_AHEAD_S < now - strike.time < expires_s)
    return sorted(node for node, num_strikes in strikes_by_node.items() if num_strikes >= threshold)


def _cut_torn_line(descriptor: int) -> None:
    """Truncate an open file after its last newline, which is in the last PIPE_BUF bytes: no line is longer."""
    size = os.fstat(descriptor).st_size
    tail = os.pread(descriptor, select.PIPE_BUF, max(0, size - select.PIPE_BUF))
    whole_lines_bytes = tail.rfind(b"\n") + 1  # 0 if there is no newline
    torn_bytes = len(tail) - whole_lines_bytes
    os.ftruncate(descriptor, size - torn_bytes)


def _plain(text: str, max_chars: int) -> str:
    return " ".join(text.split())[:max_chars]
