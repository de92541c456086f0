"""Write and read heartbeats: each rank records its phase and step, so that a supervisor notices a hang quickly.

Guarantee: each rank has one file, such as RUN/heartbeats/rank-00000.json, with one JSON object of fixed length. A beat
overwrites it in place by one write and carries a checksum, so a reader gets a whole record or none.
`analysis/hung_ranks.py` decides from these files which ranks hang. Imports no torch.

Limits: a beat proves that the Python thread of the rank made progress, not that the GPU did. But every step waits for
its results before the update, so the beats of a rank whose GPU hangs end at the latest in the next step. Other nodes
see a beat only when the shared file system shows it to them (NFS: up to a minute later), so each node's supervisor
should watch its own ranks.
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
from typing import Literal

from pydantic import TypeAdapter

from electra_dist.errors import StoreError
from electra_dist.run.folder import HEARTBEAT_DIR
from electra_dist.run.node_strikes import node_name
from electra_dist.run.records import Count, Number
from electra_dist.store.atomic_files import writable
from electra_dist.store.failure_kinds import is_worth_waiting_for
from electra_dist.store.json_file import DamagedJson, parse_json, validate_json
from electra_dist.store.regular_files import read_regular

RECORD_BYTES = 512  # length of every heartbeat file
REASON_CHARACTERS = 160  # a longer reason is cut off
LEARNED_STEPS = 20  # newest steps whose median is the learned step time
EXEMPT_STEPS = 5  # first steps, which compile, tune and allocate; they are not counted in the step time
_TRIES = 5  # how often a torn record is read: it is a write in progress, which takes microseconds
_TRY_AGAIN_S = 0.002  # between two of these reads

Phase = Literal["setup", "step", "checkpoint", "eval", "storage", "done"]  # storage: it waits for storage


@dataclass(frozen=True, kw_only=True)
class Beat:
    """Newest heartbeat of a rank: the phase and step in which the rank is. Times are Unix seconds."""

    pid: int
    host: str  # name of the node, as in strikes.jsonl
    rank: Count
    attempt: Count  # number of this start of the run, from 1; 0 until it is known
    phase: Phase
    step: Count  # optimizer steps done
    time: Number  # of this beat
    phase_since: Number  # first beat of this phase
    step_s: Number | None  # median time of the newest steps; None until more than `EXEMPT_STEPS` are timed
    reason: str = ""  # what this rank waits for, in the training thread (phase "storage") or in another one


_BEAT = TypeAdapter(Beat)


class Heartbeat:
    """Writer of this rank's heartbeat file, from which a supervisor notices that the rank hangs.

    Call `beat` at every step and at every change of phase, and `close` when the run ends normally.
    """

    def __init__(self, run_dir: Path, rank: int, attempt: int = 0) -> None:
        """Write a first heartbeat with phase "setup". The number of this start, `attempt`, may be set later."""
        host = json.dumps(node_name()[:64])  # cut off, so that a record has room in RECORD_BYTES
        self._first_fields = f'{{"pid": {os.getpid()}, "host": {host}, "rank": {rank}, '  # equal in every record
        self.attempt = attempt
        self._path = _file(Path(run_dir) / HEARTBEAT_DIR, rank)
        self._step = 0
        self._phase = ""
        self._last_beat = 0.0  # by `time.monotonic`, so that a jump of the wall clock is no step time
        self._phase_since = 0.0
        self._step_times: deque[float] = deque(maxlen=LEARNED_STEPS)  # seconds per step, the newest last
        self._num_timed = 0  # pairs of beats in a row of phase "step", the first ones included
        self._file: int | None = None  # None until the disk has accepted the file
        self.beat("setup", 0)

    def beat(self, phase: Phase, step: int, reason: str = "") -> None:
        """Record that the rank is in `phase` with `step` optimizer steps done, in about 10 us and without fsync.

        If the disk is full, read-only or away, the record is dropped silently, because no run should end for a
        heartbeat. `reason` says what a thread of the rank waits for, such as "RUN/checkpoints/...: disk full". The
        time from one beat with phase "step" to the next counts as a step time, by which readers notice a hang.
        """
        now = time.time()
        monotonic_now = time.monotonic()
        if phase == self._phase == "step" and step > self._step:
            self._num_timed += 1
            if self._num_timed > EXEMPT_STEPS:  # The first steps compile and allocate, so they take longer.
                self._step_times.append((monotonic_now - self._last_beat) / (step - self._step))
        if phase != self._phase:
            self._phase = phase
            self._phase_since = now
        self._last_beat = monotonic_now
        self._step = step
        self._line = _encode(
            f'{self._first_fields}"attempt": {self.attempt}, "phase": "{phase}", "step": {step}, "time": {now:.6f}, '
            f'"phase_since": {self._phase_since:.6f}, "step_s": {self._median_step_s()}, "reason": "{_plain(reason)}"'
        )
        try:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
            os.pwrite(self._file, self._line, 0)  # Overwrite the last record from the beginning of the file.
        except OSError as error:
            if not is_worth_waiting_for(error):
                with writable(self._path):  # turns the error into a StoreError with the path; only on the slow path
                    raise

    @property
    def last(self) -> Beat:
        """Return the newest heartbeat that this rank wrote, as readers get it (times are rounded to microseconds)."""
        beat = _decode(self._line)
        assert beat is not None  # The record was encoded by `_encode`, so its checksum fits.
        return beat

    def close(self) -> None:
        """Write a last heartbeat with phase "done" and close the file.

        Do not call this after a crash, because a rank in phase "done" never counts as hung.
        """
        self.beat("done", self._step)
        if self._file is not None:
            os.close(self._file)

    def _median_step_s(self) -> str:
        """Return the median time of the newest steps as JSON text: seconds, or null if no step time is known yet."""
        if not self._step_times:
            return "null"
        newest = sorted(self._step_times)
        return f"{newest[len(newest) // 2]:.6f}"


def read_heartbeats(run_dir: Path, ranks: Iterable[int] | None = None) -> list[Beat]:
    """Return the newest heartbeats of `ranks` (None: all), sorted by rank; some may be of an earlier start."""
    folder = Path(run_dir) / HEARTBEAT_DIR
    paths: Iterable[Path] = folder.glob("rank-*.json")
    if ranks is not None:
        paths = [_file(folder, rank) for rank in ranks]
    beats = [_read(path) for path in paths]
    return sorted((beat for beat in beats if beat is not None), key=lambda beat: beat.rank)


def delete_preflight_heartbeat(run_dir: Path, rank: int) -> None:
    """Delete a rank's heartbeat if it has `attempt` 0, because preflight, the test before a run, wrote it.

    Call this while the rank's process is not running. A heartbeat that cannot be deleted stays.
    """
    if any(beat.attempt == 0 for beat in read_heartbeats(run_dir, [rank])):
        with contextlib.suppress(OSError):
            _file(Path(run_dir) / HEARTBEAT_DIR, rank).unlink()


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.json"


def _plain(reason: str) -> str:
    """Cut a reason to `REASON_CHARACTERS`, and put "?" for characters that are not ASCII or need an escape in JSON."""
    shortened = reason[:REASON_CHARACTERS]
    return "".join(char if " " <= char <= "~" and char not in '"\\' else "?" for char in shortened)


def _encode(body: str) -> bytes:
    """Add a CRC-32 and spaces to `body`, such as `{"pid": 7`; return a record of `RECORD_BYTES` bytes."""
    data = body.encode("ascii")
    line = (data + b', "crc": %d}' % zlib.crc32(data)).ljust(RECORD_BYTES - 1) + b"\n"
    assert len(line) == RECORD_BYTES, line
    return line


def _decode(line: bytes) -> Beat | None:
    """Return the heartbeat in a file's bytes; None if length or checksum is wrong, as while the file is written."""
    body, _, rest = line.partition(b', "crc": ')
    checksum = rest.partition(b"}")[0]
    is_whole = len(line) == RECORD_BYTES and checksum.isdigit()
    if not is_whole or checksum != str(zlib.crc32(body)).encode():
        return None
    try:
        return validate_json(_BEAT, parse_json(body + b"}"))
    except DamagedJson:
        return None


def _read(path: Path) -> Beat | None:
    """Return the heartbeat in a file; read it again if a write is in progress. None if it stays unreadable."""
    with contextlib.suppress(OSError, StoreError):
        for _ in range(_TRIES):
            beat = _decode(read_regular(path))
            if beat is not None:
                return beat
            time.sleep(_TRY_AGAIN_S)
    return None
