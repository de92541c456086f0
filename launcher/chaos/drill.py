"""A run that is hit: when and by what (`plan`, pure), and what came of each hit.

The drill starts a supervisor as a user does, watches the run's heartbeats and ledger for the moment, lets a fault
(faults.py) act, starts again what ended, and waits for the first new step. A hit is bad if the end was not the one
that this fault must have.
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

PATIENCE_S = 900.0  # a run that does not get on for so long has failed the drill
_SAVE_PATIENCE_S = 10.0
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A fault to come."""

    kind: str
    step: int  # once this many steps are done
    in_save: bool  # and a checkpoint is being written
    delay: float  # and then so many step times more


@dataclass(kw_only=True)
class Hit:
    """What came of a fault. Times in seconds."""

    kind: str
    step: int
    what: str
    code: int | None = None
    notice_s: float | None = None
    recovery_s: float | None = None  # to the next step done
    steps_lost: int = 0
    fault: str = ""  # what was not as it must be


def plan(kinds: Sequence[str], count: int, num_steps: int, every_steps: int, seed: int) -> list[Planned]:
    """Every kind about as often, in random order, with a new checkpoint between any two.

    Raises:
        UserError: the run is too short for so many.
    """
    draw = random.Random(seed)
    width = num_steps // (count + 1)
    if width < 2 * every_steps:
        raise UserError(
            f"{count} faults with a checkpoint between any two need train.num_steps of at least "
            f"{2 * every_steps * (count + 1)} (2 x checkpoint.every_steps x ({count} + 1)), not {num_steps}; "
            f"add --set train.num_steps=..., or lower checkpoint.every_steps or --count"
        )
    order = (list(kinds) * (count // len(kinds) + 1))[:count]
    once = [kind for kind in order if FAULTS[kind].then == "goes on"]  # a start survives only one of them
    others = [kind for kind in order if FAULTS[kind].then != "goes on"]
    if len(once) > len(others) + 1:
        raise UserError(f"--faults {','.join(kinds)}: {once[0]} can be done once a start; add more kinds of faults")
    draw.shuffle(others)
    for place in sorted(draw.sample(range(len(others) + 1), len(once)), reverse=True):
        others.insert(place, once.pop())
    faults = []
    for number, kind in enumerate(others, start=1):
        step = number * width + draw.randrange(width - every_steps)
        in_save = FAULTS[kind].needs_save and draw.random() < 0.5
        faults.append(Planned(kind=kind, step=step, in_save=in_save, delay=draw.uniform(0.0, 2.0)))
    return faults


class Drill:
    """The run that is hit."""

    def __init__(self, run_dir: Path, command: Sequence[str], seed: int, disk: SmallDisk | None) -> None:
        self._run_dir, self._command, self._disk = run_dir, command, disk
        self._draw = random.Random(f"{seed} victims")
        self._output = run_dir.with_name(f"{run_dir.name}.log")
        self._supervisor = self._start()
        self._saved = 0  # newest checkpoint at the last fault

    def hit(self, planned: Planned) -> Hit:
        """Wait for the moment, do it, and wait until the run steps again."""
        fault = FAULTS[planned.kind]
        beat = self._wait_for(lambda: self._ready(planned))
        if planned.in_save:
            self._wait_for_save()
        time.sleep(planned.delay * (beat.step_s or 0.0))
        before, events = self._beat() or beat, len(read_ledger(self._run_dir))
        self._saved = newest_checkpoint(read_ledger(self._run_dir))
        begin = time.time()
        victim = self._victim()
        if not victim.ranks():
            raise Stuck(f"there are no ranks to hit, see {self._output}")
        what = fault.act(victim, self._draw)
        hit = Hit(kind=planned.kind, step=before.step, what=what)
        if fault.then == "ends":
            hit.code = self.finish()
            if self._disk:
                self._disk.free()
            self._supervisor = self._start()
        base = before if fault.then == "goes on" else None
        self._wait_for(lambda: self._stepped(before, base, begin))
        hit.recovery_s = time.time() - begin
        if fault.then == "goes on":
            self._wait_for(lambda: [line for line in self._log() if line[0] > begin] or None)
        self._judge(hit, fault, begin, read_ledger(self._run_dir)[events:])
        return hit

    def finish(self) -> int:
        """The exit code of the last supervisor."""
        try:
            return self._supervisor.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise Stuck(f"the supervisor does not end, see {self._output}") from None

    def close(self) -> None:
        """Leave no process."""
        kill_everything(self._victim())
        self._supervisor.wait()

    def _victim(self) -> Victim:
        runs = self._supervisor.poll() is None  # else its number may be somebody else's by now
        return Victim(run_dir=self._run_dir, supervisor=self._supervisor.pid if runs else None)

    def _start(self) -> subprocess.Popen[bytes]:
        with self._output.open("ab") as out:
            return subprocess.Popen(self._command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)

    def _beat(self) -> Beat | None:
        return next((beat for beat in read_heartbeats(self._run_dir) if beat.rank == 0), None)

    def _ready(self, planned: Planned) -> Beat | None:
        """At its step, with a checkpoint since the last fault, and with the step time learned by all ranks."""
        beats = read_heartbeats(self._run_dir)
        if not beats or beats[0].step < planned.step or any(beat.step_s is None for beat in beats):
            return None
        return beats[0] if newest_checkpoint(read_ledger(self._run_dir)) > self._saved else None

    def _stepped(self, before: Beat, base: Beat | None, begin: float) -> Beat | None:
        beat = self._beat()
        if beat is None or beat.time < begin:
            return None
        if base is not None:
            return beat if beat.step > base.step else None
        if beat.attempt == before.attempt or beat.phase == "setup":
            return None
        return beat if beat.step > _resumed(read_ledger(self._run_dir)) else None

    def _wait_for(self, condition: Callable[[], T | None]) -> T:
        """What `condition` yields, once it yields something."""
        deadline = time.monotonic() + PATIENCE_S
        while (found := condition()) is None:
            if self._supervisor.poll() is not None and condition() is None:
                raise Stuck(f"the supervisor ended with {self._supervisor.returncode}, see {self._output}")
            if time.monotonic() > deadline:
                raise Stuck(f"the run does not get on, see {self._output}")
            time.sleep(0.02)
        return found

    def _wait_for_save(self) -> None:
        """Until a checkpoint is being written, if one soon is."""
        deadline = time.monotonic() + _SAVE_PATIENCE_S
        folders = self._run_dir / CHECKPOINTS_DIR
        while time.monotonic() < deadline and all(list(f.glob("manifest*")) for f in folders.glob("step-*")):
            time.sleep(0.0005)

    def _judge(self, hit: Hit, fault: Fault, begin: float, events: Sequence[Record]) -> None:
        lines = [line for line in self._log() if line[0] > begin]
        if fault.then == "restarts":
            hit.code = EXIT_CRASH if any("crash" in text for _, text in lines) else None
        noticed = [at for at, text in lines if not text.startswith(("starting", "killing"))]
        if noticed and fault.code != -signal.SIGKILL:  # nobody is left to notice that
            hit.notice_s = noticed[0] - begin
        resumes = [event["step"] for event in events if event["event"] in ("resume", "start")]
        hit.steps_lost = max(0, hit.step - resumes[0]) if resumes else 0
        wanted = 0 if fault.then == "goes on" else 1
        if hit.code != fault.code:
            hit.fault = f"exit code {hit.code}, not {fault.code}"
        elif len(resumes) != wanted:
            hit.fault = f"{len(resumes)} new starts, not {wanted}"
        elif fault.bad_checkpoint != any(event["event"] == "set_aside" for event in events):
            hit.fault = "no checkpoint was set aside" if fault.bad_checkpoint else "a checkpoint was set aside"

    def _log(self) -> list[tuple[float, str]]:
        file = supervise_log(self._run_dir, 0)
        lines = [line.partition(" ") for line in file.read_text().splitlines()]
        return [(datetime.fromisoformat(at).timestamp(), text) for at, _, text in lines]


class Stuck(Exception):
    """The run went where the drill cannot follow."""


def _resumed(ledger: Sequence[Record]) -> int:
    return int(next(e["step"] for e in reversed(ledger) if e["event"] in ("start", "resume")))
