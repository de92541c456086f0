"""List the kinds of faults of the long drill, and plan the legs of its run.

A leg is a stretch of the run with a fixed number of ranks and a fixed place of its data. The place determines which
kinds of faults the leg has:

    local   corpus and checkpoints in folders: all kinds of `electra_launcher.chaos` except `disk`, and `commit`
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
from electra_launcher.chaos.drill import Planned, Stuck, ordered_kinds
from electra_launcher.chaos.faults import FAULTS, Act, Fault, Victim

from electra_dist.errors import EXIT_CRASH

Place = Literal["local", "s3", "disk"]

S3_PREFIX = "s3-"
# Name of a fault without the prefix -> what the proxy does to a request (support/fault_server.py).
_S3_FAULTS = {
    "slowdown": ("slowdown",),
    "reset": ("reset",),
    "short": ("short",),
    "stall": ("stall",),
    "replaced": ("replaced",),
    "expired": ("expired",),
    "lost": ("lost",),
    "away": ("away",),
    # A changed byte is noticed only in objects with a digest. "No such object" is a fault only if the object exists.
    "flip": ("flip:.tar", "flip:.safetensors"),
    "missing": ("missing:.tar", "missing:.safetensors"),
}
_MOST_IN_A_ROW = 3  # requests that are hit one after another; the product tries an operation more often than that
_STALL_S = 0.3  # how long the proxy delays an answer for the fault "stall"
_HIT_PATIENCE_S = 60.0  # how long the drill waits until a request is hit
_COMMIT_PATIENCE_S = 60.0  # how long the drill waits until a checkpoint is committed
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
class PlannedLeg:
    """Plan of one leg: a stretch of the run with a fixed number of ranks and a fixed place of its data."""

    ranks: int  # number of ranks
    place: Place  # where the data of the run are; it determines the kinds of faults
    faults: tuple[
        Planned, ...
    ]  # in their order; `step` counts from the end of the one before, or from the leg's begin


def plan_legs(seed: int, count: int, faults_per_leg: int, every_steps: int, has_disk: bool) -> list[PlannedLeg]:
    """Plan the legs of the run with all their faults; legs with a disk become local ones without `has_disk`. Pure."""
    draw = random.Random(seed)
    legs = []
    patterns = itertools.cycle(_LEGS)
    for begin in range(0, count, faults_per_leg):
        ranks, place = next(patterns)
        if place == "disk" and not has_disk:
            place = "local"
        kinds = ordered_kinds(_shuffled(kinds_of(place), draw), min(faults_per_leg, count - begin), draw)
        faults = [
            Planned(
                kind=kind,
                step=draw.randrange(every_steps),
                in_save=ALL_FAULTS[kind].needs_save and draw.random() < 0.5,
                delay=draw.uniform(0.0, 2.0),
            )
            for kind in kinds
        ]
        legs.append(PlannedLeg(ranks=ranks, place=place, faults=tuple(faults)))
    return legs


def kinds_of(place: Place) -> list[str]:
    """Return the kinds of faults that a leg with this place of its data can have, as keys of ALL_FAULTS.

    A kind that is listed twice is planned twice as often.
    """
    if place == "s3":
        return [*(f"{S3_PREFIX}{name}" for name in _S3_FAULTS), *_KILLS]
    if place == "disk":
        return ["disk", "disk", *_KILLS]
    return [kind for kind in ALL_FAULTS if kind != "disk" and not kind.startswith(S3_PREFIX)]


def _shuffled(kinds: list[str], draw: random.Random) -> list[str]:
    """Return the kinds in random order.

    A leg with fewer faults than there are kinds uses the first ones only; the order makes them others in each leg.
    """
    return draw.sample(kinds, len(kinds))


def _kill_at_commit(victim: Victim, draw: random.Random) -> str:
    """Make rank 0 kill itself right before or right after its next commit of a checkpoint, and wait for the commit.

    The request is a file in the run folder, which the rank reads and deletes (forked_run.py).
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
    """Controls of the proxy that injects faults into requests to an S3 service; the proxy is a process of its own."""

    endpoint_url = ""  # set before the first leg with S3

    @classmethod
    def set_plan(cls, **plan: object) -> None:
        """Replace the plan by which the proxy injects faults, and its count of faults."""
        request = urllib.request.Request(f"{cls.endpoint_url}/-/plan", json.dumps(plan).encode(), method="PUT")
        urllib.request.urlopen(request, timeout=30).close()

    @classmethod
    def num_hits(cls) -> int:
        """Return into how many requests the proxy has injected a fault since `set_plan` was called."""
        with urllib.request.urlopen(f"{cls.endpoint_url}/-/faults", timeout=30) as answer:
            return sum(json.load(answer).values())


def _hit_requests(kinds: tuple[str, ...]) -> Act:
    """Return a function that makes the proxy inject faults into up to three requests to S3, for `Fault.act`."""

    def act(victim: Victim, draw: random.Random) -> str:
        """Make the proxy inject faults into the next requests, and wait until one was hit."""
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
    """Return the faults of an S3 service: name, such as "s3-reset" -> fault."""
    return {
        f"{S3_PREFIX}{name}": Fault(act=_hit_requests(kinds), then="goes on", code=None)
        for name, kinds in _S3_FAULTS.items()
    }


ALL_FAULTS: dict[str, Fault] = {
    **FAULTS,
    "commit": Fault(act=_kill_at_commit, then="restarts", code=EXIT_CRASH),
    **_s3_faults(),
}
