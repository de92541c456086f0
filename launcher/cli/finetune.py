"""`electra-dist finetune` and `electra-dist minimal-pairs`: what is a pretrained model worth?"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from electra_dist.errors import UserError

if TYPE_CHECKING:  # torch and scikit-learn are loaded when a command runs, not for --help
    from electra_dist.finetune.fit import Progress as Report
    from electra_dist.finetune.tasks import Task

SUMMARY_FILE = "results.json"


class Kind(StrEnum):
    """What a custom task predicts."""

    classification = "classification"
    regression = "regression"


class Tower(StrEnum):
    """Which network of a run."""

    discriminator = "discriminator"
    generator = "generator"


Model = Annotated[str, typer.Option(help="a run's folder, a Hugging Face folder, or random:CONFIG.yaml")]
Vocab = Annotated[Path | None, typer.Option(help="vocab.txt for random:CONFIG; default: the one of its corpus")]
TowerOption = Annotated[Tower, typer.Option(help="which network of a run")]


def finetune(
    task: Annotated[
        str,
        typer.Option(help="cola sst2 mrpc stsb rte qnli qqp mnli wnli squad1 squad2, with commas between; or custom"),
    ],
    model: Model,
    data: Annotated[Path, typer.Option(help="folder with CoLA/train.tsv and so on, squad/*.json; custom: train, dev")],
    seeds: Annotated[int, typer.Option(min=1, help="runs from one model: seeds 0 to N - 1")] = 1,
    probe: Annotated[bool, typer.Option(help="freeze the encoder, fit a linear model on its states")] = False,
    output: Annotated[Path | None, typer.Option(help="default: MODEL/finetune; run again with it to go on")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="as in lr=3e-4")] = None,
    text_a: Annotated[str | None, typer.Option(help="custom: column of the text")] = None,
    text_b: Annotated[str | None, typer.Option(help="custom: column of a second text")] = None,
    label: Annotated[str | None, typer.Option(help="custom: column of the label")] = None,
    kind: Annotated[Kind, typer.Option(help="custom: what the label is")] = Kind.classification,
    tower: TowerOption = Tower.discriminator,
    vocab: Vocab = None,
) -> None:
    """Fine-tune or probe a pretrained model on GLUE, SQuAD or files of your own; finished seeds are not run again."""
    from electra_dist.finetune.config import settings_for
    from electra_dist.finetune.result import glue_average, results_table, summarize
    from electra_dist.finetune.run import run_all
    from electra_dist.pretrained.encoder import device_of_choice, load_pretrained

    tasks = [_open_task(name, data, text_a, text_b, label, kind) for name in dict.fromkeys(task.split(","))]
    encoder = load_pretrained(model, tower.value, vocab)
    width, positions = encoder.tower.hidden_size, encoder.model.max_positions
    work = [(each, settings_for(each.name, width, positions, overrides or ())) for each in tasks]
    folder = output or _default_output(model)
    device = device_of_choice()
    out = Console(highlight=False, soft_wrap=True)
    out.print(f"{encoder.name} on {device.type}, results in {folder}")
    with progress_bar(out) as progress:
        results = run_all(encoder, work, range(seeds), folder, device, probe, progress, out.print)
    summaries = [summarize([r for r in results if r.task == each.name]) for each in tasks]
    _write_json(
        folder / SUMMARY_FILE,
        {
            "model": encoder.name,
            "digest": encoder.digest,
            "settings": {each.name: settings.model_dump(mode="json") for each, settings in work},
            "tasks": [dataclasses.asdict(summary) for summary in summaries],
            "glue_average": glue_average(summaries),
        },
    )
    out.print(results_table(f"{encoder.name}: {'linear probe' if probe else 'fine-tuned'}", summaries))
    for summary in summaries:
        for seed, why in summary.failed.items():
            out.print(f"failed: {summary.task} seed {seed}: {why}")


def minimal_pairs(
    model: Model,
    pairs: Annotated[int, typer.Option(min=1, help="pairs of each phenomenon")] = 200,
    tower: TowerOption = Tower.discriminator,
    vocab: Vocab = None,
    output: Annotated[Path | None, typer.Option(help="also write the numbers to this JSON file")] = None,
) -> None:
    """How often a model tells a grammatical sentence from one that differs in a word (agreement, by templates)."""
    from electra_dist.finetune.minimal_pairs import score_minimal_pairs
    from electra_dist.pretrained.encoder import device_of_choice, load_pretrained

    encoder = load_pretrained(model, tower.value, vocab)
    out = Console(highlight=False, soft_wrap=True)
    with progress_bar(out) as progress:
        scores = score_minimal_pairs(encoder, pairs, device_of_choice(), progress)
    table = Table("phenomenon", "pairs", "accuracy", "example", title=f"{encoder.name}: minimal pairs (chance 50 %)")
    for score in scores:
        table.add_row(score.phenomenon, str(score.pairs), f"{100 * score.accuracy:.1f}", score.example)
    out.print(table)
    if output:
        _write_json(output, {"model": encoder.name, "scores": [score._asdict() for score in scores]})


def _open_task(name: str, data: Path, text_a: str | None, text_b: str | None, label: str | None, kind: Kind) -> Task:
    from electra_dist.finetune.squad.task import SquadTask
    from electra_dist.finetune.tasks import GLUE, TextSpec, TextTask

    if name in GLUE:
        return TextTask(GLUE[name], data)
    if name in ("squad1", "squad2"):
        return SquadTask(int(name[-1]), data)
    if name != "custom":
        raise UserError(f"--task {name}: unknown; one of {', '.join([*GLUE, 'squad1', 'squad2', 'custom'])}")
    if text_a is None or label is None:
        raise UserError("--task custom: needs --text-a COLUMN and --label COLUMN (and --text-b for pairs)")
    metric = "accuracy" if kind is Kind.classification else "spearman"
    spec = TextSpec(name="custom", text_a=text_a, text_b=text_b, label=label, kind=kind.value, metric=metric)
    return TextTask(spec, data)


def _default_output(model: str) -> Path:
    if model.startswith("random:"):
        return Path("runs") / f"finetune_random_{Path(model.removeprefix('random:')).stem}"
    return Path(model) / "finetune"


@contextmanager
def progress_bar(out: Console) -> Iterator[Report]:
    """A progress bar on a terminal; nothing where there is none."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    bar = Progress(
        *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=out, transient=True, disable=not out.is_terminal
    )
    with bar:
        current = bar.add_task("", total=None)

        def report(what: str, done: int, total: int) -> None:
            if bar.tasks[0].description != what:
                bar.reset(current, description=what)
            bar.update(current, completed=done, total=total)

        yield report


def _write_json(path: Path, tree: dict[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(tree, indent=2) + "\n")
