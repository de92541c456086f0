"""The kinds of faults of the long drill, and where the legs of its run keep their data.

A leg is a stretch of the run with a fixed number of ranks and a fixed place of its data:

    local   corpus and checkpoints in folders: all kinds of `launcher.chaos` except `disk`, and `commit`
    s3      the corpus and a second copy of each checkpoint on an S3 service behind a proxy: the faults of that service
    disk    a second copy of each checkpoint on a small disk: `disk`, and kills

`commit` kills rank 0 right before or right after it commits a checkpoint.
"""

from __future__ import annotations

import itertools
import json
import random
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from drills.faults.forked_run import COMMIT_FAULT

from electra_dist.errors import EXIT_CRASH
from launcher.chaos.drill import Stuck, ordered_kinds
from launcher.chaos.faults import FAULTS, Fault
from launcher.chaos.victim import Act, Victim

Place = Literal["local", "s3", "disk"]

S3_PREFIX = "s3-"
_S3_FAULTS = {
    "slowdown": ("slowdown",),
    "reset": ("reset",),
    "short": ("short",),
    "stall": ("stall",),
    "replaced": ("replaced",),
    "expired": ("expired",),
    "lost": ("lost",),
    "away": ("away",),
    # Only objects whose digest shows a wrong byte, and objects that are known to exist when they are requested.
    "flip": ("flip:.tar", "flip:.safetensors"),
    "missing": ("missing:.tar", "missing:.safetensors"),
}
_MOST_IN_A_ROW = 3  # an operation has more tries
_STALL_S = 0.3
_HIT_PATIENCE_S = 60.0  # until a request is hit
_COMMIT_PATIENCE_S = 60.0  # until a checkpoint is committed
_POLL_S = 0.02
_KILLS = ("kill", "commit", "power", "supervisor", "usr2")
# Number of ranks and place of the legs, repeated: most have two ranks, and the number goes 1 -> 2 -> 4 -> 2.
_LEGS: tuple[tuple[int, Place], ...] = (
    (2, "local"),
    (1, "local"),
    (2, "s3"),
    (4, "local"),
    (2, "disk"),
    (2, "local"),
)


@dataclass(frozen=True, kw_only=True)
class PlannedFault:
    """One fault of the plan. When it comes is counted from the end of the fault before it."""

    kind: str
    steps: int  # steps that the run must have done since then
    in_save: bool  # whether to wait until a checkpoint is being written
    delay: float  # further delay, in units of the run's step time


@dataclass(frozen=True, kw_only=True)
class PlannedLeg:
    """A stretch of the run with a fixed number of ranks, and its faults in their order."""

    ranks: int
    place: Place
    faults: tuple[PlannedFault, ...]


def plan_legs(seed: int, count: int, faults_per_leg: int, every_steps: int, has_disk: bool) -> list[PlannedLeg]:
    """Plan the legs of the run with all their faults. Pure.

    Args:
        seed: determines kinds, order and moments.
        count: number of faults.
        faults_per_leg: faults of each leg; the last leg has the rest.
        every_steps: steps between two checkpoints.
        has_disk: whether a small disk can be mounted; otherwise its legs have the place `local`.
    """
    draw = random.Random(seed)
    legs = []
    patterns = itertools.cycle(_LEGS)
    for begin in range(0, count, faults_per_leg):
        ranks, place = next(patterns)
        if place == "disk" and not has_disk:
            place = "local"
        kinds = ordered_kinds(_shuffled(kinds_of(place), draw), min(faults_per_leg, count - begin), draw, ALL_FAULTS)
        faults = [
            PlannedFault(
                kind=kind,
                steps=draw.randrange(every_steps),
                in_save=ALL_FAULTS[kind].needs_save and draw.random() < 0.5,
                delay=draw.uniform(0.0, 2.0),
            )
            for kind in kinds
        ]
        legs.append(PlannedLeg(ranks=ranks, place=place, faults=tuple(faults)))
    return legs


def kinds_of(place: Place) -> list[str]:
    """Return the kinds of faults of a leg."""
    if place == "s3":
        return [*(f"{S3_PREFIX}{name}" for name in _S3_FAULTS), *_KILLS]
    if place == "disk":
        return ["disk", "disk", *_KILLS]
    return [kind for kind in ALL_FAULTS if kind != "disk" and not kind.startswith(S3_PREFIX)]


def _shuffled(kinds: list[str], draw: random.Random) -> list[str]:
    """Return the kinds in random order, so that a leg with fewer faults than kinds does not always have the first."""
    return draw.sample(kinds, len(kinds))


def _kill_at_commit(victim: Victim, draw: random.Random) -> str:
    """Let rank 0 kill itself right before or after its next commit of a checkpoint, and wait until it has done so.

    Raises:
        Stuck: no checkpoint was committed.
    """
    moment = draw.choice(["before", "after"])
    request = victim.run_dir / COMMIT_FAULT
    unfinished = request.with_suffix(".unfinished")
    unfinished.write_text(moment)
    unfinished.replace(request)
    deadline = time.monotonic() + _COMMIT_PATIENCE_S
    while request.exists():
        if time.monotonic() > deadline:
            raise Stuck(f"no checkpoint was committed for {_COMMIT_PATIENCE_S:.0f} s")
        time.sleep(_POLL_S)
    return f"rank 0 {moment} a commit"


class FaultyService:
    """The proxy in front of an S3 service, a process of its own, as the drill controls it."""

    endpoint_url = ""  # set before the first leg with S3

    @classmethod
    def set_plan(cls, **plan: object) -> None:
        """Let the proxy inject faults by a new `FaultPlan` with these fields."""
        request = urllib.request.Request(f"{cls.endpoint_url}/-/plan", json.dumps(plan).encode(), method="PUT")
        urllib.request.urlopen(request, timeout=30).close()

    @classmethod
    def num_hits(cls) -> int:
        """Return how many requests the proxy has hit since `set_plan` was called."""
        with urllib.request.urlopen(f"{cls.endpoint_url}/-/faults", timeout=30) as answer:
            return sum(json.load(answer).values())


def _hit_requests(kinds: tuple[str, ...]) -> Act:
    """Return the action of a fault that hits up to three of the next requests to S3."""

    def act(victim: Victim, draw: random.Random) -> str:
        """Let the proxy hit requests; wait until one was hit.

        Raises:
            Stuck: no request was hit.
        """
        most = draw.randint(1, _MOST_IN_A_ROW)
        FaultyService.set_plan(
            seed=draw.randrange(1 << 32), rate=1.0, faults=kinds, most=most, in_a_row=most, stall_s=_STALL_S
        )
        deadline = time.monotonic() + _HIT_PATIENCE_S
        while FaultyService.num_hits() == 0:
            if time.monotonic() > deadline:
                raise Stuck(f"no request was hit by {kinds} for {_HIT_PATIENCE_S:.0f} s")
            time.sleep(_POLL_S)
        return f"up to {most} requests"

    return act


def _s3_faults() -> Mapping[str, Fault]:
    """Return the kinds of faults of an S3 service by their names."""
    return {
        f"{S3_PREFIX}{name}": Fault(act=_hit_requests(kinds), then="goes on", code=None)
        for name, kinds in _S3_FAULTS.items()
    }


ALL_FAULTS: dict[str, Fault] = {
    **FAULTS,
    "commit": Fault(act=_kill_at_commit, then="restarts", code=EXIT_CRASH),
    **_s3_faults(),
}
