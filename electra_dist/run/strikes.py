"""strikes.jsonl: nodes that were found at fault, living with the run; what the next submission leaves out.

Guarantees: a strike is on the disk (fsync) when `add_strike` returns. Any number of nodes may add at once: each takes
a lock on the file, cuts off what a killed writer left half written, and appends one line by one write of at most
PIPE_BUF bytes. `excluded_nodes` is a pure function: strikes expire, so that a mended node comes back by itself.

Cost: one fsync a strike; strikes are rare. Imports no torch.

Where it stops: it names nodes and does not touch the scheduler. On a shared file system without locks the write is
still one append, but a line that a killed machine left torn is not repaired and must be deleted by hand.
"""

from __future__ import annotations

import dataclasses
import fcntl
import os
import select
import socket
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from electra_dist.errors import UserError
from electra_dist.run.folder import STRIKES_FILE
from electra_dist.run.jsonl import encode, read_records
from electra_dist.store.files import writable

EXPIRES_S = 24 * 3600.0
_REASON_CHARS, _NAME_CHARS = 300, 64  # a character is at most 6 bytes of JSON: a line stays within PIPE_BUF (4096)


@dataclass(frozen=True, kw_only=True)
class Strike:
    """One reason not to use a node."""

    time: float  # Unix seconds
    node: str  # the name that the scheduler and the host file know it by
    device: str  # "GPU 3", or "" for the node as a whole
    reason: str
    by: str  # who found it: "preflight", "supervise", ...


def node_name(environ: Mapping[str, str] = os.environ) -> str:
    """This node's name: Slurm's, which `sbatch --exclude` understands, else the host's."""
    return environ.get("SLURMD_NODENAME") or socket.gethostname()


def add_strike(run_dir: Path, strike: Strike) -> None:
    """Append a strike to `run_dir`/strikes.jsonl; durable on return. Long or odd texts are shortened to one line.

    Raises:
        StoreError: the run folder cannot be written.
    """
    fields = dataclasses.asdict(strike)
    for name in ("node", "device", "reason", "by"):
        fields[name] = _plain(fields[name], _REASON_CHARS if name == "reason" else _NAME_CHARS)
    line = encode(fields)
    assert len(line) <= select.PIPE_BUF, len(line)
    path = Path(run_dir) / STRIKES_FILE
    with writable(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            if _lock(descriptor):
                _cut_torn_line(descriptor)
            os.write(descriptor, line)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read_strikes(run_dir: Path) -> list[Strike]:
    """All strikes of a run, oldest first; none without a file.

    Raises:
        UserError: names the line that is no strike.
    """
    path = Path(run_dir) / STRIKES_FILE
    strikes = []
    for number, record in enumerate(read_records(path), start=1):
        try:
            strikes.append(Strike(**record))
        except TypeError:
            raise UserError(f"{path}:{number}: not a strike; delete this line or the file") from None
    return strikes


def excluded_nodes(
    strikes: Iterable[Strike], now: float, *, expires_s: float = EXPIRES_S, threshold: int = 1
) -> list[str]:
    """Sorted names of the nodes with at least `threshold` strikes younger than `expires_s` at Unix time `now`."""
    counts = Counter(strike.node for strike in strikes if now - strike.time < expires_s)
    return sorted(node for node, count in counts.items() if count >= threshold)


def _lock(descriptor: int) -> bool:
    """Whether the file is ours alone until it is closed; False where the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:
        return False
    return True


def _cut_torn_line(descriptor: int) -> None:
    size = os.fstat(descriptor).st_size
    tail = os.pread(descriptor, select.PIPE_BUF, max(0, size - select.PIPE_BUF))
    os.ftruncate(descriptor, size - (len(tail) - tail.rfind(b"\n") - 1))


def _plain(text: str, max_chars: int) -> str:
    return " ".join(text.split())[:max_chars]
