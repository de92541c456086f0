"""Define the exit codes of a training process and the errors that users and storage cause.

The supervisor and the Slurm scripts import the exit codes. They decide whether to start a run again from the exit code
of its ranks and from its ledger, the file that records its starts and ends. Messages of errors are one line that names
the place, what is wrong and the next step. Any function that reads or writes a store may raise StoreError.
"""

from __future__ import annotations

import shlex

from electra_dist.escapes import printable

EXIT_DONE = 0  # The target step is reached; do not requeue.
EXIT_CRASH = 1  # Requeue as long as the run makes progress.
EXIT_UNHEALTHY = 69  # This node or GPU is unhealthy; requeue without it.
EXIT_STOPPED = 75  # Stopped early on purpose (signal, deadline, stop file), or storage stayed away; requeue.
EXIT_USER_ERROR = 78  # The configuration or the data is wrong; do not requeue.


_LONGEST_MESSAGE = 2000  # characters


def error_line(error: Exception) -> str:
    """Return the line "error: ..." that a process prints to stderr about an error that the user must fix.

    Line breaks and other characters that would damage the terminal are escaped; the middle of a long message is left
    out.
    """
    message = str(error)
    if len(message) > _LONGEST_MESSAGE:
        half = _LONGEST_MESSAGE // 2
        message = f"{message[:half]} ... {message[-half:]}"
    return f"error: {printable(message)}"


class UserError(Exception):
    """Error that only the user can correct; a process prints it without a traceback and ends with exit code 78."""


class NodeError(UserError):
    """Error of one node that only the user can correct, such as a PyTorch build that does not fit the driver.

    The first rank of each affected node prints it, because rank 0 may run on another node.
    """


class ManifestMismatch(UserError):
    """Error for a corpus, or a file of a corpus, that differs from what the run or corpus.json has recorded."""


class OtherNumerics(UserError):
    """Error for a run or checkpoint that was computed with other random draws or rounding (`config.NUMERICS`)."""

    def __init__(self, place: str, found: int, current: int) -> None:
        super().__init__(
            f"{place} holds a run of numerics {found}, and this version computes with numerics {current}, which has "
            f"other masks, samples or dropout; add --accept-new-numerics to continue with other draws from its newest "
            f"checkpoint, or continue with the version of electra-dist that began the run"
        )


class StoreError(UserError):
    """Error for a path or bucket that cannot be used: missing, access refused, or not writable."""


class StoreMissing(StoreError):
    """Error for an object that does not exist in a store; callers catch it where the object is optional."""


class StoreAway(StoreError):
    """Error for storage that is full, read-only or silent; a run waits for it, up to `cluster.storage_patience_s`."""


class StoreExhausted(StoreAway):
    """Error for bytes that stay wrong although those in the store are right: memory, a disk or the network is bad."""


class StorageLost(StoreAway):
    """Error for storage that stayed unusable for as long as the caller waits for it.

    The message names the first failure. A run ends with code 75 and is started again later; a command ends with code
    78.
    """

    def __init__(self, text: str, patience: object = None, reason: str = "") -> None:
        super().__init__(text)
        self.patience = patience  # the `Patience` that has waited, which does not wait again
        self.reason = reason or text  # the first failure, without the time waited


class TornCheckpoint(Exception):
    """Error for a checkpoint that differs from its manifest or belongs to another run; loading then tries another."""


def missing_packages(purpose: str, extra: str) -> UserError:
    """Return the error of one line that `purpose` needs packages: those of the extra `extra` of setup.py.

    Its pip command names the packages, not the extra, so that it works beside a clone and beside an installed wheel.
    """
    from importlib.metadata import PackageNotFoundError, requires  # here, because most processes need none of this

    from packaging.requirements import Requirement

    try:
        lines = requires("electra-dist") or []
    except PackageNotFoundError:  # it runs without being installed
        lines = []
    needed = [Requirement(line) for line in lines]
    chosen = [f"{one.name}{one.specifier}" for one in needed if one.marker and one.marker.evaluate({"extra": extra})]
    packages = shlex.join(chosen or [f".[{extra}]"])
    return UserError(f"{purpose} needs packages that are not installed; run: pip install {packages}")
