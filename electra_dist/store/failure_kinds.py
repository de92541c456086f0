"""Decide what follows from a failure of storage: another try, a wait, the end of the run, or an error of the user's.

Guarantee: this file has the only table of storage failures. Every caller that must decide about one asks the functions
below, so that equal failures have equal consequences wherever they are met.

How: one row for each error number of the operating system. An error number without a row is permanent.

Limits: an operating system reports a network file system that went away in many ways, and a hard mount (NFS) reports
nothing: its calls block until the server is back, which no table can shorten.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from electra_dist.errors import StoreAway, UserError


class FailureKind(Enum):
    """What a failure of storage asks of the caller."""

    TRANSIENT = "transient"  # another try at once, or after a short pause, is likely to succeed
    AWAY = "away"  # full, read-only or not responding: it may come back within minutes, so waiting is worth it
    PERMANENT = "permanent"  # no try and no wait helps, and no setting of the user's is known to be wrong
    USER = "user"  # the user must correct a path, a permission, a limit or a configuration


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One row of a table of failures: the kind, and the two halves of the message."""

    kind: FailureKind
    reason: str  # what is wrong, in a few words without the path
    advice: str  # the user's next step, as an imperative


_FREE_SPACE = "free space there, or choose another path"
_CHECK_SHARE = "check the mount and its server"
_CHECK_DISK = "check the disk"

# Error number of the operating system -> what it means for a file that a run reads or writes.
OS_FAILURES: Mapping[int, Failure] = {
    # Another try is likely to succeed.
    errno.EINTR: Failure(kind=FailureKind.TRANSIENT, reason="interrupted", advice="start again"),
    errno.EAGAIN: Failure(kind=FailureKind.TRANSIENT, reason="busy", advice="start again"),
    # Full.
    errno.ENOSPC: Failure(kind=FailureKind.AWAY, reason="disk full", advice=_FREE_SPACE),
    errno.EDQUOT: Failure(kind=FailureKind.AWAY, reason="disk full (quota)", advice=_FREE_SPACE),
    errno.ENOMEM: Failure(kind=FailureKind.AWAY, reason="no memory left", advice="end other processes of this node"),
    errno.ENFILE: Failure(
        kind=FailureKind.AWAY, reason="too many open files on this node", advice="raise the limit fs.file-max"
    ),
    # Read-only: what a kernel does to a file system with errors, and a server during a fail-over.
    errno.EROFS: Failure(
        kind=FailureKind.AWAY, reason="read-only file system", advice="mount it for writing, or choose another path"
    ),
    # Not responding.
    errno.EIO: Failure(kind=FailureKind.AWAY, reason="input/output error", advice=_CHECK_DISK),
    errno.EREMOTEIO: Failure(kind=FailureKind.AWAY, reason="remote input/output error", advice=_CHECK_SHARE),
    errno.ESTALE: Failure(kind=FailureKind.AWAY, reason="stale file handle of a network share", advice=_CHECK_SHARE),
    errno.ETIMEDOUT: Failure(kind=FailureKind.AWAY, reason="no answer in time", advice=_CHECK_SHARE),
    errno.EHOSTDOWN: Failure(kind=FailureKind.AWAY, reason="the server is down", advice=_CHECK_SHARE),
    errno.EHOSTUNREACH: Failure(kind=FailureKind.AWAY, reason="the server cannot be reached", advice=_CHECK_SHARE),
    errno.ENETDOWN: Failure(kind=FailureKind.AWAY, reason="the network is down", advice=_CHECK_SHARE),
    errno.ENETUNREACH: Failure(kind=FailureKind.AWAY, reason="the network cannot be reached", advice=_CHECK_SHARE),
    errno.ENETRESET: Failure(kind=FailureKind.AWAY, reason="the network dropped the connection", advice=_CHECK_SHARE),
    errno.ECONNREFUSED: Failure(kind=FailureKind.AWAY, reason="the server refuses connections", advice=_CHECK_SHARE),
    errno.ECONNRESET: Failure(kind=FailureKind.AWAY, reason="the server closed the connection", advice=_CHECK_SHARE),
    errno.ECONNABORTED: Failure(kind=FailureKind.AWAY, reason="the connection was aborted", advice=_CHECK_SHARE),
    errno.ENOTCONN: Failure(kind=FailureKind.AWAY, reason="the share is not connected", advice=_CHECK_SHARE),
    errno.ESHUTDOWN: Failure(kind=FailureKind.AWAY, reason="the share was shut down", advice=_CHECK_SHARE),
    errno.EPIPE: Failure(kind=FailureKind.AWAY, reason="the connection is broken", advice=_CHECK_SHARE),
    errno.ENODEV: Failure(kind=FailureKind.AWAY, reason="the device is gone", advice=_CHECK_DISK),
    errno.ENXIO: Failure(kind=FailureKind.AWAY, reason="the device is gone", advice=_CHECK_DISK),
    errno.ENOMEDIUM: Failure(kind=FailureKind.AWAY, reason="the device is gone", advice=_CHECK_DISK),
    errno.EBUSY: Failure(kind=FailureKind.AWAY, reason="in use by another process", advice=_CHECK_SHARE),
    errno.ENOLCK: Failure(kind=FailureKind.AWAY, reason="no lock to be had", advice="check the share's lock service"),
    # The user's.
    errno.ENOENT: Failure(kind=FailureKind.USER, reason="no such file or folder", advice="check the path"),
    errno.ENOTDIR: Failure(kind=FailureKind.USER, reason="is not a folder", advice="choose another path"),
    errno.EISDIR: Failure(kind=FailureKind.USER, reason="is a folder, not a file", advice="give the path of a file"),
    errno.EACCES: Failure(kind=FailureKind.USER, reason="permission denied", advice="give this user the right to it"),
    errno.EPERM: Failure(kind=FailureKind.USER, reason="operation not permitted", advice="choose another path"),
    errno.ENAMETOOLONG: Failure(kind=FailureKind.USER, reason="name too long", advice="choose a shorter path"),
    errno.ELOOP: Failure(kind=FailureKind.USER, reason="symbolic links form a loop", advice="remove the loop"),
    errno.EFBIG: Failure(kind=FailureKind.USER, reason="file too large", advice="raise the limit with `ulimit -f`"),
    errno.EMFILE: Failure(
        kind=FailureKind.USER, reason="too many open files", advice="raise the limit with `ulimit -n`"
    ),
}


def os_failure(error: OSError) -> Failure:
    """Return the row of the table for an error of the operating system; a permanent one if the table has no row."""
    row = OS_FAILURES.get(error.errno or 0)
    if row is not None:
        return row
    return Failure(kind=FailureKind.PERMANENT, reason=error.strerror or type(error).__name__, advice=_CHECK_DISK)


def kind_of_os_error(error: OSError) -> FailureKind:
    """Return the kind of an error that the operating system raised for a file or a folder."""
    return os_failure(error).kind


def kind_of_error(error: BaseException) -> FailureKind:
    """Return the kind of any error that an operation of a store, or of a file of the run, has raised.

    Errors of the operating system and those into which stores convert them (`StoreAway`, `StoreExhausted`, other kinds
    of `StoreError`) are known. Any other error, such as one of the program itself, is permanent.
    """
    if isinstance(error, StoreAway):
        return FailureKind.AWAY
    if isinstance(error, UserError):
        return FailureKind.USER
    if isinstance(error, OSError):
        return kind_of_os_error(error)
    return FailureKind.PERMANENT


def is_worth_waiting_for(error: BaseException) -> bool:
    """Return whether the operation that raised an error may succeed when it is repeated, now or within minutes."""
    return kind_of_error(error) in (FailureKind.TRANSIENT, FailureKind.AWAY)
