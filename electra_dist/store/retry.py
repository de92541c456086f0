"""Read bytes again if they do not match their digest, before they count as damaged in the store."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from electra_dist.errors import StoreExhausted

_Value = TypeVar("_Value")


class Rereading:
    """Reader that reads bytes again if they do not match their digest. Thread-safe.

    Bytes count as damaged in the store only if the last two readings, with a pause between them, have the same fault.
    If the fault differs each time, the service, a proxy or the network has changed the bytes on the way. Use one
    object for readings that belong together, such as those of one checkpoint: once damage is confirmed, the object no
    longer pauses between readings.
    """

    def __init__(self, pauses_s: Sequence[float]) -> None:
        """Take the pauses in seconds (one or more) before each further reading of wrong bytes."""
        self._pauses_s = pauses_s
        self._is_confirmed = False

    def read(self, name: str, read: Callable[[], tuple[_Value, str]]) -> tuple[_Value, str]:
        """Call `read` until its fault is "" or all readings are used up; return the last value and its fault.

        `read` reads once and returns (value, text of the fault); different wrong bytes must give different texts. If
        the last two faults differ, StoreExhausted is raised, and its message says that `name` was read.
        """
        value, fault = read()
        previous_fault = ""
        for pause_s in self._pauses_s:
            if not fault:
                return value, ""
            if not self._is_confirmed:
                time.sleep(pause_s)
            previous_fault = fault
            value, fault = read()
        if fault and fault != previous_fault:
            raise StoreExhausted(
                f"{name} was read {1 + len(self._pauses_s)} times and was wrong in different ways, last: {fault}; "
                f"check the network and the storage service, then start again"
            )
        if fault:
            self._is_confirmed = True
        return value, fault
