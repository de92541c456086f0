"""Plan the runs of a comparison, which have equal training FLOPs and one complete config each, and train them.

Guarantee of a plan: the budget is a number of training FLOPs: `flops` of the comparison's config, or the FLOPs of
`steps` steps of the first objective. model/counts.py counts them, as for MFU. Every run has the number of steps whose
FLOPs are nearest to the budget, so it differs from the budget by at most the FLOPs of half a step. Warm-up, and the
decay of a trapezoid, are the same share of the steps in every run as in the base config, and the decay ends with the
last step. For one seed, all objectives read the same rows and start with the same weights in the parts that they have
in common. Nothing is written; the base config is the only file that is read.

Guarantee of the training: each run has a supervisor process of its own, as an ordinary run has, so a run that crashes
does not end any other run. A run counts as finished if the checkpoint of its last step is complete, whatever its exit
code. If an earlier comparison was killed and its run still trains, this run is waited for, not started twice. After
Ctrl-C, the ranks of the runs that this comparison has started save a checkpoint and end; the next start continues from
it. A run that an earlier comparison has started goes on.

How: a run is started by `python -m electra_launcher.supervise`, which starts the ranks and watches them, with the YAML
file of the run. A user can run the same command. Its output is appended to RUN.log. Progress is read from the
heartbeat files, in which the ranks record their step.

Limits: the count contains matrix products of full rows; look-ups, evaluation and tokenizing are not counted.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from electra_dist.checkpoint.stored_copies import checkpoints, open_targets
from electra_dist.compare.comparison_config import CompareConfig, Entry
from electra_dist.config import Config
from electra_dist.config.load import load_config
from electra_dist.errors import UserError
from electra_dist.finetune.training_loop import Progress
from electra_dist.model.counts import run_flops, steps_of_flops
from electra_dist.run.heartbeat import read_heartbeats
from electra_dist.run.this_node import mark_of, marked_pids


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """One run of a comparison: an objective and a seed, with its complete config."""

    entry: str  # name of the objective's entry
    seed: int
    config: Config  # the complete config with which the run is started
    marks: tuple[int, ...]  # steps whose checkpoints are scored, ascending; the last one is the last step of the run

    @property
    def name(self) -> str:
        """Return the name of the run and of its folder: objective and seed, as in `rtd-seed1`."""
        return _run_name(self.entry, self.seed)

    @property
    def file(self) -> Path:
        """Return the path of the run's config as YAML: the run's folder with the suffix ".yaml"."""
        return Path(f"{self.config.run_dir}.yaml")

    def flops(self, step: int) -> float:
        """Return the FLOPs of the run's first `step` optimizer steps, on all ranks together; 0 for step 0."""
        return run_flops(self.config, step)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All runs of a comparison, in the order in which they are made.

    All objectives run with the first seed, then all with the second, and so on, so that the objectives can be compared
    as soon as one seed is complete.
    """

    budget_flops: float  # training FLOPs of every run, up to half a step
    runs: tuple[PlannedRun, ...]

    def of(self, entry: str) -> list[PlannedRun]:
        """Return the runs of the objective that the config names `entry`, in the order of the seeds."""
        return [run for run in self.runs if run.entry == entry]


def make_plan(compare: CompareConfig, file: Path) -> Plan:
    """Make the config of each run of the comparison in `file`; a relative path there starts at the folder of `file`.

    Raises UserError if the base config or an objective's `set` is not valid, or a run has too few steps for as many
    checkpoints as `evaluate_at` asks for.
    """
    base = file.parent / compare.base
    # The config of each objective without the keys of a single run: the FLOPs of a step and the warm-up depend on it.
    config_of = {entry.name: _load(file, base, entry, run_keys={}) for entry in compare.objectives}
    budget = compare.flops
    if budget is None:
        budget = run_flops(config_of[compare.objectives[0].name], compare.steps)
    runs = [
        _plan_run(compare, file, entry, seed, config_of[entry.name], budget)
        for seed in compare.seeds
        for entry in compare.objectives
    ]
    return Plan(budget_flops=budget, runs=tuple(runs))


def _plan_run(
    compare: CompareConfig, file: Path, entry: Entry, seed: int, objective_config: Config, budget_flops: float
) -> PlannedRun:
    """Plan the run of one objective with one seed, of as many steps as the budget pays for."""
    num_steps = steps_of_flops(objective_config, budget_flops)
    scored_steps = _scored_steps(compare, file, entry, num_steps)
    run_keys: dict[str, object] = {
        "run_dir": str(Path(compare.output) / "runs" / _run_name(entry.name, seed)),
        "seed": seed,
        "train.num_steps": num_steps,
        **_scaled_schedule(objective_config, num_steps),
        "checkpoint.keep_steps": scored_steps,
        "checkpoint.targets": [],  # checkpoints are in the run's folder only
    }
    config = _load(file, file.parent / compare.base, entry, run_keys)
    return PlannedRun(entry=entry.name, seed=seed, config=config, marks=scored_steps)


def _scaled_schedule(config: Config, num_steps: int) -> dict[str, int | None]:
    """Return the config's keys of warm-up and decay, scaled from its own number of steps to `num_steps`.

    Where rounding would make warm-up and decay longer than the run, the decay is shorter.
    """

    def scaled(steps: int) -> int:
        return round(steps / config.train.num_steps * num_steps)

    optimizer = config.optimizer
    warmup_steps = scaled(optimizer.warmup_steps)
    longest_warmup = warmup_steps
    keys: dict[str, int | None] = {"optimizer.warmup_steps": warmup_steps, "optimizer.decay_steps": None}
    if optimizer.generator is not None and optimizer.generator.warmup_steps is not None:
        keys["optimizer.generator.warmup_steps"] = scaled(optimizer.generator.warmup_steps)
        longest_warmup = max(warmup_steps, scaled(optimizer.generator.warmup_steps))
    if optimizer.decay_steps is not None:
        keys["optimizer.decay_steps"] = max(1, min(scaled(optimizer.decay_steps), num_steps - longest_warmup))
    return keys


def _scored_steps(compare: CompareConfig, file: Path, entry: Entry, num_steps: int) -> tuple[int, ...]:
    """Return the steps whose checkpoints are scored: 250 and 1,000 of 1,000 if `evaluate_at` is (0.25, 1.0).

    Raises UserError, which names the objective `entry`, if two of them are the same step.
    """
    steps = tuple(max(1, round(share * num_steps)) for share in compare.evaluate_at)
    if len(set(steps)) < len(steps):
        raise UserError(
            f"{file}: {num_steps} steps of {entry.name} are too few for {len(compare.evaluate_at)} different "
            f"checkpoints at {', '.join(map(str, compare.evaluate_at))}; raise steps or flops"
        )
    return steps


def _run_name(entry: str, seed: int) -> str:
    return f"{entry}-seed{seed}"


def _load(file: Path, base: Path, entry: Entry, run_keys: Mapping[str, object]) -> Config:
    """Load the base config with the changes of one objective and, applied last, `run_keys` (dotted key -> value)."""
    overrides = [_override("objective.name", entry.objective)]
    overrides += [_override(key, value) for key, value in entry.set.items()]
    overrides += [_override(key, value) for key, value in run_keys.items()]
    try:
        return load_config(base, overrides)
    except UserError as error:
        raise UserError(f"{file}: objectives.{entry.name}: {error}") from None


def _override(key: str, value: object) -> str:
    return f"{key}={json.dumps(value)}"


_POLL_S = 0.5  # seconds between checks of a run


def saved_steps(run: PlannedRun) -> set[int]:
    """Return the steps at which a run has a complete checkpoint in at least one of its checkpoint stores."""
    return {checkpoint.step for checkpoint in checkpoints(open_targets(run.config))}


class Pretrainings:
    """Context manager that trains the runs of a comparison, at most `parallel` of them at the same time.

    Call `result` for one run after the other. While `result` waits for a run, the next runs train beside it.
    """

    def __init__(self, runs: Sequence[PlannedRun], ranks: int, parallel: int) -> None:
        self._runs = runs
        self._ranks = ranks
        self._parallel = parallel
        self._pool = ThreadPoolExecutor(parallel)
        self._stop = threading.Event()
        self._started: dict[str, Future[str]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Stop the runs that this pool has started, and wait until their ranks have saved a checkpoint and ended."""
        self._stop.set()
        self._pool.shutdown(cancel_futures=True)

    def result(self, run: PlannedRun, progress: Progress) -> str:
        """Start a run if necessary, and wait until it ends; return "" if it is finished, else the reason in one line.

        `progress` is called every half second. Raises OSError if the supervisor cannot be started, or its log cannot
        be written.
        """
        self._start(run)
        training = self._started[run.name]
        while not training.done():
            self._start_runs_beside(run)
            progress("pretraining", current_step(run), run.marks[-1])
            wait([training], timeout=_POLL_S)
        return training.result()

    def _start_runs_beside(self, run: PlannedRun) -> None:
        """Start further runs, in their order, until `parallel - 1` of them train beside `run`, or none is left."""
        for next_run in self._runs:
            num_beside = sum(not training.done() for name, training in self._started.items() if name != run.name)
            if num_beside >= self._parallel - 1:
                return
            self._start(next_run)

    def _start(self, run: PlannedRun) -> None:
        if run.name not in self._started:
            self._started[run.name] = self._pool.submit(pretrain, run, self._ranks, self._pause)

    def _pause(self) -> None:
        """Sleep for half a second; raise _StoppedError as soon as the `with` block has ended."""
        if self._stop.wait(_POLL_S):
            raise _StoppedError


def pretrain(run: PlannedRun, ranks: int, pause: Callable[[], None]) -> str:
    """Start or continue a run, and wait until it ends; return "" if it is finished, else the reason in one line.

    If an earlier comparison has started the run and it still trains, it is not started again. `pause` is called
    between checks. If `pause` raises, a run that this call has started saves a checkpoint and ends, and the exception
    passes on.
    """
    last_step = run.marks[-1]
    # The value of an environment variable by which the run's processes on this machine are found.
    process_mark = mark_of(Path(run.config.run_dir), node=0)
    exit_code: int | None = None  # of the supervisor that this call has started
    log = _log_file(run)
    log_begin = 0  # bytes in the log before that supervisor was started; earlier starts have written them
    while last_step not in saved_steps(run):
        is_running = bool(marked_pids(process_mark))
        if is_running:
            pause()  # an earlier, interrupted comparison has started the run, which still trains
        elif exit_code is None:
            log_begin = log.stat().st_size if log.exists() else 0
            exit_code = _supervise(run, ranks, pause)
        else:
            return (
                f"the run ended with exit code {exit_code}: {_last_error(log, log_begin)}; "
                f"read {log}, correct the cause and repeat the command"
            )
    return ""


class _StoppedError(Exception):
    """Error: the pool of runs was closed, for example by Ctrl-C, so the runs that still train must be stopped."""


def current_step(run: PlannedRun) -> int:
    """Return the optimizer step that rank 0 has recorded in its heartbeat file; 0 if there is none yet."""
    for beat in read_heartbeats(Path(run.config.run_dir)):
        if beat.rank == 0:
            return beat.step
    return 0


def _supervise(run: PlannedRun, ranks: int, pause: Callable[[], None]) -> int:
    """Run the supervisor of a run; return its exit code. If `pause` raises, the ranks save a checkpoint and end."""
    command = [sys.executable, "-m", "electra_launcher.supervise", "--config", str(run.file)]
    command += ["--gpus-per-node", str(ranks)]
    with _log_file(run).open("ab") as log:
        # In a session of its own, the supervisor does not receive Ctrl-C from the terminal directly.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        while process.poll() is None:
            pause()
    finally:
        process.terminate()  # no effect if the process has ended; otherwise its ranks save a checkpoint and end
        process.wait()
    return process.returncode


def _log_file(run: PlannedRun) -> Path:
    return Path(f"{run.config.run_dir}.log")


def _last_error(log: Path, begin: int) -> str:
    """Return the last line of a log that starts with "error: ", or else its last; skip the first `begin` bytes."""
    last_line = "it has written nothing to the log"
    last_error = ""
    for line in log.read_bytes()[begin:].decode(errors="replace").splitlines():
        text = line.strip()
        if text:
            last_line = text
        if text.startswith("error: "):
            last_error = text
    return last_error or last_line
