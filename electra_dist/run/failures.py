"""Record the faults of nodes (strikes) and why starts of the ranks have failed: what, whose fault, what follows.

    strikes.jsonl              a line for each fault of a node: the next submission to Slurm excludes these nodes
    failures/node-K.jsonl      a line for each failed start on node K: the rank that explains it, and its class
    failures/rank-00003.txt    the last 64 KiB that rank 3 wrote to stderr in its newest failed start

The supervisor of node K is the only writer of its file, and of those of its ranks. Another supervisor or Slurm job
goes on with the same files, so that a fault that comes back at the same step is known in the next job, too.

Guarantee: a strike is on the disk (fsync) when `add_strike` returns. Any number of nodes may add strikes at once: each
takes a lock on the file (`records.py`), and appends one line of at most PIPE_BUF bytes by one write. Strikes expire,
so that a repaired node is used again without any action. Imports no torch.

Limits: this module only records and lists nodes; it does not talk to the scheduler. On a shared file system without
locks, a torn line that a killed machine left in strikes.jsonl is not removed and must be deleted by hand.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from electra_dist.run.error_classes import ErrorClass, Finding, class_of, class_of_stop_for_storage, is_same_fault
from electra_dist.run.folder import FAILURES_DIR, STRIKES_FILE
from electra_dist.run.history import ENDINGS, STARTS
from electra_dist.run.lease import HeldLease
from electra_dist.run.ledger import LedgerEvent
from electra_dist.run.records import Count, DatedRecord, Number, Record, append_record, read_records
from electra_dist.store.atomic_files import replacing
from electra_dist.store.patience import Patience, patient


class Failure(DatedRecord):
    """Why a start of the ranks has failed on one node, as its supervisor records it in failures/node-K.jsonl."""

    start: str  # name of the start, such as job-4711-0-start-000002
    node: str  # its name for the scheduler
    rank: Count
    code: int | None = None  # exit code of the rank, -N: signal N; None: it was ended because it hung
    error: str  # name of a class of error_classes.py
    line: str = ""  # the line of its output that tells
    step: Count | None = None  # in which it failed, counted from 0 as in `train.skip_steps`; None: before the first
    positions: list[Count] | None = None  # first and last of the rows that it then read, in the row order
    repeated: bool = False  # the same fault at the same step as in an earlier start: not started again

    @property
    def kind(self) -> ErrorClass:
        """Return the class of the failure, which says whose fault it is and what follows."""
        return class_of(self.error)

    @property
    def place(self) -> str:
        """Return the step at which the rank failed, as text such as "at step 1,200"."""
        return "before its first step" if self.step is None else f"at step {self.step:,}"

    @property
    def description(self) -> str:
        """Return one line for people: which rank failed, why and at which step; and whether that ends the run."""
        text = f"rank {self.rank} on {self.node}: {self.kind.title}, {self.place}"
        if not self.repeated:
            return text
        where = "the same step" if self.step is None else "the same step on the same rows"
        return f"{text}: {where} as before: {self.kind.fault}, not node; not restarted a second time"


@patient
def record_failure(
    run_dir: Path, node: int, failure: Failure, outputs: Mapping[int, str], *, patience: Patience | None = None
) -> None:
    """Append a failure to the file of node number `node`, and write the last output of its ranks to files.

    `outputs` maps a rank to its last output, which replaces that of an earlier failure. If the disk is full or away,
    wait for it as long as `patience` says; None: not at all.
    """
    for rank, output in outputs.items():
        with replacing(output_file(run_dir, rank)) as out:
            out.write(output.encode())
    append_record(_file(run_dir, node), failure)


@patient
def read_failures(run_dir: Path, *, patience: Patience | None = None) -> list[Failure]:
    """Return the failures of all nodes, oldest first; [] if no start under a supervisor has failed.

    If the disk is away, wait for it as long as `patience` says; None: not at all.
    """
    files = sorted((Path(run_dir) / FAILURES_DIR).glob("node-*.jsonl"))
    found = [failure for file in files for failure in read_records(file, Failure.model_validate)]
    return sorted(found, key=lambda failure: failure.unix_s)


def output_file(run_dir: Path, rank: int) -> Path:
    """Return the file with the last output of a rank in its newest failed start."""
    return Path(run_dir) / FAILURES_DIR / f"rank-{rank:05d}.txt"


def is_repetition(finding: Finding, step: int | None, earlier: Iterable[Failure]) -> bool:
    """Return whether the same fault of code, data or config came at the same step before, so that no restart helps.

    `earlier` has the failures of earlier starts. Nothing is read.
    """
    return finding.error.repeats_are_final and any(
        before.error == finding.error.name and before.step == step and is_same_fault(before.line, finding.line)
        for before in earlier
    )


def newest_failure(failures: Sequence[Failure]) -> Failure | None:
    """Return the failure that explains the newest failed start; `failures` are sorted by time. None if there is none.

    If the start failed on several nodes, it is one that did not fail because of another node.
    """
    of_start = [failure for failure in failures if failure.start == failures[-1].start]
    causes = [failure for failure in of_start if not failure.kind.is_consequence]
    return next(iter(causes or of_start), None)


def since_newest_start(
    failures: Sequence[Failure], ledger: Sequence[LedgerEvent], lease: HeldLease | None
) -> list[Failure]:
    """Return the failures that no later start has made obsolete.

    A start begins when it takes the lease of the run folder (`lease`; None if no process holds it) or, if a supervisor
    starts the ranks again, with its event in the ledger.
    """
    begins = [event.unix_s for event in ledger if event.event in STARTS]
    begins += [] if lease is None else [lease.owner.since]
    newest_begin = max(begins, default=0.0)
    return [failure for failure in failures if failure.unix_s >= newest_begin]


def account_of_end(
    run: Path, ledger: Sequence[LedgerEvent], failures: Sequence[Failure], lease: HeldLease | None = None
) -> dict[str, Any]:
    """Return what is known of the end of a run's newest start, as a JSON object. Nothing is read.

    It is made from the newest recorded failure of that start or from its end in the ledger, whichever is newer. If
    neither exists, "state" is "running or killed". `lease` says which process holds the run folder; None if none does.
    """
    failure = newest_failure(since_newest_start(failures, ledger, lease))
    ends = [event for event in ledger if event.event in (*ENDINGS, *STARTS)]
    newest = ends[-1] if ends else None
    if failure is not None:
        # The event "crash" of rank 0 is older than the supervisor's record of the same start.
        is_end = newest is not None and newest.event in ("done", "stop", "storage", "rollback")
        if newest is None or not is_end or newest.unix_s <= failure.unix_s:
            return _account_of_failure(run, failure)
    is_of_earlier_start = newest is not None and lease is not None and newest.unix_s < lease.owner.since
    if newest is None or is_of_earlier_start:
        return _nothing_known(run)
    return _account_of_event(run, newest)


def _nothing_known(run: Path) -> dict[str, Any]:
    """Return what `account_of_end` tells of a run whose newest start has recorded no end."""
    unknown = ("time", "rank", "node", "code", "class", "fault", "restart", "line", "step", "rows", "output")
    return {
        **dict.fromkeys(unknown),
        "run": str(run),
        "state": "running or killed",
        "what": "no end of the newest start is recorded",
        "repeated": False,
        "next": [f"electra-dist status {shlex.quote(str(run))}"],
    }


def _account_of_event(run: Path, event: LedgerEvent) -> dict[str, Any]:
    """Return what the ledger's newest event tells of a run's end; after the begin of a start, no end is known."""
    known = _nothing_known(run)
    if event.event in STARTS:
        return known
    what = f"{event.event} at step {event.step:,}"
    if event.why:
        what += f": {event.why}"
    known["time"] = event.time
    known["state"] = event.event if event.event in ("done", "crash", "unhealthy") else "stopped"
    known["what"] = what
    known["step"] = event.step
    if event.event == "storage":
        kind = class_of_stop_for_storage(event.why)
        known |= {"class": kind.name, "fault": kind.fault, "restart": kind.restart, "next": [kind.next_step]}
    return known


def _account_of_failure(run: Path, failure: Failure) -> dict[str, Any]:
    """Return what a recorded failure tells of a run's end: which rank failed and why, and what to do next."""
    kind = failure.kind
    next_steps = [kind.next_step]
    if failure.repeated and failure.step is not None and kind.fault == "code":
        next_steps.append(
            f"if the rows are at fault: start again with --set train.skip_steps=[{failure.step}]; nothing else changes"
        )
    if kind.restart == "elsewhere":
        next_steps.append(f"when the node is repaired, delete its lines in {run / STRIKES_FILE}")
    return {
        **_nothing_known(run),
        "time": failure.time,
        "state": "failed",
        "what": failure.description,
        "rank": failure.rank,
        "node": failure.node,
        "code": failure.code,
        "class": kind.name,
        "fault": kind.fault,
        "restart": "never" if failure.repeated else kind.restart,
        "repeated": failure.repeated,
        "line": failure.line,
        "step": failure.step,
        "rows": failure.positions,
        "output": str(output_file(run, failure.rank)),
        "next": next_steps,
    }


def _file(run_dir: Path, node: int) -> Path:
    return Path(run_dir) / FAILURES_DIR / f"node-{node}.jsonl"


EXPIRES_S = 24 * 3600.0  # age at which a strike no longer counts
_MOST_AHEAD_S = 48 * 3600.0  # a strike dated further ahead of this node's clock is ignored
# A character takes at most 6 bytes of JSON, so with these limits a line stays within PIPE_BUF (4096 bytes).
_REASON_CHARS = 300
_NAME_CHARS = 64


class Strike(Record):
    """Record of one fault of a node: which device failed, when and why, and which part of the software noticed it."""

    time: Number  # Unix seconds
    node: str  # its name for the scheduler and in the host file
    device: str  # "GPU 3", or "" for the node as a whole
    reason: str
    by: str  # the part that found it: "preflight", "supervise", ...


@patient
def add_strike(run_dir: Path, strike: Strike, *, patience: Patience | None = None) -> None:
    """Append a strike to the run's strikes.jsonl; it is on the disk on return.

    Texts are shortened to one line: 300 characters for the reason, 64 for each other field. If the disk is full or
    away, wait for it as long as `patience` says; None: not at all.
    """
    short = Strike(
        time=strike.time,
        node=_plain(strike.node, _NAME_CHARS),
        device=_plain(strike.device, _NAME_CHARS),
        reason=_plain(strike.reason, _REASON_CHARS),
        by=_plain(strike.by, _NAME_CHARS),
    )
    append_record(Path(run_dir) / STRIKES_FILE, short, shared=True)


@patient
def read_strikes(run_dir: Path, *, patience: Patience | None = None) -> list[Strike]:
    """Return all strikes of a run, oldest first, also expired ones; [] if there is no file.

    If the disk is away, wait for it as long as `patience` says; None: not at all.
    """
    return list(read_records(Path(run_dir) / STRIKES_FILE, Strike.model_validate))


def excluded_nodes(strikes: Iterable[Strike], now: float, *, expires_s: float = EXPIRES_S) -> list[str]:
    """Return the sorted names of the nodes with a strike that is younger than `expires_s` seconds at `now`.

    A strike dated in the future counts, because the clocks of nodes differ. If the date is more than two days ahead,
    the strike does not count: its clock was wrong, and it would exclude the node for too long.
    """
    return sorted({strike.node for strike in strikes if -_MOST_AHEAD_S < now - strike.time < expires_s})


def _plain(text: str, max_chars: int) -> str:
    return " ".join(text.split())[:max_chars]
