"""Convert the Unix times in heartbeats to this process's own clock, which never jumps.

Guarantee: a jump of a wall clock, on this node or another, shifts no converted time by more than the interval between
two calls for the same rank.

How: a new heartbeat was sent between the previous call for its rank, which got an older heartbeat, and the call that
gets the new one. The converted time always lies between these two calls; within them, it is the time of the new call
minus the age of the heartbeat by the wall clock.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable

from electra_dist.run.heartbeat import Beat


class HeartbeatTimes:
    """Converter of Unix times in heartbeats to times of `clock`. Make a new one each time the ranks are started."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._clock = clock
        self._wall_clock = wall_clock
        self._began = clock()
        self._seen: dict[int, tuple[Beat, Beat]] = {}  # rank -> its newest heartbeat as read, and as translated
        self._looked: dict[int, float] = {}  # rank -> time of the last call for this rank, by `clock`

    def translate(self, beats: Iterable[Beat]) -> list[Beat]:
        """Convert `time` and `phase_since` of heartbeats to seconds of `clock`. Call it just after reading them."""
        return [self._translate(beat) for beat in beats]

    def _translate(self, beat: Beat) -> Beat:
        now = self._clock()
        # The first heartbeat of a rank is taken to be younger than this object.
        last_look = self._looked.get(beat.rank, self._began)
        self._looked[beat.rank] = now
        earlier, translated = self._seen.get(beat.rank, (None, None))
        if earlier == beat and translated is not None:
            return translated

        sent = self._when(beat.time, last_look, now)
        if beat.phase_since == beat.time:
            phase_since = sent
        elif earlier is not None and translated is not None and _is_same_phase(earlier, beat):
            phase_since = translated.phase_since
        else:
            just_before = math.nextafter(sent, -math.inf)  # equal times would mean that the phase has just begun
            phase_since = self._when(beat.phase_since, last_look, just_before)
        translated = dataclasses.replace(beat, time=sent, phase_since=phase_since)
        self._seen[beat.rank] = (beat, translated)
        return translated

    def _when(self, unix_time: float, earliest: float, latest: float) -> float:
        """Convert a Unix time to a time of `clock`; a result outside of `earliest` to `latest` becomes that limit."""
        age_s = self._wall_clock() - unix_time
        return min(latest, max(earliest, self._clock() - age_s))


def _is_same_phase(earlier: Beat, beat: Beat) -> bool:
    """Return whether a rank was the same process, in the same phase of its work, at both heartbeats."""
    return (earlier.pid, earlier.phase, earlier.phase_since) == (beat.pid, beat.phase, beat.phase_since)
