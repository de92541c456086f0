"""Draw the result of a fault drill: the losses of both runs with each fault marked, and the cost of each fault."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from electra_dist.report.plot_style import print_style
from electra_dist.run.metrics import iter_steps
from electra_launcher.chaos.drill import Hit

_REFERENCE_COLOR = "#cbd5e1"
_INTERRUPTED_COLOR = "#2563eb"
_LABELS = {
    "kill": "rank killed",
    "hang": "rank frozen",
    "pause": "rank paused",
    "term": "SIGTERM",
    "hup": "SIGHUP",
    "int": "Ctrl-C",
    "term-rank": "SIGTERM to a rank",
    "usr2": "SIGUSR2",
    "stop-file": "stop requested",
    "supervisor": "supervisor killed",
    "lease": "folder taken over",
    "power": "all killed at once",
    "metrics": "metrics torn",
    "ledger": "ledger torn",
    "torn": "checkpoint torn",
    "flip": "checkpoint, one bit",
    "missing": "checkpoint, file lost",
    "disk": "disk full",
}  # kind of fault -> its name in the legend; other drills have more kinds


def write_fault_plot(reference: Path, interrupted: Path, hits: Sequence[Hit], out: Path) -> None:
    """Write a PNG with three diagrams: losses of the two runs, their difference, and the seconds each fault cost."""
    with matplotlib.rc_context(print_style()):
        figure = Figure(figsize=(7.6, 5.0), layout="constrained")
        FigureCanvasAgg(figure)
        losses, difference, costs = figure.subplots(3, 1, sharex=True, height_ratios=(4, 1, 2))
        _draw_losses(losses, reference, interrupted, hits)
        _draw_difference(difference, reference, interrupted)
        _draw_costs(costs, hits)
        figure.savefig(out, dpi=160)


def _draw_losses(axes: Axes, reference: Path, interrupted: Path, hits: Sequence[Hit]) -> None:
    steps, losses = _losses(reference)
    axes.plot(steps, losses, color=_REFERENCE_COLOR, linewidth=5, label="uninterrupted run")
    steps, losses = _losses(interrupted)
    axes.plot(steps, losses, color=_INTERRUPTED_COLOR, linewidth=1, label=f"run with {len(hits)} faults")
    for hit in hits:
        axes.axvline(hit.step, color="#dc2626", linewidth=0.6, linestyle=":")
    axes.set_title(f"Training loss; a dotted line marks each of the {len(hits)} faults")
    axes.legend(loc="upper right", frameon=False)


def _draw_difference(axes: Axes, reference: Path, interrupted: Path) -> None:
    """Draw the interrupted run's loss minus the reference run's loss, for each step that both runs logged."""
    expected = dict(zip(*_losses(reference)))
    found = dict(zip(*_losses(interrupted)))
    steps = sorted(expected.keys() & found.keys())
    differences = [found[step] - expected[step] for step in steps]
    largest = max(map(abs, differences), default=0.0)
    axes.plot(steps, differences, color=_INTERRUPTED_COLOR, linewidth=1)
    axes.set_title(
        f"Difference of the two losses: {'exactly 0 at every step' if largest == 0 else f'up to {largest:g}'}"
    )
    if largest == 0:
        axes.set_ylim(-1e-6, 1e-6)


def _draw_costs(axes: Axes, hits: Sequence[Hit]) -> None:
    """Draw a bar for each fault, colored by its kind: the seconds until the run completed its next new step."""
    colors = matplotlib.colormaps["tab20"]
    for color, kind in enumerate(sorted({hit.kind for hit in hits})):
        of_kind = [hit for hit in hits if hit.kind == kind and hit.recovery_s is not None]
        seconds = [hit.recovery_s or 0.0 for hit in of_kind]
        steps = [hit.step for hit in of_kind]
        label = _LABELS.get(kind, kind)
        axes.vlines(steps, 0, seconds, color=colors(color % colors.N), linewidth=3, label=label)
    axes.set_title("Seconds from a fault to the next new step")
    axes.set_xlabel("optimizer step")
    axes.set_ylim(bottom=0)
    handles, kinds = axes.get_legend_handles_labels()
    axes.figure.legend(handles, kinds, loc="outside lower center", ncols=6, frameon=False, fontsize=6)


def _losses(run_dir: Path) -> tuple[list[int], list[float]]:
    """Return the training steps that a run logged, and the loss of each step in nats."""
    records = list(iter_steps(run_dir))
    return [record.step for record in records], [record.loss for record in records]
