"""Write report.html, which shows a run on one page, or one page that lays up to eight runs over each other.

Guarantee: a page is self-contained (it loads no script, font, image or style, so it opens from a mail or a cluster's
file system), readable on a phone, in light and in dark mode. It is derived from files of the run folder only
(metrics.jsonl, samples.jsonl, ledger.jsonl, config.yaml, identity.json, environment.json, slurm/jobs.jsonl; the part
of a missing file is left out), so it can be written again at any time, on any machine. It is written atomically. It
names no host and no command, although environment.json does, so it may be passed on.

How: this module chooses the figures, `templates/run.html` and `templates/overlay.html` lay them out.

Limits: the page shows the state at the time of writing. While a run goes on, rank 0 has it written again every
`log.report_every_minutes`. Curves of several runs are over optimizer steps, whatever the size of a step is.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from electra_dist.config import TowerConfig
from electra_dist.config.keys import flattened
from electra_dist.data.corpora import token_shares, uses_of_phases
from electra_dist.errors import EXIT_USER_ERROR, UserError, error_line
from electra_dist.escapes import printable
from electra_dist.report.pages import NONE, decimals, draw_diagrams, minute, percent, render, write_page
from electra_dist.report.panels import RunCurves
from electra_dist.report.plot_style import MAX_RUNS
from electra_dist.report.run_record import RunRecord, read_run
from electra_dist.report.run_tiles import MAX_TILES, run_figures
from electra_dist.run.context_auc import STUCK_BELOW, first_judged_step, is_stuck, stuck_warning
from electra_dist.run.folder import METRICS_FILE, REPORT_FILE
from electra_dist.run.ledger import LedgerEvent
from electra_dist.run.metrics import CONTINUATION, EvalRecord, Samples, numbers_of
from electra_dist.run.number_formats import format_count

MAX_EVENTS = 40  # the newest events that the table of events shows
MAX_EVALUATIONS = 12  # the newest evaluations that the table of evaluations shows
# Of the background of a replaced word, from one that the discriminator takes for original to one that it is sure of;
# text stays readable on it.
_MIN_OPACITY_PERCENT = 8
_MORE_OPACITY_PERCENT = 67


class _Word(NamedTuple):
    """Word of a held-out text in which a generator has replaced tokens, with what the discriminator says of it."""

    text: str
    original: str  # the word of the corpus, if the generator replaced one of its tokens, else ""
    probability: float  # of the discriminator, that a token of the word was replaced: the largest of its tokens
    opacity_percent: int  # of the background; 0 for a word that was not replaced


def write_report(run_dir: Path, path: Path | None = None) -> Path:
    """Write the report of a finished or running run, and return its path.

    If `path` is None, it is report.html in the run's folder. Raises UserError if the folder does not exist, holds no
    run or cannot be written.
    """
    run_dir = Path(run_dir)
    text = report_page(read_run(run_dir))
    if path is None:
        path = run_dir / REPORT_FILE
    write_page(path, text)
    return path


def report_page(run: RunRecord) -> str:
    """Return the report of a run as HTML text, without writing it. What the run did not record is left out."""
    state, state_text = run.state()
    figures = run_figures(run)
    events = [event for event in run.ledger if event.event not in ("checkpoint", "eval")]
    return render(
        "run.html",
        run=run,
        state=state,
        state_text=state_text,
        verdict=learning_verdict(run),
        tiles=figures[:MAX_TILES],
        more_figures=figures[MAX_TILES:],
        diagrams=draw_diagrams([run.curves]),
        has_resumed=any(event.event == "resume" for event in run.ledger),
        samples=_sample_words(run.samples),
        evaluations=_evaluation_table(run.metrics.evals[-MAX_EVALUATIONS:]),
        num_omitted_evaluations=max(0, len(run.metrics.evals) - MAX_EVALUATIONS),
        events=[_event_row(event) for event in events[-MAX_EVENTS:]],
        num_events=len(events),
        checkpoints=_checkpoints(run.ledger),
        described=_run_and_environment(run),
        # It escapes what is not printable ASCII itself.
        config_text=yaml.safe_dump(run.config_tree, sort_keys=False, width=100) if run.config_tree else "",
    )


def learning_verdict(run: RunRecord) -> tuple[str, str] | None:
    """Return whether the run learns, as (CSS class, sentence), or None if no context AUC was evaluated.

    The sentence is a warning if metrics.jsonl is lost, and in the same cases in which `electra-dist status` warns.
    """
    if run.has_lost_metrics:
        return "bad", f"Warning: {METRICS_FILE} is missing, so there are no losses, scores and curves."
    if run.config is None or not run.metrics.evals:
        return None
    newest = run.metrics.evals[-1]
    if not math.isfinite(newest.context_auc):
        return None
    if is_stuck(newest, run.config):
        return "bad", f"Warning: {stuck_warning(newest, run.config)}"
    known = f"context AUC {newest.context_auc:.3f} at step {newest.step:,}, where 0.5 is chance"
    if newest.context_auc >= STUCK_BELOW:
        return "good", f"The discriminator learns from context: {known}."
    return "open", f"Too early to tell: {known}; it is judged from step {first_judged_step(run.config):,} on."


def _sample_words(samples: Samples | None) -> list[list[_Word]]:
    """Return the words of each text of an evaluation; a token that begins with "##" continues a word."""
    if samples is None:
        return []
    texts = []
    for text in samples.texts:
        words: list[list[tuple[str, str, float]]] = []
        for original, shown, probability in zip(text.original, text.shown, text.replaced_probability):
            token = (original, shown, probability)
            if shown.startswith(CONTINUATION) and words:
                words[-1].append(token)
            else:
                words.append([token])
        texts.append([_word(tokens) for tokens in words])
    return texts


def _word(tokens: Sequence[tuple[str, str, float]]) -> _Word:
    """Make a word of tuples (original token, token that the discriminator read, its probability of "replaced")."""
    originals, shown, probabilities = zip(*tokens, strict=True)
    is_replaced = originals != shown
    probability = max(probabilities)
    return _Word(
        text=_joined(shown),
        original=_joined(originals) if is_replaced else "",
        probability=probability,
        opacity_percent=round(_MIN_OPACITY_PERCENT + _MORE_OPACITY_PERCENT * probability) if is_replaced else 0,
    )


def _joined(tokens: Sequence[str]) -> str:
    """Join WordPiece tokens to text: a token that begins with "##" continues the word before it."""
    return " ".join(tokens).replace(f" {CONTINUATION}", "").removeprefix(CONTINUATION)


def _evaluation_table(evaluations: Sequence[EvalRecord]) -> list[list[str]]:
    """Return the head of a table and a row for each evaluation, without the columns that have no value; [] if none."""
    rows = [_evaluation_row(record) for record in evaluations]
    names = [name for name in rows[0] if any(row[name] != NONE for row in rows)] if rows else []
    return [names, *([row[name] for name in names] for row in rows)] if rows else []


def _evaluation_row(record: EvalRecord) -> dict[str, str]:
    losses = numbers_of(record)
    return {
        "step": f"{record.step:,}",
        "context AUC": decimals(record.context_auc),
        "ROC-AUC": decimals(record.auc),
        "RTD loss": decimals(losses["rtd_loss"]),
        "token loss": decimals(losses["token_loss"]),
        "MLM loss": decimals(losses["mlm_loss"]),
        "right": percent(record.mlm_accuracy),
        "accuracy": percent(record.accuracy),
        "precision": percent(record.precision),
        "recall": percent(record.recall),
        "rows": f"{record.rows:,}",
    }


def _event_row(event: LedgerEvent) -> list[str]:
    """Return an event as cells of a table: time, name, step, and its other fields, such as "attempt 3, ranks 8"."""
    details = []
    for key, value in event.fields().items():
        if key not in ("time", "event", "step") and not isinstance(value, dict):
            shown = f"{value:.3g}" if isinstance(value, float) else str(value)
            details.append(f"{key.replace('_', ' ')} {shown}")
    return [minute(event.time), event.event, f"{event.step:,}", ", ".join(details)]


def _checkpoints(ledger: Sequence[LedgerEvent]) -> dict[str, Any]:
    """Return how many checkpoints there were, the newest one's step and the median pause for a save; {} if none."""
    saves = [event for event in ledger if event.event == "checkpoint"]
    if not saves:
        return {}
    stall_s = statistics.median(event.stall_s for event in saves)
    return {"number": len(saves), "newest": saves[-1].step, "stall_s": stall_s}


def _run_and_environment(run: RunRecord) -> list[list[tuple[str, str]]]:
    """Return the tables of the run, the hardware and the versions; those without rows are left out."""
    tables = [describe_run(run)]
    if run.environment:
        tables += [_hardware_rows(run.environment), list(run.environment["versions"].items())]
    return [rows for rows in tables if rows]


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
    """Return (name, value) for each corpus of a run with several: its size, and how much of it was read so far."""
    phases = run.environment.get("corpus", {}).get("phases", ())
    if run.config is None:
        return []
    rows = []
    uses = uses_of_phases(phases, run.step, run.config.train.global_batch)
    for use, share in zip(uses, token_shares(uses), strict=True):
        size = f"{use.corpus_rows:,} rows, {use.corpus_tokens:,} tokens, {use.fingerprint[:12]}"
        read = f"{use.epochs:.2f} epochs seen, {share:.1%} of the tokens seen"
        rows.append((f"corpus from step {use.from_step:,} on", f"{size}; {read}"))
    return rows


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
    """Describe a node's GPUs as (name, value), such as ("GPUs of a node", "8 x NVIDIA H100, 80 GB"); [] if none."""
    devices = gpus.get("devices", [])
    if not devices:
        return []
    rows = []
    num_of_model = Counter((device["name"], device["memory_gb"]) for device in devices)
    for (name, memory_gb), count in sorted(num_of_model.items(), key=str):
        memory = f", {memory_gb:g} GB" if memory_gb else ""
        rows.append(("GPUs of a node", f"{count} x {name}{memory}"))
    rows.append(("driver", str(gpus["driver"])))
    return rows


def main(run_dir: str) -> int:
    """Write the report of a run and return exit code 0; if that fails, print one line to stderr and return 78.

    During a run, rank 0 runs this module as a separate process (`tracking.py`), so that no training step waits for it.
    """
    try:
        write_report(Path(run_dir))
    except UserError as error:
        print(error_line(error), file=sys.stderr)
        return EXIT_USER_ERROR
    return 0


OVERLAY_FILE = "runs_report.html"  # default name, in the current folder


def write_overlay(run_dirs: Sequence[Path], path: Path) -> Path:
    """Write one HTML page that compares one to eight runs, which may still be going on, and return its path.

    Raises UserError if there are more runs, a folder is not a run, a file is damaged, or the page cannot be written.
    """
    if len(run_dirs) > MAX_RUNS:
        raise UserError(f"report: {len(run_dirs)} runs, but one page shows at most {MAX_RUNS}; name fewer runs")
    names = [printable(name) for name in unique_names(run_dirs)]
    write_page(path, overlay_page([read_run(Path(run_dir)) for run_dir in run_dirs], names))
    return path


def unique_names(run_dirs: Sequence[Path]) -> list[str]:
    """Return a name for each run: as many last parts of the folders' paths as make all names distinct.

    If a folder is given twice, the paths are returned as they were given.
    """
    names = shortest_endings([Path(run_dir).resolve().parts for run_dir in run_dirs])
    return names if len(set(names)) == len(names) else [str(run_dir) for run_dir in run_dirs]


def shortest_endings(all_parts: Sequence[Sequence[str]]) -> list[str]:
    """Return for each path, given as its parts, as few last parts as make all results distinct, joined by "/".

    All results have equally many parts. If two paths are equal, the whole paths are returned.
    """
    longest = max(len(parts) for parts in all_parts)
    names: list[str] = []
    for num_parts in range(1, longest + 1):
        names = ["/".join(parts[-num_parts:]) for parts in all_parts]
        if len(set(names)) == len(names):
            break
    return names


def overlay_page(runs: Sequence[RunRecord], names: Sequence[str]) -> str:
    """Return a page that compares runs, as HTML text, without writing it."""
    run_curves = [RunCurves(name=name, columns=run.metrics.columns) for run, name in zip(runs, names, strict=True)]
    return render(
        "overlay.html",
        names=list(names),
        verdicts=[(name, learning_verdict(run)) for run, name in zip(runs, names, strict=True)],
        figures=_figures(runs),
        diagrams=draw_diagrams(run_curves),
        differences=_differences(runs),
    )


def _figures(runs: Sequence[RunRecord]) -> list[list[str]]:
    """Return a table row for each figure that any run has, such as a loss: its name, then its value in each run."""
    columns = [_figures_of(run) for run in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    return [[name, *(column.get(name, NONE) for column in columns)] for name in names]


def _figures_of(run: RunRecord) -> dict[str, str]:
    """Return a run's figures by name: its state, those of its own report, and what text and code it is made of."""
    figures = {"State": run.state()[1], **{name: value for name, value, _ in run_figures(run)}}
    if run.parameters is not None:
        figures["Generator, not shared"] = format_count(run.parameters.generator_only)
    if run.corpus_fingerprint:
        figures["Corpus fingerprint"] = run.corpus_fingerprint[:12]
    commit = run.environment.get("commit")
    if commit:
        figures["Commit"] = commit["sha"][:12]
    return figures


def _differences(runs: Sequence[RunRecord]) -> list[list[str]]:
    """Return a row for each config key whose values differ between the runs: the key, then its value in each run."""
    trees = [flattened(run.config_tree) for run in runs]
    keys = dict.fromkeys(key for tree in trees for key in tree)
    rows = []
    for key in keys:
        values = [str(tree.get(key, NONE)) for tree in trees]
        if key != "run_dir" and len(set(values)) > 1:
            rows.append([key, *values])
    return rows


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
