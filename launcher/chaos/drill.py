"""Plan the faults of a drill (`plan`), inflict them on a run, and judge how the run reacts to each (`Drill`).

Guarantee: `plan` is a pure function of its arguments, so equal seeds give equal drills.

How: the drill starts a supervisor as a user does and watches the run's heartbeats and ledger. At the planned step it
inflicts a fault (faults.py), starts the supervisor again if the fault ended it, and waits for the first new step. The
result (`Hit`) is bad if the run did not react as it must to this kind of fault.
"""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from electra_dist.config import CHECKPOINTS_DIR
from electra_dist.errors import EXIT_CRASH, UserError
from electra_dist.run.folder import supervise_log
from electra_dist.run.heartbeat import Beat, read_heartbeats
from electra_dist.run.jsonl import Record
from electra_dist.run.ledger import newest_checkpoint, read_ledger
from launcher.chaos.faults import FAULTS, Fault, SmallDisk, Victim, kill_everything

PATIENCE_S = 900.0  # A run that makes no progress for this long has failed the drill.
_SAVE_PATIENCE_S = 10.0  # how long a fault waits for a checkpoint to be written
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Planned:
    """Planned fault of a drill: its kind and its moment (a step, perhaps during a save, and a short delay)."""

    kind: str  # a key of FAULTS
    step: int  # steps that must be done before
    in_save: bool  # whether to wait until a checkpoint is being written
    delay: float  # further delay, in step times


@dataclass(kw_only=True)
class Hit:
    """Result of one fault of a drill: what was hit, and how the run reacted. Times are in seconds since the fault."""

    kind: str  # a key of FAULTS
    step: int  # steps done at the fault
    what: str  # what was hit
    code: int | None = None  # exit code of the start or of the supervisor; None: the run went on
    notice_s: float | None = None  # to the first decision in the supervisor's log; None: there was none
    recovery_s: float | None = None  # to the next new step
    steps_lost: int = 0  # steps that had to be repeated
    fault: str = ""  # how the reaction differed from the required one; "": it did not


def plan(kinds: Sequence[str], count: int, num_steps: int, every_steps: int, seed: int) -> list[Planned]:
    """Plan the faults of a drill: every kind about equally often, in random order. Pure.

    The run is divided into `count` + 1 windows of equal length. Each fault comes at a random step of its window, early
    enough that the run saves a new checkpoint between any two faults. Between two faults after which the run goes on
    without a restart there is always one that restarts it, because one start of the ranks survives only one of them.

    Args:
        kinds: keys of FAULTS to choose from.
        count: number of faults.
        num_steps: steps of the run.
        every_steps: steps between two checkpoints.
        seed: determines order, steps and delays.

    Raises:
        UserError: the run is too short for so many faults, or `kinds` has too few kinds that end a start.
    """
    draw = random.Random(seed)
    window = num_steps // (count + 1)
    if window < 2 * every_steps:
        raise UserError(
            f"{count} faults with a checkpoint between any two need train.num_steps of at least "
            f"{2 * every_steps * (count + 1)} (2 x checkpoint.every_steps x ({count} + 1)), not {num_steps}; "
            f"add --set train.num_steps=..., or lower checkpoint.every_steps or --count"
        )
    all_kinds = (list(kinds) * (count // len(kinds) + 1))[:count]
    harmless = [kind for kind in all_kinds if FAULTS[kind].then == "goes on"]
    order = [kind for kind in all_kinds if FAULTS[kind].then != "goes on"]
    if len(harmless) > len(order) + 1:
        raise UserError(
            f"--faults {','.join(kinds)}: the fault {harmless[0]} can hit each start of the ranks only once; "
            f"add a kind that ends a start, such as kill"
        )
    draw.shuffle(order)
    # Insertion from the last position to the first leaves the earlier positions valid.
    for position in sorted(draw.sample(range(len(order) + 1), len(harmless)), reverse=True):
        order.insert(position, harmless.pop())
    faults = []
    for number, kind in enumerate(order, start=1):
        step = number * window + draw.randrange(window - every_steps)
        in_save = FAULTS[kind].needs_save and draw.random() < 0.5
        faults.append(Planned(kind=kind, step=step, in_save=in_save, delay=draw.uniform(0.0, 2.0)))
    return faults


class Drill:
    """A run under a supervisor that is hit by faults.

    Call `hit` for each planned fault, then `finish`, and call `close` in a `finally` block.
    """

    def __init__(self, run_dir: Path, command: Sequence[str], seed: int, disk: SmallDisk | None) -> None:
        """Start the run's supervisor.

        Args:
            run_dir: the run folder; the output of the supervisor goes to RUN_DIR.log beside it.
            command: the command that starts the supervisor.
            seed: determines which ranks and files the faults hit.
            disk: file system of the checkpoints if the fault `disk` is among the faults.
        """
        self._run_dir = run_dir
        self._command = command
        self._disk = disk
        self._draw = random.Random(f"{seed} victims")
        self._output = run_dir.with_name(f"{run_dir.name}.log")
        self._supervisor = self._start()
        self._saved = 0  # newest checkpoint at the last fault

    def hit(self, planned: Planned) -> Hit:
        """Wait for the planned moment, inflict the fault, wait until the run makes new steps, and return the result.

        Starts the supervisor again if the fault ends it.

        Raises:
            Stuck: the run has no ranks to hit, ends unexpectedly, or makes no progress within PATIENCE_S.
        """
        fault = FAULTS[planned.kind]
        beat = self._wait_for(lambda: self._ready(planned))
        if planned.in_save:
            self._wait_for_save()
        time.sleep(planned.delay * (beat.step_s or 0.0))
        before = self._beat() or beat
        num_events_before = len(read_ledger(self._run_dir))
        self._saved = newest_checkpoint(read_ledger(self._run_dir))
        begin = time.time()
        victim = self._victim()
        if not victim.ranks():
            raise Stuck(f"the run has no ranks to hit; see {self._output}")
        what = fault.act(victim, self._draw)
        hit = Hit(kind=planned.kind, step=before.step, what=what)
        if fault.then == "ends":
            hit.code = self.finish()
            if self._disk:
                self._disk.free()
            self._supervisor = self._start()
        restarts = fault.then != "goes on"
        self._wait_for(lambda: self._new_step(before, begin, restarts))
        hit.recovery_s = time.time() - begin
        if not restarts:
            self._wait_for(lambda: self._log_since(begin) or None)
        self._judge(hit, fault, begin, read_ledger(self._run_dir)[num_events_before:])
        return hit

    def finish(self) -> int:
        """Wait for the end of the supervisor that was started last, and return its exit code.

        Raises:
            Stuck: the supervisor does not end within PATIENCE_S.
        """
        try:
            return self._supervisor.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise Stuck(f"the supervisor did not end within {PATIENCE_S:.0f} s; see {self._output}") from None

    def close(self) -> None:
        """Kill the supervisor and all processes of the run."""
        kill_everything(self._victim())
        self._supervisor.wait()

    def _victim(self) -> Victim:
        """Return the run as a target for faults; its supervisor is None if it has ended."""
        runs = self._supervisor.poll() is None
        return Victim(run_dir=self._run_dir, supervisor=self._supervisor.pid if runs else None)

    def _start(self) -> subprocess.Popen[bytes]:
        """Start the supervisor of the run in a session of its own, and append its output to RUN_DIR.log."""
        with self._output.open("ab") as out:
            return subprocess.Popen(self._command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)

    def _beat(self) -> Beat | None:
        """Return the last heartbeat of rank 0; None before the first."""
        return next((beat for beat in read_heartbeats(self._run_dir) if beat.rank == 0), None)

    def _ready(self, planned: Planned) -> Beat | None:
        """Return rank 0's heartbeat once the planned fault may come, otherwise None.

        The planned step must be reached, a checkpoint must have been saved since the last fault, and every rank must
        have learned its step time, without which a hang is not noticed.
        """
        beats = read_heartbeats(self._run_dir)
        if not beats or beats[0].step < planned.step or any(beat.step_s is None for beat in beats):
            return None
        return beats[0] if newest_checkpoint(read_ledger(self._run_dir)) > self._saved else None

    def _new_step(self, before: Beat, begin: float, restarts: bool) -> Beat | None:
        """Return rank 0's heartbeat once the run has made a new step after a fault, otherwise None.

        Args:
            before: rank 0's heartbeat at the fault.
            begin: Unix time of the fault.
            restarts: whether the ranks must have been started again; then a step counts only if it is of a new start
                and beyond the checkpoint from which that start resumed.
        """
        beat = self._beat()
        if beat is None or beat.time < begin:
            return None
        if not restarts:
            return beat if beat.step > before.step else None
        if beat.attempt == before.attempt or beat.phase == "setup":
            return None
        return beat if beat.step > _resumed_step(read_ledger(self._run_dir)) else None

    def _wait_for(self, condition: Callable[[], T | None]) -> T:
        """Call `condition` every 20 ms until it returns something other than None, and return that.

        Raises:
            Stuck: the supervisor has ended, or PATIENCE_S have passed.
        """
        deadline = time.monotonic() + PATIENCE_S
        while (result := condition()) is None:
            if self._supervisor.poll() is not None and condition() is None:
                raise Stuck(f"the supervisor ended with exit code {self._supervisor.returncode}; see {self._output}")
            if time.monotonic() > deadline:
                raise Stuck(f"the run made no progress for {PATIENCE_S:.0f} s; see {self._output}")
            time.sleep(0.02)
        return result

    def _wait_for_save(self) -> None:
        """Wait until a checkpoint is being written, which is a folder without a manifest; give up after 10 s."""
        deadline = time.monotonic() + _SAVE_PATIENCE_S
        checkpoints = self._run_dir / CHECKPOINTS_DIR
        while time.monotonic() < deadline:
            all_committed = all(list(folder.glob("manifest*")) for folder in checkpoints.glob("step-*"))
            if not all_committed:
                return
            time.sleep(0.0005)

    def _judge(self, hit: Hit, fault: Fault, begin: float, events: Sequence[Record]) -> None:
        """Fill in the result of a fault: exit code, time to notice, lost steps, and what was not as required.

        Args:
            hit: the result, which is changed.
            fault: how the run must react.
            begin: Unix time of the fault.
            events: the ledger's events since the fault.
        """
        lines = self._log_since(begin)
        if fault.then == "restarts":
            hit.code = EXIT_CRASH if any("crash" in text for _, text in lines) else None
        decision_times = [at for at, text in lines if not text.startswith(("starting", "killing"))]
        supervisor_was_killed = fault.code == -signal.SIGKILL
        if decision_times and not supervisor_was_killed:
            hit.notice_s = decision_times[0] - begin
        resumed_steps = [event["step"] for event in events if event["event"] in ("resume", "start")]
        hit.steps_lost = max(0, hit.step - resumed_steps[0]) if resumed_steps else 0
        required_starts = 0 if fault.then == "goes on" else 1
        was_set_aside = any(event["event"] == "set_aside" for event in events)
        if hit.code != fault.code:
            hit.fault = f"the exit code is {hit.code}, but after {hit.kind} it must be {fault.code}"
        elif len(resumed_steps) != required_starts:
            hit.fault = f"{len(resumed_steps)} new starts, but after {hit.kind} there must be {required_starts}"
        elif fault.bad_checkpoint and not was_set_aside:
            hit.fault = f"no checkpoint was set aside, although {hit.kind} damaged one"
        elif was_set_aside and not fault.bad_checkpoint:
            hit.fault = f"a checkpoint was set aside, although {hit.kind} damages none"

    def _log_since(self, begin: float) -> list[tuple[float, str]]:
        """Return (Unix time, text) of the lines that the supervisor logged after Unix time `begin`."""
        lines = [line.partition(" ") for line in supervise_log(self._run_dir, 0).read_text().splitlines()]
        entries = [(datetime.fromisoformat(time_text).timestamp(), text) for time_text, _, text in lines]
        return [(at, text) for at, text in entries if at > begin]


class Stuck(Exception):
    """The run made no progress or ended unexpectedly, so that the drill cannot go on; names the log to read."""


def _resumed_step(ledger: Sequence[Record]) -> int:
    """Return the step at which the newest start of the run began."""
    return int(next(event["step"] for event in reversed(ledger) if event["event"] in ("start", "resume")))
