"""Commands `electra-dist finetune` and `electra-dist minimal-pairs`: score pretrained models.

`finetune` trains and scores a model on labelled tasks; `minimal-pairs` scores it on sentence pairs, without training.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from electra_dist.console import Console
from electra_dist.errors import UserError
from electra_dist.escapes import printable
from launcher.cli.console import open_console

if TYPE_CHECKING:  # torch and scikit-learn are loaded when a command runs, not for --help
    from electra_dist.finetune.finetune_config import FinetuneConfig
    from electra_dist.finetune.scores import SeedSummary
    from electra_dist.finetune.training_loop import Progress as Report
    from electra_dist.pretrained.load_encoder import Pretrained

_BUILT_IN_PAIRS = 200  # pairs of each phenomenon that `minimal-pairs` makes by default
SUMMARY_FILE = "results.json"  # settings and summary of a fine-tuning command, in its output folder


class Kind(StrEnum):
    """Kind of label in the user's own files: a class (scored by accuracy) or a number (by Spearman's correlation)."""

    classification = "classification"
    regression = "regression"


class Tower(StrEnum):
    """Name of one of the two networks that an ELECTRA run trains.

    The generator proposes replacements for masked tokens. The discriminator detects the replaced tokens; it is the
    network that is fine-tuned by default.
    """

    discriminator = "discriminator"
    generator = "generator"


Model = Annotated[str, typer.Option(help="folder of a run, folder of a Hugging Face model, or random:CONFIG.yaml")]
OptionalModel = Annotated[
    str | None, typer.Option("--model", help="folder of a run, folder of a Hugging Face model, or random:CONFIG.yaml")
]
Vocab = Annotated[Path | None, typer.Option(help="vocab.txt for random:CONFIG.yaml; default: that of its corpus")]
TowerOption = Annotated[Tower, typer.Option(help="network of a run that is used")]


def finetune(
    task: Annotated[
        str,
        typer.Option(
            help="cola, sst2, mrpc, stsb, rte, qnli, qqp, mnli, wnli, squad1, squad2, ner (named entities), tagging "
            "(any label per word) or custom; several are separated by commas"
        ),
    ],
    model: Model,
    data: Annotated[
        Path,
        typer.Option(
            help="folder with CoLA/train.tsv and so on, and squad/*.json; for custom, ner and tagging, with train and "
            "dev files"
        ),
    ],
    seeds: Annotated[int, typer.Option(min=1, help="number of seeds per task: seeds 0 to N - 1")] = 1,
    probe: Annotated[bool, typer.Option(help="freeze the encoder and fit a linear model to its states")] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            help="folder of the results and of the models best, seed-0, ... (TASK/best with several tasks), where an "
            "interrupted command resumes; default: MODEL/finetune, with the models in MODEL/finetune/TASK"
        ),
    ] = None,
    save: Annotated[
        bool, typer.Option("--save/--no-save", help="write the tuned models and their predictions, or scores only")
    ] = True,
    parallel: Annotated[
        int,
        typer.Option(min=1, metavar="N", help="seeds that are computed at the same time, each in a process (and GPU)"),
    ] = 1,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="change a setting, as in --set lr=3e-4")
    ] = None,
    text_a: Annotated[str | None, typer.Option(help="custom: column of the text")] = None,
    text_b: Annotated[str | None, typer.Option(help="custom: column of the second text, for pairs")] = None,
    label: Annotated[str | None, typer.Option(help="custom: column of the label")] = None,
    kind: Annotated[Kind, typer.Option(help="custom: whether the label is a class or a number")] = Kind.classification,
    tower: TowerOption = Tower.discriminator,
    vocab: Vocab = None,
) -> None:
    """Fine-tune a pretrained model on GLUE, SQuAD or your own files, or fit a linear probe to its frozen states.

    Each task is run with several seeds, and the scores are printed and written to OUTPUT/results.json. The tuned model
    of each seed, and of the best one, is written for transformers. A seed whose result is in the output folder already
    is not run again.
    """
    import torch

    from electra_dist.finetune.finetune_config import settings_for
    from electra_dist.finetune.scores import summarize
    from electra_dist.finetune.seeds import (
        ModelRequest,
        SeedProcesses,
        TaskRequest,
        advice_on_threads,
        open_task,
        run_all,
    )
    from electra_dist.pretrained.load_encoder import device_of_choice, load_pretrained

    if probe and parallel > 1:
        raise UserError("--parallel: a probe has no seeds to run at the same time; leave out --parallel or --probe")
    task_names = list(dict.fromkeys(task.split(",")))  # Each task once, in the order given.
    writes_models = save and not probe
    request_of_any = TaskRequest(
        name="", data=data, text_a=text_a, text_b=text_b, label=label, kind=kind.value, with_test=writes_models
    )
    requests = {name: dataclasses.replace(request_of_any, name=name) for name in task_names}
    tasks = {name: open_task(request) for name, request in requests.items()}
    encoder = load_pretrained(model, tower.value, vocab)
    settings = {
        name: settings_for(name, encoder.tower.hidden_size, encoder.model.max_positions, overrides or ())
        for name in task_names
    }
    folder = output or _default_output(model)
    has_one_task_folder = output is not None and len(task_names) == 1
    model_dirs = {name: folder if has_one_task_folder else folder / name for name in task_names}
    device = device_of_choice()
    out = open_console()
    out.print(f"{encoder.name} on {device.type}, results in {folder}")
    if device.type == "cpu":
        advice = advice_on_threads(parallel, torch.get_num_threads(), len(os.sched_getaffinity(0)))
        if advice:
            out.print(advice)
    with progress_bar(Console(stderr=True)) as progress:
        processes = SeedProcesses(
            parallel,
            ModelRequest(spec=model, tower=tower.value, vocab=vocab),
            {name: (requests[name], settings[name]) for name in task_names},
            progress,
        )
        results = run_all(
            encoder,
            work=[(tasks[name], settings[name]) for name in task_names],
            seeds=range(seeds),
            output=folder,
            device=device,
            probe=probe,
            progress=progress,
            note=out.print,
            save_to=model_dirs if writes_models else None,
            compute_jobs=processes if parallel > 1 else None,
        )
    summaries = [summarize([result for result in results if result.task == name]) for name in task_names]
    _write_summary(folder / SUMMARY_FILE, encoder, settings, summaries)
    _print_summaries(out, f"{encoder.name}: {'linear probe' if probe else 'fine-tuned'}", summaries)


def minimal_pairs(
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]", help="the model, in place of --model: folder of a run or of a model", show_default=False
        ),
    ] = None,
    model: OptionalModel = None,
    file: Annotated[
        list[Path] | None,
        typer.Option(
            help="minimal pairs of your own: a .jsonl file in BLiMP's format, a .txt file in Zorro's, or a folder of "
            "such files; repeat the option for several. Default: built-in pairs on number agreement in English"
        ),
    ] = None,
    pairs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="number of sentence pairs of each kind, always the same ones. Default: 200 of the built-in pairs, "
            "all pairs of the files",
        ),
    ] = None,
    tower: TowerOption = Tower.discriminator,
    vocab: Vocab = None,
    output: Annotated[Path | None, typer.Option(help="JSON file to which the scores are written, too")] = None,
) -> None:
    """Print how often a model prefers a grammatical sentence to an ungrammatical one that differs little.

    The built-in pairs test number agreement in English, such as singular and plural verbs; --file reads others, such
    as BLiMP's. Nothing is trained. A standard error (s.e.) is that of the choice of pairs.
    """
    from electra_dist.pretrained.load_encoder import device_of_choice, load_pretrained
    from electra_dist.scoring.minimal_pairs import read_pair_files, score_minimal_pairs, score_sentence_pairs

    spec = source if model is None else model
    if spec is None or (source is not None and model is not None):
        raise UserError("name one model: electra-dist minimal-pairs MODEL, or --model MODEL")
    sentence_pairs = read_pair_files(file).sample(pairs).pairs if file else None
    encoder = load_pretrained(spec, tower.value, vocab)
    device = device_of_choice()
    out = open_console()
    with progress_bar(Console(stderr=True)) as progress:
        if sentence_pairs is None:
            scores = score_minimal_pairs(encoder, pairs or _BUILT_IN_PAIRS, device, progress)
        else:
            scores = score_sentence_pairs(encoder, sentence_pairs, device, progress)
    table = Table(
        "phenomenon", "pairs", "accuracy", "s.e.", "example", title=f"{encoder.name}: minimal pairs (chance 50 %)"
    )
    for score in scores:
        accuracy = f"{100 * score.accuracy:.1f}"
        standard_error = f"{100 * score.standard_error:.1f}"
        table.add_row(score.phenomenon, str(score.pairs), accuracy, standard_error, score.example)
    out.print(table)
    if output:
        _write_json(output, {"model": encoder.name, "scores": [score._asdict() for score in scores]})


def _print_summaries(out: Console, title: str, summaries: list[SeedSummary]) -> None:
    """Print a table of the scores of all tasks, and the reason for each seed that counts as failed."""
    from electra_dist.finetune.scores import results_table

    out.print(results_table(title, summaries))
    for summary in summaries:
        for seed, reason in summary.failed.items():
            out.print(f"failed: {summary.task} seed {seed}: {reason}")


def _default_output(model: str) -> Path:
    """Return MODEL/finetune or, for the untrained model random:CONFIG.yaml, runs/finetune_random_CONFIG."""
    if model.startswith("random:"):
        config_name = Path(model.removeprefix("random:")).stem
        return Path("runs") / f"finetune_random_{config_name}"
    return Path(model) / "finetune"


@contextmanager
def progress_bar(out: Console) -> Iterator[Report]:
    """Show a progress bar while the `with` block runs; show nothing if `out` is not a terminal.

    Yields a function that updates the bar. Its arguments are the name of the current activity, the number of parts
    that are done, and the number of all parts. The bar restarts when the name changes.
    """
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=out,
        transient=True,
        disable=not out.is_terminal,
    )
    with bar:
        bar_id = bar.add_task("", total=None)

        def report(activity: str, done: int, total: int) -> None:
            description = printable(activity)
            if bar.tasks[0].description != description:
                bar.reset(bar_id, description=description)
            bar.update(bar_id, completed=done, total=total)

        yield report


def _write_summary(
    path: Path, encoder: Pretrained, settings: dict[str, FinetuneConfig], summaries: list[SeedSummary]
) -> None:
    """Write the scores and the settings of a fine-tuning command as JSON, for other programs to read."""
    from electra_dist.finetune.scores import glue_average

    _write_json(
        path,
        {
            "model": encoder.name,
            "digest": encoder.digest,
            "settings": {name: task_settings.model_dump(mode="json") for name, task_settings in settings.items()},
            "tasks": [dataclasses.asdict(summary) for summary in summaries],
            "glue_average": glue_average(summaries),
        },
    )


def _write_json(path: Path, tree: dict[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(tree, indent=2) + "\n", "utf-8")
