"""Write report.html, which shows a run on one page, in one file.

Guarantee: the page is self-contained (it loads no script, font, image or style, so it opens from a mail or a cluster's
file system), readable on a phone, in light and in dark mode. It is derived from files of the run folder only
(metrics.jsonl, samples.jsonl, ledger.jsonl, config.yaml, identity.json, environment.json, slurm/jobs.jsonl; the part
of a missing file is left out), so it can be written again at any time, on any machine. It is written atomically. It
names no host and no command, although environment.json does, so it may be passed on.

Limits: the page shows the state at the time of writing. While a run goes on, rank 0 has it written again every
`log.report_every_minutes`.
"""

from __future__ import annotations

import html
import math
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from electra_dist.config import TowerConfig
from electra_dist.data.corpora import token_shares, uses_of_phases
from electra_dist.errors import EXIT_USER_ERROR, UserError, error_line
from electra_dist.escapes import html_text
from electra_dist.report.curves import write_curves_png
from electra_dist.report.html_parts import curves, minute, now, omitted, page, percent, table, write_page
from electra_dist.report.run_record import RunRecord, read_run
from electra_dist.report.run_tiles import tiles
from electra_dist.report.samples_section import samples_section
from electra_dist.run.folder import REPORT_FILE
from electra_dist.run.goodput import Goodput
from electra_dist.run.ledger import LedgerEvent
from electra_dist.run.metrics import EvalRecord

__all__ = ["REPORT_FILE", "write_curves_png", "write_report"]

MAX_EVENTS = 40  # the newest events that the table of events shows
MAX_EVALUATIONS = 12  # the newest evaluations that the table of evaluations shows
_EVALUATION_HEAD = (
    "step",
    "generator loss",
    "right",
    "discriminator loss",
    "ROC-AUC",
    "context AUC",
    "accuracy",
    "precision",
    "recall",
    "rows",
)


def write_report(run_dir: Path, path: Path | None = None) -> Path:
    """Write the report of a finished or running run to `path` (None: report.html in `run_dir`), and return the path.
    Raises UserError if the folder does not exist, holds no run or cannot be written.
    """
    run_dir = Path(run_dir)
    text = report_page(read_run(run_dir))
    if path is None:
        path = run_dir / REPORT_FILE
    write_page(path, text)
    return path


def report_page(run: RunRecord) -> str:
    """Return the report of a run as HTML text, without writing it. What the run did not record is left out."""
    name = html_text(run.name)
    body = "".join(
        [
            _header(name, run),
            tiles(run),
            curves([run.curves], _curves_note(run)),
            samples_section(run.samples),
            _evaluations(run.metrics.evals),
            _events(run.ledger, run.account),
            _run_and_environment(run),
            _config(run.config_tree),
        ]
    )
    return page(name, body)


def _header(name: str, run: RunRecord) -> str:
    state, text = run.state()
    period = ""
    if run.ledger:
        period = f" &middot; {minute(run.ledger[0].time)} to {minute(run.ledger[-1].time)} UTC"
    written = f" &middot; this page was written {now()} UTC"
    return f'<header><h1>{name}</h1><p><span class="state {state}">{text}</span>{period}{written}</p></header>\n'


def _curves_note(run: RunRecord) -> str:
    has_resumed = any(event.event == "resume" for event in run.ledger)
    dotted = "; dotted: resumed from a checkpoint" if has_resumed else ""
    return (
        f"Over optimizer steps. Faint: every record, bold: smoothed, dashed grey: what a guess reaches{dotted}. "
        f"Move the pointer over a diagram to read its values."
    )


def _evaluations(evals: Sequence[EvalRecord]) -> str:
    """Return the table of the newest 12 evaluations on held-out rows, oldest first; empty if there was none."""
    if not evals:
        return ""
    shown = evals[-MAX_EVALUATIONS:]
    rows = [
        (
            f"{record.step:,}",
            f"{record.mlm_loss:.4f}",
            percent(record.mlm_accuracy),
            f"{record.rtd_loss:.4f}",
            f"{record.auc:.4f}",
            _context_auc(record),
            percent(record.accuracy),
            percent(record.precision),
            percent(record.recall),
            f"{record.rows:,}",
        )
        for record in shown
    ]
    older_note = omitted(len(evals) - len(shown), "evaluations")
    return f"<h2>Held-out evaluations</h2>\n{table(rows, _EVALUATION_HEAD)}{older_note}"


def _events(ledger: Sequence[LedgerEvent], account: Goodput) -> str:
    """Return the section "How the run went": the newest 40 events, where the time went, and the checkpoints."""
    if not ledger:
        return ""
    events = [event for event in ledger if event.event not in ("checkpoint", "eval")]
    shown = events[-MAX_EVENTS:]
    rows = [(minute(event.time), event.event, f"{event.step:,}", _details(event)) for event in shown]
    event_table = table(rows, ("time (UTC)", "event", "step", ""), left=True)
    older_note = omitted(len(events) - len(shown), "events")
    account_note = f'<p class="note">Where the time went: {account.described()}.</p>\n'
    return f"<h2>How the run went</h2>\n{event_table}{older_note}{account_note}{_checkpoint_note(ledger)}"


def _details(event: LedgerEvent) -> str:
    """Return the fields of a ledger event other than time, event and step, such as "attempt 3, ranks 8"."""
    details = []
    for key, value in event.fields().items():
        if key not in ("time", "event", "step") and not isinstance(value, dict):
            details.append(f"{key.replace('_', ' ')} {_shown(value)}")
    return ", ".join(details)


def _checkpoint_note(ledger: Sequence[LedgerEvent]) -> str:
    """Return a note on the checkpoints: their number, newest step and median stop of training; "" without any."""
    saves = [event for event in ledger if event.event == "checkpoint"]
    if not saves:
        return ""
    stall_s = statistics.median(event.stall_s for event in saves)
    return (
        f'<p class="note">{len(saves):,} checkpoints, the newest of step {saves[-1].step:,}, each held the training '
        f"up for {stall_s:.2f} s (median).</p>\n"
    )


def _run_and_environment(run: RunRecord) -> str:
    tables = ""
    run_rows = describe_run(run)
    if run_rows:
        tables += table(run_rows, left=True)
    if run.environment:
        tables += table(_hardware_rows(run.environment), left=True)
        tables += table(list(run.environment["versions"].items()), left=True)
    if not tables:
        return ""
    return f'<h2>Model, corpus, hardware and versions</h2>\n<div class="pair">\n{tables}</div>\n'


def describe_run(run: RunRecord) -> list[tuple[str, str]]:
    """Return the rows (name, value) of the report's table about the model, its data and its code.
    A row is left out if the run folder does not record its value. The generator's row is left out if it has no
    parameters of its own.
    """
    rows: list[tuple[str, str]] = []
    config = run.config
    parameters = run.parameters
    if config is not None and parameters is not None:
        rows.append(("objective", config.objective.name))
        rows.append(("discriminator", _tower(config.model.discriminator, parameters.discriminator)))
        if parameters.generator_only:
            rows.append(("generator", _tower(config.model.generator, parameters.generator_only)))
        rows.append(("parameters", f"{parameters.total:,} trained in all"))
        rows.append(("vocabulary", f"{config.model.vocab_size:,} tokens"))
        rows.append(("batch", f"{config.train.global_batch:,} rows of {config.data.seq_len} tokens"))
        rows.append(("steps", f"{config.train.num_steps:,}"))
    corpus = run.environment.get("corpus")
    if corpus is not None:
        rows.append(("corpus", f"{corpus['rows']:,} rows of {corpus['seq_len']}, {corpus['tokens']:,} tokens"))
    rows += _phase_rows(run)
    if run.corpus_fingerprint:
        rows.append(("corpus fingerprint", run.corpus_fingerprint[:12]))
    commit = run.environment.get("commit")
    if commit:
        changed = ", with local changes" if commit["has_changes"] else ""
        rows.append(("commit", f"{commit['sha'][:12]}{changed}"))
    return rows


def _phase_rows(run: RunRecord) -> list[tuple[str, str]]:
    """Return a row (name, value) for each corpus of `data.phases`: its size and how much the run read of it."""
    phases = run.environment.get("corpus", {}).get("phases", ())
    if run.config is None:
        return []
    uses = uses_of_phases(phases, run.step, run.config.train.global_batch)
    return [
        (
            f"corpus from step {use.from_step:,} on",
            f"{use.corpus_rows:,} rows, {use.corpus_tokens:,} tokens, {use.fingerprint[:12]}; {use.epochs:.2f} epochs "
            f"seen, {share:.1%} of the tokens seen",
        )
        for use, share in zip(uses, token_shares(uses), strict=True)
    ]


def _tower(tower: TowerConfig, num_parameters: int) -> str:
    """Return the shape and size of a network as text, such as "12 layers of 768, 110,000,000 parameters"."""
    return f"{tower.num_layers} layers of {tower.hidden_size}, {num_parameters:,} parameters"


def _hardware_rows(environment: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the rows (name, value) of the hardware table; it does not name the hosts."""
    cpu = environment["cpu"]
    rows = [("ranks", str(environment["world_size"]))]
    if "hosts" in environment:
        rows.append(("nodes", str(len(environment["hosts"]))))
    rows += _gpu_rows(environment["gpus"])
    rows += [
        ("CPU", str(cpu["model"])),
        ("cores", f"{cpu['usable_cores']} usable of {cpu['cores']}"),
        ("memory", f"{cpu['memory_gb']} GB"),
        ("system", str(environment["system"])),
    ]
    return rows


def _gpu_rows(gpus: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of a node's GPUs, such as ("GPUs of a node", "8 x NVIDIA H100, 80 GB"); [] without GPUs."""
    devices = gpus.get("devices", [])
    if not devices:
        return []
    rows = []
    num_of_model = Counter((device["name"], device["memory_gb"]) for device in devices)
    for (name, memory_gb), count in sorted(num_of_model.items(), key=str):
        memory = f", {memory_gb} GB" if memory_gb else ""
        rows.append(("GPUs of a node", f"{count} x {name}{memory}"))
    rows.append(("driver", str(gpus["driver"])))
    return rows


def _config(tree: dict[str, Any]) -> str:
    """Return the section with the text of config.yaml, which the reader can unfold; "" for an empty tree."""
    if not tree:
        return ""
    text = yaml.safe_dump(tree, sort_keys=False, width=100)  # it escapes what is not printable ASCII itself
    inner = f"<details><summary>config.yaml</summary><pre>{html.escape(text)}</pre></details>"
    return f'<h2>Resolved configuration</h2>\n<div class="card">{inner}</div>\n'


def _context_auc(record: EvalRecord) -> str:
    return f"{record.context_auc:.4f}" if math.isfinite(record.context_auc) else "-"


def _shown(value: Any) -> str:
    """Return a value of a ledger event as text; a float is rounded to three significant figures, such as 0.0123."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main(run_dir: str) -> int:
    """Write the report of a run and return exit code 0; if that fails, print one line to stderr and return 78.
    While a run goes on, rank 0 runs this module as a separate process (`tracking/report_refresh.py`), so that no
    training step waits for it.
    """
    try:
        write_report(Path(run_dir))
    except UserError as error:
        print(error_line(error), file=sys.stderr)
        return EXIT_USER_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
