"""Simulates a run whose use of every second is known: its ledger, its jobs, and the true account of its time."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from electra_dist.run.ledger import JobBegan, LedgerEvent

EVERY = 10  # steps between checkpoints
STEP, DATA, COMPILE, STALL = 0.5, 0.03125, 7.0, 0.25  # seconds; powers of two, so that sums are exact
QUEUE, BOOT, IMPORT, BUILD, RESTORE, NOTICE = 40.0, 8.0, 5.0, 3.0, 2.0, 16.0


@dataclass
class Simulation:
    """Simulated clock, ledger and job records of a run, with the true seconds of each use of time in `truth`."""

    now: float = 1.7e9
    saved: int = 0
    reached: int = 0
    ledger: list[LedgerEvent] = field(default_factory=list)
    jobs: list[JobBegan] = field(default_factory=list)
    truth: dict[str, float] = field(default_factory=dict)

    def spend(self, name: str, seconds: float) -> None:
        """Advance the clock by `seconds` and add them to the use `name`."""
        self.truth[name] = self.truth.get(name, 0.0) + seconds
        self.now += seconds

    def event(self, name: str, step: int, **details: Any) -> None:
        """Append an event to the ledger at the present time."""
        self.ledger.append(LedgerEvent(time=self.iso(), event=name, step=step, **details))

    def iso(self) -> str:
        """Return the present time as the ledger writes it."""
        return datetime.fromtimestamp(self.now, UTC).isoformat(timespec="milliseconds")

    def job(self, steps: int, ending: str) -> None:
        """Simulate one job: queue, start, `steps` steps from the last checkpoint, and the event `ending`.

        The ending `kill` records no event.
        """
        submitted = self.iso()
        self.spend("queue", QUEUE)
        self.jobs.append(
            JobBegan(
                event="begin",
                time=self.iso(),
                job=str(len(self.jobs)),
                restart=0,
                submitted=submitted,
                started=self.iso(),
                ledger_events=len(self.ledger),
            )
        )
        self.spend("boot", BOOT)
        for name, seconds in (("imports", IMPORT), ("build", BUILD), ("restore", RESTORE)):
            self.spend(name, seconds)
        setup = {"import": IMPORT, "build": BUILD, "restore": RESTORE}
        first_step, repeated = self.saved, self.reached - self.saved
        self.event("resume" if self.saved else "start", self.saved, setup_s=setup, repeated=repeated)
        spent = dict.fromkeys(("first", "step", "data", "stall", "eval"), 0.0)
        unseen = 0
        for done in range(first_step + 1, first_step + steps + 1):
            first = done == first_step + 1
            if first:
                self.spend("compile", COMPILE)
            self.spend("data", DATA)
            self.spend("useful", STEP)
            spent["first" if first else "step"] += STEP + DATA + (COMPILE if first else 0.0)
            spent["data"] += DATA
            unseen += 1
            if done % EVERY == 0 or (ending == "stop" and done == first_step + steps):
                self.spend("stall", STALL)
                spent["stall"] += STALL
                self.event("checkpoint", done, stall_s=STALL, wait_s=0.0, spent_s=dict(spent))
                self.saved, unseen = done, 0
        self.reached = first_step + steps
        self.truth["lost"] = self.truth.get("lost", 0.0) + STEP * (self.reached - self.saved)
        self.truth["useful"] -= STEP * (self.reached - self.saved)
        if ending == "kill":  # the ledger cannot distinguish waits for rows since the last checkpoint from down time
            self.truth["data"] -= DATA * unseen
            self.truth["down"] = self.truth.get("down", 0.0) + DATA * unseen
            self.spend("down", NOTICE)
        else:
            self.event(ending, self.reached, spent_s=dict(spent))
