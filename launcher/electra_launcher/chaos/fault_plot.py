"""Draw the result of a fault drill: both losses of both runs, how far they are apart, and when each fault came."""

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
_FAULT_COLOR = "#dc2626"
_GROUPS = {
    "process killed or frozen": ("kill", "hang", "pause", "supervisor", "power"),
    "run stopped": ("term", "hup", "int", "term-rank", "usr2", "stop-file", "lease"),
    "file damaged": ("torn", "flip", "missing", "metrics", "ledger"),
}  # name in the diagram -> kinds of faults; all other kinds are failures of the storage


def write_fault_plot(reference: Path, interrupted: Path, hits: Sequence[Hit], out: Path) -> None:
    """Draw the losses of both runs and the faults (`fault_figure`) into the PNG `out`."""
    fault_figure(reference, interrupted, hits).savefig(out, dpi=160, facecolor="white")


def fault_figure(reference: Path, interrupted: Path, hits: Sequence[Hit]) -> Figure:
    """Return a diagram of each network's loss with both runs in it, and below them one with a row per group of faults.

    The loss that training minimises would be the natural one to show, but it may rise while both networks learn,
    because the discriminator's part grows as the generator's replacements become plausible.
    """
    expected = {record.step: record for record in iter_steps(reference)}
    found = {record.step: record for record in iter_steps(interrupted)}
    networks = {"Generator": "mlm_loss"}
    if any(record.rtd_loss for record in expected.values()):
        networks["Discriminator"] = "rtd_loss"
    with matplotlib.rc_context(print_style()):
        figure = Figure(figsize=(7.6, 1.0 + 1.5 * len(networks)), layout="constrained")
        FigureCanvasAgg(figure)
        *losses, faults = figure.subplots(len(networks) + 1, 1, sharex=True, height_ratios=[3] * len(networks) + [1.2])
        for axes, (network, field) in zip(losses, networks.items(), strict=True):
            _draw_losses(
                axes,
                network,
                {step: getattr(record, field) for step, record in expected.items()},
                {step: getattr(record, field) for step, record in found.items()},
            )
        losses[0].legend(loc="upper right", frameon=False)
        _draw_faults(faults, hits)
        return figure


def _draw_losses(axes: Axes, network: str, expected: dict[int, float], found: dict[int, float]) -> None:
    """Draw the interrupted run's losses by step thinly over the reference run's; the title has their difference."""
    axes.plot(
        list(expected), list(expected.values()), color=_REFERENCE_COLOR, linewidth=5.0, label="uninterrupted run"
    )
    axes.plot(list(found), list(found.values()), color=_INTERRUPTED_COLOR, linewidth=1.0, label="run with faults")
    largest = max((abs(found[step] - expected[step]) for step in expected.keys() & found.keys()), default=0.0)
    difference = "exactly 0 at every step" if largest == 0 else f"up to {largest:g}"
    axes.set_title(f"{network}'s loss, difference of the two runs: {difference}")
    axes.set_ylabel("nats per token")


def _draw_faults(axes: Axes, hits: Sequence[Hit]) -> None:
    """Draw a row for each group of faults that occurred, with their number and a mark at the step of each."""
    group_of = {kind: group for group, kinds in _GROUPS.items() for kind in kinds}
    steps: dict[str, list[int]] = {}
    for hit in hits:
        steps.setdefault(group_of.get(hit.kind, "storage failed"), []).append(hit.step)
    for row, marks in enumerate(steps.values()):
        axes.plot(marks, [row] * len(marks), "|", color=_FAULT_COLOR, markersize=9, markeredgewidth=2)
    axes.set_yticks(range(len(steps)), [f"{group}: {len(marks)}" for group, marks in steps.items()])
    axes.set_ylim(len(steps) - 0.5, -0.5)
    axes.set_title(f"The {len(hits)} faults")
    axes.set_xlabel("training step")
