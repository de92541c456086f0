"""The commands `finetune` and `predict`.

Everything that can be wrong in the command line or the data is checked before torch and transformers are imported.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from electra_dist.console import Console
from electra_dist.errors import UserError
from electra_launcher.cli.command_output import open_console, progress_bar, resumable, write_json
from electra_launcher.cli.options import TowerOption, Vocab

if TYPE_CHECKING:
    from electra_dist.finetune.finetune_config import FinetuneConfig
    from electra_dist.finetune.stored_scores import SeedSummary
    from electra_dist.finetune.task import Task
    from electra_dist.pretrained.encoder import Pretrained

SUMMARY_FILE = "results.json"  # settings and summary of a fine-tuning command, in its output folder


Model = Annotated[
    str,
    typer.Option(
        help="folder of a run, of its export, or of a Hugging Face model, ORG/NAME of one on the Hub, or "
        "random:CONFIG.yaml",
        metavar="FOLDER",
    ),
]
Data = Annotated[
    str,
    typer.Option(
        metavar="PATH",
        help="a table with your texts and labels (.csv, .tsv, .jsonl, .parquet, or a folder of "
        "datasets.save_to_disk), or a folder with train and dev tables; for other tasks, the folder with their "
        "files, such as CoLA/train.tsv or squad/*.json; also a URL, such as hf://datasets/ORG/NAME",
    ),
]
TaskNames = Annotated[
    str,
    typer.Option(
        help="custom (your own texts), cola, sst2, mrpc, stsb, rte, qnli, qqp, mnli, wnli, squad1, squad2, ner "
        "(named entities), tagging (any label per word) or pairs (retrieval, from pairs of texts); several are "
        "separated by commas"
    ),
]
Seeds = Annotated[int, typer.Option(min=1, help="number of seeds per task: seeds 0 to N - 1")]
Probe = Annotated[bool, typer.Option(help="freeze the encoder and fit a linear model to its states")]
Output = Annotated[
    Path | None,
    typer.Option(
        help="folder of the results and of the models best, seed-0, ... (TASK/best with several tasks); the same "
        "command keeps finished seeds that it finds there; default: MODEL/finetune, with the models in "
        "MODEL/finetune/TASK; of a model on the Hub: runs/finetune_NAME"
    ),
]
Save = Annotated[
    bool, typer.Option("--save/--no-save", help="write the tuned models and their predictions, or scores only")
]
Parallel = Annotated[
    int,
    typer.Option(min=1, metavar="N", help="seeds that are computed at the same time, each in a process (and GPU)"),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="change a setting, as in --set lr=3e-4; others are epochs, batch, max_length, early_stopping, "
        "class_weights (docs/finetune.md lists all with their defaults)",
    ),
]
TextA = Annotated[str | None, typer.Option(help="custom, pairs: column of the text; default: the one that fits")]
TextB = Annotated[
    str | None,
    typer.Option(help="custom, pairs: column of the second text; default: none, or of pairs the one that fits"),
]
Label = Annotated[str | None, typer.Option(help="custom: column of the label; default: the one that fits")]
KindOfLabel = Annotated[
    Literal["classification", "regression"], typer.Option(help="custom: whether the label is a class or a number")
]
Dev = Annotated[
    str | None, typer.Option(metavar="FILE", help="custom, pairs: table of development examples; default: in --data")
]
DevShare = Annotated[
    float, typer.Option(min=0.001, max=0.5, help="custom, pairs, ner, tagging: share held out without dev")
]
SplitSeed = Annotated[int, typer.Option(min=0, help="custom, pairs, ner, tagging: seed that chooses them")]
Delimiter = Annotated[
    str | None, typer.Option(metavar="CHAR", help="what separates columns of .csv; default: found in the header")
]
CheckpointOfRun = Annotated[
    str | None, typer.Option(help="of a run: best, the number of its step, or its folder; default: the newest")
]


def finetune(
    model: Model,
    data: Data,
    task: TaskNames = "custom",
    seeds: Seeds = 1,
    probe: Probe = False,
    output: Output = None,
    save: Save = True,
    parallel: Parallel = 1,
    overrides: Settings = None,
    text_a: TextA = None,
    text_b: TextB = None,
    label: Label = None,
    kind: KindOfLabel = "classification",
    dev: Dev = None,
    dev_share: DevShare = 0.1,
    split_seed: SplitSeed = 0,
    delimiter: Delimiter = None,
    checkpoint: CheckpointOfRun = None,
    tower: TowerOption = "discriminator",
    vocab: Vocab = None,
) -> None:
    """Fine-tune a pretrained model on your own files, GLUE or SQuAD, or fit a linear probe to its frozen states.

    Each task is run with several seeds, and the scores are printed and written to OUTPUT/results.json. The tuned model
    of each seed, and of the best one, is written for transformers. A seed whose result is in the output folder already
    is not run again.
    """
    from electra_dist.finetune.finetune_config import check_overrides, settings_for
    from electra_dist.finetune.open_task import TaskRequest, open_task
    from electra_dist.pretrained.locate import choose_step, locate_model
    from electra_dist.store.url_files import local_copy

    if probe and parallel > 1:
        raise UserError("--parallel: a probe has no seeds to run at the same time; leave out --parallel or --probe")
    names = [name.strip() for name in task.split(",")]
    task_names = list(dict.fromkeys(name for name in names if name)) or [task]  # each once, in the order given
    writes_models = save and not probe
    request_of = partial(
        TaskRequest,
        data=local_copy(data),
        text_a=text_a,
        text_b=text_b,
        label=label,
        kind=kind,
        dev=None if dev is None else local_copy(dev),
        delimiter=delimiter,
        dev_share=dev_share,
        split_seed=split_seed,
        with_test=writes_models,
    )
    checked = check_overrides(overrides or ())
    requests = {name: request_of(name=name) for name in task_names}
    tasks = {name: open_task(request) for name, request in requests.items()}
    for opened in tasks.values():
        opened.check(checked)
    step = choose_step(model, checkpoint)
    located = locate_model(model, tower)
    out = open_console()
    for opened in tasks.values():
        for remark in opened.notes:
            out.print(remark)
    out.print(f"loading {located}")

    from electra_dist.finetune.run_seeds import (
        ModelRequest,
        compute_in_processes,
        only_command,
        run_all,
        settings_to_learn_more,
    )
    from electra_dist.finetune.stored_scores import summarize
    from electra_dist.pretrained.encoder import device_of_choice, load_pretrained

    encoder = load_pretrained(located, tower, vocab, step)
    sizes = encoder.tower.hidden_size, encoder.model.max_positions
    settings = {name: settings_for(name, *sizes, overrides or ()) for name in task_names}
    folder = output or _default_output(model)
    has_one_task_folder = output is not None and len(task_names) == 1
    model_dirs = {name: folder if has_one_task_folder else folder / name for name in task_names}
    device = device_of_choice()
    out.print(f"{encoder.name} on {device.type}, results in {folder}")
    if device.type == "cpu":
        _advise_on_threads(out, parallel)
    kept = "seeds whose result was printed are kept, the others begin again"
    with resumable(kept), only_command(folder), progress_bar(Console(stderr=True)) as progress:
        processes = partial(
            compute_in_processes,
            parallel,
            ModelRequest(spec=located, tower=tower, vocab=vocab, step=step),
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
    _print_scores(out, f"{encoder.name}: {'linear probe' if probe else 'fine-tuned'}", summaries, tasks)
    if writes_models:
        options = {name: settings_to_learn_more(encoder, tasks[name], settings[name]) for name in task_names}
        _print_next(out, model_dirs, summaries, options, settings)


def _advise_on_threads(out: Console, parallel: int) -> None:
    """Print a line if the processes of --parallel need more cores than this machine has."""
    import torch

    from electra_dist.finetune.run_seeds import advice_on_threads

    advice = advice_on_threads(parallel, torch.get_num_threads(), len(os.sched_getaffinity(0)))
    if advice:
        out.print(advice)


def _print_scores(out: Console, title: str, summaries: list[SeedSummary], tasks: dict[str, Task]) -> None:
    """Print a table of the scores of all tasks, why seeds count as failed, and what a constant guess scores."""
    from electra_dist.finetune.stored_scores import results_table

    out.print(results_table(title, summaries, lambda name, metric: tasks[name].shown_metric(metric)))
    for summary in summaries:
        for seed, reason in summary.failed.items():
            out.print(f"failed: {summary.task} seed {seed}: {reason}")
    for name, task in tasks.items():
        guess = task.constant_guess()
        if guess:
            out.print(f"to compare: {name}: {guess}")


def _print_next(
    out: Console,
    model_dirs: dict[str, Path],
    summaries: list[SeedSummary],
    options: dict[str, list[str]],
    settings: dict[str, FinetuneConfig],
) -> None:
    """Print the command that predicts with the best model of each task, where `predict` reads such models.

    Of a task whose seeds have all failed, print how to repeat it; `options` has the settings that may help each task
    to learn, `settings` those that it had.
    """
    diverged = {summary.task for summary in summaries if summary.median is None}
    failed = {summary.task for summary in summaries if len(summary.failed) == len(summary.scores)}
    files = {"squad1": "QUESTIONS.json", "squad2": "QUESTIONS.json", "ner": "WORDS.txt", "tagging": "WORDS.txt"}
    commands = [
        f"  electra-dist predict {shlex.quote(str(folder))} {files.get(name, 'NEW.csv')} --output predictions.csv"
        for name, folder in model_dirs.items()
        if name != "pairs" and name not in failed and (folder / "best" / "config.json").exists()
    ]
    for name in model_dirs:
        if name in diverged:
            lower_lr = f"repeat the command with --set lr={settings[name].lr / 10:.1g}"
            commands.append(f"  {name} has diverged: {lower_lr}, or with an earlier --checkpoint of a run")
        elif name in failed:
            repeat = f"repeat the command with {' '.join(options[name])} and another --output"
            other = "add examples, change --set lr, or pretrain longer (docs/finetune.md)"
            commands.append(f"  {name} has learnt nothing: {repeat if options[name] else other}")
    for line in ["next:", *commands] if commands else []:
        out.print(line, soft_wrap=True)


def _default_output(model: str) -> Path:
    """Return MODEL/finetune; for random:CONFIG.yaml runs/finetune_random_CONFIG, for ORG/NAME runs/finetune_NAME."""
    from electra_dist.hub import hub_name

    if model.startswith("random:"):
        config_name = Path(model.removeprefix("random:")).stem
        return Path("runs") / f"finetune_random_{config_name}"
    name = hub_name(model)
    if name is not None:
        return Path("runs") / f"finetune_{name['repo'].partition('/')[2]}"
    return Path(model) / "finetune"


def _write_summary(
    path: Path, encoder: Pretrained, settings: dict[str, FinetuneConfig], summaries: list[SeedSummary]
) -> None:
    """Write the scores and the settings of a fine-tuning command as JSON, for other programs to read."""
    from electra_dist.finetune.stored_scores import glue_average

    write_json(
        path,
        {
            "model": encoder.name,
            "digest": encoder.digest,
            "settings": {name: task_settings.model_dump(mode="json") for name, task_settings in settings.items()},
            "tasks": [dataclasses.asdict(summary) for summary in summaries],
            "glue_average": glue_average(summaries),
        },
    )


def predict(
    model: Annotated[
        str,
        typer.Argument(
            help="the --output of finetune, whose best seed is used, the folder of a tuned model, such as "
            "tuned/seed-0, or of one for a task in transformers, or ORG/NAME of one on the Hub"
        ),
    ],
    file: Annotated[
        str,
        typer.Argument(
            help="texts: a table (.csv, .tsv, .jsonl, .parquet, datasets.save_to_disk) or one text on each line; "
            "words, as for training or one on each line; questions: SQuAD's JSON, or a table with question and "
            "context; also a URL"
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            help="file to write: .csv (commas) or .tsv (tabs), otherwise JSON lines; default: JSON lines on stdout"
        ),
    ] = None,
    text_a: Annotated[str | None, typer.Option(help="column of the text; default: that of the training data")] = None,
    text_b: Annotated[
        str | None, typer.Option(help="column of the second text; default: that of the training data")
    ] = None,
    label: Annotated[
        str | None,
        typer.Option(help="column of the label, or '' to score nothing; default: that of the training data"),
    ] = None,
    delimiter: Delimiter = None,
) -> None:
    """Write what a tuned model predicts for new texts, words or questions, and score it where there are labels.

    The predictions are classes with their probabilities, numbers, tags with their spans, or answers with their places
    in the passage; `index` is the row of FILE, from 0. A table of predictions for texts begins with the columns of
    FILE. Those for the development data are the ones that `finetune` has written.
    """
    from electra_dist.hub import model_folder
    from electra_dist.scoring.predictions import open_predictions
    from electra_dist.scoring.tuned_model import TunedModel
    from electra_dist.store.atomic_files import replacing
    from electra_dist.store.url_files import local_copy

    tuned = TunedModel(model_folder(model))
    run = open_predictions(tuned, local_copy(file), text_a, text_b, label, delimiter)
    with progress_bar(Console(stderr=True)) as progress:
        predictions = run(progress)
    content = predictions.text("" if output is None else output.suffix.lower())
    if output is None:
        sys.stdout.write(content)
    else:
        with replacing(output) as written:
            written.write(content.encode())
    out = Console(stderr=True) if output is None else open_console()
    for note in predictions.notes:
        out.print(note, soft_wrap=True)
    for name, value in predictions.metrics.items():
        out.print(f"{tuned.shown_metric(name)} {value:.4f}")
    if output is not None:
        out.print(f"{output}: {len(predictions.objects)} predictions")
