"""Show the plan of a corpus as a table with remarks, or as JSON, for `electra-dist corpus plan`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.table import Table

from electra_dist.corpus.plan.corpus_plan import CorpusPlan, Prices, Workload
from electra_dist.corpus.plan.corpus_rates import CorpusRates
from electra_dist.run.number_formats import format_count, format_duration


def plan_table(plan: CorpusPlan, prices: Prices) -> Table:
    """Return a table with a row for each step of the planned build and a row of sums; costs only if prices are set."""
    columns = ["step", "core-hours", "GB read", "GB written", "GET", "PUT", "LIST", "DELETE"]
    table = Table(*columns, *(["cost"] if prices.any else []))
    for column in table.columns[1:]:
        column.justify = "right"
    for step in [*plan.steps, plan.whole]:
        requests = step.requests
        numbers = [requests.get, requests.put, requests.list, requests.delete]
        cells = [step.name, f"{step.core_hours:,.2f}", f"{step.bytes_in / 1e9:,.1f}", f"{step.bytes_out / 1e9:,.1f}"]
        cells += [f"{number:,}" for number in numbers]
        if prices.any:
            cells.append(f"{step.cost(prices):,.2f}")
        table.add_row(*cells)
    return table


def remarks(
    plan: CorpusPlan, rates: CorpusRates, work: Workload, hours: float | None, num_machines_needed: int | None
) -> list[str]:
    """Return the lines below the table of a plan: sizes of the corpus, duration, and the measured rates.

    `hours`, if not None, is the time in which the user wants the build to finish; a line then says how many machines
    that takes, `num_machines_needed`, or that no number of machines suffices (None).
    """
    most_busy_cores = min(plan.num_groups, plan.num_buckets)
    lines = [
        f"{format_count(plan.tokens)} tokens from {work.text_bytes / 1e9:,.1f} GB of text in {work.num_files:,} "
        f"files: {plan.num_shards:,} shards; {plan.num_groups:,} groups of inputs and {plan.num_buckets:,} buckets, "
        f"so at most {most_busy_cores:,} cores have work",
        f"spill files: {plan.spill_bytes / 1e9:,.1f} GB in the output until the corpus is merged",
        f"time on {plan.num_machines} x {plan.cores_per_machine} cores: {format_duration(plan.hours * 3600)}, if "
        "storage keeps up",
    ]
    if hours is not None and num_machines_needed is None:
        lines.append(f"no number of machines finishes in {hours:g} h, because the merge, one process, takes longer")
    elif hours is not None:
        lines.append(
            f"for {hours:g} h: {num_machines_needed} machines of {plan.cores_per_machine} cores "
            f"(--machines {num_machines_needed})"
        )
    lines.append(
        f"rates: {rates.tokens_per_core_s_of_build / 1e6:.2f} M tokens/s a core in all steps, measured on "
        f"{rates.text_bytes / 1e6:.1f} MB, {rates.sample}; {rates.hardware}, {rates.date[:10]}"
    )
    if rates.prepare:
        lines.append(
            f"preparation: {work.raw_text_bytes / 1e9:,.1f} GB of text before it; without the extraction of HTML, and "
            "without its reading and writing of files"
        )
    return lines


def plan_as_json(
    plan: CorpusPlan, rates: CorpusRates, prices: Prices, hours: float | None, num_machines_needed: int | None
) -> dict[str, Any]:
    """Return the plan as a JSON object; `num_machines_needed` is in it only if the user wants certain `hours`."""
    steps = [asdict(step) | {"cost": step.cost(prices)} for step in plan.steps]
    fields_with_steps = ("prepare", "parallel", "merge")
    tree = {name: value for name, value in asdict(plan).items() if name not in fields_with_steps}
    tree |= {"steps": steps, "hours": plan.hours, "rates": rates.model_dump()}
    if hours is not None:
        tree["machines_for_wanted_hours"] = num_machines_needed
    return tree
