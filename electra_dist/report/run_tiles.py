"""Choose the figures of a run that the report shows in tiles: small boxes, each with name, value and remark."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from electra_dist.report.pages import Tile, percent
from electra_dist.report.panels import guessed_replaced
from electra_dist.report.run_record import MetricsHistory, RunRecord
from electra_dist.run.goodput import Goodput
from electra_dist.run.metrics import EvalRecord, StepRecord
from electra_dist.run.number_formats import format_count, format_duration


def run_tiles(run: RunRecord) -> list[Tile]:
    """Return the tiles of a run; none if the run recorded nothing."""
    return [
        *_evaluation_tiles(run.metrics.evals),
        *_training_tiles(run.metrics),
        *_size_tiles(run),
        *_time_tiles(run.account),
        *_energy_tiles(run),
    ]


def _evaluation_tiles(evals: Sequence[EvalRecord]) -> list[Tile]:
    if not evals:
        return []
    last = evals[-1]
    figures = [
        ("ROC-AUC, held out", f"{last.auc:.4f}", f"at step {last.step:,}"),
        ("RTD loss, held out", f"{last.rtd_loss:.4f}", _since(evals[0], "rtd_loss")),
        ("MLM loss, held out", f"{last.mlm_loss:.3f}", f"{percent(last.mlm_accuracy)} right"),
    ]
    if math.isfinite(last.context_auc):
        remark = f"standard error {last.context_auc_se:.4f}; 0.5: frequency alone"
        figures.insert(1, ("Context AUC, held out", f"{last.context_auc:.4f}", remark))
    return figures


def _training_tiles(metrics: MetricsHistory) -> list[Tile]:
    """Return the tiles about training; losses and accuracies are means of the newest 20 records, speeds medians."""
    recent = metrics.recent
    if metrics.first is None or metrics.newest is None:
        return []
    averaged = f"mean of {len(recent)} records"
    guess = statistics.fmean(guessed_replaced(record) for record in recent)
    guess_remark = f"; a random guess finds {percent(guess)}" if math.isfinite(guess) else ""
    figures = [
        ("RTD loss", f"{mean(recent, 'rtd_loss'):.4f}", f"{averaged}; {_since(metrics.first, 'rtd_loss')}"),
        ("MLM loss", f"{mean(recent, 'mlm_loss'):.3f}", f"{averaged}; {_since(metrics.first, 'mlm_loss')}"),
        ("Replaced tokens found", percent(mean(recent, "replaced_accuracy")), f"{averaged}{guess_remark}"),
        ("Original tokens kept", percent(mean(recent, "original_accuracy")), averaged),
        ("Tokens seen", format_count(metrics.newest.tokens_seen), f"{metrics.newest.step:,} steps"),
    ]
    tokens_per_s = metrics.median("tokens_per_s")
    if tokens_per_s is not None:
        figures.append(("Tokens per second", format_count(tokens_per_s), "median"))
    mfu = metrics.median("mfu")
    if mfu is not None:
        figures.append(("MFU", percent(mfu), "median, of the dense peak"))
    figures.append(("Waiting for data", f"{100 * metrics.mean('data_wait'):.2f} %", "of the time, mean"))
    return figures


def _size_tiles(run: RunRecord) -> list[Tile]:
    figures = []
    if run.parameters is not None:
        generator = f"parameters; generator {format_count(run.parameters.generator_only)} more"
        remark = generator if run.parameters.generator_only else "parameters"
        figures.append(("Discriminator", format_count(run.parameters.discriminator), remark))
    corpus = run.environment.get("corpus")
    if corpus is not None:
        epochs = ""
        if run.metrics.newest is not None and not corpus.get("phases"):
            epochs = f"; {run.metrics.newest.rows_seen / corpus['rows']:.2f} epochs seen"
        remark = f"tokens in {corpus['rows']:,} rows of {corpus['seq_len']}{epochs}"
        figures.append(("Corpus", format_count(corpus["tokens"]), remark))
    return figures


def _time_tiles(account: Goodput) -> list[Tile]:
    if account.fraction is None:
        return []
    starts = "1 start" if account.starts == 1 else f"{account.starts} starts"
    return [
        ("Wall clock", format_duration(account.wall), starts),
        ("Goodput", percent(account.fraction), f"{account.steps_lost:,} steps lost"),
    ]


def _energy_tiles(run: RunRecord) -> list[Tile]:
    """Return the tiles of estimated energy and (with `log.kwh_price`) its cost; [] if no GPU power was recorded."""
    if run.energy is None:
        return []
    nodes = "1 node" if run.energy.num_nodes == 1 else f"{run.energy.num_nodes} nodes"
    how = (
        f"estimate: GPUs of {nodes}, {run.energy.mean_power_w:,.0f} W per node, {format_duration(run.energy.seconds)}"
    )
    figures = [("Energy", _kwh(run.energy.kwh), how)]
    price = run.config.log.kwh_price if run.config is not None else None
    if price is not None:
        figures.append(("Cost of energy", f"{run.energy.kwh * price:,.2f}", f"at {price:g} per kWh"))
    return figures


def _kwh(kwh: float) -> str:
    """Return an energy as text with at least three significant figures, such as "0.0123 kWh" or "12,345 kWh"."""
    return f"{kwh:,.0f} kWh" if kwh >= 100 else f"{kwh:.3g} kWh"


def mean(records: Sequence[StepRecord], field: str) -> float:
    """Return the mean of a field over one or more records, each of which must have the field."""
    return statistics.fmean(getattr(record, field) for record in records)


def _since(first: StepRecord | EvalRecord, field: str) -> str:
    """Return a remark that tells the first recorded value of a field, such as "from 10.4"."""
    return f"from {getattr(first, field):.3g}"
