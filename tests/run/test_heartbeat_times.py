"""Times of heartbeats by the supervisor's clock: right while wall clocks jump, and hangs are found all the same."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from electra_dist.run.heartbeat import Beat, HangLimits, HeartbeatTimes, Phase, hung

LOOK_S = 0.5
DAY_S = 86_400.0


class Clocks:
    """A clock that never jumps, and the wall clocks of the ranks and of the supervisor, which do."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.rank_offset = self.supervisor_offset = 1.7e9

    def beat(self, phase: Phase, phase_began: float, step: int = 7) -> Beat:
        """Return a heartbeat that a rank sends now, in a phase that it entered at `phase_began`."""
        sent = self.now + self.rank_offset
        since = sent if phase_began == self.now else phase_began + self.rank_offset
        return Beat(
            pid=9, host="a", rank=0, attempt=1, phase=phase, step=step, time=sent, phase_since=since, step_s=1.0
        )

    def times(self) -> HeartbeatTimes:
        """Return a translator that runs by these clocks."""
        return HeartbeatTimes(clock=lambda: self.now, wall_clock=lambda: self.now + self.supervisor_offset)


JUMPS = st.sampled_from([0.0, 0.0, 0.0, 3600.0, -3600.0, DAY_S, -DAY_S])
PAUSES = st.integers(1, 1280).map(lambda number: number / 64)  # sums of them are exact
EVENTS = st.lists(st.tuples(PAUSES, JUMPS, JUMPS, st.booleans()), min_size=1, max_size=12)


@given(EVENTS)
def test_a_heartbeat_is_dated_within_one_look_whatever_the_wall_clocks_do(
    events: list[tuple[float, float, float, bool]],
) -> None:
    clocks = Clocks()
    times = clocks.times()
    looked = sent = phase_began = clocks.now
    newest = clocks.beat("step", phase_began)
    for pause, rank_jump, supervisor_jump, changes_phase in events:
        clocks.now += pause
        clocks.rank_offset += rank_jump
        if changes_phase:
            phase_began = clocks.now
        newest = clocks.beat("step", phase_began) if not rank_jump else clocks.beat("eval", clocks.now)
        sent = clocks.now
        while clocks.now < sent + 3 * LOOK_S:
            clocks.now += LOOK_S
            clocks.supervisor_offset += supervisor_jump
            (found,) = times.translate([newest])
            assert looked <= found.time <= clocks.now
            assert abs(found.time - sent) <= max(LOOK_S, sent - looked)
            assert (found.phase_since == found.time) == (newest.phase_since == newest.time)
        looked = clocks.now


def test_a_clock_that_jumps_neither_hides_a_hang_nor_makes_one() -> None:
    limits = HangLimits(step_floor_s=30.0)
    for jump in (0.0, 3600.0, -3600.0, DAY_S, -DAY_S):
        for of_rank, of_supervisor in ((jump, 0.0), (0.0, jump), (jump, jump)):
            clocks = Clocks()
            times = clocks.times()
            times.translate([clocks.beat("step", 990.0, step=6)])
            clocks.rank_offset += of_rank
            clocks.supervisor_offset += of_supervisor
            clocks.now += 1.0
            newest = clocks.beat("step", 990.0)
            silences = []
            while not silences:
                clocks.now += LOOK_S
                silences = hung(times.translate([newest]), clocks.now, limits)
                assert clocks.now < 1060.0
            assert 1030.0 < clocks.now <= 1032.0  # sent at 1001.0, after the look at 1000.0
