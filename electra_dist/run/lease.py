"""Take and hold the lease of a run folder, so that only one start of a run at a time trains in it.

Guarantee: of all starts in a folder, on any machines and in any containers, one holds the lease; every other start
is refused in one line that names the owner. A lease is free at once when it was released, or when its owner was killed
on this machine. From another machine a killed owner cannot be told from a slow one, so the lease is free after the
owner has not renewed it for `LEASE_S` seconds. An owner notices within `RENEW_S` seconds that another start has taken
its lease, or that its run folder was deleted or moved, and ends.

How: a process takes a lease by creating the file of the next number (`lease_file.py`), which only one process can do.
A waiting process measures by its own clock for how long the owner has not renewed its file, so the clocks of two
machines are never compared. The owner also locks the file. The kernel drops that lock when the process ends, which
shows on the same machine, also in another container, that the lease is free. The supervisor of node 0 is the owner;
its ranks get the token of the lease in the environment variable `TOKEN_VARIABLE`. Without a supervisor, rank 0 is the
owner. Imports no torch.

Limits: a process that did not run for `LEASE_S` seconds, such as one in a suspended virtual machine, may write for up
to `RENEW_S` seconds after another one has taken its lease. It commits no checkpoint then (`checkpoint/commit.py`).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from electra_dist.errors import UserError
from electra_dist.run.folder import LEASE_DIR, STOP_FILE, is_run_folder
from electra_dist.run.lease_file import (
    FoundLease,
    LeaseOwner,
    create,
    find_newest,
    lease_files,
    release,
    renew,
    write_locked,
)
from electra_dist.store.atomic_files import readable

RENEW_S = 2.0  # between two renewals
LEASE_S = 30.0  # a lease that was not renewed for this long is free, if its owner may be on another machine
TOKEN_VARIABLE = "ELECTRA_DIST_LEASE"  # environment variable by which a supervisor passes its token to its ranks

_POLL_S = 0.2  # between two looks at the lease of another process
_SAY_AFTER_S = 3.0  # a longer wait is announced


class LeaseLost(UserError):
    """Error that this process has lost the lease: it must not write into the run folder, and ends without a save."""


class RunLease:
    """Lease of a run folder. This process owns the lease, or it is a rank that only watches its supervisor's lease.

    Create it by `take_lease` (owner) or `join_lease` (rank). Read `is_lost` at every step; call `release` at the end.
    """

    def __init__(self, run_dir: Path, lease: FoundLease, lock: int | None) -> None:
        """Renew the lease in a thread if `lock` (descriptor of its locked file) is given; otherwise only watch it."""
        self._run_dir = run_dir
        self._folder_id = _file_id(run_dir)
        self._lease = lease
        self._lock = lock
        self._lost = ""
        self._looking = threading.Lock()
        self._ends = threading.Event()
        self._next_look = time.monotonic() + RENEW_S
        self._thread: threading.Thread | None = None
        if lock is not None:
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
        """Return whether the lease is lost, so that this process must stop writing; most calls cost one `stat`."""
        is_due = self._thread is None and time.monotonic() > self._next_look
        if is_due or _is_missing(self._lease.path):
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
        if self._thread is None or self._lock is None:
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
        """Renew an owned lease; if the lease is lost, set `_lost` to the reason. Errors of the storage are ignored."""
        with self._looking, contextlib.suppress(OSError):
            self._next_look = time.monotonic() + RENEW_S
            newest = find_newest(self._lease.path.parent)
            is_held = newest.path == self._lease.path and newest.content == self._lease.content
            if is_held and self._thread is not None:
                renew(self._lease.path)
            elif not is_held:
                self._lost = self._find_loss(newest)

    def _find_loss(self, newest: FoundLease) -> str:
        """Return how the lease was lost, in one line; "" if only its file was deleted, which is then restored."""
        if _file_id(self._run_dir) != self._folder_id:
            return (
                f"run folder {self._run_dir} was deleted or moved while the run trained in it, so the run has ended "
                f"without a save; move it back or set run_dir to its new place, then start again"
            )
        # The lease goes on if a person has deleted its file: the owner writes it again.
        was_deleted = newest.number < self._lease.number
        if was_deleted and self._lock is not None:
            self._lock = write_locked(self._lease.path, lambda has_lock: self._lease.content) or self._lock
        if was_deleted:
            return ""
        return (
            f"run folder {self._run_dir} was taken over by another start: {newest.description}; this process did not "
            f"renew its lease for {LEASE_S:.0f} s and has ended without a save; let the other start go on"
        )


def hold_lease(run_dir: Path, say: Callable[[str], None]) -> RunLease:
    """Return a run folder's lease for rank 0: its supervisor's lease or, without a supervisor, a new lease."""
    token = os.environ.get(TOKEN_VARIABLE, "")
    return join_lease(run_dir, token) if token else take_lease(run_dir, "rank 0", say)


def take_lease(
    run_dir: Path,
    holder: str,
    say: Callable[[str], None],
    patience_s: float = 0.0,
    give_up: Callable[[], bool] = lambda: False,
) -> RunLease:
    """Take the lease of a run folder as soon as its owner has released it, has ended or has stopped renewing it.

    While the owner renews the lease, wait for at most `patience_s` seconds, then raise UserError. Take a lease that
    was not renewed for `LEASE_S` seconds, or raise UserError if its owner lives on this machine and `patience_s` is 0.
    `holder` says who takes the lease, "supervisor" or "rank 0". `say` prints a line about a long wait.
    KeyboardInterrupt is raised when `give_up` returns True.
    """
    folder = run_dir / LEASE_DIR
    seen: FoundLease | None = None
    begin = time.monotonic()
    seen_since = begin
    has_said = False
    while True:
        with readable(folder):
            newest = find_newest(folder)
            has_ended = newest.has_ended
        now = time.monotonic()
        if newest != seen:
            is_at_work = seen is not None and not has_ended
            if is_at_work and now - begin > patience_s:
                raise UserError(_refusal(run_dir, newest, "trains in this folder"))
            seen = newest
            seen_since = now
        is_expired = now - seen_since > LEASE_S
        if is_expired and has_ended is False and patience_s == 0:
            raise UserError(_refusal(run_dir, newest, f"has this folder and was silent for {LEASE_S:.0f} s"))
        if has_ended or is_expired:
            created = create(folder, newest.number + 1, holder)
            if created is not None:
                return RunLease(run_dir, *created)
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
    """Return the lease of this rank's supervisor, who passed `token`; raise LeaseLost if the supervisor lost it."""
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


def read_owner(run_dir: Path) -> tuple[LeaseOwner, float] | None:
    """Return the owner of a run folder's lease, and the Unix time of its newest renewal; None if nobody holds it.

    The owner may have been killed since: the lease of a killed process stays until the next start takes it.
    """
    with readable(run_dir / LEASE_DIR):
        newest = find_newest(run_dir / LEASE_DIR)
    owner = newest.owner
    if newest.is_released or owner is None:
        return None
    return owner, newest.renewed_ns / 1e9


def _refusal(run_dir: Path, found: FoundLease, what: str) -> str:
    return (
        f"run_dir {run_dir}: another start {what}: {found.description}; wait until it ends, stop it with "
        f"`touch {run_dir / STOP_FILE}`, or set another run_dir"
    )


def _file_id(path: Path) -> tuple[int, int] | None:
    """Return device and inode of a file or folder; None if it does not exist."""
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_dev, status.st_ino


def _is_missing(path: Path) -> bool:
    """Return whether a file does not exist; False if the storage does not answer."""
    try:
        return _file_id(path) is None
    except OSError:
        return False


def _remove_unused(run_dir: Path) -> None:
    """Remove the released leases from a folder without a run, then the folder, if nothing else is in it."""
    with contextlib.suppress(OSError):  # Another start has begun there, or the folder holds other files.
        for file in lease_files(run_dir / LEASE_DIR):
            if file.suffix == ".released":
                file.unlink()
        (run_dir / LEASE_DIR).rmdir()
        run_dir.rmdir()
