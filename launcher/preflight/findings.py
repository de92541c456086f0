"""What a check of the nodes finds: one line each, from which exit code and strike follow by pure functions.

Where it stops: a finding about no node in particular (`node` is JOB) ends the start, but strikes nobody.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TextIO

from rich.console import Console
from rich.table import Table

from electra_dist.errors import EXIT_CRASH, EXIT_DONE, EXIT_UNHEALTHY, EXIT_USER_ERROR, UserError
from electra_dist.run.strikes import Strike

JOB = ""  # the node of a finding that concerns all of them

Severity = Literal["ok", "warning", "unhealthy", "user error"]
_COLOURS: dict[Severity, str] = {"ok": "green", "warning": "yellow", "unhealthy": "red", "user error": "red"}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    severity: Severity
    node: str
    device: str = ""  # "GPU 3", or "" for the node
    what: str
    next_step: str = ""


def from_error(error: UserError, node: str) -> Finding:
    """A user's mistake ("what; next step") as a finding."""
    what, _, next_step = str(error).partition("; ")
    return Finding(severity="user error", node=node, what=what, next_step=next_step)


def exit_code(findings: Iterable[Finding], node: str) -> int:
    """The exit code of a process on `node`.

    What only the user can mend comes first: to requeue the job on other nodes would not help. A fault that no node can
    be blamed for is a crash: whoever sees 69 leaves the node out.
    """
    found = {(finding.node, finding.severity) for finding in findings}
    if (node, "user error") in found:
        return EXIT_USER_ERROR
    if (node, "unhealthy") in found:
        return EXIT_UNHEALTHY
    return EXIT_CRASH if (JOB, "unhealthy") in found else EXIT_DONE


def strike_of(findings: Iterable[Finding], node: str, now: float) -> Strike | None:
    """One strike against `node` for all that is unhealthy on it, so that a threshold counts checks, not devices."""
    faults = [finding for finding in findings if finding.node == node and finding.severity == "unhealthy"]
    if not faults:
        return None
    devices = ", ".join(dict.fromkeys(fault.device for fault in faults if fault.device))
    reason = "; ".join(dict.fromkeys(fault.what for fault in faults))
    return Strike(time=now, node=node, device=devices, reason=reason, by="preflight")


def print_findings(findings: Iterable[Finding], stream: TextIO) -> None:
    """A table on a terminal, one plain line each elsewhere; the same words in both."""
    if not stream.isatty():
        for finding in findings:
            print(_plain(finding), file=stream, flush=True)
        return
    table = Table("", "node", "device", "what", "next step")
    for finding in findings:
        colour = _COLOURS[finding.severity]
        table.add_row(
            f"[{colour}]{finding.severity}[/]", finding.node or "all", finding.device, finding.what, finding.next_step
        )
    Console(file=stream, highlight=False).print(table)


def as_json(findings: Iterable[Finding], node: str) -> str:
    """All findings and this process's exit code, in one line."""
    found = list(findings)
    tree = {"node": node, "exit_code": exit_code(found, node), "findings": [dataclasses.asdict(f) for f in found]}
    return json.dumps(tree)


def _plain(finding: Finding) -> str:
    where = " ".join(part for part in (finding.node or "all nodes", finding.device) if part)
    next_step = f"; {finding.next_step}" if finding.next_step else ""
    return f"{finding.severity:<10}  {where:<16}  {finding.what}{next_step}"
