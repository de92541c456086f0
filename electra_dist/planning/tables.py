"""The text of `--dry-run`: what a run will take, before anything is touched.

Guarantee: a function of the config (and of the corpus manifest, if it is at hand); it reads nothing, needs no GPU and
does not import torch. Tables on a terminal, plain aligned text elsewhere, the same words and numbers in both.

Where it stops: see budget.py for what the numbers leave out.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TextIO

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from electra_dist.config import Config
from electra_dist.data.manifest import CorpusManifest
from electra_dist.engine.state_layout import PARTS, state_layout
from electra_dist.planning.budget import Budget, make_budget
from electra_dist.planning.scaling import ASSUMPTIONS, Cluster, scale
from electra_dist.run.formats import format_count, format_duration


@dataclass(frozen=True)
class PlanSection:
    """A titled table of text; `mark` is the row that the config chooses, `note` stands below."""

    title: str
    rows: list[list[str]]
    header: list[str] | None = None
    mark: int | None = None
    note: str = ""
    prose: bool = True  # the last column is text, not numbers


def print_plan(
    config: Config,
    corpus: CorpusManifest | None = None,
    stream: TextIO | None = None,
    cluster: Cluster | None = None,
) -> None:
    """Print the plan of a run on `stream` (default stdout); with `cluster` also how it scales over nodes."""
    stream = stream or sys.stdout
    sections = [*plan_sections(config, corpus), *([scaling_section(config, cluster)] if cluster else [])]
    if stream.isatty():
        Console(file=stream, highlight=False).print(_tables(sections))
    else:
        print(_text(sections), file=stream, flush=True)


def plan_sections(config: Config, corpus: CorpusManifest | None = None) -> list[PlanSection]:
    """The plan as tables of text.

    Raises:
        UserError: no peak is known for `plan.gpu`.
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
    """The run on growing numbers of nodes.

    Raises:
        UserError: the batch does not go into the nodes, or the GPU is not known.
    """
    rows = []
    for scaled in scale(config, cluster):
        price = cluster.gpu_hour_price
        cost = [] if price is None else [f"{scaled.gpu_hours * price:,.0f}"]
        rows.append([
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
            *cost,
        ])  # fmt: skip
    measured = cluster.gpu_tokens_per_s
    rate = (
        f"{format_count(measured)} tok/s a GPU, given" if measured else f"plan.utilisation {config.plan.utilisation}"
    )
    note = f"ZeRO-{config.engine.zero_stage}, {config.train.precision}; compute: {rate}; {'; '.join(ASSUMPTIONS)}"
    header = ["nodes", "GPUs", "micro-batches", "GB sent", "compute s", "comm. s", "step s", "efficiency", "tok/s"]
    header += ["days", "GPU-hours", *([] if cluster.gpu_hour_price is None else ["cost"])]
    title = f"Scaling on {cluster.gpu}, {8 * cluster.fabric_bytes_per_s / 1e9:g} Gb/s a node"
    return PlanSection(title, rows, header=header, note=note, prose=False)


def _text(sections: list[PlanSection]) -> str:
    return "\n\n".join(_plain(section) for section in sections)


def _model(config: Config, budget: Budget) -> PlanSection:
    def shape(tower: str) -> str:
        t = getattr(config.model, tower)
        return f"{t.num_layers} layers x {t.hidden_size}, {t.num_heads} heads, feed-forward {t.intermediate_size}"

    counts = budget.parameters
    rows = [
        ["discriminator", _millions(counts.discriminator), f"{shape('discriminator')}; with embeddings and head"],
        ["generator only", _millions(counts.generator_only), shape("generator")],
        ["trained", _millions(counts.total), f"vocabulary {config.model.vocab_size:,}, embeddings shared by both"],
    ]
    return PlanSection("Parameters", rows)


def _data(config: Config, budget: Budget, corpus: CorpusManifest | None) -> PlanSection:
    train, optimizer, seq_len = config.train, config.optimizer, config.data.seq_len
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
    world_size, total = config.plan.num_gpus, budget.parameters.total
    unit, name = (1e9, "GB") if total > 50e6 else (1e6, "MB")
    rows = []
    for stage in range(4):
        layout = state_layout(config.train.precision, stage, config.engine.offload_optimizer)
        sizes = [layout.bytes_per_gpu(part, total, world_size) for part in PARTS]
        rows.append([f"ZeRO-{stage}", *(f"{size / unit:.2f}" for size in [*sizes, sum(sizes)]), layout.formula()])
    offload = "master and moments in host memory; " if config.engine.offload_optimizer else ""
    return PlanSection(
        f"State per GPU in {name}, {config.train.precision} on W = {world_size} GPUs",
        rows,
        header=["", *PARTS, "sum", "bytes"],
        mark=config.engine.zero_stage,
        note=f"P = {_millions(total)} parameters; {offload}activations and buffers come on top",
    )


def _compute(config: Config, budget: Budget) -> PlanSection:
    flops, compute = budget.flops, budget.compute
    share = flops.generator / flops.total
    unit, name = (1e9, "GFLOP") if flops.total > 5e7 else (1e6, "MFLOP")
    rows = [
        [
            "per token",
            f"{flops.total / unit:.3f} {name}",
            "matmuls, forward x 3, vocabulary logits at masked positions",
        ],
        ["discriminator", f"{flops.discriminator / unit:.3f} {name}", ""],
        ["generator", f"{flops.generator / unit:.3f} {name}", f"{100 * share:.1f} %"],
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
    train, sizes = config.train, list(budget.accumulation)
    shown = sizes if len(sizes) <= 16 else [*sizes[:13], *sizes[-3:]]
    rows = [["GPUs", *map(str, shown)], ["micro-batches per step", *(str(budget.accumulation[s]) for s in shown)]]
    note = f"the GPU counts that share {train.global_batch:,} rows in micro-batches of {train.micro_batch}"
    if config.plan.num_gpus not in budget.accumulation:
        note += f"; plan.num_gpus {config.plan.num_gpus} is not one of them"
    return PlanSection("World sizes", rows, note=note, prose=False)


def _millions(count: int) -> str:
    return f"{count / 1e6:.2f} M"


def _widths(section: PlanSection) -> list[int]:
    lines = [*([section.header] if section.header else []), *section.rows]
    return [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]


def _plain(section: PlanSection) -> str:
    widths = _widths(section)

    def join(line: list[str], marker: str) -> str:
        cells = [
            cell.ljust(width) if _is_text(section, column) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        return (marker + "  ".join(cells)).rstrip()

    lines = [section.title]
    if section.header:
        lines.append(join(section.header, "  "))
    lines += [join(row, "> " if number == section.mark else "  ") for number, row in enumerate(section.rows)]
    return "\n".join([*lines, *([f"  ({section.note})"] if section.note else [])])


def _is_text(section: PlanSection, column: int) -> bool:
    return column == 0 or (section.prose and column == len(section.rows[0]) - 1)


def _tables(sections: list[PlanSection]) -> Group:
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
            text = _is_text(section, column)
            table.add_column(name, justify="left" if text else "right", no_wrap=column == 0 or not text)
        for number, row in enumerate(section.rows):
            table.add_row(*map(Text, row), style="bold green" if number == section.mark else None)
        tables.append(table)
    return Group(*tables)
