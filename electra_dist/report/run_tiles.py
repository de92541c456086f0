"""Choose the figures of a run that its report shows: the most important ones in tiles, the others in a table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from electra_dist.report.pages import NONE, Tile, decimals, percent
from electra_dist.report.panels import constant_guess_loss, guessed_by_recall, guessed_replaced
from electra_dist.report.run_record import MetricsHistory, RunRecord
from electra_dist.run.goodput import Goodput
from electra_dist.run.metrics import EvalRecord, StepRecord, numbers_of
from electra_dist.run.number_formats import format_count, format_duration

MAX_TILES = 8  # figures that are shown in tiles


def run_figures(run: RunRecord) -> list[Tile]:
    """Return the figures of a run, most important first: what it has learnt, its progress and speed, then the rest.

    Each has a name, a value and a remark, which says what a good value is or what a guess reaches. If the run has no
    records, the list is empty.
    """
    metrics = run.metrics
    losses = _training_losses(metrics)
    speeds = _speed_figures(metrics)
    figures = [
        *(_heldout_figures(run) or losses),
        *_found_figures(metrics),
        *speeds[:2],
        *_time_figures(run.account),
        *(losses if metrics.evals else ()),
        *speeds[2:],
        *_size_figures(run),
        *_energy_figures(run),
    ]
    return [figure for figure in figures if figure[1] != NONE]


def _heldout_figures(run: RunRecord) -> list[Tile]:
    """Return tiles (name, value, remark) of the newest evaluation on held-out rows; [] if there was none."""
    evals = run.metrics.evals
    if not evals:
        return []
    last = evals[-1]
    losses = numbers_of(last)
    context_remark = f"0.5 = chance (token frequency alone), 1 = perfect; standard error {last.context_auc_se:.4f}"
    rtd_remark = f"{_since(evals[0], 'rtd_loss')}{_constant_guess(run.metrics.recent)}"
    mlm_remark = f"{percent(last.mlm_accuracy)} of the masked tokens right; {_since(evals[0], 'mlm_loss')}"
    return [
        ("Context AUC, held out", decimals(last.context_auc), context_remark),
        ("ROC-AUC, held out", decimals(last.auc), f"0.5 = chance, 1 = perfect; at step {last.step:,}"),
        ("RTD loss, held out", decimals(losses["rtd_loss"]), rtd_remark),
        ("Token loss, held out", decimals(losses["token_loss"]), _since(evals[0], "token_loss")),
        ("MLM loss, held out", decimals(losses["mlm_loss"]), mlm_remark),
    ]


def _constant_guess(recent: Sequence[StepRecord]) -> str:
    """Return the end of a remark: which RTD loss the same guess for every token reaches; "" if it is not known."""
    if not recent:
        return ""
    loss = constant_guess_loss(mean(recent, "replaced_fraction"))
    return f"; the same guess for every token reaches {loss:.3f}" if math.isfinite(loss) else ""


def _training_losses(metrics: MetricsHistory) -> list[Tile]:
    """Return tiles of the losses in training, as means of the newest 20 records; [] if there are no records."""
    if metrics.first is None:
        return []
    recent = metrics.recent
    averaged = f"mean of {len(recent)} records"
    rtd_remark = f"{averaged}; {_since(metrics.first, 'rtd_loss')}{_constant_guess(recent)}"
    return [
        ("RTD loss, training", decimals(mean(recent, "rtd_loss")), rtd_remark),
        *(
            (name, decimals(mean(recent, field)), f"{averaged}; {_since(metrics.first, field)}")
            for name, field in (("Token loss, training", "token_loss"), ("MLM loss, training", "mlm_loss"))
        ),
    ]


def _found_figures(metrics: MetricsHistory) -> list[Tile]:
    """Return a tile on the replaced tokens found, in the newest evaluation or, without one, in the newest records."""
    if metrics.evals:
        last = metrics.evals[-1]
        return [("Replaced tokens found, held out", percent(last.recall), _guess_remark(guessed_by_recall(last)))]
    if metrics.newest is None:
        return []
    guess = statistics.fmean(guessed_replaced(record) for record in metrics.recent)
    remark = f"mean of {len(metrics.recent)} records{_guess_remark(guess, '; ')}"
    return [("Replaced tokens found, training", percent(mean(metrics.recent, "replaced_accuracy")), remark)]


def _guess_remark(guess: float, separator: str = "") -> str:
    return f"{separator}a random guess finds {percent(guess)}" if math.isfinite(guess) else ""


def _speed_figures(metrics: MetricsHistory) -> list[Tile]:
    """Return tiles of progress and speed, the two most important first; speeds are medians over all records."""
    if metrics.newest is None:
        return []
    figures = [("Tokens seen", format_count(metrics.newest.tokens_seen), f"{metrics.newest.step:,} steps")]
    tokens_per_s = metrics.median("tokens_per_s")
    if tokens_per_s is not None:
        figures.append(("Tokens per second", format_count(tokens_per_s), "median"))
    kept = percent(mean(metrics.recent, "original_accuracy"))
    figures.append(("Original tokens kept", kept, "not taken for replaced ones; 100 % = perfect"))
    mfu = metrics.median("mfu")
    if mfu is not None:
        figures.append(("MFU", percent(mfu), "median, of the dense peak"))
    waited = f"{100 * metrics.mean('data_wait'):.2f} %"
    figures.append(("Waiting for data", waited, "of the time, mean; 0 % = training never waits for rows"))
    return figures


def _size_figures(run: RunRecord) -> list[Tile]:
    """Return tiles of the sizes of model and corpus, as far as they are recorded."""
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


def _time_figures(account: Goodput) -> list[Tile]:
    if account.fraction is None:
        return []
    starts = "1 start" if account.starts == 1 else f"{account.starts} starts"
    return [
        ("Goodput", percent(account.fraction), f"100 % = no time lost; {account.steps_lost:,} steps repeated"),
        ("Wall clock", format_duration(account.wall), starts),
    ]


def _energy_figures(run: RunRecord) -> list[Tile]:
    """Return tiles of estimated energy and (with `log.kwh_price`) its cost; [] if no GPU power was recorded."""
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
    """Return the mean of a field over one or more records; NaN for a loss that the objective does not have."""
    return statistics.fmean(numbers_of(record)[field] for record in records)


def _since(first: StepRecord | EvalRecord, field: str) -> str:
    """Return a remark that tells the first recorded value of a field, such as "from 10.4"."""
    return f"from {getattr(first, field):.3g}"
