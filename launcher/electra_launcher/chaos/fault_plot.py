"""Draw the result of a fault drill: the losses of both runs with every fault marked, and their difference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from electra_dist.report.plot_style import print_style
from electra_dist.run.metrics import StepRecord, iter_steps
from electra_launcher.chaos.drill import Hit

_REFERENCE_COLOR = "#cbd5e1"
_INTERRUPTED_COLOR = "#2563eb"
_FAULT_COLOR = "#dc2626"
_GROUPS = {
    "processes killed or frozen": ("kill", "hang", "pause", "supervisor", "power"),
    "stops from outside": ("term", "hup", "int", "term-rank", "usr2", "stop-file", "lease"),
    "files damaged": ("torn", "flip", "missing", "metrics", "ledger"),
}  # name in the legend -> kinds of faults; all other kinds are failures of the storage


def write_fault_plot(reference: Path, interrupted: Path, hits: Sequence[Hit], out: Path) -> None:
    """Draw the losses of both runs and their difference (`fault_figure`) into the PNG `out`."""
    fault_figure(reference, interrupted, hits).savefig(out, dpi=160, facecolor="white")


def fault_figure(reference: Path, interrupted: Path, hits: Sequence[Hit]) -> Figure:
    """Return two diagrams: the losses of the two runs in predicting masked tokens, and their difference.

    The loss that training minimises would be the natural one to show, but it may rise while both networks learn,
    because the discriminator's part grows as the generator's replacements become plausible.
    """
    with matplotlib.rc_context(print_style()):
        figure = Figure(figsize=(7.6, 3.1), layout="constrained")
        FigureCanvasAgg(figure)
        losses, difference = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        expected = list(iter_steps(reference))
        found = list(iter_steps(interrupted))
        _draw_losses(losses, expected, found, hits)
        _draw_difference(difference, expected, found)
        return figure


def _draw_losses(axes: Axes, expected: Sequence[StepRecord], found: Sequence[StepRecord], hits: Sequence[Hit]) -> None:
    """Draw the interrupted run thinly over the reference run, and a triangle below them at the step of each fault."""
    for records, color, width, label in (
        (expected, _REFERENCE_COLOR, 5.0, "uninterrupted run"),
        (found, _INTERRUPTED_COLOR, 1.0, f"run with {len(hits)} faults"),
    ):
        steps = [record.step for record in records]
        axes.plot(steps, [record.mlm_loss for record in records], color=color, linewidth=width, label=label)
    at_the_bottom = axes.get_xaxis_transform()  # x is a step, y a share of the axes' height
    heights = [0.05] * len(hits)
    axes.plot(
        [hit.step for hit in hits],
        heights,
        "^",
        color=_FAULT_COLOR,
        markersize=5,
        transform=at_the_bottom,
        label=_faults_in_groups(hits),
    )
    axes.set_title("Loss in predicting masked tokens")
    axes.set_ylabel("nats per token")
    axes.legend(loc="upper right", frameon=False)


def _draw_difference(axes: Axes, expected: Sequence[StepRecord], found: Sequence[StepRecord]) -> None:
    """Draw the interrupted run's loss minus the reference run's, for each step that both runs logged."""
    expected_losses = {record.step: record.mlm_loss for record in expected}
    found_losses = {record.step: record.mlm_loss for record in found}
    steps = sorted(expected_losses.keys() & found_losses.keys())
    differences = [found_losses[step] - expected_losses[step] for step in steps]
    largest = max(map(abs, differences), default=0.0)
    axes.plot(steps, differences, color=_INTERRUPTED_COLOR, linewidth=1)
    axes.set_title(
        f"Difference of the two curves: {'exactly 0 at every step' if largest == 0 else f'up to {largest:g}'}"
    )
    axes.set_xlabel("training step")
    axes.set_ylabel("nats")
    if largest == 0:
        axes.set_ylim(-1.5e-6, 1.5e-6)  # a scale on which a difference of float32 rounding could be seen
        axes.set_yticks([-1e-6, 0, 1e-6], ["-0.000001", "0", "0.000001"])


def _faults_in_groups(hits: Sequence[Hit]) -> str:
    """Return a line for each group of faults that occurred: how many there were, and the group's name."""
    group_of = {kind: group for group, kinds in _GROUPS.items() for kind in kinds}
    counts = Counter(group_of.get(hit.kind, "failures of the storage") for hit in hits)
    return "\n".join(f"{count} {group}" for group, count in counts.most_common())
