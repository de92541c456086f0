"""The wall clock is set while a supervised run goes on: nothing is taken for a hang, and a real hang is noticed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.clock_shim import DAY_BACK, HOUR_FORWARD, ClockShim, has_compiler
from support.supervised_runs import FAKE, supervised

from electra_dist.run.heartbeat import read_heartbeats

HANG_LIMIT_S = 4.0
SETTINGS = {"train.num_steps": 100_000, "cluster.hang_step_floor_s": HANG_LIMIT_S, "cluster.hang_setup_s": 60.0}
JUMPS = [
    {"ranks_s": HOUR_FORWARD},
    {"others_s": DAY_BACK},
    {"ranks_s": DAY_BACK, "others_s": HOUR_FORWARD},
    {"ranks_s": DAY_BACK, "others_s": DAY_BACK},
    {"ranks_s": HOUR_FORWARD, "others_s": HOUR_FORWARD},
]


@pytest.mark.skipif(not has_compiler(), reason="needs a C compiler, cc, for the library that shifts the clock")
def test_jumps_of_the_wall_clock_are_no_hang_and_hide_none_and_move_no_deadline(
    tiny_config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ClockShim(tmp_path, ranks="fake_rank")
    for name, value in clock.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(round(time.time() + 1800)))  # the run would stop 10 s before it
    run_dir = tmp_path / "run"
    with supervised(FAKE, tiny_config(**SETTINGS), run_dir, "--gpus-per-node", "2") as run:
        run.wait_for_step(8)  # the step time is learnt
        for jump in JUMPS:
            clock.set(**jump)
            reached = max(beat.step for beat in read_heartbeats(run_dir))
            run.wait_for_step(reached + 10)
        assert run.starts() == 1 and not run.logged("hung"), run.story()
        shown = [beat.time - time.time() for beat in read_heartbeats(run_dir)]
        assert all(HOUR_FORWARD - 60 < shift_s < HOUR_FORWARD + 60 for shift_s in shown)  # the ranks did see the jump

        stopped = time.monotonic()
        os.kill(run.rank_pid(1), signal.SIGSTOP)
        run.wait(lambda: run.logged("hung: rank"))
        noticed_s = time.monotonic() - stopped
        assert HANG_LIMIT_S - 0.5 <= noticed_s < HANG_LIMIT_S + 10  # the upper bound allows for a busy machine
        (resumed,) = run.wait(lambda: run.events("resume"))
        run.wait_for_step(resumed.step + 2, attempt=resumed.attempt)
        (run_dir / "stop").touch()
        assert run.end() == 75, run.story()
    reasons = [event.why for event in run.events("stop")]
    assert len(reasons) == 1 and reasons[0].startswith("file ")  # not the end of the job, half an hour ahead
