"""Heartbeats: each rank says where it is; whoever supervises it sees a hang within a few steps' time.

Guarantees: a rank owns one file, RUN/heartbeats/rank-00000.json, one JSON object of fixed length. A beat overwrites it
in place by one write, and carries a checksum, so a reader takes a whole record or none. `hung` is a pure function: the
limit of a step is learned from the rank's own steps, the other phases have theirs in seconds.

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
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from electra_dist.config import ClusterConfig
from electra_dist.run.strikes import node_name
from electra_dist.store.local import writable

HEARTBEAT_DIR = "heartbeats"
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


@dataclass(frozen=True, kw_only=True)
class HangLimits:
    """Seconds without a beat after which a rank counts as hung."""

    setup_s: float = 1800.0  # start, restore, first shards; also the exempt first steps
    step_factor: float = 5.0  # times the learned step time ...
    step_floor_s: float = 30.0  # ... but never less: a step may wait for a shard
    checkpoint_s: float = 600.0
    eval_s: float = 600.0

    def of(self, beat: Beat) -> float:
        """The limit of the phase that a rank is in."""
        if beat.phase == "step" and beat.step_s is not None:
            return max(self.step_floor_s, self.step_factor * beat.step_s)
        return {"checkpoint": self.checkpoint_s, "eval": self.eval_s, "done": float("inf")}.get(
            beat.phase, self.setup_s
        )

    def of_its_collective(self, beat: Beat) -> float:
        """The same for who cannot see the other ranks, one of which may still be in the phase before (see `hung`)."""
        first_after_another = beat.phase == "step" and beat.time == beat.phase_since and beat.step_s is not None
        return max(self.of(beat), self.checkpoint_s, self.eval_s) if first_after_another else self.of(beat)


def hang_limits(cluster: ClusterConfig) -> HangLimits:
    """What the config says."""
    return HangLimits(
        setup_s=cluster.hang_setup_s,
        step_factor=cluster.hang_step_factor,
        step_floor_s=cluster.hang_step_floor_s,
        checkpoint_s=cluster.hang_checkpoint_s,
        eval_s=cluster.hang_eval_s,
    )


@dataclass(frozen=True, kw_only=True)
class Hung:
    """A rank that has been silent for too long."""

    rank: int
    host: str  # "" when the rank never beat
    phase: Phase
    step: int
    quiet_s: float
    limit_s: float


def hung(
    heartbeats: Iterable[Beat],
    now: float,
    limits: HangLimits,
    *,
    started: float = 0.0,
    ranks: Iterable[int] = (),
    everyone: Callable[[], Iterable[Beat]] = tuple,
) -> list[Hung]:
    """The hung ranks, the likely culprit first: fewest steps done, then longest silent (the others wait for it).

    The first step after another phase waits in its first collective for ranks that are still in that phase, as rank 0
    may be while an earlier checkpoint is being written: as long as there is one, its limit counts.

    Args:
        everyone: reads the beats of all nodes' ranks; asked only about such a first step.
        now: Unix time.
        started: when the ranks were started; older beats are of an earlier start and do not count.
        ranks: ranks that must exist; one that has not beaten since `started` is in setup since then.
    """
    current = {beat.rank: beat for beat in heartbeats if beat.time >= started}
    silent = []
    for b in current.values():
        since, limit_s = b.time, limits.of(b)
        if b.phase == "step" and b.time == b.phase_since and now - since > limit_s:
            others = [other for other in everyone() if other.attempt == b.attempt]
            since = max([since, *(other.phase_since for other in others)])
            limit_s = max([limit_s, *(limits.of(other) for other in others if other.phase in ("checkpoint", "eval"))])
        silent.append(Hung(rank=b.rank, host=b.host, phase=b.phase, step=b.step, quiet_s=now - since, limit_s=limit_s))
    silent += [
        Hung(rank=rank, host="", phase="setup", step=0, quiet_s=now - started, limit_s=limits.setup_s)
        for rank in ranks
        if rank not in current
    ]
    return sorted((h for h in silent if h.quiet_s > h.limit_s), key=lambda h: (h.step, -h.quiet_s, h.rank))


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
