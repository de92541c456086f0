"""Heartbeats: each rank says where it is; whoever supervises it sees a hang within a few steps' time.

Guarantees: a rank owns one file, RUN/heartbeats/rank-00000.json, one JSON object of fixed length. A beat overwrites it
in place by one write, and carries a checksum, so a reader takes a whole record or none. `analysis/hangs.py` decides
from these files which ranks hang.

Cost: 10 us a beat, measured on a local disk and in memory alike; no fsync, and no disk block is allocated after the
first beat. Imports no torch.

Where it stops: a beat proves that the Python thread of the rank went on, not that the GPU did; the loop reads a result
back at log steps. Other nodes see a beat as late as the shared file system shows it to them (NFS: up to a minute), so
each node's supervisor should watch its own ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import zlib
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from electra_dist.run.folder import HEARTBEAT_DIR
from electra_dist.run.strikes import node_name
from electra_dist.store.files import writable

RECORD_BYTES = 320
LEARNED_STEPS = 20  # newest steps whose median is the learned step time
EXEMPT_STEPS = 5  # first steps, which compile, tune and allocate: nothing is learned from them
_TRIES, _TRY_AGAIN_S = 5, 0.002  # a torn read is of a write in progress, which takes microseconds

Phase = Literal["setup", "step", "checkpoint", "eval", "done"]


@dataclass(frozen=True, kw_only=True)
class Beat:
    """What a rank last said. Times are Unix seconds."""

    pid: int
    host: str
    rank: int
    attempt: int
    phase: Phase
    step: int  # optimizer steps done
    time: float  # of this beat
    phase_since: float
    step_s: float | None  # median of the newest steps; None during the exempt ones


class Heartbeat:
    """This rank's file; `close` says "done"."""

    def __init__(self, run_dir: Path, rank: int, attempt: int = 0) -> None:
        """Open the file and beat once, in phase "setup" at step 0. `attempt` may be set later, once it is known.

        Raises:
            StoreError: the run folder cannot be written.
        """
        path = _file(Path(run_dir) / HEARTBEAT_DIR, rank)
        host = json.dumps(node_name()[:64])
        self._fixed = f'{{"pid": {os.getpid()}, "host": {host}, "rank": {rank}, '
        self.attempt = attempt
        self._path, self._step, self._phase = path, 0, ""
        self._now = self._since = 0.0
        self._step_times: deque[float] = deque(maxlen=LEARNED_STEPS)
        self._num_timed = 0
        with writable(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        self.beat("setup", 0)

    def beat(self, phase: Phase, step: int) -> None:
        """Say that the rank is in `phase` with `step` steps done. Call it at every step and change of phase.

        The time between two beats of phase "step" is learned as that of the steps between them.

        Raises:
            StoreError: the disk is full.
        """
        now = time.time()
        if phase == self._phase == "step" and step > self._step:
            self._num_timed += 1
            if self._num_timed > EXEMPT_STEPS:
                self._step_times.append((now - self._now) / (step - self._step))
        if phase != self._phase:
            self._phase, self._since = phase, now
        self._now, self._step = now, step
        self._line = _encode(
            f'{self._fixed}"attempt": {self.attempt}, "phase": "{phase}", "step": {step}, "time": {now:.6f}, '
            f'"phase_since": {self._since:.6f}, "step_s": {self._learned()}'
        )
        try:
            os.pwrite(self._file, self._line, 0)
        except OSError:
            with writable(self._path):
                raise

    @property
    def last(self) -> Beat:
        """What was said last, as others read it."""
        beat = _decode(self._line)
        assert beat is not None
        return beat

    def close(self) -> None:
        """Beat "done" at the last step and close. Not called by a rank that crashes."""
        self.beat("done", self._step)
        os.close(self._file)

    def _learned(self) -> str:
        if not self._step_times:
            return "null"
        newest = sorted(self._step_times)
        return f"{newest[len(newest) // 2]:.6f}"


def read_heartbeats(run_dir: Path, ranks: Iterable[int] | None = None) -> list[Beat]:
    """The last beat of every rank that ever beat, or of some, by rank; of earlier attempts too."""
    folder = Path(run_dir) / HEARTBEAT_DIR
    paths = folder.glob("rank-*.json") if ranks is None else (_file(folder, rank) for rank in ranks)
    beats = (_read(path) for path in paths)
    return sorted((beat for beat in beats if beat), key=lambda beat: beat.rank)


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.json"


def _encode(body: str) -> bytes:
    """`{"pid": ..., "crc": 123}` padded with spaces to RECORD_BYTES; the checksum is over all before its key."""
    data = body.encode("ascii")
    line = (data + b', "crc": %d}' % zlib.crc32(data)).ljust(RECORD_BYTES - 1) + b"\n"
    assert len(line) == RECORD_BYTES, line
    return line


def _decode(line: bytes) -> Beat | None:
    body, _, rest = line.partition(b', "crc": ')
    checksum = rest.partition(b"}")[0]
    if len(line) != RECORD_BYTES or not checksum.isdigit() or int(checksum) != zlib.crc32(body):
        return None
    fields: dict[str, Any] = json.loads(body + b"}")
    return Beat(**fields)


def _read(path: Path) -> Beat | None:
    """A rank's beat; None without a file, or for one that stays torn, as a machine that lost power may leave it."""
    with contextlib.suppress(FileNotFoundError):
        for _ in range(_TRIES):
            if beat := _decode(path.read_bytes()):
                return beat
            time.sleep(_TRY_AGAIN_S)
    return None
