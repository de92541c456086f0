"""The command `predict`. The model's folder and the file are checked before torch and transformers are imported."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from electra_dist.console import Console
from electra_launcher.cli.console import open_console, progress_bar
from electra_launcher.cli.finetune import Delimiter


def predict(
    model: Annotated[
        Path, typer.Argument(help="folder of a tuned model, such as tuned/best, or of one for a task in transformers")
    ],
    file: Annotated[
        Path,
        typer.Argument(
            help="texts: a table (.csv, .tsv, .jsonl, .parquet, datasets.save_to_disk) or one text on each line; "
            "words, as for training or one on each line; questions: SQuAD's JSON, or a table with question and context"
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(help="file to write: .csv or .tsv, otherwise JSON lines; default: JSON lines on stdout"),
    ] = None,
    text_a: Annotated[str | None, typer.Option(help="column of the text; default: that of the training data")] = None,
    text_b: Annotated[str | None, typer.Option(help="column of the second text, for pairs")] = None,
    label: Annotated[str | None, typer.Option(help="column of the label; default: that of the training data")] = None,
    delimiter: Delimiter = None,
) -> None:
    """Write what a tuned model predicts for new texts, words or questions, and score it where there are labels.

    The predictions are classes with their probabilities, numbers, tags with their spans, or answers with their places
    in the passage. Those for the development data are the ones that `finetune` has written.
    """
    from electra_dist.scoring.predictions import TunedModel, open_predictions
    from electra_dist.store.atomic_files import replacing

    run = open_predictions(TunedModel(model), file, text_a, text_b, label, delimiter)
    with progress_bar(Console(stderr=True)) as progress:
        predictions = run(progress)
    content = predictions.text("" if output is None else output.suffix)
    if output is None:
        sys.stdout.write(content)
    else:
        with replacing(output) as written:
            written.write(content.encode())
    out = Console(stderr=True) if output is None else open_console()
    for name, value in predictions.metrics.items():
        out.print(f"{name} {value:.4f}")
    if output is not None:
        out.print(f"{output}: {len(predictions.objects)} predictions")
