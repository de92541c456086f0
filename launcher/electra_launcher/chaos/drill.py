"""Plan the faults of a drill (`plan`), inflict them on a run, and judge how the run reacts to each (`Drill`).

Guarantee: `plan` is a pure function of its arguments, so equal seeds give equal drills.

How: the drill starts a supervisor as a user does, and watches the run's heartbeats and its ledger (list of events). At
the planned step it inflicts a fault (faults.py), starts the supervisor again if the fault ended it, and waits for the
first new step. The result (`Hit`) is bad if the run did not react as it must to this kind of fault.
"""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from electra_dist.checkpoint.stored_copies import checkpoints
from electra_dist.config import CHECKPOINTS_DIR
from electra_dist.errors import EXIT_CRASH, UserError
from electra_dist.run.folder import LEDGER_FILE, supervise_log
from electra_dist.run.heartbeat import Beat, read_heartbeats
from electra_dist.run.history import newest_checkpoint, starts
from electra_dist.run.ledger import LedgerEvent, read_ledger
from electra_dist.store.open_store import LocalStore
from electra_launcher.chaos.faults import FAULTS, Fault, Victim, kill_everything

PATIENCE_S = 900.0  # A run that makes no progress for this long has failed the drill.
_SAVE_PATIENCE_S = 10.0  # how long a fault with `Planned.in_save` waits until a checkpoint is being written
_POLL_S = 0.02  # between two looks at the run
_SAVE_POLL_S = 0.0005  # between two looks for a save; short, because a small checkpoint takes only milliseconds
_MOST_DELAY = 2.0  # longest random delay of a fault, in step times
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Planned:
    """Planned fault of a drill: its kind, and when it is inflicted.

    The drill waits until the run has reached `step` and, if `in_save` is set, until the run writes a checkpoint. Then
    it waits for `delay` times the duration of a step, and inflicts the fault.
    """

    kind: str  # a key of FAULTS
    step: int  # steps that the run must have done before the fault
    in_save: bool  # whether to wait until a checkpoint is being written
    delay: float  # further delay, in units of the run's step time


@dataclass(kw_only=True)
class Hit:
    """Result of one fault of a drill: what was hit, and how the run reacted. Times count from the fault."""

    kind: str  # a key of FAULTS
    step: int  # steps done at the fault
    what: str  # what was hit
    code: int | None = None  # exit code of the ranks (after a restart) or of the supervisor; None: the run went on
    notice_s: float | None = None  # until the supervisor logged its first decision; None: it logged none
    recovery_s: float | None = None  # until the run completed its next new step; None: not yet
    steps_lost: int = 0  # steps that had to be repeated
    problem: str = ""  # what was wrong with the run's reaction; "": it reacted as it must


def plan(kinds: Sequence[str], count: int, num_steps: int, every_steps: int, seed: int) -> list[Planned]:
    """Plan `count` faults: every kind about equally often, in random order.

    The run of `num_steps` steps is divided into `count` + 1 windows of equal length. Each fault comes at a random step
    of its window, early enough that the run saves a new checkpoint (one every `every_steps` steps) between any two
    faults. Raises UserError if the run is too short for that.
    """
    draw = random.Random(seed)
    window = num_steps // (count + 1)
    if window < 2 * every_steps:
        raise UserError(
            f"{count} faults with a checkpoint between any two need train.num_steps of at least "
            f"{2 * every_steps * (count + 1)} (2 x checkpoint.every_steps x ({count} + 1)), not {num_steps}; "
            f"add --set train.num_steps=..., or lower checkpoint.every_steps or --count"
        )
    faults = []
    for number, kind in enumerate(ordered_kinds(kinds, count, draw), start=1):
        # Window 0 has no fault. The last `every_steps` steps of a window are left for the next checkpoint.
        step = number * window + draw.randrange(window - every_steps)
        in_save = FAULTS[kind].needs_save and draw.random() < 0.5
        delay = draw.uniform(0.0, _MOST_DELAY)
        faults.append(Planned(kind=kind, step=step, in_save=in_save, delay=delay))
    return faults


def ordered_kinds(kinds: Sequence[str], count: int, draw: random.Random) -> list[str]:
    """Return `count` of the `kinds` in random order, each about equally often."""
    num_repetitions = count // len(kinds) + 1
    order = (list(kinds) * num_repetitions)[:count]
    draw.shuffle(order)
    return order


class Drill:
    """A run under a supervisor (`electra_launcher.supervise`) that is hit by faults, one after the other.

    Creating a drill starts the run. Call `hit` for each planned fault, then `finish`, and `close` in a `finally`
    block.
    """

    def __init__(
        self,
        run_dir: Path,
        command: Sequence[str],
        seed: int,
        faults: Mapping[str, Fault] = FAULTS,
        first_step: int = 0,
        disk: Path | None = None,
    ) -> None:
        """Start the supervisor by `command`, with its output in RUN_DIR.log. `seed` decides what the faults hit.

        The run may not fall back behind `first_step`, so a fault that damages a checkpoint waits until there are two
        complete checkpoints of this step or later ones. `disk` is the folder whose disk `fill_disk` fills; None stands
        for the run's checkpoint folder.
        """
        self._run_dir = run_dir
        self._command = command
        self._faults = faults
        self._first_step = first_step
        self._disk = disk
        self._draw = random.Random(f"{seed} victims")
        self._output = run_dir.with_name(f"{run_dir.name}.log")
        self._supervisor = self._start()
        self._saved = 0  # step of the newest checkpoint at the last fault
        self._events: list[LedgerEvent] = []  # the events of the ledger when it was read last
        self._read_version = (0, 0)  # size (bytes) and modification time (ns) of the ledger when it was read last

    def hit(self, planned: Planned) -> Hit:
        """Wait for the planned moment, inflict the fault, wait until the run makes new steps, and return the result.

        If the fault ends the supervisor, this call starts it again. Raises Stuck if the run has no ranks to hit, ends
        unexpectedly, or makes no progress for 900 s (PATIENCE_S).
        """
        fault = self._faults[planned.kind]
        if fault.bad_checkpoint:
            # A run without another checkpoint would end with exit code 78, because it never goes back to step 0.
            self._wait_for(lambda: self._num_checkpoints() > 1 or None)
        beat_before = self._wait_for_moment(planned)
        ledger_before = read_ledger(self._run_dir)
        self._saved = newest_checkpoint(ledger_before)
        begin = time.time()
        victim = self._victim()
        if not victim.ranks():
            raise Stuck(f"the run has no ranks to hit at step {beat_before.step}; read {self._output}")
        what = fault.act(victim, self._draw)
        hit = Hit(kind=planned.kind, step=beat_before.step, what=what)
        if fault.then == "ends":
            hit.code = self.finish()
            if fault.undo is not None:
                fault.undo(victim)
            self._supervisor = self._start()
        elif fault.undo is not None:
            time.sleep(fault.lasts_s)
            fault.undo(victim)
        restarts = fault.then != "goes on"
        self._wait_for(lambda: self._new_step(beat_before, begin, restarts))
        hit.recovery_s = time.time() - begin
        events = read_ledger(self._run_dir)[len(ledger_before) :]
        self._judge(hit, fault, begin, events)
        return hit

    def _wait_for_moment(self, planned: Planned) -> Beat:
        """Wait until it is time to inflict a planned fault, and return rank 0's newest heartbeat."""
        beat = self._wait_for(lambda: self._ready(planned))
        if planned.in_save:
            self._wait_for_save()
        step_s = 0.0 if beat.step_s is None else beat.step_s
        time.sleep(planned.delay * step_s)
        newest_beat = self._beat()
        return beat if newest_beat is None else newest_beat

    def finish(self) -> int:
        """Wait until the supervisor ends, and return its exit code (-9 after SIGKILL); raise Stuck after 900 s."""
        try:
            return self._supervisor.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise Stuck(f"the supervisor did not end within {PATIENCE_S:.0f} s; read {self._output}") from None

    def close(self) -> None:
        """Kill the supervisor and all processes of the run, and wait until they have ended."""
        kill_everything(self._victim())
        self._supervisor.wait()

    def _victim(self) -> Victim:
        is_running = self._supervisor.poll() is None
        supervisor_pid = self._supervisor.pid if is_running else None
        return Victim(run_dir=self._run_dir, supervisor=supervisor_pid, disk=self._disk)

    def _num_checkpoints(self) -> int:
        found = checkpoints([LocalStore(self._victim().checkpoints)])
        return len([checkpoint for checkpoint in found if checkpoint.step >= self._first_step])

    def _start(self) -> subprocess.Popen[bytes]:
        # A child inherits ignored signals: with the default action, the fault `hup` works in a drill under `nohup`,
        # too.
        own_handler = signal.signal(signal.SIGHUP, signal.SIG_DFL)
        try:
            with self._output.open("ab") as out:
                # In a session of its own, so that Ctrl-C in the drill's terminal reaches only the drill.
                return subprocess.Popen(self._command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        finally:
            signal.signal(signal.SIGHUP, own_handler)

    def _ledger(self) -> list[LedgerEvent]:
        """Return the events of the run's ledger (its list of events); an unchanged file is not read again."""
        file = self._run_dir / LEDGER_FILE
        if file.exists():
            status = file.stat()
            version = (status.st_size, status.st_mtime_ns)
            if version != self._read_version:
                self._events = read_ledger(self._run_dir)
                self._read_version = version
        return self._events

    def _beat(self) -> Beat | None:
        for beat in read_heartbeats(self._run_dir):
            if beat.rank == 0:
                return beat
        return None

    def _ready(self, planned: Planned) -> Beat | None:
        """Return rank 0's heartbeat if the planned fault may be inflicted now, otherwise None.

        The run must have reached the planned step and saved a checkpoint since the last fault, and each rank must know
        its step time.
        """
        beats = read_heartbeats(self._run_dir)
        if not beats:
            return None
        first_beat = beats[0]
        is_step_reached = first_beat.step >= planned.step
        # A rank without a step time may be silent for much longer, so that a hang would be noticed late. Heartbeats of
        # an earlier start of the ranks, which may have had more ranks, do not count.
        is_step_time_known = all(beat.step_s is not None for beat in beats if beat.attempt == first_beat.attempt)
        if not is_step_reached or not is_step_time_known:
            return None
        has_new_checkpoint = newest_checkpoint(self._ledger()) > self._saved
        return first_beat if has_new_checkpoint else None

    def _new_step(self, before: Beat, begin: float, restarts: bool) -> Beat | None:
        """Return rank 0's heartbeat if the run has completed a step since Unix time `begin`, otherwise None.

        `before` is rank 0's heartbeat at the fault. If the fault restarts the ranks (`restarts`), the step must come
        after the checkpoint from which they resumed; it may repeat a step that was done before the fault.
        """
        beat = self._beat()
        if beat is None or beat.time < begin:
            return None
        last_known_step = before.step
        if restarts:
            is_of_new_start = beat.attempt != before.attempt and beat.phase != "setup"
            if not is_of_new_start:
                return None
            last_known_step = starts(self._ledger())[-1].first_step
        return beat if beat.step > last_known_step else None

    def _wait_for(self, condition: Callable[[], T | None]) -> T:
        """Poll `condition` until it returns not None, and return this; raise Stuck if the run ends, or after 900 s."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            has_ended = self._supervisor.poll() is not None
            result = condition()
            if result is not None:
                return result
            # It had ended before `condition` was called, which therefore has seen all that the run will ever do.
            if has_ended:
                raise Stuck(f"the supervisor ended with exit code {self._supervisor.returncode}; read {self._output}")
            if time.monotonic() > deadline:
                raise Stuck(f"the run made no progress for {PATIENCE_S:.0f} s; read {self._output}")
            time.sleep(_POLL_S)

    def _wait_for_save(self) -> None:
        """Wait until the run is writing a checkpoint, but at most 10 s."""
        deadline = time.monotonic() + _SAVE_PATIENCE_S
        checkpoints = self._run_dir / CHECKPOINTS_DIR
        while time.monotonic() < deadline:
            for folder in checkpoints.glob("step-*"):
                # A checkpoint's folder gets its manifest last, so a folder without one is being written.
                has_manifest = any(folder.glob("manifest*"))
                if not has_manifest:
                    return
            time.sleep(_SAVE_POLL_S)

    def _judge(self, hit: Hit, fault: Fault, begin: float, events: Sequence[LedgerEvent]) -> None:
        """Fill in `hit.code`, `notice_s`, `steps_lost` and `problem` from the supervisor's log and the new `events`.

        `begin` is the Unix time of the fault.
        """
        lines = self._log_since(begin)
        if fault.then == "restarts":
            has_noticed_crash = any("crash" in text for _, text in lines)
            hit.code = EXIT_CRASH if has_noticed_crash else None
        # A killed supervisor notices nothing; the next one only starts.
        supervisor_was_killed = fault.code == -signal.SIGKILL
        # All other lines of the supervisor's log are decisions that follow from something that it has noticed.
        decision_times = [at for at, text in lines if not text.startswith(("starting", "killing"))]
        if decision_times and not supervisor_was_killed:
            hit.notice_s = decision_times[0] - begin
        resumed_steps = [start.first_step for start in starts(events)]
        if resumed_steps:
            hit.steps_lost = max(0, hit.step - resumed_steps[0])
        was_set_aside = any(event.event == "set_aside" for event in events)
        hit.problem = _reaction_problem(hit, fault, num_starts=len(resumed_steps), was_set_aside=was_set_aside)

    def _log_since(self, begin: float) -> list[tuple[float, str]]:
        """Return the lines that the supervisor logged after Unix time `begin`, each as (Unix time, text)."""
        entries = []
        for line in supervise_log(self._run_dir, 0).read_text("utf-8").splitlines():
            time_text, _, text = line.partition(" ")
            logged_at = datetime.fromisoformat(time_text).timestamp()
            if logged_at > begin:
                entries.append((logged_at, text))
        return entries


def _reaction_problem(hit: Hit, fault: Fault, num_starts: int, was_set_aside: bool) -> str:
    """Return in one line what is wrong with the run's reaction to a fault, or "" if it reacted as it must."""
    required_starts = 0 if fault.then == "goes on" else 1
    if hit.code != fault.code:
        return f"the exit code is {hit.code}, but after {hit.kind} it must be {fault.code}"
    if num_starts != required_starts:
        return f"{num_starts} new starts, but after {hit.kind} there must be {required_starts}"
    if fault.bad_checkpoint and not was_set_aside:
        return f"no checkpoint was set aside, although {hit.kind} damaged one"
    if was_set_aside and not fault.bad_checkpoint:
        return f"a checkpoint was set aside, although {hit.kind} damages none"
    return ""


class Stuck(Exception):
    """The run made no progress or ended unexpectedly, so that the drill cannot go on; the message names the log."""
