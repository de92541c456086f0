"""The five ways a training process ends, and the errors a user can cause or meet.

A run's future is decided by the exit code of its ranks and by its ledger, so both are named once, here.
"""

from __future__ import annotations

EXIT_DONE = 0  # target step reached: do not requeue
EXIT_CRASH = 1  # requeue while progress is made
EXIT_UNHEALTHY = 69  # this node or GPU: requeue without it
EXIT_STOPPED = 75  # stopped early on purpose (signal, deadline, stop file): requeue
EXIT_USER_ERROR = 78  # configuration or data: do not requeue


class UserError(Exception):
    """A mistake that only the user can mend: one line naming what, where and the next step; exit 78."""


class ManifestMismatch(UserError):
    """A corpus or checkpoint that is not the one this run was told to use."""


class StoreError(UserError):
    """A path or bucket that is missing, refused or unwritable: names the URL and what to do."""


class StoreMissing(StoreError):
    """An object that is not there: names it."""


class StoreExhausted(StoreError):
    """An object that could not be had after all retries: names it."""


class TornCheckpoint(Exception):
    """A checkpoint whose bytes are not those that its manifest promises: names the file and the fault."""
