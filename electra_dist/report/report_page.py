"""Write report.html, which shows a run on one page, in one file.

Guarantee: the page is self-contained (it loads no script, font, image or style, so it opens from a mail or a cluster's
file system), readable on a phone, in light and in dark mode. It is derived from files of the run folder only
(metrics.jsonl, ledger.jsonl, config.yaml, environment.json, slurm/jobs.jsonl; the part of a missing file is left out),
so it can be written again at any time, on any machine. It is written atomically.

Cost: about 2 s, 300 KB.

Limits: the page shows the state at the time of writing; it does not update itself.
"""

from __future__ import annotations

import html
import math
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

MAX_EVENTS = 40  # the newest events that the table of events shows
MAX_EVALUATIONS = 12  # the newest evaluations that the table of evaluations shows
RECENT_RECORDS = 20  # training records over which the tiles average
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


def write_report(run_dir: Path) -> Path:
    """Write report.html into the run folder `run_dir` and return its path.

    It shows what the files of the run folder record so far; the run may still be going on. An existing report is
    replaced atomically.

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
    """Return the HTML text of the report of the run in `run_dir`; nothing is written.

    A file that is missing in the run folder leaves its part of the page out.
    """
    metrics = read_metrics(run_dir)
    train = [record for record in metrics if record["kind"] == "train"]
    evals = [record for record in metrics if record["kind"] == "eval"]
    ledger = read_ledger(run_dir)
    account = goodput(ledger, read_jobs(run_dir))
    config_file = run_dir / CONFIG_FILE
    config_text = config_file.read_text(encoding="utf-8") if config_file.exists() else ""
    name = html.escape(run_dir.resolve().name)
    sections = [
        _header(name, config_text, train, ledger),
        _tiles(train, evals, account),
        _curves(metrics, ledger),
        _evaluations(evals),
        _events(ledger, account),
        _environment(read_environment(run_dir)),
        _config(config_text),
    ]
    body = "".join(sections)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{name}</title>\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n<main>\n{body}</main>\n</body>\n</html>\n"
    )


def _header(name: str, config_text: str, train: Sequence[Record], ledger: Sequence[Record]) -> str:
    """Return the page's <header>: the name of the run, its state, and the times of its first and last event.

    Args:
        name: name of the run, HTML-escaped.
        config_text: config.yaml, for the number of steps; may be empty.
        train: the records of training steps in metrics.jsonl, oldest first.
        ledger: all events of ledger.jsonl (starts, checkpoints, ends, ...), oldest first.
    """
    state, text = _state(config_text, train, ledger)
    period = ""
    if ledger:
        period = f" &middot; {_minute(ledger[0]['time'])} to {_minute(ledger[-1]['time'])} UTC"
    return f'<header><h1>{name}</h1><p><span class="state {state}">{text}</span>{period}</p></header>\n'


def _state(config_text: str, train: Sequence[Record], ledger: Sequence[Record]) -> tuple[str, str]:
    """Return the state of a run: a CSS class, and a text for the reader with the steps done.

    The last event of the ledger decides the class: "done", "stop" (on request) or "crash". After any other event it is
    "open": the run is still going on, or it was killed and could not record its end.

    Args:
        config_text: text of config.yaml, for the number of steps; may be empty.
        train: the records of training steps in metrics.jsonl, oldest first.
        ledger: all events of ledger.jsonl (starts, checkpoints, ends, ...), oldest first.
    """
    step = train[-1]["step"] if train else 0
    total = _total_steps(config_text)
    of_total = f" of {total:,}" if total else ""
    last_event = ledger[-1]["event"] if ledger else ""
    if last_event == "done":
        return "done", f"finished: step {step:,}{of_total}"
    if last_event == "stop":
        return "stop", f"stopped on purpose after step {ledger[-1]['step']:,}{of_total}"
    if last_event == "crash":
        return "crash", f"crashed after step {step:,}{of_total}"
    return "open", f"under way or cut off: last record of step {step:,}{of_total}"


def _total_steps(config_text: str) -> int | None:
    """Return `train.num_steps` from the text of a config.yaml; None if the text is empty or lacks the key."""
    config = yaml.safe_load(config_text) or {}
    train = config.get("train") or {}
    return train.get("num_steps")


def _tiles(train: Sequence[Record], evals: Sequence[Record], account: Goodput) -> str:
    """Return the HTML section of tiles, small boxes that show one figure of the run each.

    The result is empty if nothing was recorded.

    Args:
        train: the records of training steps in metrics.jsonl, oldest first.
        evals: records of evaluations on held-out rows.
        account: the run's wall-clock seconds, split by activity.
    """
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
    """Return the figures of the newest evaluation on held-out rows; [] if there was none.

    A tile is a small box on the page: the name of a figure, its value, and a remark.
    """
    if not evals:
        return []
    last = evals[-1]
    tiles = [
        ("ROC-AUC, held out", f"{last['auc']:.4f}", f"at step {last['step']:,}"),
        ("RTD loss, held out", f"{last['rtd_loss']:.4f}", _since(evals, "rtd_loss")),
        ("MLM loss, held out", f"{last['mlm_loss']:.3f}", f"{_percent(last['mlm_accuracy'])} right"),
    ]
    if math.isfinite(last.get("context_auc", math.nan)):
        remark = f"standard error {last['context_auc_se']:.4f}; 0.5: frequency alone"
        tiles.insert(1, ("Context AUC, held out", f"{last['context_auc']:.4f}", remark))
    return tiles


def _training_tiles(train: Sequence[Record]) -> list[Tile]:
    """Return the tiles of losses, accuracies and throughput in training; [] if no step was recorded.

    A tile is a small box on the page: the name of a figure, its value, and a remark. Losses and accuracies are means
    over the newest 20 records. Throughput and MFU are medians over all records; MFU is left out if no record has it.
    """
    if not train:
        return []
    recent = train[-RECENT_RECORDS:]
    averaged = f"mean of {len(recent)} records"
    tiles = [
        ("RTD loss", f"{_mean(recent, 'rtd_loss'):.4f}", f"{averaged}; {_since(train, 'rtd_loss')}"),
        ("MLM loss", f"{_mean(recent, 'mlm_loss'):.3f}", f"{averaged}; {_since(train, 'mlm_loss')}"),
        ("Replaced tokens found", _percent(_mean(recent, "replaced_accuracy")), averaged),
        ("Original tokens kept", _percent(_mean(recent, "original_accuracy")), averaged),
        ("Tokens seen", format_count(train[-1]["tokens_seen"]), f"{train[-1]['step']:,} steps"),
        ("Tokens per second", format_count(_median(train, "tokens_per_s")), "median"),
    ]
    if any(record["mfu"] is not None for record in train):
        tiles.append(("MFU", _percent(_median(train, "mfu")), "median, of the dense peak"))
    tiles.append(("Waiting for data", f"{100 * _mean(train, 'data_wait'):.2f} %", "of the time, mean"))
    return tiles


def _time_tiles(account: Goodput) -> list[Tile]:
    """Return the tiles of wall-clock time and goodput; [] if the ledger has too few events to compute them.

    Goodput is the fraction of the time, without the time in Slurm's queue, that went into steps that were kept.
    """
    if account.fraction is None:
        return []
    starts = "1 start" if account.starts == 1 else f"{account.starts} starts"
    return [
        ("Wall clock", format_duration(account.wall), starts),
        ("Goodput", _percent(account.fraction), f"{account.steps_lost:,} steps lost"),
    ]


def _curves(metrics: Sequence[Record], ledger: Sequence[Record]) -> str:
    """Return the HTML section of curves, or a note if no step was recorded; resumes are marked by dotted lines.

    Args:
        metrics: all records of metrics.jsonl.
        ledger: all events of ledger.jsonl; a "resume" is a start of the run from a checkpoint, at the event's step.
    """
    resumes = [event["step"] for event in ledger if event["event"] == "resume"]
    cards = ""
    for panel in PANELS:
        svg = panel_svg(panel, metrics, resumes)
        if svg:
            cards += f'<div class="card">{svg}</div>\n'
    if not cards:
        return '<p class="note">No step has been recorded yet.</p>\n'
    dotted = "; dotted: resumed from a checkpoint" if resumes else ""
    note = f'<p class="note">Over optimizer steps. Faint: every record, bold: smoothed{dotted}.</p>\n'
    return f'<h2>Curves</h2>\n<section class="curves">\n{cards}</section>\n{note}'


def _evaluations(evals: Sequence[Record]) -> str:
    """Return the table of the newest evaluations on held-out rows, oldest first; empty if there was none.

    It has at most 12 rows; a note below it gives the number of older evaluations.
    """
    if not evals:
        return ""
    shown = evals[-MAX_EVALUATIONS:]
    rows = [
        (
            f"{record['step']:,}",
            f"{record['mlm_loss']:.4f}",
            _percent(record["mlm_accuracy"]),
            f"{record['rtd_loss']:.4f}",
            f"{record['auc']:.4f}",
            _context_auc(record),
            _percent(record["accuracy"]),
            _percent(record["precision"]),
            _percent(record["recall"]),
            f"{record['rows']:,}",
        )
        for record in shown
    ]
    omitted = _omitted(len(evals) - len(shown), "evaluations")
    return f"<h2>Held-out evaluations</h2>\n{_table(rows, _EVALUATION_HEAD)}{omitted}"


def _events(ledger: Sequence[Record], account: Goodput) -> str:
    """Return the section "How the run went": events, where the time went, and the checkpoints.

    The table shows the newest 40 events. Checkpoints and evaluations are too many for it; a note sums up the
    checkpoints.

    Args:
        ledger: all events of the run, oldest first; the section is empty if there are none.
        account: the run's wall-clock seconds, split by activity.
    """
    if not ledger:
        return ""
    events = [event for event in ledger if event["event"] not in ("checkpoint", "eval")]
    shown = events[-MAX_EVENTS:]
    rows = [(_minute(event["time"]), event["event"], f"{event['step']:,}", _details(event)) for event in shown]
    table = _table(rows, ("time (UTC)", "event", "step", ""), left=True)
    omitted = _omitted(len(events) - len(shown), "events")
    account_note = f'<p class="note">Where the time went: {account.described()}.</p>\n'
    return f"<h2>How the run went</h2>\n{table}{omitted}{account_note}{_checkpoint_note(ledger)}"


def _details(event: Record) -> str:
    """Return the further fields of a ledger event as text, such as "attempt 3, ranks 8".

    The fields time, event and step are left out, because they have columns of their own, and so are nested objects.
    """
    details = []
    for key, value in event.items():
        if key not in ("time", "event", "step") and not isinstance(value, dict):
            details.append(f"{key.replace('_', ' ')} {_shown(value)}")
    return ", ".join(details)


def _checkpoint_note(ledger: Sequence[Record]) -> str:
    """Return a note with the number of checkpoints, the newest one and the median stall; empty without checkpoints.

    The stall is the time for which a save held up the training, in seconds.
    """
    saves = [event for event in ledger if event["event"] == "checkpoint"]
    if not saves:
        return ""
    stalls = [event["stall_s"] for event in saves if event.get("stall_s") is not None]
    stall_remark = ""
    if stalls:
        stall_remark = f", each held the training up for {statistics.median(stalls):.2f} s (median)"
    newest_step = saves[-1]["step"]
    return f'<p class="note">{len(saves):,} checkpoints, the newest of step {newest_step:,}{stall_remark}.</p>\n'


def _environment(environment: Record) -> str:
    """Return the tables of hardware and package versions; empty if environment.json is missing.

    Args:
        environment: content of environment.json; empty if the file is missing.
    """
    if not environment:
        return ""
    cpu = environment["cpu"]
    hardware = [
        ("ranks", str(environment["world_size"])),
        *_gpu_rows(environment["gpus"]),
        ("CPU", str(cpu["model"])),
        ("cores", f"{cpu['usable_cores']} usable of {cpu['cores']}"),
        ("memory", f"{cpu['memory_gb']} GB"),
        ("system", str(environment["system"])),
    ]
    versions = list(environment["versions"].items())
    tables = _table(hardware, left=True) + _table(versions, left=True)
    return f'<h2>Hardware and versions</h2>\n<div class="pair">\n{tables}</div>\n'


def _gpu_rows(gpus: Record) -> list[tuple[str, str]]:
    """Return the rows of the hardware table that describe a node's GPUs: one per model, and the driver.

    Args:
        gpus: the entry "gpus" of environment.json.

    Returns:
        Names and values, such as ("GPUs of a node", "8 x NVIDIA H100, 80 GB"); [] without GPUs.
    """
    devices = gpus.get("devices", [])
    if not devices:
        return []
    rows = []
    models = {(device["name"], device["memory_gb"]) for device in devices}
    for name, memory_gb in sorted(models):
        count = sum(device["name"] == name for device in devices)
        memory = f", {memory_gb} GB" if memory_gb else ""
        rows.append(("GPUs of a node", f"{count} x {name}{memory}"))
    rows.append(("driver", str(gpus["driver"])))
    return rows


def _config(text: str) -> str:
    """Return the section with the text of config.yaml, folded until the reader opens it; empty for an empty text."""
    if not text:
        return ""
    inner = f"<details><summary>config.yaml</summary><pre>{html.escape(text)}</pre></details>"
    return f'<h2>Resolved configuration</h2>\n<div class="card">{inner}</div>\n'


def _table(rows: Iterable[Sequence[str]], head: Sequence[str] = (), left: bool = False) -> str:
    """Return an HTML table in a card that scrolls sideways on a narrow screen. Cells are escaped.

    Args:
        rows: text of each cell, row by row.
        head: text of the heading of each column; empty for no headings.
        left: whether to align all columns to the left; otherwise only the first one is.
    """
    lines = []
    if head:
        lines.append("".join(f"<th>{html.escape(cell)}</th>" for cell in head))
    for row in rows:
        lines.append("".join(f"<td>{html.escape(cell)}</td>" for cell in row))
    inner = "".join(f"<tr>{line}</tr>\n" for line in lines)
    css_class = " class=left" if left else ""
    return f'<div class="card scroll"><table{css_class}>\n{inner}</table></div>\n'


def _omitted(count: int, name: str) -> str:
    """Return a note that `count` earlier rows of a table are not shown; empty if the count is 0.

    `name` is the plural noun for the rows, such as "events".
    """
    if count <= 0:
        return ""
    return f'<p class="note">{count:,} earlier {name} are not shown.</p>\n'


def _context_auc(record: Record) -> str:
    """Return the context AUC of an evaluation with four decimals; a dash if it has none."""
    context_auc = record.get("context_auc", math.nan)
    return f"{context_auc:.4f}" if math.isfinite(context_auc) else "-"


def _percent(fraction: float) -> str:
    """Return a fraction as a percentage with one decimal: "12.5 %" for 0.125."""
    return f"{100 * fraction:.1f} %"


def _shown(value: Any) -> str:
    """Return a value of a ledger event as text; a float is rounded to three significant figures, such as 0.0123."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _mean(records: Sequence[Record], field: str) -> float:
    """Return the mean of a field over the records; each of them must have it, and there must be at least one."""
    return statistics.fmean(record[field] for record in records)


def _median(records: Sequence[Record], field: str) -> float:
    """Return the median of a field over the records in which it is not None; at least one must have it."""
    return statistics.median(record[field] for record in records if record[field] is not None)


def _since(records: Sequence[Record], field: str) -> str:
    """Return the remark "from X" for a figure of the report, where X is the value of the field in the first record.

    It shows how far the figure has come; X has three significant figures, as in "from 10.4".
    """
    return f"from {records[0][field]:.3g}"


def _minute(time: str) -> str:
    """Return an ISO 8601 time for display, without its seconds and time zone, such as 2026-01-31 09:05."""
    return datetime.fromisoformat(time).strftime("%Y-%m-%d %H:%M")
