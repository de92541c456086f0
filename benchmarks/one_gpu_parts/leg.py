"""Runs one leg of the experiment of `one_gpu.sh`: trains for some minutes, scores a finished run, writes results.

Guarantee: a leg begins at the step at which the last one stopped, and its losses are those of a run without a stop.
It stops by itself in time to save and to write its results. The exit code is 0 when the run is finished and scored, 75
when the same command has to be repeated, else that of the training that failed (78: a user's error).

How: the run learns the end of the leg as it learns that of a Slurm job, from SLURM_JOB_END_TIME: it stops twice the
longest step and save before it, at least 10 s. Training that still runs 90 s after the end hangs, and is killed.
Ctrl-C and SIGTERM stop the run with a checkpoint.

Limits: the run's state stays in its run folder on this machine. One GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gpu_train_parts.real_run import speed
from gpu_train_parts.training_process import OutOfTime, Training, read_lines
from one_gpu_parts.experiment import (
    ARCHIVE,
    ARMS,
    CARRIED,
    CONFIG,
    CORPUS,
    REPOSITORY,
    UNPACKED,
    config_of,
    settings_of,
)
from one_gpu_parts.results import write_results
from one_gpu_parts.scores import read_scores

from electra_dist.data.corpus_manifest import MANIFEST_KEY
from electra_dist.errors import EXIT_CRASH, EXIT_DONE, EXIT_STOPPED, EXIT_USER_ERROR, UserError
from electra_dist.run.folder import ENVIRONMENT_FILE, LEDGER_FILE, STOP_FILE

_RESULTS_S = 20.0  # of a leg's end, for export and results
_HANG_S = 90.0  # after the end of its time, training is killed
_SCORES = Path(__file__).with_name("scores.py")
Json = dict[str, Any]


def unpack(carried: Path) -> Path | None:
    """Unpack the archive of `prepare` beside itself, unless that was done, and return the folder.

    A folder that was unpacked from another archive is replaced.

    Args:
        carried: folder of the archive.

    Returns:
        The folder with the corpus and the data for the scores; None if there is no archive and no such folder.

    Raises:
        UserError: the archive is damaged.
    """
    archive = carried / ARCHIVE
    folder = carried / UNPACKED
    if not archive.exists():
        return folder if folder.exists() else None
    with archive.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    marker = folder / "archive.sha256"
    if marker.exists() and marker.read_text() == sha256:
        return folder
    partial = folder.with_suffix(".partial")
    for stale in (partial, folder):
        shutil.rmtree(stale, ignore_errors=True)
    try:
        with tarfile.open(archive, "r:xz") as tar:
            tar.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.4 and later have it
            tar.extractall(partial)
    except (tarfile.TarError, lzma.LZMAError, EOFError) as error:
        raise UserError(f"{archive}: damaged ({error}); copy it again from where `prepare` made it") from None
    (partial / marker.name).write_text(sha256)
    partial.rename(folder)
    return folder


def train(run_dir: Path, settings: list[str], end_time: float) -> int:
    """Train until the last step or until shortly before the end of the leg; return the exit code.

    Args:
        run_dir: folder of the run.
        settings: KEY=VALUE changes of the configuration.
        end_time: when the leg's training must have ended, in Unix seconds.
    """
    job_end = os.environ.get("SLURM_JOB_END_TIME", "")
    if job_end.isdigit():
        end_time = min(end_time, float(job_end))  # inside a Slurm job that ends earlier
    os.environ["SLURM_JOB_END_TIME"] = str(round(end_time))
    time_left_s = max(0.0, end_time - time.time())
    deadline = time.monotonic() + time_left_s + _HANG_S
    training = Training(CONFIG, run_dir, settings, deadline, to_console=True)
    try:
        try:
            return training.wait()
        except KeyboardInterrupt:
            print(f"stopping {run_dir}", flush=True)
            (run_dir / STOP_FILE).touch()
            return training.wait()
    except OutOfTime:
        print(f"the training still ran {_HANG_S:.0f} s after the end of its time, and was killed", flush=True)
        return EXIT_CRASH
    finally:
        if training.process.poll() is None:
            training.kill()


def score(run_dir: Path, data: Path, end_time: float) -> int:
    """Compute the missing scores of a finished run; return 0, or 75 if the time did not suffice for all.

    Args:
        run_dir: folder of the run.
        data: folder of the carried data.
        end_time: when the scores must be computed, in Unix seconds.
    """
    command = [sys.executable, str(_SCORES), str(run_dir), "--data", str(data)]
    try:
        return subprocess.run(command, timeout=max(0.0, end_time - time.time())).returncode
    except subprocess.TimeoutExpired:
        print("no time is left for all scores: the next leg computes the missing ones", flush=True)
        return EXIT_STOPPED


def last_step(run_dir: Path) -> int:
    """Return the step at which the run ended or was saved last, from its ledger; 0 if it has not begun."""
    steps = [event["step"] for event in read_lines(run_dir / LEDGER_FILE) if "step" in event]
    return steps[-1] if steps else 0


def describe(arguments: argparse.Namespace, run_dir: Path, num_steps: int, exit_code: int) -> Json:
    """Return the content of leg.json: how the leg ended, the run's speed, its context AUC over the steps, its scores.

    Args:
        arguments: the command line.
        run_dir: folder of the run.
        num_steps: steps of the whole run.
        exit_code: with which the leg ends.
    """
    environment = run_dir / ENVIRONMENT_FILE
    return {
        "benchmark": "one_gpu",
        "date": time.strftime("%Y%m%d", time.gmtime()),
        "arm": arguments.arm,
        "smoke": arguments.smoke,
        "minutes": arguments.minutes,
        "exit_code": exit_code,
        "step": last_step(run_dir),
        "num_steps": num_steps,
        "speed": speed(run_dir),  # of the second half of the logged steps
        "scores": read_scores(run_dir),
        "environment": json.loads(environment.read_text()) if environment.exists() else None,
    }


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Treat SIGTERM as Ctrl-C, which stops the training with a checkpoint."""
    raise KeyboardInterrupt


def _parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8, help="time of the leg (default: %(default)s)")
    parser.add_argument("--arm", choices=list(ARMS), default=next(iter(ARMS)), help="what is trained")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a config key")
    parser.add_argument("--smoke", action="store_true", help="train a toy model on the CPU")
    parser.add_argument("--carried", type=Path, default=CARRIED, help="folder that `prepare` made: .../carried")
    parser.add_argument("--output", type=Path, help="folder of the results (default: $OUT, else RUN/returned)")
    parser.add_argument("--begun", type=float, default=time.time(), help=argparse.SUPPRESS)  # Unix seconds
    return parser.parse_args()


def run_leg(arguments: argparse.Namespace) -> int:
    """Run the leg of a command line, and return its exit code.

    Raises:
        UserError: a setting, the corpus or the run folder cannot be used.
    """
    end_time = arguments.begun + 60 * arguments.minutes - _RESULTS_S
    data = unpack(arguments.carried.absolute())
    settings = settings_of(arguments.arm, arguments.smoke, data / CORPUS if data else None, arguments.set)
    config = config_of(settings)
    if data is None and not (REPOSITORY / config.data.corpus / MANIFEST_KEY).exists():
        raise UserError(
            f"{arguments.carried / ARCHIVE}: no such file; make it with `bash benchmarks/one_gpu.sh prepare --corpus "
            f"DIR`, or name its folder with --carried"
        )
    run_dir = Path(config.run_dir).absolute()
    exit_code = train(run_dir, settings, end_time)
    if exit_code == EXIT_USER_ERROR:
        return exit_code  # an input was refused: the folder, if it exists, may be that of another run
    if exit_code == EXIT_DONE:
        exit_code = score(run_dir, data or arguments.carried, end_time)
    output = arguments.output or Path(os.environ.get("OUT", run_dir / "returned"))
    num_steps = config.train.num_steps
    try:
        write_results(run_dir, output, describe(arguments, run_dir, num_steps, exit_code))
    except UserError as error:
        if exit_code in (EXIT_DONE, EXIT_STOPPED):
            raise
        print(f"no weights: {error}", flush=True)  # training failed before its first checkpoint
    print(f"results in {output}", flush=True)
    if exit_code == EXIT_STOPPED:
        step = last_step(run_dir)
        print(f"{run_dir}: not finished (step {step:,} of {num_steps:,}); repeat the command", flush=True)
    return exit_code


def main() -> None:
    """Run one leg and exit with its code; print a user's error as one line."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        sys.exit(run_leg(_parse()))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)


if __name__ == "__main__":
    main()
