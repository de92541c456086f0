"""report.html: a run on one page, in one file.

Guarantees: self-contained (no script, font, image or style from elsewhere, so it opens from a mail or a cluster's file
system), readable on a phone, light and dark. It is derived from files of the run folder only (metrics.jsonl,
ledger.jsonl, config.yaml, environment.json; whichever are missing leave their part out), so it can be written again at
any time, on any machine. Written atomically.

Cost: about 2 s, 300 KB. Where it stops: it is a picture of the moment at which it was written.
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
from electra_dist.report.style import STYLE
from electra_dist.run.environment import read_environment
from electra_dist.run.folder import CONFIG_FILE, REPORT_FILE
from electra_dist.run.formats import format_count, format_duration
from electra_dist.run.jsonl import Record
from electra_dist.run.ledger import read_jobs, read_ledger
from electra_dist.run.metrics import read_metrics
from electra_dist.store.files import replacing

__all__ = ["REPORT_FILE", "write_curves_png", "write_report"]

MAX_EVENTS = 40
MAX_EVALUATIONS = 12


def write_report(run_dir: Path) -> Path:
    """Write report.html into `run_dir` and return its path.

    Raises:
        UserError: there is no such run folder, or it cannot be written.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise UserError(f"{run_dir}: no such run folder; give the run_dir of a run")
    path = run_dir / REPORT_FILE
    page = report_page(run_dir)
    with replacing(path) as file:
        file.write(page.encode())
    return path


def report_page(run_dir: Path) -> str:
    """The page of the run in `run_dir`."""
    metrics, ledger = read_metrics(run_dir), read_ledger(run_dir)
    account = goodput(ledger, read_jobs(run_dir))
    config_file = run_dir / CONFIG_FILE
    config_text = config_file.read_text(encoding="utf-8") if config_file.exists() else ""
    train = [record for record in metrics if record["kind"] == "train"]
    evals = [record for record in metrics if record["kind"] == "eval"]
    environment = read_environment(run_dir)
    name = html.escape(run_dir.resolve().name)
    body = [
        _header(name, config_text, train, ledger),
        _tiles(train, evals, ledger, account),
        _curves(metrics, ledger),
        _evaluations(evals),
        _course(ledger, account),
        _environment(environment),
        _config(config_text),
    ]
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{name}</title>\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n<main>\n{''.join(body)}</main>\n</body>\n</html>\n"
    )


def _header(name: str, config_text: str, train: Sequence[Record], ledger: Sequence[Record]) -> str:
    total = ((yaml.safe_load(config_text) or {}).get("train") or {}).get("num_steps") if config_text else None
    step = train[-1]["step"] if train else 0
    of = f" of {total:,}" if total else ""
    event = ledger[-1]["event"] if ledger else ""
    said = {
        "done": ("done", f"finished: step {step:,}{of}"),
        "stop": ("stop", f"stopped on purpose after step {ledger[-1]['step'] if ledger else 0:,}{of}"),
        "crash": ("crash", f"crashed after step {step:,}{of}"),
    }
    kind, text = said.get(event, ("open", f"under way or cut off: last record of step {step:,}{of}"))
    when = f" &middot; {_minute(ledger[0]['time'])} to {_minute(ledger[-1]['time'])} UTC" if ledger else ""
    return f'<header><h1>{name}</h1><p><span class="state {kind}">{text}</span>{when}</p></header>\n'


def _tiles(train: Sequence[Record], evals: Sequence[Record], ledger: Sequence[Record], account: Goodput) -> str:
    tiles: list[tuple[str, str, str]] = []
    if evals:
        last = evals[-1]
        tiles += [
            ("ROC-AUC, held out", f"{last['auc']:.4f}", f"at step {last['step']:,}"),
            ("RTD loss, held out", f"{last['rtd_loss']:.4f}", _since(evals, "rtd_loss")),
            ("MLM loss, held out", f"{last['mlm_loss']:.3f}", f"{100 * last['mlm_accuracy']:.1f} % right"),
        ]
    if train:
        recent = train[-min(20, len(train)) :]
        told = f"mean of {len(recent)} records"
        tiles += [
            ("RTD loss", f"{_mean(recent, 'rtd_loss'):.4f}", f"{told}; {_since(train, 'rtd_loss')}"),
            ("MLM loss", f"{_mean(recent, 'mlm_loss'):.3f}", f"{told}; {_since(train, 'mlm_loss')}"),
            ("Replaced tokens found", f"{100 * _mean(recent, 'replaced_accuracy'):.1f} %", told),
            ("Original tokens kept", f"{100 * _mean(recent, 'original_accuracy'):.1f} %", told),
            ("Tokens seen", format_count(train[-1]["tokens_seen"]), f"{train[-1]['step']:,} steps"),
            ("Tokens per second", format_count(_median(train, "tokens_per_s")), "median"),
        ]
        if any(record["mfu"] is not None for record in train):
            tiles.append(("MFU", f"{100 * _median(train, 'mfu'):.1f} %", "median, of the dense peak"))
        tiles.append(("Waiting for data", f"{100 * _mean(train, 'data_wait'):.2f} %", "of the time, mean"))
    if account.fraction is not None:
        starts = f"{account.starts} start{'s' if account.starts != 1 else ''}"
        tiles.append(("Wall clock", format_duration(account.wall), starts))
        tiles.append(("Goodput", f"{100 * account.fraction:.1f} %", f"{account.steps_lost:,} steps lost"))
    cells = (
        f'<div class="tile"><span class="name">{name}</span><span class="value">{value}</span>'
        f'<span class="more">{more}</span></div>\n'
        for name, value, more in tiles
    )
    return f'<section class="tiles">\n{"".join(cells)}</section>\n' if tiles else ""


def _curves(metrics: Sequence[Record], ledger: Sequence[Record]) -> str:
    resumes = [event["step"] for event in ledger if event["event"] == "resume"]
    drawn = [svg for panel in PANELS if (svg := panel_svg(panel, metrics, resumes))]
    if not drawn:
        return '<p class="note">No step has been recorded yet.</p>\n'
    dotted = "; dotted: resumed from a checkpoint" if resumes else ""
    cards = "".join(f'<div class="card">{svg}</div>\n' for svg in drawn)
    note = f'<p class="note">Over optimizer steps. Faint: every record, bold: smoothed{dotted}.</p>\n'
    return f'<h2>Curves</h2>\n<section class="curves">\n{cards}</section>\n{note}'


def _evaluations(evals: Sequence[Record]) -> str:
    if not evals:
        return ""
    shown = evals[-MAX_EVALUATIONS:]
    head = (
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
    rows = [
        (
            f"{e['step']:,}",
            f"{e['mlm_loss']:.4f}",
            f"{100 * e['mlm_accuracy']:.1f} %",
            f"{e['rtd_loss']:.4f}",
            f"{e['auc']:.4f}",
            *(f"{100 * e[name]:.1f} %" for name in ("accuracy", "precision", "recall")),
            f"{e['rows']:,}",
        )
        for e in shown
    ]
    return f"<h2>Held-out evaluations</h2>\n{_table(rows, head)}{_omitted(len(evals) - len(shown), 'evaluations')}"


def _course(ledger: Sequence[Record], account: Goodput) -> str:
    """How the run went: everything but checkpoints and evaluations one by one, those summed up."""
    if not ledger:
        return ""
    rows = []
    for event in ledger:
        step = event["step"]
        details = {k: v for k, v in event.items() if k not in ("time", "event", "step") and not isinstance(v, dict)}
        text = ", ".join(f"{key.replace('_', ' ')} {_shown(value)}" for key, value in details.items())
        if event["event"] not in ("checkpoint", "eval"):
            rows.append((_minute(event["time"]), event["event"], f"{step:,}", text))
    shown = rows[-MAX_EVENTS:]
    saves = [event for event in ledger if event["event"] == "checkpoint"]
    note = f'<p class="note">Where the time went: {account.described()}.</p>\n'
    if saves:
        stalls = [event["stall_s"] for event in saves if event.get("stall_s") is not None]
        stall = f", each held the training up for {statistics.median(stalls):.2f} s (median)" if stalls else ""
        note += f'<p class="note">{len(saves):,} checkpoints, the newest of step {saves[-1]["step"]:,}{stall}.</p>\n'
    table = _table(shown, ("time (UTC)", "event", "step", ""), left=True)
    return f"<h2>How the run went</h2>\n{table}{_omitted(len(rows) - len(shown), 'events')}{note}"


def _environment(environment: Record) -> str:
    if not environment:
        return ""
    cpu, gpus = environment["cpu"], environment["gpus"].get("devices", [])
    hardware = [("ranks", str(environment["world_size"]))]
    kinds = {(gpu["name"], gpu["memory_gb"]) for gpu in gpus}
    for name, memory_gb in sorted(kinds):
        count = sum(gpu["name"] == name for gpu in gpus)
        hardware.append(("GPUs of a node", f"{count} x {name}" + (f", {memory_gb} GB" if memory_gb else "")))
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
    if not text:
        return ""
    inner = f"<details><summary>config.yaml</summary><pre>{html.escape(text)}</pre></details>"
    return f'<h2>Resolved configuration</h2>\n<div class="card">{inner}</div>\n'


def _table(rows: Iterable[Sequence[str]], head: Sequence[str] = (), left: bool = False) -> str:
    lines = ["".join(f"<th>{html.escape(cell)}</th>" for cell in head)] if head else []
    lines += ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows]
    inner = "".join(f"<tr>{line}</tr>\n" for line in lines)
    return f'<div class="card scroll"><table{" class=left" if left else ""}>\n{inner}</table></div>\n'


def _omitted(count: int, what: str) -> str:
    return f'<p class="note">{count:,} earlier {what} are not shown.</p>\n' if count > 0 else ""


def _shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _mean(records: Sequence[Record], field: str) -> float:
    return statistics.fmean(record[field] for record in records)


def _median(records: Sequence[Record], field: str) -> float:
    return statistics.median(record[field] for record in records if record[field] is not None)


def _since(records: Sequence[Record], field: str) -> str:
    return f"from {records[0][field]:.3g}"


def _minute(time: str) -> str:
    return datetime.fromisoformat(time).strftime("%Y-%m-%d %H:%M")
