"""Prints the plan of a run, what it would take, for `--dry-run` and `electra-dist plan`.

Guarantee: the plan is a function of the config, and of the corpus manifest if it is passed. Nothing is read or
written, no GPU is needed and torch is not imported. A terminal gets tables, any other stream plain aligned text, with
the same words and numbers.

Limits: the docstring of budget.py names what the numbers leave out, such as activations.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TextIO

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from electra_dist.config import Config, TowerConfig
from electra_dist.data.corpus_manifest import CorpusManifest
from electra_dist.engine.state_layout import PARTS, state_layout
from electra_dist.planning.budget import Budget, make_budget
from electra_dist.planning.multi_node_scaling import ASSUMPTIONS, Cluster, scale
from electra_dist.run.number_formats import format_count, format_duration


@dataclass(frozen=True)
class PlanSection:
    """Table of a plan with a title; its cells are text."""

    title: str
    rows: list[list[str]]
    header: list[str] | None = None
    mark: int | None = None  # index of the row that the config selects; it is highlighted
    note: str = ""  # printed below the table
    prose: bool = True  # the last column is text (aligned to the left), not numbers


def print_plan(
    config: Config,
    corpus: CorpusManifest | None = None,
    stream: TextIO | None = None,
    cluster: Cluster | None = None,
) -> None:
    """Print the plan of a run: tables on a terminal, plain text on any other stream.

    Args:
        config: the configuration of the run.
        corpus: manifest of its corpus, from which the epochs follow; None: they are not shown.
        stream: where to print; None: stdout.
        cluster: adds a table of how the run scales over the nodes of this cluster.

    Raises:
        UserError: the GPU is not known, or the global batch cannot be shared by the nodes of `cluster`.
    """
    stream = stream or sys.stdout
    sections = plan_sections(config, corpus)
    if cluster:
        sections.append(scaling_section(config, cluster))
    if stream.isatty():
        Console(file=stream, highlight=False).print(_tables(sections))
    else:
        print(_text(sections), file=stream, flush=True)


def plan_sections(config: Config, corpus: CorpusManifest | None = None) -> list[PlanSection]:
    """Return the plan as tables: parameters, data, state per GPU, compute and possible numbers of GPUs.

    Raises:
        UserError: the peak of `plan.gpu` is not known.
    """
    budget = make_budget(config, corpus)
    return [
        _model(config, budget),
        _data(config, budget, corpus),
        _memory(config, budget),
        _compute(config, budget),
        _world_sizes(config, budget),
    ]


def scaling_section(config: Config, cluster: Cluster) -> PlanSection:
    """Return the table of the run on 1, 2, 4, ... and `cluster.nodes` nodes; with a price it has a column of costs.

    Raises:
        UserError: the global batch cannot be shared by the nodes, or the GPU is not known.
    """
    price = cluster.gpu_hour_price
    rows = []
    for scaled in scale(config, cluster):
        row = [
            str(scaled.nodes),
            str(scaled.ranks),
            str(scaled.micro_batches),
            f"{scaled.wire_bytes / 1e9:.2f}",
            f"{scaled.compute_s:.3g}",
            f"{scaled.communication_s:.3g}",
            f"{scaled.step_s:.3g}",
            f"{scaled.efficiency:.1%}",
            format_count(scaled.tokens_per_s),
            f"{scaled.days:,.2f}",
            f"{scaled.gpu_hours:,.0f}",
        ]
        if price is not None:
            row.append(f"{scaled.gpu_hours * price:,.0f}")
        rows.append(row)
    header = ["nodes", "GPUs", "micro-batches", "GB sent", "compute s", "comm. s", "step s", "efficiency", "tok/s"]
    header += ["days", "GPU-hours"]
    if price is not None:
        header.append("cost")
    if cluster.gpu_tokens_per_s:
        rate = f"{format_count(cluster.gpu_tokens_per_s)} tok/s a GPU, given"
    else:
        rate = f"plan.utilisation {config.plan.utilisation}"
    note = f"ZeRO-{config.engine.zero_stage}, {config.train.precision}; compute: {rate}; {'; '.join(ASSUMPTIONS)}"
    title = f"Scaling on {cluster.gpu}, {8 * cluster.fabric_bytes_per_s / 1e9:g} Gb/s a node"
    return PlanSection(title, rows, header=header, note=note, prose=False)


def _text(sections: list[PlanSection]) -> str:
    """Return the sections as plain text, with an empty line between them."""
    return "\n\n".join(_plain(section) for section in sections)


def _model(config: Config, budget: Budget) -> PlanSection:
    """Return the table of parameters of both towers."""
    model = config.model
    counts = budget.parameters
    discriminator = f"{_shape(model.discriminator)}; with embeddings and head"
    rows = [
        ["discriminator", _millions(counts.discriminator), discriminator],
        ["generator only", _millions(counts.generator_only), _shape(model.generator)],
        ["trained", _millions(counts.total), f"vocabulary {model.vocab_size:,}, embeddings shared by both"],
    ]
    return PlanSection("Parameters", rows)


def _shape(tower: TowerConfig) -> str:
    """Return the sizes of a tower as text."""
    return (
        f"{tower.num_layers} layers x {tower.hidden_size}, {tower.num_heads} heads, "
        f"feed-forward {tower.intermediate_size}"
    )


def _data(config: Config, budget: Budget, corpus: CorpusManifest | None) -> PlanSection:
    """Return the table of steps, rows, tokens and epochs."""
    train = config.train
    optimizer = config.optimizer
    seq_len = config.data.seq_len
    masked = round(100 * config.objective.mask_prob, 2)
    rows = [
        ["steps", f"{train.num_steps:,}", f"warm-up {optimizer.warmup_steps:,}, peak lr {optimizer.lr:g}"],
        ["rows per step", f"{budget.rows_per_step:,}", f"of {seq_len} tokens, {masked:g} % masked"],
        ["tokens per step", f"{budget.tokens_per_step:,}", ""],
        ["rows in all", f"{budget.rows:,}", ""],
        ["tokens in all", format_count(budget.tokens), f"{budget.tokens:,} positions of rows"],
    ]
    if corpus is None or budget.epochs is None:
        rows.append(["epochs", "-", f"corpus {config.data.corpus} was not read"])
    else:
        size = f"{corpus.num_rows:,} rows, {corpus.num_tokens:,} tokens in {len(corpus.shards):,} shards"
        rows.append(["epochs", f"{budget.epochs:.2f}", f"{config.data.corpus}: {size}"])
    return PlanSection("Data", rows)


def _memory(config: Config, budget: Budget) -> PlanSection:
    """Return the table of the training state per GPU at each ZeRO stage; the row of the config's stage is marked."""
    world_size = config.plan.num_gpus
    total = budget.parameters.total
    unit, unit_name = (1e9, "GB") if total > 50e6 else (1e6, "MB")
    rows = []
    for stage in range(4):
        layout = state_layout(config.train.precision, stage, config.engine.offload_optimizer)
        sizes = [layout.bytes_per_gpu(part, total, world_size) for part in PARTS]
        cells = [f"{size / unit:.2f}" for size in [*sizes, sum(sizes)]]
        rows.append([f"ZeRO-{stage}", *cells, layout.formula()])
    offload = "master and moments in host memory; " if config.engine.offload_optimizer else ""
    return PlanSection(
        f"State per GPU in {unit_name}, {config.train.precision} on W = {world_size} GPUs",
        rows,
        header=["", *PARTS, "sum", "bytes"],
        mark=config.engine.zero_stage,
        note=f"P = {_millions(total)} parameters; {offload}activations and buffers come on top",
    )


def _compute(config: Config, budget: Budget) -> PlanSection:
    """Return the table of FLOPs and, where a peak is known, of throughput and time."""
    flops = budget.flops
    compute = budget.compute
    generator_share = flops.generator / flops.total
    unit, unit_name = (1e9, "GFLOP") if flops.total > 5e7 else (1e6, "MFLOP")
    counted = "matmuls, forward x 3, vocabulary logits at masked positions"
    rows = [
        ["per token", f"{flops.total / unit:.3f} {unit_name}", counted],
        ["discriminator", f"{flops.discriminator / unit:.3f} {unit_name}", ""],
        ["generator", f"{flops.generator / unit:.3f} {unit_name}", f"{100 * generator_share:.1f} %"],
        ["run", f"{budget.run_flops:.2e} FLOP", ""],
    ]
    if compute is None:
        return PlanSection("Compute", rows, note="no time is predicted in fp32: peaks are known for 16 bits only")
    assumed = f"{compute.num_gpus} x {compute.gpu} of {compute.peak / 1e12:g} TFLOP/s"
    rows += [
        ["throughput", f"{format_count(compute.tokens_per_s)} tok/s", f"{assumed} at {100 * compute.utilisation:g} %"],
        ["step", f"{compute.step_s:.3g} s", ""],
        ["wall clock", format_duration(compute.days * 86_400), f"{compute.days:,.2f} days"],
        ["GPU-hours", f"{compute.gpu_hours:,.1f}", "change plan.gpu, plan.num_gpus, plan.utilisation to ask again"],
    ]
    return PlanSection("Compute", rows)


def _world_sizes(config: Config, budget: Budget) -> PlanSection:
    """Return the table of GPU counts that can share the global batch; of many, the first 13 and the last 3."""
    train = config.train
    world_sizes = list(budget.accumulation)
    shown = world_sizes if len(world_sizes) <= 16 else [*world_sizes[:13], *world_sizes[-3:]]
    rows = [
        ["GPUs", *(str(world_size) for world_size in shown)],
        ["micro-batches per step", *(str(budget.accumulation[world_size]) for world_size in shown)],
    ]
    note = f"the GPU counts that share {train.global_batch:,} rows in micro-batches of {train.micro_batch}"
    if config.plan.num_gpus not in budget.accumulation:
        note += f"; plan.num_gpus {config.plan.num_gpus} is not one of them"
    return PlanSection("World sizes", rows, note=note, prose=False)


def _millions(count: int) -> str:
    """Return a count in millions, for example "335.14 M"."""
    return f"{count / 1e6:.2f} M"


def _widths(section: PlanSection) -> list[int]:
    """Return the width of each column of a table in characters."""
    lines = [section.header, *section.rows] if section.header else section.rows
    return [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]


def _plain(section: PlanSection) -> str:
    """Return a section as aligned text: title, header, rows, and the note in parentheses; ">" marks a row."""
    widths = _widths(section)
    lines = [section.title]
    if section.header:
        lines.append(_plain_line(section, section.header, widths, marker="  "))
    for number, row in enumerate(section.rows):
        marker = "> " if number == section.mark else "  "
        lines.append(_plain_line(section, row, widths, marker))
    if section.note:
        lines.append(f"  ({section.note})")
    return "\n".join(lines)


def _plain_line(section: PlanSection, cells: list[str], widths: list[int], marker: str) -> str:
    """Return one line of a section: `marker`, then the cells, text to the left and numbers to the right."""
    aligned = []
    for column, (cell, width) in enumerate(zip(cells, widths, strict=True)):
        aligned.append(cell.ljust(width) if _is_text(section, column) else cell.rjust(width))
    return (marker + "  ".join(aligned)).rstrip()


def _is_text(section: PlanSection, column: int) -> bool:
    """Return whether a column holds text: the first one does, and the last one in a section of prose."""
    return column == 0 or (section.prose and column == len(section.rows[0]) - 1)


def _tables(sections: list[PlanSection]) -> Group:
    """Return the sections as rich tables, with the marked row in bold green."""
    tables = []
    for section in sections:
        table = Table(
            title=section.title,
            title_justify="left",
            title_style="bold",
            caption=section.note or None,
            caption_justify="left",
            show_header=section.header is not None,
            box=box.ROUNDED,
        )
        for column, name in enumerate(section.header or section.rows[0]):
            is_text = _is_text(section, column)
            table.add_column(name, justify="left" if is_text else "right", no_wrap=column == 0 or not is_text)
        for number, row in enumerate(section.rows):
            table.add_row(*map(Text, row), style="bold green" if number == section.mark else None)
        tables.append(table)
    return Group(*tables)
