"""Make one case: run it with its interruptions, run its twin without any, and compare what both have left.

Which twin equals the interrupted run bit for bit follows from docs/exactness.md. A restart with other ranks, another
micro-batch or another ZeRO stage may change the last bits, so the twin makes the same change at the same step; ZeRO 1
to 2 and back changes nothing, so the twin does not. Steps that the guard has stopped or discarded count as if they
had been in `train.skip_steps`, so the twin of a run with spikes has them there and meets no spike.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from drills.campaign.cases import CUT, MISSING, TORN_LEDGER, TORN_METRICS, Case, Interruption, Leg, sources_of
from drills.campaign.draws import placed, tree_of
from drills.campaign.forked_starts import run_command, start
from drills.kill_matrix.comparison import NOT_COMPARED, first_difference, read_lines
from drills.kill_matrix.short_run import DONE, STOPPED
from support.checkpoints import committed, read_manifest
from support.real_runs import write_corpus

from electra_dist.errors import EXIT_USER_ERROR
from electra_dist.run.folder import IDENTITY_FILE, LEDGER_FILE, METRICS_FILE, SAMPLES_FILE, SKIPPED_STEPS_FILE
from electra_dist.store.open_store import LocalStore

_TRACEBACK = "Traceback (most recent call last)"
_DIVERGED = "diverge"  # in the error line of a run that the guard has given up
_KILLED = -9
_MOST_RESTARTS = 3  # after the planned starts
_COMPARED_STATE = (
    "step", "rows_seen", "rows_digest", "skipped", "recent_losses", "overflowed", "loss_scale", "eval_context_auc",
    "eval_loss",
)  # fmt: skip


class Fault(Exception):
    """Error for a case in which a run failed or differs from its twin; the message says how, in one or more lines."""


class Segment(NamedTuple):
    """Steps of a run from one step on, up to the next segment, with one setting."""

    from_step: int
    ranks: int
    settings: tuple[tuple[str, Any], ...]


@dataclass
class Side:
    """One of the two runs of a case: the interrupted one or its twin."""

    folder: Path
    case: Case
    data: Path
    changes: Mapping[str, Any] = field(default_factory=dict)  # further changes of the case's config
    num_starts: int = 0
    targets: Sequence[str] = ()  # of the last start
    damaged: set[int] = field(default_factory=set)  # steps of damaged checkpoints

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    def checkpoint_folders(self) -> list[Path]:
        """Return the folders of the checkpoint targets of the last start."""
        return [self.folder / target.removeprefix("SIDE/") for target in self.targets or ["SIDE/run/checkpoints"]]

    def start(self, leg: Leg, spikes: Sequence[int] = ()) -> tuple[list[int], str]:
        """Start the run; return the exit codes of its ranks and what they have printed."""
        self.num_starts += 1
        changes = {**self.case.changes, **self.changes, **leg.settings}
        self.targets = changes.get("checkpoint.targets", [])
        places = {"DATA": self.data, "CASE": self.folder.parent, "SIDE": self.folder}
        config = self.folder / f"start-{self.num_starts}.yaml"
        config.write_text(yaml.safe_dump(placed(tree_of(changes), places)))
        output = config.with_suffix(".txt")
        codes = start(config, self.folder, leg.ranks, output, leg.interruption, spikes, leg.from_scratch)
        text = output.read_text(errors="replace") if output.exists() else ""
        if _TRACEBACK in text and _KILLED not in codes:
            raise Fault(f"traceback: {_last_line(text)}; {output}")
        return codes, text

    def ledger(self) -> list[dict[str, Any]]:
        """Return the events of the ledger."""
        return read_lines(self.run_dir / LEDGER_FILE)

    def skipped(self) -> list[int]:
        """Return the steps that the guard has stopped or discarded."""
        file = self.run_dir / SKIPPED_STEPS_FILE
        return json.loads(file.read_text())["steps"] if file.exists() else []

    def newest_checkpoint(self) -> tuple[int, Path] | None:
        """Return step and folder of the newest checkpoint of the first target; None if there is none."""
        folder = self.checkpoint_folders()[0]
        if not folder.exists():
            return None
        found = max(committed(LocalStore(folder)), default=None)
        return (found[0], folder / found[2]) if found else None

    def go_back(self, step: int) -> None:
        """Delete all checkpoints after a step."""
        for target in self.checkpoint_folders():
            for checkpoint, _, folder in committed(LocalStore(target)):
                if checkpoint > step:
                    shutil.rmtree(target / folder)


@dataclass
class Outcome:
    """What came of a case."""

    case: Case
    fault: str = ""  # empty: the case is good
    met: list[str] = field(default_factory=list)  # kinds of the interruptions that came
    ended: str = "done"  # or "diverged": both runs ended with the guard's error


def write_data(folder: Path) -> None:
    """Write the corpora of the campaign."""
    write_corpus(str(folder / "corpus"), [7, 3, 12, 1, 9])
    write_corpus(str(folder / "corpus" / "heldout"), [24], seed=9)
    write_corpus(str(folder / "second"), [5, 4], seed=4)
    write_corpus(str(folder / "third"), [31], seed=5)


def run_case(case: Case, folder: Path, data: Path) -> Outcome:
    """Make a case in an empty folder."""
    outcome = Outcome(case)
    try:
        _make_sources(case, folder, data)
        interrupted = _side(folder / "interrupted", case, data)
        segments = _run_interrupted(interrupted, outcome)
        if outcome.ended == "done":
            skipped = interrupted.skipped() if case.spikes or "rollback" in outcome.met else []
            twin = _run_twin(folder / "twin", case, data, segments, skipped)
            compare(interrupted, twin)
    except Fault as fault:
        outcome.fault = str(fault)
    return outcome


def _side(folder: Path, case: Case, data: Path, **changes: Any) -> Side:
    folder.mkdir(parents=True)
    return Side(folder, case, data, changes)


def _make_sources(case: Case, folder: Path, data: Path) -> None:
    """Train the runs whose weights the case begins with."""
    for place, changes in sources_of(case.changes).items():
        name = place.removeprefix("CASE/")
        side = _side(folder / "sources" / name, dataclasses.replace(case, changes=changes), data)
        codes, text = side.start(Leg(1, {}, None))
        if codes != [DONE]:
            raise Fault(f"the run for the weights of the {name} ended with {codes}: {_last_line(text)}")
        os.symlink(side.run_dir, folder / name)


def _run_interrupted(side: Side, outcome: Outcome) -> list[Segment]:
    """Run all starts of a case; return the segments in which the steps of the result were computed."""
    case = outcome.case
    segments: list[Segment] = []
    first_discarded = case.changes["train.num_steps"]  # a rollback sets the checkpoints after this step aside
    legs = [*case.legs, *[case.legs[-1]] * _MOST_RESTARTS]
    for number, leg in enumerate(legs):
        earlier = side.ledger()
        codes, text = side.start(leg, case.spikes)
        events = side.ledger()
        if events[: len(earlier)] != earlier:  # the run has begun again, with a new ledger
            earlier, segments, first_discarded = [], [], case.changes["train.num_steps"]
        for event in events[len(earlier) :]:
            if event["event"] in ("start", "resume"):
                segments = [segment for segment in segments if segment.from_step < event["step"]]
                segments.append(Segment(event["step"], leg.ranks, tuple(sorted(leg.settings.items()))))
            if event["event"] == "rollback":
                first_discarded = min(first_discarded, event["skip_from"])
            if event["event"] == "set_aside" and not _may_be_set_aside(side, event["reason"], first_discarded):
                raise Fault(f"set aside: {event}")
        interruption = leg.interruption
        if _KILLED in codes:
            if interruption is None or not interruption.kind.startswith("kill"):
                raise Fault(f"start {number + 1} was killed: {codes}")
            outcome.met += [interruption.kind, *_damage(side, leg.damage)]
            continue
        if interruption is not None and interruption.step < 0 and codes == [-interruption.signal]:
            outcome.met.append(interruption.kind)  # before the run has set its handlers
            continue
        if set(codes) == {STOPPED} and interruption is not None and interruption.kind != "save file":
            outcome.met.append(interruption.kind)
            continue
        if set(codes) == {EXIT_USER_ERROR} and _DIVERGED in text:
            _must_diverge(case, side)
            outcome.ended = "diverged"
            return segments
        if set(codes) != {DONE}:
            raise Fault(f"start {number + 1} ended with {codes}: {_last_line(text)}; {side.folder}")
        break
    else:
        raise Fault(f"not finished after {len(legs)} starts; {side.folder}")
    if any(event["event"] == "rollback" for event in side.ledger()):
        outcome.met.append("rollback")
    for command in (("verify", "RUN"), case.command):
        _run_command(side, command)
    return segments


def _run_command(side: Side, command: Sequence[str]) -> None:
    """Run a command on the finished run; raise Fault unless it ends well."""
    places = {"RUN": str(side.run_dir), "CONFIG": str(side.folder / f"start-{side.num_starts}.yaml")}
    output = side.folder / f"{'-'.join(command)}.txt"
    code = run_command([places.get(word, word) for word in command], output)
    text = output.read_text(errors="replace")
    if code != DONE or _TRACEBACK in text:
        raise Fault(f"{' '.join(command)} ended with {code}: {_last_line(text)}; {side.folder}")


def _may_be_set_aside(side: Side, reason: str, first_discarded: int) -> bool:
    """Return whether a checkpoint that the ledger names was damaged, or discarded by a rollback to a step."""
    found = re.search(r"step-(\d{8})-a\d{4}", reason)
    step = int(found[1]) if found else 0
    return step > first_discarded or step in side.damaged


def _damage(side: Side, damage: str) -> list[str]:
    """Damage a file of a killed run; return the damage, or nothing if there is no such file.

    A checkpoint is damaged only if the run can use an older one.
    """
    if damage in (TORN_METRICS, TORN_LEDGER):
        file = side.run_dir / (METRICS_FILE if damage == TORN_METRICS else LEDGER_FILE)
        if not file.exists():
            return []
        with file.open("a") as out:
            out.write('{"kind": "tr')
        return [damage]
    targets = side.checkpoint_folders()
    has_rollback = bool(side.case.spikes) or any(event["event"] == "rollback" for event in side.ledger())
    if not damage or has_rollback or len(targets) > 1 or not targets[0].exists():
        return []
    *older, newest = [None, *sorted(committed(LocalStore(targets[0])))]
    if len(older) < 2 or newest is None:
        return []
    side.damaged.add(newest[0])
    file = min((targets[0] / newest[2]).glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    if damage == MISSING:
        file.unlink()
    elif damage == CUT:
        file.write_bytes(content[: len(content) // 2])
    else:
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    return [damage]


def _must_diverge(case: Case, side: Side) -> None:
    """Check that the run diverges without interruptions, too."""
    twin = _side(side.folder.parent / "twin", case, side.data)
    codes, text = twin.start(case.legs[0]._replace(interruption=None), case.spikes)
    if set(codes) != {EXIT_USER_ERROR} or _DIVERGED not in text:
        raise Fault(f"the interrupted run diverged, its twin ended with {codes}: {_last_line(text)}")


def _run_twin(folder: Path, case: Case, data: Path, segments: list[Segment], skipped: Sequence[int]) -> Side:
    """Run the twin of an interrupted run, which only changes ranks and settings, at the same steps."""
    changes: dict[str, Any] = {}
    if skipped:
        changes["train.skip_steps"] = sorted({*case.changes.get("train.skip_steps", []), *skipped})
    pieces = without_equal_neighbours(segments)
    ends = [piece.from_step for piece in pieces[1:]]
    changes["checkpoint.keep_steps"] = sorted({*case.changes.get("checkpoint.keep_steps", []), *ends})
    twin = _side(folder, case, data, **changes)
    for piece, end in zip(pieces, [*ends, None], strict=True):
        leg = Leg(piece.ranks, dict(piece.settings), None)
        if end is None:
            codes, text = twin.start(leg)
            if set(codes) != {DONE}:
                raise Fault(f"the twin ended with {codes}: {_last_line(text)}; {twin.folder}")
        else:
            _train_up_to(twin, leg, end)
    return twin


def _train_up_to(twin: Side, leg: Leg, end: int) -> None:
    """Train the twin until a step has a checkpoint, and let it continue from there at its next start."""
    codes, text = twin.start(leg._replace(interruption=Interruption("SIGTERM", 0, end)))
    if set(codes) not in ({DONE}, {STOPPED}):
        raise Fault(f"the twin ended with {codes}: {_last_line(text)}; {twin.folder}")
    twin.go_back(end)
    newest = twin.newest_checkpoint()
    if newest is None or newest[0] != end:
        raise Fault(f"the twin has no checkpoint of step {end}, but {newest}; {twin.folder}")


def without_equal_neighbours(segments: Sequence[Segment]) -> list[Segment]:
    """Join neighbouring segments that differ in nothing that may change the last bits."""
    pieces: list[Segment] = []
    for segment in segments:
        if not pieces or _bits_of(pieces[-1]) != _bits_of(segment):
            pieces.append(segment)
    return pieces


def _bits_of(segment: Segment) -> tuple[Any, ...]:
    """Return what of a segment may change the last bits; ZeRO 1 and 2 do not differ."""
    settings = {key: 2 if (key, value) == ("engine.zero_stage", 1) else value for key, value in segment.settings}
    return segment.ranks, settings


def compare(interrupted: Side, twin: Side) -> None:
    """Raise Fault unless both runs have left the same."""
    num_steps = interrupted.case.changes["train.num_steps"]
    for file in (METRICS_FILE, SAMPLES_FILE):
        found, expected = (
            [_exact(record) for record in read_lines(side.run_dir / file)] for side in (interrupted, twin)
        )
        if found != expected:
            raise Fault(f"{file}: {first_difference(found, expected)}; {interrupted.folder}")
    # The twin of a run with spikes or rollbacks has these steps in its config, and must stop no others.
    expected_skips = [] if "train.skip_steps" in twin.changes else interrupted.skipped()
    if twin.skipped() != expected_skips:
        raise Fault(f"the twin skips {twin.skipped()} instead of {expected_skips}; {interrupted.folder}")
    identities = [(side.run_dir / IDENTITY_FILE).read_bytes() for side in (interrupted, twin)]
    if identities[0] != identities[1]:
        raise Fault(f"{IDENTITY_FILE} differs; {interrupted.folder}")
    _compare_checkpoints(interrupted, twin, num_steps)
    _check_ledger(interrupted, num_steps)


def _compare_checkpoints(interrupted: Side, twin: Side, num_steps: int) -> None:
    """Raise Fault unless the last checkpoints hold the same bytes and the same state, in all targets."""
    newest = twin.newest_checkpoint()
    assert newest is not None and newest[0] == num_steps, newest
    expected = _digests(newest[1])
    state = read_manifest(LocalStore(newest[1].parent), newest[1].name).state
    for target in interrupted.checkpoint_folders():
        last = max(committed(LocalStore(target)), default=None)
        if last is None or last[0] != num_steps:
            raise Fault(f"{target}: the newest checkpoint is {last}")
        digests = _digests(target / last[2])
        found_state = read_manifest(LocalStore(target), last[2]).state
        for name in _COMPARED_STATE:
            found, wanted = getattr(found_state, name), getattr(state, name)
            if found != wanted:
                raise Fault(f"checkpoint: {name} {found} instead of {wanted}; {interrupted.folder}")
        if found_state.zero_stage == state.zero_stage and digests != expected:
            different = sorted(name for name in {*digests, *expected} if digests.get(name) != expected.get(name))
            raise Fault(f"checkpoint: other bytes in {different}; {target / last[2]}")


def _check_ledger(side: Side, num_steps: int) -> None:
    """Raise Fault if the ledger has a stopped step or a rollback twice, or does not end with `done`."""
    events = side.ledger()
    once = [(event["event"], event["step"]) for event in events if event["event"] in ("stopped_step", "rollback")]
    if len(once) != len(set(once)):
        raise Fault(f"{LEDGER_FILE}: an event twice: {once}")
    if (events[-1]["event"], events[-1]["step"]) != ("done", num_steps):
        raise Fault(f"{LEDGER_FILE}: ends with {events[-1]}")


def _digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of the tensor files of a checkpoint by their names."""
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.glob("*.safetensors")}


def _exact(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a record that an equal run repeats; NaN as text, because it is not equal to itself."""
    return {name: repr(value) for name, value in record.items() if name not in NOT_COMPARED}


def _last_line(text: str) -> str:
    """Return the line of a text that says what went wrong: its last error line or, if there is none, its last line."""
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"error: |(\w+\.)*\w*(Error|Exception|Interrupt)\b", line)]
    return (errors or lines or ["nothing"])[-1][:600]
