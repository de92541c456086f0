"""Sets the wall clock while real runs train under a supervisor, and compares them with a run that was left alone.

    python tests/drills/clock_jumps.py

For each case a run of 2 ranks trains under the supervisor. In its middle the wall clock of the ranks, of the
supervisor, or of both jumps an hour forward or a day back, by a library that these processes preload. Later one rank
is stopped by SIGSTOP. The verdict is good if the jump was not taken for a hang, the stopped rank was noticed within
its limit, the resumed run ended with 0, and every loss equals the undisturbed run's, bit for bit. The drill prints a
table and exits with 1 if a verdict is bad. It needs a C compiler, and two minutes on two cores.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from drill import Drill, chosen, first_difference, judge, options
from support.clock_shim import DAY_BACK, HOUR_FORWARD, ClockShim
from support.supervised_runs import REAL, supervised

NUM_STEPS, EVERY_STEPS, JUMP_STEP, HANG_STEP = 60, 10, 22, 37
NOTICE_S = 10.0  # in which a hang is noticed after its limit
CLOCKS = {"ranks": ("ranks_s",), "supervisor": ("others_s",), "both": ("ranks_s", "others_s")}
JUMPS = {"an hour forward": HOUR_FORWARD, "a day back": DAY_BACK}
CASES = {
    f"{clock_of}, {jump}": dict.fromkeys(clocks, seconds)
    for clock_of, clocks in CLOCKS.items()
    for jump, seconds in JUMPS.items()
}


def jump_and_hang(drill: Drill, clock: ClockShim, name: str, limit_s: float) -> tuple[bool, str]:
    """Make one run whose clock jumps and one of whose ranks hangs, and return the verdict on it."""
    twin = drill.twin()
    run = drill.new_run(name)
    clock.set()
    with supervised(REAL, run.config, run.folder, "--gpus-per-node", "2") as seen:
        seen.wait_for_step(JUMP_STEP)
        clock.set(**CASES[name])
        seen.wait_for_step(HANG_STEP)
        false_hangs = sum("hung: rank" in line for line in seen.log())
        stopped = time.monotonic()
        os.kill(seen.rank_pid(1), signal.SIGSTOP)
        seen.wait(lambda: sum("hung: rank" in line for line in seen.log()) > false_hangs)
        noticed_s = time.monotonic() - stopped
        code = seen.end(600)
        num_starts = seen.starts()
    difference = first_difference(run.steps(), twin.steps())
    good = code == false_hangs == 0 and noticed_s < limit_s + NOTICE_S and not difference
    return good, (
        f"exit {code}, {false_hangs} false hangs, hang noticed after {noticed_s:.1f} s of {limit_s:.0f} s, "
        f"{num_starts} starts, {difference or 'losses equal'}"
    )


def main() -> int:
    """Run the drill and return its exit code: 0 if every verdict is good."""
    parser = options(__doc__)
    parser.add_argument("--limit", type=float, default=10.0, help="cluster.hang_step_floor_s (default: %(default)s)")
    parser.add_argument("--only", nargs="*", default=[], help="names of cases, or words in them")
    args = parser.parse_args()
    names = chosen(parser, "--only", args.only, CASES)
    settings = {
        "train.num_steps": NUM_STEPS,
        "checkpoint.every_steps": EVERY_STEPS,
        "model.hidden_dropout": 0.1,
        "cluster.hang_step_floor_s": args.limit,
        "cluster.hang_setup_s": 600.0,
    }
    with tempfile.TemporaryDirectory() as folder:
        drill = Drill(Path(folder), [100, 100, 100], heldout=[40], **settings)
        drill.twin()
        clock = ClockShim(Path(folder), ranks="electra_launcher.supervise.rank_main")
        os.environ.update(clock.environment)
        cases = {name: functools.partial(jump_and_hang, drill, clock, name, args.limit) for name in names}
        return judge("wall clocks that jump", cases)


if __name__ == "__main__":
    sys.exit(main())
