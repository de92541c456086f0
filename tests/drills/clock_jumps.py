"""Sets the wall clock while real runs train under a supervisor, and compares them with a run that was left alone.

    python tests/drills/clock_jumps.py

For each case a run of 2 ranks trains under the supervisor. In its middle the wall clock of the ranks, of the
supervisor, or of both jumps an hour forward or a day back, by a library that these processes preload. Later one rank
is stopped by SIGSTOP. The verdict is good if the jump was not taken for a hang, the stopped rank was noticed within
its limit, the resumed run ended with 0, and every loss equals the undisturbed run's, bit for bit. The drill prints a
table and exits with 1 if a verdict is bad. It needs a C compiler, and two minutes on two cores.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tests/
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from support.clock_shim import DAY_BACK, HOUR_FORWARD, ClockShim
from support.real_runs import deepspeed_command, read_losses, write_corpus, write_tiny_config
from support.supervised_runs import REAL, supervised

NUM_STEPS, EVERY_STEPS, JUMP_STEP, HANG_STEP = 60, 10, 22, 37
NOTICE_S = 10.0  # in which a hang is noticed after its limit
CASES = {"ranks": ("ranks_s",), "supervisor": ("others_s",), "both": ("ranks_s", "others_s")}
JUMPS = {"an hour forward": HOUR_FORWARD, "a day back": DAY_BACK}


def run_case(config: Path, run_dir: Path, clock: ClockShim, shifts: dict[str, int], limit_s: float) -> list[str]:
    """Make one run whose clock jumps and one of whose ranks hangs; return the cells of its row of the table.

    The cells are the exit code, the hangs that were found before one was made, the seconds until the hang was
    noticed, and the number of starts.
    """
    clock.set()
    with supervised(REAL, config, run_dir, "--gpus-per-node", "2") as run:
        run.wait_for_step(JUMP_STEP)
        clock.set(**shifts)
        run.wait_for_step(HANG_STEP)
        false_hangs = sum("hung: rank" in line for line in run.log())
        stopped = time.monotonic()
        os.kill(run.rank_pid(1), signal.SIGSTOP)
        run.wait(lambda: sum("hung: rank" in line for line in run.log()) > false_hangs)
        noticed_s = time.monotonic() - stopped
        code = run.end(600)
        is_in_time = noticed_s < limit_s + NOTICE_S
        noticed = f"{noticed_s:.1f} s of {limit_s:.0f} s" + ("" if is_in_time else " (LATE)")
        return [str(code), str(false_hangs), noticed, str(run.starts())]


def main() -> int:
    """Run all cases, print the table, and return the exit code of the drill."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--limit", type=float, default=10.0, help="cluster.hang_step_floor_s (default: %(default)s)")
    limit_s = options.parse_args().limit
    settings = {
        "train.num_steps": NUM_STEPS,
        "checkpoint.every_steps": EVERY_STEPS,
        "model.hidden_dropout": 0.1,
        "cluster.hang_step_floor_s": limit_s,
        "cluster.hang_setup_s": 600.0,
    }
    is_good = True
    print("| clock of | jump | exit code | false hangs | hang noticed after | starts | losses equal |")
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        clock = ClockShim(folder, ranks="electra_launcher.supervise.rank_main")
        write_corpus(str(folder / "corpus"), [100, 100, 100])
        write_corpus(str(folder / "corpus" / "heldout"), [40], seed=1)
        undisturbed = folder / "undisturbed"
        config = write_tiny_config(folder / "undisturbed.yaml", undisturbed, str(folder / "corpus"), **settings)
        subprocess.run(deepspeed_command(config, 2), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.environ.update(clock.environment)
        for whose, names in CASES.items():
            for jump, seconds in JUMPS.items():
                run_dir = folder / f"{whose}-{seconds}"
                config = write_tiny_config(
                    folder / f"{run_dir.name}.yaml", run_dir, str(folder / "corpus"), **settings
                )
                cells = run_case(config, run_dir, clock, dict.fromkeys(names, seconds), limit_s)
                is_equal = read_losses(run_dir) == read_losses(undisturbed)
                is_good = is_good and is_equal and cells[:2] == ["0", "0"] and "LATE" not in cells[2]
                row = [whose, jump, *cells, "yes" if is_equal else "NO"]
                print(f"| {' | '.join(row)} |", flush=True)
    print("good" if is_good else "BAD")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
