"""Heartbeats: each rank records its phase and step, so that its supervisor notices soon that it hangs.

Guarantee: each rank has one file, such as RUN/heartbeats/rank-00000.json, with one JSON object of fixed length. A beat
overwrites it in place by one write and carries a checksum, so a reader gets a whole record or none. `hung` is a pure
function: a rank is hung if its last heartbeat is older than the limit of its phase. The limit of a step is a multiple
of the rank's own step time, which is measured during the run; the other phases have fixed limits. Imports no torch.

How: heartbeats have Unix times. The supervisor, which must not be misled by a wall clock that jumps, dates them by its
own clock when it first sees them (launcher/electra_launcher/supervise/hangs.py).

Limits: a beat proves that the Python thread of the rank made progress, not that the GPU did. But every step waits for
its results before the update, so the beats of a rank whose GPU hangs end at the latest in the next step. Other nodes
see a beat only when the shared file system shows it to them (NFS: up to a minute later), so each node's supervisor
should watch its own ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import statistics
import time
import zlib
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from electra_dist.config import ClusterConfig
from electra_dist.errors import StoreError
from electra_dist.run.folder import HEARTBEAT_DIR
from electra_dist.run.records import Count, Number
from electra_dist.run.this_node import node_name
from electra_dist.store.atomic_files import read_regular, writable
from electra_dist.store.failure_kinds import is_worth_waiting_for
from electra_dist.store.json_file import DamagedJson, parse_json, validate_json

RECORD_BYTES = 512  # length of every heartbeat file
REASON_CHARACTERS = 160  # a longer reason is cut off
_NOT_PLAIN = re.compile(r'[^ -~]|["\\]')
LEARNED_STEPS = 20  # newest steps whose median is the learned step time
EXEMPT_STEPS = 5  # first steps, which compile, tune and allocate; they are not counted in the step time
_TRIES = 5  # how often a torn record is read: it is a write in progress, which takes microseconds
_TRY_AGAIN_S = 0.002  # between two of these reads
# Added to the patience with storage: a try that has begun may end after the patience does. A request to S3 that is
# silent ends after a minute (`Pace.rate_window_s`).
_STORAGE_MARGIN_S = 120.0

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
        self._host = node_name()[:64]  # cut off, so that a record has room in RECORD_BYTES
        self._pid = os.getpid()
        self._rank = rank
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
        # The newest heartbeat, as readers get it.
        self.last = Beat(
            pid=self._pid,
            host=self._host,
            rank=self._rank,
            attempt=self.attempt,
            phase=phase,
            step=step,
            time=round(now, 6),
            phase_since=round(self._phase_since, 6),
            step_s=round(statistics.median_high(self._step_times), 6) if self._step_times else None,
            # Without the characters that JSON would escape, so that the length of a record is known.
            reason=_NOT_PLAIN.sub("?", reason[:REASON_CHARACTERS]),
        )
        self._overwrite(self.last)

    def _overwrite(self, beat: Beat) -> None:
        """Write a heartbeat over the one in the file; ignore the error of a disk that is full, read-only or away.

        Any other error, such as a missing permission, is raised as a StoreError.
        """
        try:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
            os.pwrite(self._file, _encode(beat), 0)  # from the beginning of the file
        except OSError as error:
            if not is_worth_waiting_for(error):
                with writable(self._path):  # turns the error into a StoreError with the path; only on the slow path
                    raise

    def close(self) -> None:
        """Write a last heartbeat with phase "done" and close the file.

        Do not call this after a crash, because a rank in phase "done" never counts as hung.
        """
        self.beat("done", self._step)
        if self._file is not None:
            os.close(self._file)


def read_heartbeats(run_dir: Path, ranks: Iterable[int] | None = None) -> list[Beat]:
    """Return the newest heartbeats of `ranks` (None: of all ranks), sorted by rank; unreadable ones are left out.

    A heartbeat may be left from an earlier start of the run; its `attempt` is the number of that start.
    """
    folder = Path(run_dir) / HEARTBEAT_DIR
    paths: Iterable[Path] = folder.glob("rank-*.json")
    if ranks is not None:
        paths = [_file(folder, rank) for rank in ranks]
    beats = [_read(path) for path in paths]
    return sorted((beat for beat in beats if beat is not None), key=lambda beat: beat.rank)


def delete_preflight_heartbeat(run_dir: Path, rank: int) -> None:
    """Delete the heartbeat that preflight, the test before a run, wrote for a rank; its `attempt` is 0.

    Call this while the rank's process is not running. A heartbeat of training stays, and so does one that cannot be
    deleted.
    """
    if any(beat.attempt == 0 for beat in read_heartbeats(run_dir, [rank])):
        with contextlib.suppress(OSError):
            _file(Path(run_dir) / HEARTBEAT_DIR, rank).unlink()


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.json"


def _encode(beat: Beat) -> bytes:
    """Return a heartbeat as a JSON object with a CRC-32 of its other fields, and spaces up to `RECORD_BYTES` bytes."""
    data = json.dumps(vars(beat)).removesuffix("}").encode("ascii")
    line = (data + b', "crc": %d}' % zlib.crc32(data)).ljust(RECORD_BYTES - 1) + b"\n"
    assert len(line) == RECORD_BYTES, line
    return line


def _decode(line: bytes) -> Beat | None:
    """Return the heartbeat in a file's bytes, or None if length or checksum is wrong, as during a write."""
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
    """Return the heartbeat in a file, after another try if a write is in progress; None if it stays unreadable."""
    with contextlib.suppress(OSError, StoreError):
        for _ in range(_TRIES):
            beat = _decode(read_regular(path))
            if beat is not None:
                return beat
            time.sleep(_TRY_AGAIN_S)
    return None


def storage_limit_s(cluster: ClusterConfig) -> float:
    """Return the seconds that a rank may wait for storage, from the begin of the wait on, before it counts as hung."""
    return cluster.storage_patience_s + _STORAGE_MARGIN_S


def silence_limit_s(beat: Beat, cluster: ClusterConfig) -> float:
    """Return the longest allowed silence after heartbeat `beat`, in seconds; infinity if the rank is done.

    The config's keys `cluster.hang_...` set the limit of each phase. Until a rank knows its step time, the limit of
    the setup applies.
    """
    if beat.phase == "done":
        return float("inf")
    if beat.phase == "storage":
        return storage_limit_s(cluster)
    if beat.phase == "checkpoint":
        return cluster.hang_checkpoint_s
    if beat.phase == "eval":
        return cluster.hang_eval_s
    if beat.phase == "step" and beat.step_s is not None:
        return max(cluster.hang_step_floor_s, cluster.hang_step_factor * beat.step_s)
    return cluster.hang_setup_s


def collective_limit_s(beat: Beat, cluster: ClusterConfig) -> float:
    """Return the seconds that a collective of all ranks may take, after the newest heartbeat of this rank.

    In the first step after a checkpoint or evaluation, other ranks may still be busy with these, so the longest of the
    limits applies.
    """
    has_completed_no_step = beat.phase == "step" and beat.time == beat.phase_since  # since it entered the phase
    if has_completed_no_step and beat.step_s is not None:
        return max(silence_limit_s(beat, cluster), cluster.hang_checkpoint_s, cluster.hang_eval_s)
    return silence_limit_s(beat, cluster)


@dataclass(frozen=True, kw_only=True)
class Hung:
    """How long a rank has been silent, and the limit that applies to it."""

    rank: int
    host: str  # "" if the rank never sent a heartbeat
    phase: Phase
    step: int  # optimizer steps done
    quiet_s: float  # seconds without a heartbeat
    limit_s: float  # seconds above which the rank counts as hung

    @property
    def is_too_long(self) -> bool:
        """Return whether the rank has been silent for longer than its limit allows."""
        return self.quiet_s > self.limit_s


def hung(
    heartbeats: Iterable[Beat],
    now: float,
    cluster: ClusterConfig,
    *,
    started: float = 0.0,
    ranks: Iterable[int] = (),
    all_beats: Sequence[Beat] = (),
    not_before: float = float("-inf"),
) -> list[Hung]:
    """Find the hung ranks at the Unix time `now`; the likely culprit comes first: fewest steps, then longest silence.

    Other ranks usually wait for the culprit in a collective. So a rank above its own limit counts as hung only if the
    ranks for which it may wait have all been silent, too, for the longest of their limits. These are ranks that have
    made no more steps, or that wait for storage; `all_beats` has the heartbeats of all nodes to find them.

    Heartbeats before `started` are ignored; a rank of `ranks` without a newer one counts as in setup since `started`.
    Until `not_before` no heartbeat could be written, so the time before it is no silence.
    """
    beat_of_rank = {beat.rank: beat for beat in heartbeats if beat.time >= started}
    silences = []
    for beat in beat_of_rank.values():
        silence = _silence_among_others(beat, (), now, cluster, not_before)
        if silence.is_too_long:
            silence = _silence_among_others(beat, all_beats, now, cluster, not_before)
        silences.append(silence)
    for rank in ranks:
        if rank not in beat_of_rank:
            quiet_s = now - max(started, not_before)
            missing_rank = Hung(
                rank=rank, host="", phase="setup", step=0, quiet_s=quiet_s, limit_s=cluster.hang_setup_s
            )
            silences.append(missing_rank)
    hung_ranks = [silence for silence in silences if silence.is_too_long]
    return sorted(hung_ranks, key=lambda silence: (silence.step, -silence.quiet_s, silence.rank))


def _silence_among_others(
    beat: Beat, all_beats: Iterable[Beat], now: float, cluster: ClusterConfig, not_before: float
) -> Hung:
    """Return how long a rank and all ranks for which it may wait have been silent, and the longest of their limits."""
    waited_for = [other for other in all_beats if other.attempt == beat.attempt and _may_wait_for(beat, other)]
    considered = [beat, *waited_for]
    silent_since = max(_silent_since(considered_beat) for considered_beat in considered)
    limit_s = max(silence_limit_s(considered_beat, cluster) for considered_beat in considered)
    return Hung(
        rank=beat.rank,
        host=beat.host,
        phase=beat.phase,
        step=beat.step,
        quiet_s=now - max(silent_since, not_before),
        limit_s=limit_s,
    )


def _may_wait_for(beat: Beat, other: Beat) -> bool:
    """Return whether a rank may wait for `other`: one that waits for storage, or is not done and has no more steps."""
    # The heartbeats of a rank in phase "storage" may come late, so it counts in any case.
    return other.phase == "storage" or (other.phase != "done" and other.step <= beat.step)


def _silent_since(beat: Beat) -> float:
    # A rank that waits for storage goes on sending heartbeats: only the length of the wait shows that it hangs.
    return beat.phase_since if beat.phase == "storage" else beat.time
