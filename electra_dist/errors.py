"""Define the exit codes of a training process and the errors that users and storage cause.

The supervisor and the Slurm scripts import the exit codes. They decide whether to start a run again from the exit code
of its ranks and from its ledger, the file that records its starts and ends.
"""

from __future__ import annotations

from electra_dist.escapes import printable

EXIT_DONE = 0  # The target step is reached; do not requeue.
EXIT_CRASH = 1  # Requeue as long as the run makes progress.
EXIT_UNHEALTHY = 69  # This node or GPU is unhealthy; requeue without it.
EXIT_STOPPED = 75  # Stopped early on purpose (signal, deadline, stop file), or storage stayed away; requeue.
EXIT_USER_ERROR = 78  # The configuration or the data is wrong; do not requeue.


_LONGEST_MESSAGE = 2000  # characters


def error_line(error: Exception) -> str:
    """Return the line that a process prints to stderr about an error that the user must fix.

    It begins with "error: ".
    """
    message = str(error)
    if len(message) > _LONGEST_MESSAGE:
        half = _LONGEST_MESSAGE // 2
        message = f"{message[:half]} ... {message[-half:]}"
    return f"error: {printable(message)}"


class UserError(Exception):
    """Error that only the user can correct, such as a wrong configuration or missing data.

    The message is one line that says what is wrong, where, and what to do next. The process prints the message
    without a traceback and ends with exit code 78.
    """


class NodeError(UserError):
    """Error of one node of a run that only the user can correct, such as a torch that does not fit its driver.

    The first rank of each node that has it prints it, because rank 0 may run on another node.
    """


class ManifestMismatch(UserError):
    """Error for a corpus, or a file of it, that differs from what the run or the corpus's manifest requires.

    The message names the file or the corpus, the difference, and the next step. A restart does not help.
    """


class OtherNumerics(UserError):
    """Error for a run folder or a checkpoint that was computed with another numerics version than the current one.

    The numerics version (`config.NUMERICS`) is a number that is raised whenever the program changes its random
    draws (masks, samples, dropout) or its rounding.
    """

    def __init__(self, place: str, found: int, current: int) -> None:
        super().__init__(
            f"{place} holds a run of numerics {found}, and this version computes with numerics {current}, which has "
            f"other masks, samples or dropout; add --accept-new-numerics to continue with other draws from its newest "
            f"checkpoint, or continue with the version of electra-dist that began the run"
        )


class StoreError(UserError):
    """Error for a path or bucket that cannot be used: missing, access refused, or not writable.

    The message names the URL and the next step.
    """


class StoreMissing(StoreError):
    """Error for an object or file that does not exist in a store; the message names it.

    It is a separate class because a caller may expect it, for example when it looks for an optional file.
    """


class StoreAway(StoreError):
    """Error for storage that is full, read-only or does not respond, and that may come back within minutes.

    A run waits for it, up to `cluster.storage_patience_s`. The message names the path or URL, the reason and the
    next step.
    """


class StoreExhausted(StoreAway):
    """Error for an object in a store that could not be read or written correctly after all retries.

    The message names the object, the last error and the next step.
    """


class StorageLost(Exception):
    """Error for storage that stayed full, read-only or silent for longer than `cluster.storage_patience_s`.

    It is no error of the user's: the run ends with exit code 75 and is started again later. The message names the
    first failure, because later ones are often its consequences.
    """


class TornCheckpoint(Exception):
    """Error for a checkpoint that cannot be used: its content differs from its manifest, or it is of another run.

    The message says what is wrong. The code that loads checkpoints catches this error and tries another copy or an
    earlier checkpoint.
    """
