"""Writes report.html, which shows a run on one page, in one file.

Guarantee: the page is self-contained (it loads no script, font, image or style, so it opens from a mail or a cluster's
file system), readable on a phone, in light and in dark mode. It is derived from files of the run folder only
(metrics.jsonl, ledger.jsonl, config.yaml, environment.json, slurm/jobs.jsonl; the part of a missing file is left
out), so it can be written again at any time, on any machine. It is written atomically.

Cost: about 2 s, 300 KB.

Limits: the page shows the state at the time of writing; it does not update itself.
"""

from __future__ import annotations

import html
import statistics
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from electra_dist.analysis.goodput import Goodput, goodput
from electra_dist.errors import UserError
from electra_dist.report.curves import PANELS, panel_svg, write_curves_png
from electra_dist.report.page_style import STYLE
from electra_dist.run.environment_record import read_environment
from electra_dist.run.folder import CONFIG_FILE, REPORT_FILE
from electra_dist.run.jsonl import Record
from electra_dist.run.ledger import read_jobs, read_ledger
from electra_dist.run.metrics_writer import read_metrics
from electra_dist.run.number_formats import format_count, format_duration
from electra_dist.store.atomic_files import replacing

__all__ = ["REPORT_FILE", "write_curves_png", "write_report"]

Tile = tuple[str, str, str]  # name, value, remark

MAX_EVENTS = 40  # the newest events and evaluations that the tables show
MAX_EVALUATIONS = 12
_EVALUATION_HEAD = (
    "step",
    "generator loss",
    "right",
    "discriminator loss",
    "ROC-AUC",
    "accuracy",
    "precision",
    "recall",
    "rows",
)


def write_report(run_dir: Path) -> Path:
    """Write report.html into `run_dir` and return its path.

    The run may still be going on; an existing report is replaced atomically.

    Raises:
        UserError: the folder does not exist or cannot be written.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise UserError(f"{run_dir}: no such run folder; give the run_dir of an existing run")
    path = run_dir / REPORT_FILE
    page = report_page(run_dir)
    with replacing(path) as file:
        file.write(page.encode())
    return path


def report_page(run_dir: Path) -> str:
    """Return the HTML text of the report of the run in `run_dir`; a missing file leaves its part of the page out."""
    metrics = read_metrics(run_dir)
    ledger = read_ledger(run_dir)
    account = goodput(ledger, read_jobs(run_dir))
    config_file = run_dir / CONFIG_FILE
    config_text = config_file.read_text(encoding="utf-8") if config_file.exists() else ""
    train = [record for record in metrics if record["kind"] == "train"]
    evals = [record for record in metrics if record["kind"] == "eval"]
    environment = read_environment(run_dir)
    name = html.escape(run_dir.resolve().name)
    body = [
        _header(name, config_text, train, ledger),
        _tiles(train, evals, account),
        _curves(metrics, ledger),
        _evaluations(evals),
        _events(ledger, account),
        _environment(environment),
        _config(config_text),
    ]
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{name}</title>\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n<main>\n{''.join(body)}</main>\n</body>\n</html>\n"
    )


def _header(name: str, config_text: str, train: Sequence[Record], ledger: Sequence[Record]) -> str:
    """Return the heading: name of the run, its state by the last event of the ledger, and its first and last time.

    Args:
        name: name of the run, HTML-escaped.
        config_text: config.yaml, for the number of steps; may be empty.
        train: training records.
        ledger: all events.
    """
    step = train[-1]["step"] if train else 0
    total = _total_steps(config_text)
    of_total = f" of {total:,}" if total else ""
    last_event = ledger[-1]["event"] if ledger else ""
    if last_event == "done":
        state, text = "done", f"finished: step {step:,}{of_total}"
    elif last_event == "stop":
        state, text = "stop", f"stopped on purpose after step {ledger[-1]['step']:,}{of_total}"
    elif last_event == "crash":
        state, text = "crash", f"crashed after step {step:,}{of_total}"
    else:
        state, text = "open", f"under way or cut off: last record of step {step:,}{of_total}"
    when = f" &middot; {_minute(ledger[0]['time'])} to {_minute(ledger[-1]['time'])} UTC" if ledger else ""
    return f'<header><h1>{name}</h1><p><span class="state {state}">{text}</span>{when}</p></header>\n'


def _total_steps(config_text: str) -> int | None:
    """Return train.num_steps of a config.yaml; None if the text is empty or lacks it."""
    config = yaml.safe_load(config_text) or {}
    train = config.get("train") or {}
    return train.get("num_steps")


def _tiles(train: Sequence[Record], evals: Sequence[Record], account: Goodput) -> str:
    """Return the section of tiles, each with one figure of the run; empty if nothing was recorded."""
    tiles = [*_evaluation_tiles(evals), *_training_tiles(train), *_time_tiles(account)]
    if not tiles:
        return ""
    cells = (
        f'<div class="tile"><span class="name">{name}</span><span class="value">{value}</span>'
        f'<span class="more">{remark}</span></div>\n'
        for name, value, remark in tiles
    )
    return f'<section class="tiles">\n{"".join(cells)}</section>\n'


def _evaluation_tiles(evals: Sequence[Record]) -> list[Tile]:
    """Return the tiles of the newest held-out evaluation; [] if there was none."""
    if not evals:
        return []
    last = evals[-1]
    return [
        ("ROC-AUC, held out", f"{last['auc']:.4f}", f"at step {last['step']:,}"),
        ("RTD loss, held out", f"{last['rtd_loss']:.4f}", _since(evals, "rtd_loss")),
        ("MLM loss, held out", f"{last['mlm_loss']:.3f}", f"{100 * last['mlm_accuracy']:.1f} % right"),
    ]


def _training_tiles(train: Sequence[Record]) -> list[Tile]:
    """Return the tiles of losses, accuracies and throughput in training; [] if no step was recorded."""
    if not train:
        return []
    recent = train[-20:]
    averaged = f"mean of {len(recent)} records"
    tiles = [
        ("RTD loss", f"{_mean(recent, 'rtd_loss'):.4f}", f"{averaged}; {_since(train, 'rtd_loss')}"),
        ("MLM loss", f"{_mean(recent, 'mlm_loss'):.3f}", f"{averaged}; {_since(train, 'mlm_loss')}"),
        ("Replaced tokens found", f"{100 * _mean(recent, 'replaced_accuracy'):.1f} %", averaged),
        ("Original tokens kept", f"{100 * _mean(recent, 'original_accuracy'):.1f} %", averaged),
        ("Tokens seen", format_count(train[-1]["tokens_seen"]), f"{train[-1]['step']:,} steps"),
        ("Tokens per second", format_count(_median(train, "tokens_per_s")), "median"),
    ]
    if any(record["mfu"] is not None for record in train):
        tiles.append(("MFU", f"{100 * _median(train, 'mfu'):.1f} %", "median, of the dense peak"))
    tiles.append(("Waiting for data", f"{100 * _mean(train, 'data_wait'):.2f} %", "of the time, mean"))
    return tiles


def _time_tiles(account: Goodput) -> list[Tile]:
    """Return the tiles of wall-clock time and goodput; [] before the ledger has events to compute them from."""
    if account.fraction is None:
        return []
    starts = f"{account.starts} start{'s' if account.starts != 1 else ''}"
    return [
        ("Wall clock", format_duration(account.wall), starts),
        ("Goodput", f"{100 * account.fraction:.1f} %", f"{account.steps_lost:,} steps lost"),
    ]


def _curves(metrics: Sequence[Record], ledger: Sequence[Record]) -> str:
    """Return the section of curves, or a note if no step was recorded; resumes are marked by dotted lines."""
    resumes = [event["step"] for event in ledger if event["event"] == "resume"]
    panels = [panel_svg(panel, metrics, resumes) for panel in PANELS]
    drawn = [svg for svg in panels if svg]
    if not drawn:
        return '<p class="note">No step has been recorded yet.</p>\n'
    dotted = "; dotted: resumed from a checkpoint" if resumes else ""
    cards = "".join(f'<div class="card">{svg}</div>\n' for svg in drawn)
    note = f'<p class="note">Over optimizer steps. Faint: every record, bold: smoothed{dotted}.</p>\n'
    return f'<h2>Curves</h2>\n<section class="curves">\n{cards}</section>\n{note}'


def _evaluations(evals: Sequence[Record]) -> str:
    """Return the table of the newest held-out evaluations; empty if there was none."""
    if not evals:
        return ""
    shown = evals[-MAX_EVALUATIONS:]
    rows = [
        (
            f"{record['step']:,}",
            f"{record['mlm_loss']:.4f}",
            f"{100 * record['mlm_accuracy']:.1f} %",
            f"{record['rtd_loss']:.4f}",
            f"{record['auc']:.4f}",
            *(f"{100 * record[name]:.1f} %" for name in ("accuracy", "precision", "recall")),
            f"{record['rows']:,}",
        )
        for record in shown
    ]
    omitted = _omitted(len(evals) - len(shown), "evaluations")
    return f"<h2>Held-out evaluations</h2>\n{_table(rows, _EVALUATION_HEAD)}{omitted}"


def _events(ledger: Sequence[Record], account: Goodput) -> str:
    """Return the section "How the run went": a table of events, the goodput account, and a note on checkpoints.

    Checkpoints and evaluations are too many for the table; checkpoints are summed up in the note.
    """
    if not ledger:
        return ""
    events = [event for event in ledger if event["event"] not in ("checkpoint", "eval")]
    rows = [(_minute(event["time"]), event["event"], f"{event['step']:,}", _details(event)) for event in events]
    shown = rows[-MAX_EVENTS:]
    table = _table(shown, ("time (UTC)", "event", "step", ""), left=True)
    omitted = _omitted(len(rows) - len(shown), "events")
    account_note = f'<p class="note">Where the time went: {account.described()}.</p>\n'
    return f"<h2>How the run went</h2>\n{table}{omitted}{account_note}{_checkpoint_note(ledger)}"


def _details(event: Record) -> str:
    """Return the fields of an event as text, without its time, name and step and without nested objects."""
    details = []
    for key, value in event.items():
        if key not in ("time", "event", "step") and not isinstance(value, dict):
            details.append(f"{key.replace('_', ' ')} {_shown(value)}")
    return ", ".join(details)


def _checkpoint_note(ledger: Sequence[Record]) -> str:
    """Return a note with the number of checkpoints, the newest one and the median stall; empty without checkpoints."""
    saves = [event for event in ledger if event["event"] == "checkpoint"]
    if not saves:
        return ""
    stalls = [event["stall_s"] for event in saves if event.get("stall_s") is not None]
    stall = f", each held the training up for {statistics.median(stalls):.2f} s (median)" if stalls else ""
    return f'<p class="note">{len(saves):,} checkpoints, the newest of step {saves[-1]["step"]:,}{stall}.</p>\n'


def _environment(environment: Record) -> str:
    """Return the tables of hardware and package versions; empty if environment.json is missing."""
    if not environment:
        return ""
    cpu = environment["cpu"]
    gpus = environment["gpus"].get("devices", [])
    hardware = [("ranks", str(environment["world_size"]))]
    kinds = {(gpu["name"], gpu["memory_gb"]) for gpu in gpus}
    for name, memory_gb in sorted(kinds):
        count = sum(gpu["name"] == name for gpu in gpus)
        memory = f", {memory_gb} GB" if memory_gb else ""
        hardware.append(("GPUs of a node", f"{count} x {name}{memory}"))
    if gpus:
        hardware.append(("driver", str(environment["gpus"]["driver"])))
    hardware += [
        ("CPU", str(cpu["model"])),
        ("cores", f"{cpu['usable_cores']} usable of {cpu['cores']}"),
        ("memory", f"{cpu['memory_gb']} GB"),
        ("system", str(environment["system"])),
    ]
    versions = list(environment["versions"].items())
    tables = _table(hardware, left=True) + _table(versions, left=True)
    return f'<h2>Hardware and versions</h2>\n<div class="pair">\n{tables}</div>\n'


def _config(text: str) -> str:
    """Return the section with config.yaml, folded; empty if the file is missing."""
    if not text:
        return ""
    inner = f"<details><summary>config.yaml</summary><pre>{html.escape(text)}</pre></details>"
    return f'<h2>Resolved configuration</h2>\n<div class="card">{inner}</div>\n'


def _table(rows: Iterable[Sequence[str]], head: Sequence[str] = (), left: bool = False) -> str:
    """Return an HTML table; `left` aligns all columns to the left, otherwise only the first one is."""
    lines = []
    if head:
        lines.append("".join(f"<th>{html.escape(cell)}</th>" for cell in head))
    for row in rows:
        lines.append("".join(f"<td>{html.escape(cell)}</td>" for cell in row))
    inner = "".join(f"<tr>{line}</tr>\n" for line in lines)
    return f'<div class="card scroll"><table{" class=left" if left else ""}>\n{inner}</table></div>\n'


def _omitted(count: int, name: str) -> str:
    """Return a note that `count` earlier rows of a table are not shown; empty if the count is 0.

    `name` is the plural noun for the rows, such as "events".
    """
    return f'<p class="note">{count:,} earlier {name} are not shown.</p>\n' if count > 0 else ""


def _shown(value: Any) -> str:
    """Return a value of an event as text; floats have three significant figures."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _mean(records: Sequence[Record], field: str) -> float:
    """Return the mean of a field that every record has."""
    return statistics.fmean(record[field] for record in records)


def _median(records: Sequence[Record], field: str) -> float:
    """Return the median of a field over the records in which it is not None; at least one must have it."""
    return statistics.median(record[field] for record in records if record[field] is not None)


def _since(records: Sequence[Record], field: str) -> str:
    """Return the remark below a figure that gives the value of the field in the first record."""
    return f"from {records[0][field]:.3g}"


def _minute(time: str) -> str:
    """Return an ISO 8601 time without its seconds, for display."""
    return datetime.fromisoformat(time).strftime("%Y-%m-%d %H:%M")
