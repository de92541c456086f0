"""`electra-dist speed`: measure where the time of a training step goes on this machine, and what to change first."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from electra_dist.config.load import load_config
from electra_dist.run.folder import open_run
from launcher.cli.console import open_console
from launcher.cli.options import Overrides

if TYPE_CHECKING:
    from electra_dist.speed.step_profile import StepProfile

_MUCH_WAITING = 0.05  # shares of a step from which a change is advised
_MUCH_PADDING = 0.05
_MUCH_HOST = 0.2


def speed(
    run: Annotated[Path, typer.Argument(metavar="RUN|CONFIG", help="folder of a run, or YAML file of a config")],
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=1, help="steps to time, after two that warm up")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object instead of tables")] = False,
) -> None:
    """Measure where the time of a training step goes on this machine, and say what to change first.

    Runs a few steps on one device with random weights; the run folder is not touched. Rows come from the corpus of the
    config, or are made up if it does not exist.
    """
    config = open_run(run, overrides or ()) if run.is_dir() else load_config(run, overrides or ())
    with _stdout_to_stderr():  # torch's profiler and DeepSpeed print lines of their own, DeepSpeed when it is imported
        from electra_dist.speed.step_profile import profile_step

        profile = profile_step(config, steps)
    if as_json:
        print(json.dumps(profile.as_json()))
    else:
        _print_tables(profile)
        for line in advice(profile):
            print(f"- {line}")


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Redirect stdout to stderr during a `with` block, also the output of C++ libraries (by the file descriptor)."""
    sys.stdout.flush()
    stdout_copy = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout_copy, 1)
        os.close(stdout_copy)


def advice(profile: StepProfile) -> list[str]:
    """Return hints on how to make steps faster, one line each; without a hint, one line names the slowest part."""
    lines = []
    if profile.wait_share > _MUCH_WAITING:
        lines.append(
            f"{profile.wait_share:.0%} of the step waits for rows: raise data.fetch_threads, or put data.cache_dir on "
            f"a faster disk"
        )
    if profile.padding_share > _MUCH_PADDING:
        lines.append(
            f"{profile.padding_share:.0%} of the positions are pads: build the corpus with packing "
            f"(corpus.packing, see docs/corpus.md)"
        )
    host_share = sum(part.share for part in profile.parts if part.name.startswith("host"))
    if host_share > _MUCH_HOST:
        lines.append(
            f"{host_share:.0%} of the step is Python and DeepSpeed on the host: raise train.micro_batch, or set "
            f"engine.compile: true"
        )
    if profile.attention_backend == "sdpa" and profile.device_ms is not None:
        lines.append(f"attention runs with a bias (sdpa: {profile.attention_reason}); see engine.attention")
    if not lines:
        largest = profile.parts[0]
        lines.append(f"nothing stands out; the largest part is {largest.name} with {largest.share:.0%} of the step")
    return lines


def _print_tables(profile: StepProfile) -> None:
    """Print two tables: facts about a training step, such as its speed, and the time of each of its parts."""
    from rich.table import Table

    facts = Table(show_header=False, box=None)
    facts.add_row("device", profile.device)
    facts.add_row("rows", f"{profile.rows}; {profile.padding_share:.1%} pads")
    facts.add_row("step", f"{profile.step_ms:,.0f} ms, {profile.micro_batches} micro-batches of {profile.micro_batch}")
    facts.add_row("speed", f"{profile.tokens_per_s:,.0f} tokens/s")
    facts.add_row("waiting for rows", f"{profile.wait_share:.1%}")
    dropout = f"dropout {profile.attention_dropout}"
    facts.add_row("attention", f"{profile.attention_backend}, {dropout} ({profile.attention_reason})")
    facts.add_row("operators", f"{profile.operators_per_micro_batch:,} per micro-batch")
    facts.add_row("host reads", f"{profile.host_reads:,} a step")
    if profile.device_ms is not None:
        facts.add_row("device busy", f"{profile.device_ms:,.1f} ms")
    facts.add_row("optimizer", profile.optimizer)
    parts = Table("part", "ms", "share", "alone, ms")
    for part in profile.parts:
        ceiling = "" if part.ceiling_ms is None else f"{part.ceiling_ms:,.1f}"
        parts.add_row(part.name, f"{part.ms:,.1f}", f"{part.share:.1%}", ceiling)
    console = open_console(soft_wrap=False)
    console.print(facts)
    console.print(parts)
