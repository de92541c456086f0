"""`electra-dist`: everything around a run that is not the run itself. A user's mistake is one line and exit 78."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from electra_dist.config import Config
from electra_dist.config_file import dump_yaml, load_config, sources
from electra_dist.errors import EXIT_USER_ERROR, UserError
from launcher.cli.checkpoint import app as checkpoint_app
from launcher.cli.compare import compare
from launcher.cli.corpus import app as corpus_app
from launcher.cli.finetune import finetune, minimal_pairs
from launcher.cli.flops import flops
from launcher.cli.plan import plan
from launcher.cli.status import status
from launcher.cli.submit import submit
from launcher.cli.verify import verify_command

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)
app.add_typer(corpus_app, name="corpus", help="Text to rows to shards.")
app.add_typer(checkpoint_app, name="checkpoint", help="What a run has saved: list, verify, diff, repair.")
app.command()(submit)
app.command()(status)
app.command()(finetune)
app.command()(compare)
app.command()(flops)
app.command()(plan)
app.command("minimal-pairs")(minimal_pairs)
app.command("verify")(verify_command)

ConfigFile = Annotated[Path, typer.Argument(help="YAML file, for example configs/large_25pct_mask.yaml")]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="override, may repeat")]
RunFolder = Annotated[Path, typer.Argument(help="a run's folder, for example runs/demo_cpu")]


@app.command()
def config(
    file: ConfigFile,
    overrides: Overrides = None,
    describe: Annotated[bool, typer.Option(help="also say what each key is")] = False,
) -> None:
    """The resolved configuration, and where each value comes from."""
    origin = sources(file, overrides or ())
    resolved = load_config(file, overrides or ()).model_dump(mode="json")
    table = Table("key", "value", "from", *(["what it is"] if describe else []), title=str(file))
    for key, where in origin.items():
        value: object = resolved
        for part in key.split("."):
            value = value[part] if isinstance(value, dict) else value
        table.add_row(key, str(value), where, *([_description(key)] if describe else []))
    Console().print(table)


@app.command()
def export(
    run: RunFolder,
    output: Annotated[Path | None, typer.Option(help="folder to write; default: RUN/export")] = None,
) -> None:
    """The newest checkpoint as Hugging Face models: OUTPUT/discriminator and OUTPUT/generator."""
    from electra_dist.pretrained.export import export_run

    state, folders = export_run(run, output or run / "export")
    out = Console(highlight=False, soft_wrap=True)
    out.print(f"\n[bold]{run}[/bold] at step {state.step:,}")
    out.print(f"  report         {run / 'report.html'}")
    out.print(f"  metrics        {run / 'metrics.jsonl'}   (tensorboard --logdir {run / 'tensorboard'})")
    for name, folder in folders.items():
        out.print(f"  {name:<14} {folder}")
    out.print("next:")
    load = f"from transformers import AutoModel; print(AutoModel.from_pretrained('{folders['discriminator']}'))"
    out.print(f'  python -c "{load}"')
    out.print("  deepspeed launcher/pretrain.py --config configs/large_25pct_mask.yaml --dry-run")


@app.command()
def report(run: RunFolder) -> None:
    """Write RUN/report.html again."""
    from electra_dist.report.page import write_report

    print(write_report(run))


@app.command()
def resolve(file: ConfigFile, overrides: Overrides = None) -> None:
    """The resolved configuration as YAML."""
    print(dump_yaml(load_config(file, overrides or ())), end="")


def _description(key: str) -> str:
    fields = Config.model_fields
    *path, last = key.split(".")
    for part in path:
        inner = fields[part].annotation
        fields = getattr(inner, "model_fields", {})
    return (fields[last].description or "") if last in fields else ""


def main() -> None:
    """Entry point of the console command."""
    try:
        app()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
