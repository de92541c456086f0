"""Export a run as Hugging Face models, and fine-tune the discriminator on labelled files of your own.

    python examples/export_and_finetune.py RUN DATA OUTPUT [--text-column text] [--label-column label]

DATA is a folder with train.tsv and dev.tsv (or .csv, .jsonl), each with a column of texts and one of labels. OUTPUT
gets models/ (the export) and finetuned/ (the results).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path


def main() -> None:
    """Run `electra-dist export`, then `electra-dist finetune` on the exported discriminator."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument("data", type=Path, help="folder with train and dev files")
    parser.add_argument("output", type=Path, help="folder for everything that is written")
    parser.add_argument("--text-column", default="text")
    parser.add_argument("--label-column", default="label")
    parser.add_argument("--average", default="last:1", help="last:N exports the mean of the newest N checkpoints")
    parser.add_argument("--epochs", type=int, default=3)
    arguments = parser.parse_args()

    models = arguments.output / "models"
    export = ["electra-dist", "export", str(arguments.run), "--output", str(models), "--average", arguments.average]
    finetune = ["electra-dist", "finetune", "--task", "custom", "--model", str(models / "discriminator")]
    finetune += ["--data", str(arguments.data), "--output", str(arguments.output / "finetuned")]
    finetune += ["--text-a", arguments.text_column, "--label", arguments.label_column]
    finetune += ["--set", f"epochs={arguments.epochs}"]
    for command in (export, finetune):
        print("$", " ".join(command), flush=True)
        code = subprocess.run(command).returncode
        if code != 0:
            sys.exit(code)


if __name__ == "__main__":
    main()
