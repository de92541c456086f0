"""Write, find and judge the files in RUN/lease, each of which describes the owner of one lease of the run folder.

A lease is the right to train in the folder. Each new owner creates the lease with the next number.

Guarantee: of several processes that create the lease of the same number, on any machines, exactly one succeeds. The
content of a file never changes, so no reader sees half a renewal: the owner renews its lease by setting the file's
modification time, and releases it by renaming 000007.json to 000007.released. Imports no torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from pydantic import TypeAdapter

from electra_dist.errors import StoreError
from electra_dist.run.processes import ProcessIdentity, is_of_this_machine, is_running, node_name, this_process
from electra_dist.store.atomic_files import is_temporary, replacing
from electra_dist.store.json_file import DamagedJson, parse_json_object, validate_json
from electra_dist.store.regular_files import read_regular

_LEASE_NAME = re.compile(r"(?P<number>\d{6,18})\.(json|released)")  # 000007.json
_TRIES = 20  # of reading the newest lease, which may be released or taken over meanwhile
_LATEST_TIME = 1e11  # Unix seconds; a later time is no time of a lease


@dataclass(frozen=True, kw_only=True)
class LeaseOwner:
    """Process that holds the lease of a run folder (the right to train in it), as the lease's file describes it."""

    token: str  # random; no other lease has it
    holder: str  # "supervisor" or "rank 0"
    host: str  # name of the node, as in strikes.jsonl
    pid: int
    process_start: int  # this and the next two fields: see ProcessIdentity
    pid_namespace: str
    boot_id: str
    has_lock: bool  # whether the owner holds an flock on the file
    since: float  # Unix time at which the lease was taken
    slurm_job: str  # "" outside Slurm

    @property
    def description(self) -> str:
        """Return who the owner is, such as "supervisor on host n1, pid 4711, since 2026-07-01T10:00:00+00:00"."""
        since = datetime.fromtimestamp(self.since, UTC).isoformat(timespec="seconds")
        job = f", Slurm job {self.slurm_job}" if self.slurm_job else ""
        return f"{self.holder} on host {self.host}, pid {self.pid}, since {since}{job}"

    @property
    def process(self) -> ProcessIdentity:
        """Return the identity of the owner's process."""
        return ProcessIdentity(
            pid=self.pid, start=self.process_start, pid_namespace=self.pid_namespace, boot_id=self.boot_id
        )


_OWNER = TypeAdapter(LeaseOwner)


@dataclass(frozen=True, kw_only=True)
class FoundLease:
    """Newest lease of a run folder at one moment. Two readings are equal if nobody renewed the lease in between."""

    number: int  # 0: no lease was ever taken
    path: Path
    content: bytes
    renewed_ns: int  # modification time of the file, Unix time in nanoseconds

    @property
    def is_released(self) -> bool:
        """Return whether the owner has released the lease; True also if no lease was ever taken."""
        return self.number == 0 or self.path.suffix == ".released"

    @property
    def owner(self) -> LeaseOwner | None:
        """Return the owner that the lease's file describes; None if the file is damaged."""
        return _decode(self.content)

    @property
    def description(self) -> str:
        """Return who the owner is, for messages, or that the lease's file is damaged."""
        owner = self.owner
        return f"an owner whose file {self.path} is damaged" if owner is None else owner.description

    @property
    def has_ended(self) -> bool | None:
        """Return whether no living process owns the lease; None if unknown, for example for another machine's."""
        if self.is_released:
            return True
        owner = self.owner
        if owner is None:
            return None
        lives = is_running(owner.process)
        if lives is False:
            return True
        if not owner.has_lock or not is_of_this_machine(owner.process):
            return None if lives is None else False
        if lives and _is_unlocked(self.path):
            return None  # The folder is a copy, or a network file system has lost the lock.
        return _is_unlocked(self.path)  # The owner may be in another container, where its process cannot be seen.


def find_newest(folder: Path) -> FoundLease:
    """Return the newest lease in the folder RUN/lease, with number 0 if there is none; OSError if reading fails."""
    for _ in range(_TRIES):
        files = lease_files(folder)
        if not files:
            return FoundLease(number=0, path=folder, content=b"", renewed_ns=0)
        path = max(files, key=number_of)
        with contextlib.suppress(FileNotFoundError):  # It was released, or taken over, since it was listed.
            return FoundLease(
                number=number_of(path), path=path, content=read_regular(path), renewed_ns=path.stat().st_mtime_ns
            )
    raise OSError(errno.ESTALE, "the newest lease is listed and is not there", str(folder))


def create(folder: Path, number: int, holder: str) -> tuple[FoundLease, int] | None:
    """Create the file of a lease for this process, and delete the files of earlier leases and unfinished files.

    `number` is one more than the newest lease's number. Returns the lease, and a file descriptor that keeps the file
    locked until it is closed or the process ends. Returns None if another process has created the file.
    """
    path = folder / f"{number:06d}.json"
    if path.with_suffix(".released").exists():
        return None
    lock = write_locked(path, lambda has_lock: _encode(_describe_this_process(holder, has_lock=has_lock)))
    if lock is None:
        return None
    for file in folder.iterdir():
        is_older = _LEASE_NAME.fullmatch(file.name) is not None and number_of(file) < number
        if is_older or is_temporary(file.name):
            with contextlib.suppress(OSError):  # A foreign folder may have such a name.
                file.unlink()
    content = read_regular(path)
    return FoundLease(number=number, path=path, content=content, renewed_ns=path.stat().st_mtime_ns), lock


def write_locked(path: Path, make_content: Callable[[bool], bytes]) -> int | None:
    """Create a file that this process locks before other processes can see it; return the descriptor with the lock.

    `make_content` gets True if the file could be locked, and returns its content. Returns None if the file exists.
    """
    lock = -1
    try:
        with replacing(path, only_new=True) as file:
            lock = os.dup(file.fileno())  # keeps the lock when `file` is closed
            file.write(make_content(_try_lock(lock, fcntl.LOCK_EX)))
    except (FileExistsError, StoreError):
        if lock >= 0:
            os.close(lock)
        if path.exists():
            return None  # Another process was faster, and may have deleted the unfinished file of this one.
        raise
    return lock


def renew(path: Path) -> None:
    """Renew a lease: set the modification time of its file to the present time; raise OSError if it is gone."""
    now_ns = time.time_ns()
    if path.stat().st_mtime_ns == now_ns:
        now_ns += 1000  # A clock that stands still must not make the lease look abandoned.
    os.utime(path, ns=(now_ns, now_ns))


def release(path: Path) -> None:
    """Mark a lease as released. Ignore a failure, because a lease that is not renewed expires anyway."""
    with contextlib.suppress(OSError):
        path.rename(path.with_suffix(".released"))


def lease_files(folder: Path) -> list[Path]:
    """Return the lease files in the folder RUN/lease, in any order; [] if the folder does not exist."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [folder / name for name in names if _LEASE_NAME.fullmatch(name)]


def number_of(path: Path) -> int:
    """Return the number of a lease from its file's name, for example 7 from 000007.json."""
    return int(path.stem)


def _describe_this_process(holder: str, *, has_lock: bool) -> LeaseOwner:
    process = this_process()
    return LeaseOwner(
        token=secrets.token_hex(16),
        holder=holder,
        host=node_name(),
        pid=process.pid,
        process_start=process.start,
        pid_namespace=process.pid_namespace,
        boot_id=process.boot_id,
        has_lock=has_lock,
        since=round(time.time(), 3),
        slurm_job=os.environ.get("SLURM_JOB_ID", ""),
    )


def _try_lock(descriptor: int, kind: int) -> bool:
    """Try to lock an open file without waiting; return whether it is locked. False on a file system without locks."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_unlocked(path: Path) -> bool:
    """Return whether no process holds the flock of a lease's file; True for a missing file."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        return _try_lock(file.fileno(), fcntl.LOCK_SH)
    return True


def _encode(owner: LeaseOwner) -> bytes:
    return json.dumps(dataclasses.asdict(owner)).encode("ascii") + b"\n"


def _decode(content: bytes) -> LeaseOwner | None:
    try:
        owner = validate_json(_OWNER, parse_json_object(content))
    except DamagedJson:
        return None
    is_sane = 0 <= owner.since < _LATEST_TIME and 0 < owner.pid < 1 << 31
    return owner if is_sane else None
