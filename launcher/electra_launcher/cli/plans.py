"""Commands about a config: `init`, `plan`, `speed`, `config` and `resolve`.

Modules that a command needs are imported when it runs, so that `--help` answers at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import sys
import textwrap
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from electra_dist.errors import UserError
from electra_dist.store.atomic_files import replacing, writable
from electra_launcher.cli.command_output import open_console, print_json
from electra_launcher.cli.options import AsJson, ConfigFile, Overrides

if TYPE_CHECKING:
    from electra_dist.train.step_profile import StepProfile

_MUCH_WAITING = 0.05  # shares of a step from which a change is advised
_MUCH_PADDING = 0.05
_MUCH_HOST = 0.2
_DESCRIPTION_COLUMNS = 96  # beside an indent of 4


def plan(
    file: ConfigFile,
    overrides: Overrides = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="also estimate for 1, 2, 4, ... nodes, up to this number; default: one")
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="GPU model; default: plan.gpu of the config")] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option(min=1, help="GPUs per node; default: 8, without --nodes plan.num_gpus")
    ] = None,
    fabric: Annotated[
        str | None,
        typer.Option(
            help="network links of a node, per second: 400Gb, 8x400Gb (bits) or 50GB (bytes); default: 400Gb"
        ),
    ] = None,
    step_tokens_per_s: Annotated[
        float | None,
        typer.Option(min=1, help="measured tokens per second of one GPU; default: its peak x plan.utilisation"),
    ] = None,
    gpu_hour_price: Annotated[
        float | None,
        typer.Option(min=0, help="price of one GPU-hour, in any currency, for the cost of the run; default: none"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Estimate what a run would take: parameters, tokens, memory, FLOPs and days.

    With --nodes, also estimate the time on 1, 2, 4, ... nodes; an option that describes nodes or their price stands
    for one node where --nodes is missing. A corpus that is a folder and exists is read for its size. Nothing is run
    or written.
    """
    from electra_dist.config.load import load_config
    from electra_dist.config.rules import check_new_run
    from electra_dist.planning.multi_node_scaling import Cluster, parse_fabric
    from electra_dist.planning.plan import make_plan
    from electra_dist.planning.plan_page import print_plan
    from electra_dist.run.folder import is_run_folder

    config = load_config(file, overrides or ())
    if not is_run_folder(Path(config.run_dir)):
        check_new_run(config)
    planned_gpus = config.plan
    if gpu is not None:
        planned_gpus = planned_gpus.model_copy(update={"gpu": gpu})
    cluster = None
    if any(option is not None for option in (nodes, gpus_per_node, fabric, step_tokens_per_s, gpu_hour_price)):
        gpus_of_node = gpus_per_node or (planned_gpus.num_gpus if nodes is None else 8)
        planned_gpus = planned_gpus.model_copy(update={"num_gpus": (nodes or 1) * gpus_of_node})
        cluster = Cluster(
            nodes=nodes or 1,
            gpu=planned_gpus.gpu,
            gpus_per_node=gpus_of_node,
            fabric_bytes_per_s=parse_fabric(fabric or "400Gb"),
            gpu_tokens_per_s=step_tokens_per_s,
            gpu_hour_price=gpu_hour_price,
        )
    planned = make_plan(config.model_copy(update={"plan": planned_gpus}), cluster)
    if as_json:
        print_json(planned.as_json())
    else:
        print_plan(planned)


def config(
    file: ConfigFile,
    overrides: Overrides = None,
    describe: Annotated[bool, typer.Option(help="also describe each key")] = False,
) -> None:
    """Print every key of the resolved config, its value, and where the value comes from.

    The source is the YAML file that sets the key, `--set` for an override on the command line, or `default`.
    """
    from rich.table import Table

    from electra_dist.config import Config
    from electra_dist.config.keys import fields, flattened
    from electra_dist.config.load import load_config, sources

    source_of_key = sources(file, overrides or ())
    values = flattened(load_config(file, overrides or ()).model_dump(mode="json"))
    if not describe:
        table = Table("key", "value", "from", title=str(file))
        for key, source in source_of_key.items():
            table.add_row(key, str(values[key]), source)
        open_console(soft_wrap=False).print(table)
        return
    out = open_console()
    described = fields(Config)
    for key, source in source_of_key.items():
        field = described.get(key)  # the entries of a mapping, such as corpus.licences, have none
        description = field.description or "" if field else ""
        out.print(f"{key}: {values[key]}  ({source})")
        for line in textwrap.wrap(description, _DESCRIPTION_COLUMNS, break_long_words=False, break_on_hyphens=False):
            out.print(f"    {line}")


def resolve(file: ConfigFile, overrides: Overrides = None) -> None:
    """Print the config as YAML, with all defaults and overrides applied; the output can be used as a config file."""
    from electra_dist.config.load import dump_yaml, load_config

    print(dump_yaml(load_config(file, overrides or ())), end="")


def speed(
    run: Annotated[Path, typer.Argument(metavar="RUN|CONFIG", help="folder of a run, or YAML file of a config")],
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=1, help="steps to time, after two that warm up")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object instead of tables")] = False,
) -> None:
    """Measure where the time of a training step goes on this machine, and say what to change first.

    Runs a few steps with random weights in one process, as one of the ranks that `train` would start here: on a CPU
    with its share of the cores. The run folder is not touched. Rows come from the corpus of the config, or are made up
    if it does not exist.
    """
    from electra_dist.config.load import load_config
    from electra_dist.run.folder import open_run
    from electra_launcher.cli.train import usual_ranks

    config = open_run(run, overrides or ()) if run.is_dir() else load_config(run, overrides or ())
    num_ranks = 1
    with contextlib.suppress(UserError):  # a run on several machines: nobody knows how many ranks would be here
        num_ranks = usual_ranks(config)
    with _stdout_to_stderr():  # torch's profiler and DeepSpeed print lines of their own, DeepSpeed when it is imported
        from electra_dist.train.step_profile import profile_step

        profile = profile_step(config, steps, num_ranks)
    if as_json:
        print(json.dumps(dataclasses.asdict(profile)))
    else:
        _print_tables(profile, num_ranks)
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
    if profile.attention.backend == "sdpa" and profile.device_ms is not None:
        lines.append(f"attention runs with a bias (sdpa: {profile.attention.reason}); see engine.attention")
    if not lines:
        largest = profile.parts[0]
        lines.append(f"nothing stands out; the largest part is {largest.name} with {largest.share:.0%} of the step")
    return lines


def _print_tables(profile: StepProfile, num_ranks: int) -> None:
    """Print two tables: facts about a training step, such as its speed, and the time of each of its parts.

    `num_ranks` is how many ranks `train` would start on this machine.
    """
    from rich.table import Table

    facts = Table(show_header=False, box=None)
    facts.add_row("device", profile.device)
    facts.add_row("rows", f"{profile.rows}; {profile.padding_share:.1%} pads")
    facts.add_row("step", f"{profile.step_ms:,.0f} ms, {profile.micro_batches} micro-batches of {profile.micro_batch}")
    others = f" of one rank; `electra-dist train` starts {num_ranks} here" if num_ranks > 1 else ""
    facts.add_row("speed", f"{profile.tokens_per_s:,.0f} tokens/s{others}")
    facts.add_row("waiting for rows", f"{profile.wait_share:.1%}")
    attention = profile.attention
    facts.add_row("attention", f"{attention.backend}, dropout {attention.dropout} ({attention.reason})")
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


_CONFIG_FILE = "pretrain.yaml"  # config.yaml would make the folder a run folder


class Size(StrEnum):
    """Sizes that `init` offers, and the packaged config of each."""

    TINY = "tiny"
    SMALL = "small"
    BASE = "base"
    LARGE = "large"
    MODERN_BASE = "modern_base"

    @property
    def config(self) -> str:
        """The path of the packaged config, as `--config` takes it."""
        names = {Size.TINY: "demo_cpu", Size.BASE: "base_size", Size.LARGE: "large_25pct_mask"}
        return f"configs/{names.get(self, self.value)}.yaml"


def init(
    folder: Annotated[Path, typer.Argument(help="folder for the config, and later for its corpus and its run")],
    size: Annotated[
        Size, typer.Option(help="size of the model; tiny learns from 60 KB to 5 MB of text on two CPU cores")
    ] = Size.SMALL,
) -> None:
    """Write FOLDER/pretrain.yaml, a config of your own with each key explained, and print the commands that use it.

    The values are those of the config of this size that comes with the package. Edit them; `electra-dist config
    FOLDER/pretrain.yaml --describe` shows all other keys.
    """
    from electra_dist.config.load import find_config_file, load_config, read_yaml

    file = folder / _CONFIG_FILE
    if file.exists():
        raise UserError(f"{file}: there is a config already; edit it, or give another folder")
    tree = read_yaml(find_config_file(Path(size.config)))
    vocab_size = load_config(size.config).model.vocab_size
    tree["extends"] = size.config
    tree["run_dir"] = str(folder / "run")
    tree["data"] |= {"corpus": str(folder / "corpus"), "heldout": "{corpus}/heldout"}
    with writable(file):
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(file, only_new=True) as out_file:
            out_file.write(_commented(tree, size).encode())
    out = open_console(soft_wrap=True)
    out.print(f"{file} is written. Edit it, then, with TEXT as the folder of your text:")
    vocabulary, config = shlex.quote(str(folder / "vocab.txt")), shlex.quote(str(file))
    corpus, run = shlex.quote(str(folder / "corpus")), shlex.quote(str(folder / "run"))
    out.print(f"  electra-dist corpus vocab --input TEXT --output {vocabulary} --size {vocab_size}")
    out.print(f"  electra-dist corpus build --input TEXT --vocab {vocabulary} --output {corpus} --config {config}")
    out.print(f"  electra-dist train {config}")
    out.print(f"  electra-dist export {run}")
    out.print(
        "Text in a table or in JSON lines: add --text-field COLUMN to both corpus commands, unless it is `text`."
    )
    if size is Size.TINY:
        out.print("The training takes three minutes on two CPU cores, and longer on a machine that does other work.")


def _commented(tree: dict[str, Any], size: Size) -> str:
    """Return a config as YAML, with the first sentence of its description above each key."""
    from electra_dist.config import Config
    from electra_dist.config.keys import fields

    described = fields(Config)
    lines = [
        f"# A run of size {size.value}. Paths are relative to the folder in which a command is started.",
        "# Only `extends` is relative to this file, or names a config that comes with the package, as it does here.",
    ]

    def add(key: str, value: object, indent: str = "") -> None:
        field = described.get(key)
        if field is not None and field.description:
            lines.append(f"{indent}# {field.description.split('. ')[0].rstrip('.')}.")
        lines.append(f"{indent}{key.rpartition('.')[2]}: {_yaml(value)}")

    for key, value in tree.items():
        if isinstance(value, dict):
            lines.append(f"\n{key}:")
            for inner_key, inner_value in value.items():
                add(f"{key}.{inner_key}", inner_value, "  ")
        else:
            add(key, value)
    return "\n".join(lines) + "\n"


def _yaml(value: object) -> str:
    """Return a value as YAML on one line."""
    import yaml

    return yaml.safe_dump([value], default_flow_style=True, sort_keys=False, width=1_000)[1:-2]
