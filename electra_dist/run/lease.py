"""Take and hold the lease of a run folder, so that only one start of a run at a time trains in it.

Guarantee: of all starts in a folder, on any machines and in any containers, one holds the lease; every other start
is refused in one line that names the owner. A lease is free when it was released, when its owner was killed on this
machine and has not renewed it for `LOCAL_LEASE_S` seconds, or when nobody has renewed it for `LEASE_S` seconds. An
owner notices within `RENEW_S` seconds that another start has taken its lease, or that its run folder was deleted or
moved, and ends.

How: each lease is a file in RUN/lease, such as 000007.json, which describes its owner. A process takes a lease by
creating the file of the next number, which only one process can do. The content never changes, so no reader sees half
a renewal: the owner renews its lease by setting the file's modification time, and releases it by renaming the file to
000007.released. A waiting process measures by its own clock for how long the owner has not renewed its file, so the
clocks of two machines are never compared. The owner also locks the file. The kernel drops that lock when the process
ends, which shows on the same machine, also in another container, that it has ended; because a network file system may
lose a lock, the lease must have gone without a renewal, too. The supervisor of node 0 is the owner; its ranks get the
token of the lease in the environment variable `TOKEN_VARIABLE`. Without a supervisor, rank 0 is the owner. Imports no
torch.

Limits: a process that did not run for `LEASE_S` seconds, such as one that was stopped or in a suspended virtual
machine, may write for up to `RENEW_S` seconds after another one has taken its lease. It commits no checkpoint then
(`checkpoint/commit.py`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shlex
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import BaseModel, Field

from electra_dist.errors import StoreError, UserError
from electra_dist.run.folder import LEASE_DIR, STOP_FILE, is_run_folder
from electra_dist.run.this_node import boot_id, node_name
from electra_dist.store.atomic_files import is_temporary, lock_file, read_regular, readable, replacing
from electra_dist.store.json_file import parse_document
from electra_dist.store.patience import Patience, patient

RENEW_S = 2.0  # between two renewals
LEASE_S = 30.0  # a lease that was not renewed for this long is free
LOCAL_LEASE_S = 5.0  # the same if the owner's lock shows on its machine that it has ended
TOKEN_VARIABLE = "ELECTRA_DIST_LEASE"  # environment variable by which a supervisor passes its token to its ranks

_POLL_S = 0.2  # between two looks at the lease of another process
_SAY_AFTER_S = 3.0  # a longer wait is announced
_LEASE_NAME = re.compile(r"(?P<number>\d{6,18})\.(json|released)")  # 000007.json
_TRIES = 20  # of reading the newest lease, which may be released or taken over meanwhile


class LeaseLost(UserError):
    """Error of a process that has lost the lease: it must not write into the run folder, and ends without a save."""


class LeaseOwner(BaseModel, frozen=True):
    """Process that holds the lease of a run folder (the right to train in it), as the lease's file describes it."""

    token: str  # random; no other lease has it
    holder: str  # "supervisor" or "rank 0"
    host: str  # name of the node, as in strikes.jsonl
    pid: Annotated[int, Field(gt=0, lt=1 << 31)]
    boot_id: str  # of the kernel that runs the owner; "" if unknown
    since: Annotated[float, Field(ge=0, lt=1e11)]  # Unix time at which the lease was taken
    slurm_job: str  # "" outside Slurm

    @property
    def description(self) -> str:
        """Return who the owner is, such as "supervisor on host n1, pid 4711, since 2026-07-01T10:00:00+00:00"."""
        since = datetime.fromtimestamp(self.since, UTC).isoformat(timespec="seconds")
        job = f", Slurm job {self.slurm_job}" if self.slurm_job else ""
        return f"{self.holder} on host {self.host}, pid {self.pid}, since {since}{job}"


@dataclass(frozen=True, kw_only=True)
class FoundLease:
    """Newest lease of a run folder as read at one moment; two readings differ if it was renewed in between."""

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
        with contextlib.suppress(UserError):
            return parse_document(self.content, self.path, LeaseOwner, "")
        return None

    @property
    def description(self) -> str:
        """Return who the owner is, as a part of a message; if the lease's file is damaged, this is said instead."""
        owner = self.owner
        return f"an owner whose file {self.path} is damaged" if owner is None else owner.description

    @property
    def owner_has_ended(self) -> bool:
        """Return whether the owner's lock shows that it has ended; False if it ran on another machine."""
        owner = self.owner
        is_local = owner is not None and owner.boot_id != "" and owner.boot_id == boot_id()
        return is_local and not self.is_released and _is_unlocked(self.path)

    def is_free(self, silent_s: float) -> bool:
        """Return whether another process may take the lease.

        `silent_s` is how many seconds the caller has watched the lease without seeing a renewal.
        """
        if self.is_released:
            return True
        if self.owner_has_ended:
            age_s = time.time() - self.renewed_ns / 1e9  # by the clock by which the owner has renewed it
            return max(age_s, silent_s) > LOCAL_LEASE_S
        return silent_s > LEASE_S


class RunLease:
    """Lease of a run folder. This process owns the lease, or it is a rank that only watches its supervisor's lease.

    Create it by `take_lease` (owner) or `join_lease` (rank). Read `is_lost` at every step; call `release` at the end.
    """

    def __init__(self, run_dir: Path, lease: FoundLease, lock: int | None) -> None:
        """Watch the lease in a thread. The owner gives the descriptor of its file as `lock`, and also renews it."""
        self._run_dir = run_dir
        self._folder_id = _file_id(run_dir)
        self._lease = lease
        self._lock = lock
        self._lost = ""
        self._looking = threading.Lock()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)
        self._thread.start()

    @property
    def token(self) -> str:
        """Return the random token of the lease, which a supervisor passes to its ranks in `TOKEN_VARIABLE`."""
        owner = self._lease.owner
        assert owner is not None  # `take_lease` has just written it, or `join_lease` has read it.
        return owner.token

    @property
    def is_lost(self) -> bool:
        """Return whether the lease is lost, so that this process must stop writing; the call costs one `stat`."""
        with contextlib.suppress(OSError):  # storage that does not answer says nothing about the lease
            if not self._lease.path.exists():
                self._look()
        return self._lost != ""

    def check(self) -> None:
        """Raise LeaseLost, with the reason, if the lease is lost."""
        if self.is_lost:
            raise LeaseLost(self._lost)

    def release(self) -> None:
        """End the lease, so that another start can take it at once; do nothing in a rank that only watches it.

        Remove a run folder in which no run was begun, unless it holds other files. Calling it twice is fine.
        """
        self._ends.set()
        if self._lock is None:
            return
        self._thread.join()
        if not self._lost:
            release(self._lease.path)
        os.close(self._lock)
        self._lock = None
        if not is_run_folder(self._run_dir):
            _remove_unused(self._run_dir)

    def _keep(self) -> None:
        while not self._lost and not self._ends.wait(RENEW_S):
            self._look()

    def _look(self) -> None:
        """Renew the lease if this process owns it; if it is lost, store why. Errors of the disk are ignored."""
        with self._looking, contextlib.suppress(OSError):
            newest = find_newest(self._lease.path.parent)
            if newest.path == self._lease.path and newest.content == self._lease.content:
                if self._lock is not None:
                    renew(self._lease.path)
            elif _file_id(self._run_dir) != self._folder_id:
                self._lost = (
                    f"run folder {self._run_dir} was deleted or moved while the run trained in it, so the run has "
                    f"ended without a save; move it back or set run_dir to its new place, then start again"
                )
            elif newest.number < self._lease.number:
                # A person has deleted the file of the lease, which goes on: the owner writes the file again.
                if self._lock is not None:
                    self._lock = _write_locked(self._lease.path, self._lease.content) or self._lock
            else:
                self._lost = (
                    f"run folder {self._run_dir} was taken over by another start: {newest.description}; this process "
                    f"did not renew its lease for {LEASE_S:.0f} s and has ended without a save; let the other start "
                    f"go on"
                )


def hold_lease(run_dir: Path, say: Callable[[str], None]) -> RunLease:
    """Return the lease of a run folder for rank 0: that of its supervisor or, if it has none, a new one."""
    token = os.environ.get(TOKEN_VARIABLE, "")
    return join_lease(run_dir, token) if token else take_lease(run_dir, "rank 0", say)


@patient
def take_lease(
    run_dir: Path,
    holder: str,
    say: Callable[[str], None],
    take_over_s: float = 0.0,
    give_up: Callable[[], bool] = lambda: False,
    *,
    patience: Patience | None = None,
) -> RunLease:
    """Take the lease of a run folder as soon as it is free (`FoundLease.is_free`).

    While the owner renews the lease, wait for at most `take_over_s` seconds, then raise UserError. `holder` says who
    takes the lease, "supervisor" or "rank 0". `say` prints a line about a long wait. KeyboardInterrupt is raised when
    `give_up` returns True.
    """
    folder = run_dir / LEASE_DIR
    seen: FoundLease | None = None
    begin = time.monotonic()
    seen_since = begin
    has_said = False
    while True:
        with readable(folder):
            newest = find_newest(folder)
            now = time.monotonic()
            is_renewed = seen is not None and newest != seen
            if newest != seen:
                seen = newest
                seen_since = now
            is_free = newest.is_free(now - seen_since)
        if is_free:
            created = create(folder, newest.number + 1, holder)
            if created is not None:
                return RunLease(run_dir, *created)
        elif is_renewed and now - begin > take_over_s:
            raise UserError(
                f"run_dir {run_dir}: another start trains in this folder: {newest.description}; wait until it ends, "
                f"stop it with `touch {shlex.quote(str(run_dir / STOP_FILE))}`, or set another run_dir"
            )
        elif now - begin > _SAY_AFTER_S and not has_said:
            has_said = True
            say(
                f"waiting for the lease of {run_dir}, which is free {LEASE_S:.0f} s after the last renewal by "
                f"{newest.description}"
            )
        if give_up():
            raise KeyboardInterrupt
        time.sleep(_POLL_S)


def join_lease(run_dir: Path, token: str) -> RunLease:
    """Return the lease that this rank's supervisor holds, known by its `token`; raise LeaseLost if it is lost."""
    folder = run_dir / LEASE_DIR
    with readable(folder):
        newest = find_newest(folder)
    owner = newest.owner
    if owner is None or owner.token != token:
        raise LeaseLost(
            f"run folder {run_dir}: the supervisor of this rank has lost its lease to {newest.description}; let that "
            f"start go on"
        )
    return RunLease(run_dir, newest, lock=None)


class HeldLease(NamedTuple):
    """Owner of a run folder's lease, and how it was seen; the lease of a killed owner stays until the next start."""

    owner: LeaseOwner
    renewed: float  # Unix time of the newest renewal
    owner_has_ended: bool  # whether the owner is known to have ended: it ran on this machine

    def is_living(self, now: float) -> bool:
        """Return whether the owner has renewed its lease so lately that it counts as alive at Unix time `now`."""
        return not self.owner_has_ended and now - self.renewed < LEASE_S


def read_owner(run_dir: Path) -> HeldLease | None:
    """Return who holds the lease of a run folder, even if that process has died without releasing it.

    None if the lease is released, was never taken, or its file is damaged.
    """
    with readable(run_dir / LEASE_DIR):
        newest = find_newest(run_dir / LEASE_DIR)
    owner = newest.owner
    if newest.is_released or owner is None:
        return None
    return HeldLease(owner, newest.renewed_ns / 1e9, newest.owner_has_ended)


def _file_id(path: Path) -> tuple[int, int] | None:
    """Return device and inode of a file or folder, or None if it does not exist."""
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_dev, status.st_ino


def _remove_unused(run_dir: Path) -> None:
    """Remove the released leases from a folder in which no run was begun; then the folder, if it is empty."""
    with contextlib.suppress(OSError):  # Another start has begun there, or the folder holds other files.
        for file in _files_in(run_dir / LEASE_DIR):
            if file.suffix == ".released":
                file.unlink()
        (run_dir / LEASE_DIR).rmdir()
        run_dir.rmdir()


def find_newest(folder: Path) -> FoundLease:
    """Return the newest lease in the folder RUN/lease; its number is 0 if no lease was ever taken.

    Raises OSError if reading fails.
    """
    for _ in range(_TRIES):
        files = _files_in(folder)
        if not files:
            return FoundLease(number=0, path=folder, content=b"", renewed_ns=0)
        path = max(files, key=lambda file: int(file.stem))
        with contextlib.suppress(FileNotFoundError):  # It was released, or taken over, since it was listed.
            content = read_regular(path)
            return FoundLease(number=int(path.stem), path=path, content=content, renewed_ns=path.stat().st_mtime_ns)
    raise OSError(errno.ESTALE, "the newest lease is listed and is not there", str(folder))


class CreatedLease(NamedTuple):
    """Lease that this process has created, and the file descriptor that keeps its file locked until it is closed."""

    lease: FoundLease
    lock: int


def create(folder: Path, number: int, holder: str) -> CreatedLease | None:
    """Create the file of a lease for this process in RUN/lease, and delete what earlier leases have left there.

    `number` is one more than the newest lease's number, and `holder` says who takes it, "supervisor" or "rank 0".
    Returns None if another process has created the file.
    """
    path = folder / f"{number:06d}.json"
    if path.with_suffix(".released").exists():
        return None
    owner = LeaseOwner(
        token=secrets.token_hex(16),
        holder=holder,
        host=node_name(),
        pid=os.getpid(),
        boot_id=boot_id(),
        since=round(time.time(), 3),
        slurm_job=os.environ.get("SLURM_JOB_ID", ""),
    )
    content = owner.model_dump_json().encode() + b"\n"
    lock = _write_locked(path, content)
    if lock is None:
        return None
    _delete_older(folder, number)
    lease = FoundLease(number=number, path=path, content=content, renewed_ns=path.stat().st_mtime_ns)
    return CreatedLease(lease, lock)


def _delete_older(folder: Path, number: int) -> None:
    """Delete the files of leases with lower numbers, and unfinished files, which killed processes have left."""
    for file in folder.iterdir():
        is_older = _LEASE_NAME.fullmatch(file.name) is not None and int(file.stem) < number
        if is_older or is_temporary(file.name):
            with contextlib.suppress(OSError):  # A foreign folder may have such a name.
                file.unlink()


def _write_locked(path: Path, content: bytes) -> int | None:
    """Create a file that is locked by this process before other processes can see it; None if the file exists.

    Returns the file descriptor that keeps the lock.
    """
    lock = -1
    try:
        with replacing(path, only_new=True) as file:
            lock = os.dup(file.fileno())  # keeps the lock when `file` is closed
            lock_file(lock, wait=False)
            file.write(content)
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


def _files_in(folder: Path) -> list[Path]:
    """Return the lease files in the folder RUN/lease, in any order; [] if the folder does not exist."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [folder / name for name in names if _LEASE_NAME.fullmatch(name)]


def _is_unlocked(path: Path) -> bool:
    """Return whether no process holds the lock of a lease's file; False on a file system without locks."""
    with contextlib.suppress(FileNotFoundError, BlockingIOError), path.open("rb") as file:
        return lock_file(file.fileno(), shared=True, wait=False)
    return False
