"""Print the plan of a run as tables, for `--dry-run` and `electra-dist plan`.

On a terminal the tables are framed, on any other stream they are aligned plain text, with the same words and numbers.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TextIO

from rich import box
from rich.table import Table

from electra_dist.config import Config, TowerConfig
from electra_dist.config.schedule import Schedule, schedules_of, value_at
from electra_dist.console import Console, styled
from electra_dist.engine.state_layout import PARTS
from electra_dist.gpu_models import GPU_MEMORY_GB, GPUS_WITHOUT_BF16
from electra_dist.model.counts import frozen_generator_parameters
from electra_dist.planning.activation_memory import FREE_FRACTION, micro_batch_limit
from electra_dist.planning.multi_node_scaling import ASSUMPTIONS, Cluster, Scaled
from electra_dist.planning.plan import Plan, PlannedPhase
from electra_dist.planning.training_days import Budget, generator_training, run_flops_by_paper
from electra_dist.run.number_formats import format_count, format_duration
from electra_dist.store.open_store import REMOTE_SCHEMES

_SCHEDULE_PERCENTS = (0, 5, 10, 25, 50, 75, 100)  # points of the run at which the values of a schedule are shown
_NOTE_ON_FP32 = (
    "no time is predicted in fp32: peaks are known for 16 bits only; `electra-dist speed CONFIG` measures it here"
)
_MOST_WORLD_SIZES = 16  # numbers of GPUs that fit side by side in a terminal
_WIDTH_OF_PLAIN_TEXT = 10_000  # columns; wider than any table
_LAST_WORLD_SIZES = 3  # how many of them show the largest numbers, where some must be left out


@dataclass(frozen=True)
class PlanSection:
    """Table of a plan, with a title and cells of text; printed with a frame or as aligned plain text."""

    title: str
    rows: list[list[str]]  # equally many cells in every row, and in the header
    header: list[str] | None = None
    mark: int | None = None  # index of the row that the config selects; it is highlighted
    note: str = ""  # printed below the table
    prose: bool = True  # the last column is text (aligned to the left), not numbers


def print_plan(plan: Plan, stream: TextIO | None = None) -> None:
    """Print a plan to `stream` (None: stdout): framed tables on a terminal, otherwise plain text, which is not cut."""
    out = sys.stdout if stream is None else stream
    is_framed = out.isatty()
    plain = {"width": _WIDTH_OF_PLAIN_TEXT, "force_terminal": False, "color_system": None}
    console = Console(file=out, **({} if is_framed else plain))
    with console.capture() as printed:
        for section in plan_sections(plan):
            console.print(styled((section.title, "bold")))
            console.print(_table(section, is_framed=is_framed))
            if section.note:
                console.print(f"  ({section.note})", style="dim")
            console.print()
    print("\n".join(line.rstrip() for line in printed.get().rstrip().splitlines()), file=out, flush=True)


def plan_sections(plan: Plan) -> list[PlanSection]:
    """Return a plan as tables, in the order of printing."""
    return [
        _model(plan),
        _data(plan),
        *_schedules(plan.config),
        _memory(plan),
        _largest_micro_batch(plan.config),
        _compute(plan),
        _world_sizes(plan.config, plan.budget),
        *_without_effect(plan),
        *([_scaling(plan, plan.cluster)] if plan.cluster else []),
    ]


def _scaling(plan: Plan, cluster: Cluster) -> PlanSection:
    """Return the table of the predictions for 1, 2, 4, ... nodes; if a price is known, with the costs."""
    header = ["nodes", "GPUs", "micro-batches", "GB sent", "compute s", "comm. s", "update s", "step s"]
    header += ["efficiency", "MFU", "tok/s", "days", "GPU-hours"]
    if cluster.gpu_hour_price is not None:
        header.append("cost")
    rows = [_scaling_row(prediction, cluster.gpu_hour_price) for prediction in plan.scaling]

    config = plan.config
    if cluster.gpu_tokens_per_s:
        gpu_rate = f"{format_count(cluster.gpu_tokens_per_s)} tok/s a GPU, given"
    else:
        gpu_rate = f"plan.utilisation {config.plan.utilisation}"
    training = f"ZeRO-{config.engine.zero_stage}, {config.train.precision}"
    note = "; ".join([training, f"compute: {gpu_rate}", *ASSUMPTIONS])
    fabric_gigabits_per_s = 8 * cluster.fabric_bytes_per_s / 1e9
    title = f"Scaling on {cluster.gpu}, {fabric_gigabits_per_s:g} Gb/s a node"
    return PlanSection(title, rows, header=header, note=note, prose=False)


def _scaling_row(prediction: Scaled, gpu_hour_price: float | None) -> list[str]:
    """Return the cells of one row of the scaling table, in the order of the header in `_scaling`."""
    cells = [
        str(prediction.nodes),
        str(prediction.ranks),
        str(prediction.micro_batches),
        f"{prediction.wire_bytes / 1e9:.2f}",
        f"{prediction.compute_s:.3g}",
        f"{prediction.communication_s:.3g}",
        f"{prediction.update_s:.3g}",
        f"{prediction.step_s:.3g}",
        f"{prediction.efficiency:.1%}",
        "-" if prediction.utilisation is None else f"{prediction.utilisation:.1%}",
        format_count(prediction.tokens_per_s),
        f"{prediction.days:,.2f}",
        f"{prediction.gpu_hours:,.0f}",
    ]
    if gpu_hour_price is not None:
        cells.append(f"{prediction.gpu_hours * gpu_hour_price:,.0f}")
    return cells


def _model(plan: Plan) -> PlanSection:
    config = plan.config
    model = config.model
    counts = plan.budget.parameters
    discriminator_sizes = f"{_shape(model.discriminator)}; with embeddings and head"
    generator_row = ["generator only", _millions(counts.generator_only), _shape(model.generator)]
    if config.objective.generator == "frozen":
        num_frozen = frozen_generator_parameters(model, config.objective)
        generator_row = ["frozen generator", _millions(num_frozen), f"{_shape(model.generator)}; not trained"]
    rows = [
        ["discriminator", _millions(counts.discriminator), discriminator_sizes],
        generator_row,
        ["trained", _millions(counts.total), f"vocabulary {model.vocab_size:,}, embeddings shared by both"],
    ]
    return PlanSection("Parameters", rows)


def _shape(tower: TowerConfig) -> str:
    """Return the sizes of a network as text: "12 layers x 256, 4 heads, feed-forward 1024"."""
    return (
        f"{tower.num_layers} layers x {tower.hidden_size}, {tower.num_heads} heads, "
        f"feed-forward {tower.intermediate_size}"
    )


def _data(plan: Plan) -> PlanSection:
    """Return the table of steps, rows, tokens and epochs; if there are `data.phases`, with a row for each corpus."""
    config, budget = plan.config, plan.budget
    train = config.train
    seq_len = config.data.seq_len
    rows = [
        ["steps", f"{train.num_steps:,}", _describe_learning_rate(config)],
        ["rows per step", f"{budget.rows_per_step:,}", f"of {seq_len} tokens, {_masked_percent(config)} % masked"],
        ["tokens per step", f"{budget.tokens_per_step:,}", ""],
        ["rows in all", f"{budget.rows:,}", ""],
        ["tokens in all", format_count(budget.tokens), f"{budget.tokens:,} positions of rows"],
    ]
    if config.data.phases:
        rows += _phase_rows(plan)
    else:
        [phase] = plan.phases
        rows.append(["epochs", "-" if phase.epochs is None else f"{phase.epochs:.2f}", _describe_corpus(phase)])
    return PlanSection("Data", rows)


def _describe_corpus(phase: PlannedPhase) -> str:
    if phase.corpus_rows is not None:
        return f"{phase.corpus}: {phase.corpus_rows:,} rows, {phase.corpus_tokens:,} tokens"
    if phase.corpus.startswith(REMOTE_SCHEMES):
        return f"{phase.corpus} is remote and was not read"
    return f"{phase.corpus} does not exist yet"


def _phase_rows(plan: Plan) -> list[list[str]]:
    """Return a row of cells for each training corpus: its first step, its tokens, and how it is used."""
    num_steps = plan.config.train.num_steps
    table = []
    for phase in plan.phases:
        share = f"{phase.steps / num_steps:.1%}, in {phase.steps * plan.budget.rows_per_step:,} rows"
        if phase.epochs is not None:
            share += f", {phase.epochs:.2f} epochs"
        name = f"tokens from step {phase.from_step:,}"
        table.append([name, format_count(phase.tokens), f"{share}; {_describe_corpus(phase)}"])
    return table


def _describe_learning_rate(config: Config) -> str:
    """Describe warm-up and decay in a line, with the highest learning rate that is reached and its step.

    With `shape: polynomial` it is below `optimizer.lr`, because the decay begins at step 0.
    """
    num_steps = config.train.num_steps
    parts = []
    settings = {"": config.optimizer}
    if config.optimizer.generator is not None:
        settings["generator: "] = config.optimizer.for_generator
    for prefix, optimizer in settings.items():
        peak_step, peak = optimizer.peak_learning_rate(num_steps)
        at_peak = f"peak lr {peak:.4g} at step {peak_step:,} (lr {optimizer.lr:g})"
        if optimizer.shape == "trapezoid":
            at_peak += f", decay in the last {optimizer.trapezoid_decay_steps(num_steps):,} steps"
        parts.append(f"{prefix}warm-up {optimizer.warmup_steps:,}, {at_peak}")
    return "; ".join(parts)


def _masked_percent(config: Config) -> str:
    """Return the share of masked tokens in percent as text: "15", or "30 to 15" for a schedule."""
    mask_prob = config.objective.mask_prob
    shares = [mask_prob.start, mask_prob.end] if isinstance(mask_prob, Schedule) else [mask_prob]
    return " to ".join(f"{round(100 * share, 2):g}" for share in shares)


def _schedules(config: Config) -> list[PlanSection]:
    schedules = schedules_of(config.objective)
    if not schedules:
        return []
    rows = []
    for key, schedule in schedules.items():
        values = [value_at(schedule, percent / 100) for percent in _SCHEDULE_PERCENTS]
        rows.append([f"objective.{key}", schedule.shape, *(f"{value:.4g}" for value in values)])
    header = ["key", "shape", *(f"{percent} %" for percent in _SCHEDULE_PERCENTS)]
    return [PlanSection("Schedules", rows, header=header, note="values after shares of the run's steps", prose=False)]


def _without_effect(plan: Plan) -> list[PlanSection]:
    rows = [[key, reason] for key, reason in plan.keys_without_effect.items()]
    return [PlanSection("Keys without effect", rows)] if rows else []


def _memory(plan: Plan) -> PlanSection:
    """Return the table of the training state per GPU at each ZeRO stage; the config's stage is marked.

    The state is weights, gradients, fp32 master copy and Adam's moments, without activations and buffers.
    """
    config = plan.config
    num_parameters = plan.budget.parameters.total
    if num_parameters > 50e6:
        unit_bytes = 1e9
        unit_name = "GB"
    else:
        unit_bytes = 1e6
        unit_name = "MB"

    rows = []
    for stage, layout in enumerate(plan.layouts):
        part_bytes = plan.state_bytes(stage).values()
        part_cells = [f"{size / unit_bytes:.2f}" for size in part_bytes]
        sum_cell = f"{sum(part_bytes) / unit_bytes:.2f}"
        rows.append([f"ZeRO-{stage}", *part_cells, sum_cell, layout.formula()])

    notes = [f"P = {_millions(num_parameters)} parameters"]
    if config.engine.offload_optimizer:
        notes.append("master and moments in host memory")
    notes.append("activations and buffers come on top: see the next table")
    return PlanSection(
        f"State per GPU in {unit_name}, {config.train.precision} on W = {config.plan.num_gpus} GPUs",
        rows,
        header=["", *PARTS, "sum", "bytes"],
        mark=config.engine.zero_stage,
        note="; ".join(notes),
    )


def _largest_micro_batch(config: Config) -> PlanSection:
    """Return the table of the largest micro-batch for each size of GPU memory, with and without recomputation.

    The header marks the column that the config has chosen (`engine.activation_checkpointing`).
    """
    engine = config.engine
    settings = [False, True]
    names = ["all activations kept", "activation_checkpointing"]
    chosen = settings.index(engine.activation_checkpointing)
    names[chosen] = f"> {names[chosen]}"

    rows = []
    for memory_gb in sorted(set(GPU_MEMORY_GB.values()), reverse=True):
        limits = [micro_batch_limit(config, memory_gb, recompute) for recompute in settings]
        names_of_gpus = [name for name, size in GPU_MEMORY_GB.items() if size == memory_gb]
        gpus = [f"{name} (fp16 or fp32)" if name in GPUS_WITHOUT_BF16 else name for name in names_of_gpus]
        rows.append([f"{memory_gb} GB", *(f"{limit.fitting_rows:,}" for limit in limits), ", ".join(gpus)])

    row_megabytes = [f"{micro_batch_limit(config, 0, recompute).row_bytes / 1e6:.3g}" for recompute in settings]
    rows.append(["MB a row", *row_megabytes, "activations only"])
    unused_memory = f"{100 * FREE_FRACTION:g} % of the memory stays free"
    note = f"predicted, not measured; {unused_memory}; a micro-batch must divide the rows per GPU"
    title = f"Largest micro-batch in rows, ZeRO-{engine.zero_stage} on W = {config.plan.num_gpus} GPUs"
    return PlanSection(title, rows, header=["engine", *names, ""], note=note)


def _compute(plan: Plan) -> PlanSection:
    """Return the table of the run's FLOPs and of its predicted throughput, time and GPU-hours."""
    config, budget = plan.config, plan.budget
    flops = budget.flops
    compute = budget.compute
    generator_share = flops.generator / flops.total
    if flops.total > 5e7:
        unit_flops = 1e9
        unit_name = "GFLOP"
    else:
        unit_flops = 1e6
        unit_name = "MFLOP"

    counted = "matmuls, forward x 3, vocabulary logits at masked positions"
    rows = [
        ["per token", f"{flops.total / unit_flops:.3f} {unit_name}", counted],
        ["discriminator", f"{flops.discriminator / unit_flops:.3f} {unit_name}", ""],
        ["generator", f"{flops.generator / unit_flops:.3f} {unit_name}", f"{100 * generator_share:.1f} %"],
        ["run", f"{budget.run_flops:.2e} FLOP", ""],
    ]
    by_paper = run_flops_by_paper(config)
    if by_paper is not None:
        rows.append(["paper's count", f"{by_paper:.2e} FLOP", "backward = forward, look-ups counted"])
    if config.objective.generator == "frozen":
        rows.append(["generator's training", *generator_training(config)])
    if compute is None:
        return PlanSection("Compute", rows, note=_NOTE_ON_FP32)

    gpus = f"{compute.num_gpus} x {compute.gpu} of {compute.peak / 1e12:g} TFLOP/s"
    is_limited_by_host = compute.step_s == compute.launch_s
    launches = f"at least {compute.launch_s:.3g} s, in which the host launches its operators"
    rows += [
        ["throughput", f"{format_count(compute.tokens_per_s)} tok/s", f"{gpus} at {100 * compute.utilisation:.3g} %"],
        ["step", f"{compute.step_s:.3g} s", f"{launches}: the limit" if is_limited_by_host else launches],
        ["wall clock", format_duration(compute.days * 86_400), f"{compute.days:,.2f} days"],
        ["GPU-hours", f"{compute.gpu_hours:,.1f}", "change plan.gpu, plan.num_gpus, plan.utilisation to ask again"],
    ]
    notes = []
    if plan.asked_gpus != compute.num_gpus:
        notes.append(
            f"plan.num_gpus {plan.asked_gpus} cannot share {config.train.global_batch:,} rows evenly, so "
            f"{compute.num_gpus} are planned"
        )
    if config.train.precision == "bf16" and compute.gpu.upper() in GPUS_WITHOUT_BF16:
        notes.append(f"plan.gpu {compute.gpu} has no bf16, so it cannot run this config; set train.precision: fp16")
    return PlanSection("Compute", rows, note="; ".join(notes))


def _world_sizes(config: Config, budget: Budget) -> PlanSection:
    """Return the table of the numbers of GPUs that can share the global batch evenly."""
    train = config.train
    shown = list(budget.accumulation)
    if len(shown) > _MOST_WORLD_SIZES:
        num_first = _MOST_WORLD_SIZES - _LAST_WORLD_SIZES
        shown = [*shown[:num_first], *shown[-_LAST_WORLD_SIZES:]]
    rows = [
        ["GPUs", *(str(world_size) for world_size in shown)],
        ["rows per micro-batch", *(str(train.fitting_micro_batch(world_size)) for world_size in shown)],
        ["micro-batches per step", *(str(budget.accumulation[world_size]) for world_size in shown)],
    ]
    note = f"the GPU counts that share {train.global_batch:,} rows in micro-batches of at most {train.micro_batch}"
    return PlanSection("World sizes", rows, note=note, prose=False)


def _millions(count: int) -> str:
    return f"{count / 1e6:.2f} M"


def _table(section: PlanSection, *, is_framed: bool) -> Table:
    """Return a section as a table of the library rich; ">" marks the row that the config selects."""
    table = Table(
        box=box.ROUNDED if is_framed else None,
        pad_edge=is_framed,
        padding=(0, 1) if is_framed else (0, 2, 0, 0),
        show_header=section.header is not None,
    )
    names = section.header or section.rows[0]  # without a header, the columns still need names, which are not shown
    for column, name in enumerate(names):
        is_text = column == 0 or (section.prose and column == len(names) - 1)
        title = f"  {name}" if column == 0 else name
        table.add_column(title, justify="left" if is_text else "right", no_wrap=column == 0 or not is_text)
    for number, (first, *others) in enumerate(section.rows):
        is_marked = number == section.mark
        table.add_row(f"{'>' if is_marked else ' '} {first}", *others, style="bold green" if is_marked else None)
    return table
