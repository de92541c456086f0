"""Fills carried/corpus and wheels/ with what `gpu_train.sh` needs on a machine without network.

Guarantee: the script fails if both folders together exceed 60 MB, the most that is carried to a GPU machine.

How: without --corpus, the rows are those of the Python documentation on this machine (some 10 MB of text), with the
vocabulary size and row length of ELECTRA-Large.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gpu_parts.carried_packages import TO_TRAIN, collect_wheels

REPOSITORY = Path(__file__).resolve().parents[2]
MOST_BYTES = 60_000_000
CONFIG = REPOSITORY / "configs" / "large_25pct_mask.yaml"


def carry_corpus(target: Path, source: Path | None) -> None:
    """Copy a corpus, or build one of the Python documentation.

    Args:
        target: Folder of the carried corpus; it is replaced.
        source: Folder of a corpus of 512 tokens a row; None builds one.

    Raises:
        SystemExit: `source` holds no corpus, or is larger than what is carried.
        subprocess.CalledProcessError: the corpus could not be built.
    """
    if source is not None:
        if not (source / "corpus.json").exists():
            sys.exit(f"{source} holds no corpus.json: name the folder of a finished corpus")
        if folder_bytes(source) > MOST_BYTES:
            sys.exit(f"{source} has {folder_bytes(source) / 1e6:.0f} MB: name a corpus of less than 60 MB")
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target)
        return
    shutil.rmtree(target, ignore_errors=True)
    command = [sys.executable, "-c", "from launcher.cli.main import main; main()", "corpus"]
    with tempfile.TemporaryDirectory() as text:
        subprocess.run([*command, "python-docs", "--output", text], cwd=REPOSITORY, check=True)
        build = ["build", "--input", text, "--output", str(target), "--config", str(CONFIG)]
        # So few documents need a larger held-out share than the configuration's 33 billion tokens do.
        subprocess.run([*command, *build, "--set", "corpus.heldout_fraction=0.03"], cwd=REPOSITORY, check=True)


def folder_bytes(folder: Path) -> int:
    """Return the size of all files below a folder, in bytes."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> None:
    """Fill both folders and check their size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, help="finished corpus of 512 tokens a row (default: built here)")
    parser.add_argument("--python", default="3.12", help="Python version of the target (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=REPOSITORY, help="where carried/ and wheels/ are made")
    arguments = parser.parse_args()
    corpus, wheels = arguments.output / "carried" / "corpus", arguments.output / "wheels"
    carry_corpus(corpus, arguments.corpus)
    shutil.rmtree(wheels, ignore_errors=True)
    collect_wheels(TO_TRAIN, wheels, arguments.python)
    num_bytes = folder_bytes(corpus) + folder_bytes(wheels)
    print(f"{corpus}: {folder_bytes(corpus) / 1e6:.1f} MB; {wheels}: {folder_bytes(wheels) / 1e6:.1f} MB")
    if num_bytes > MOST_BYTES:
        sys.exit(f"together {num_bytes / 1e6:.0f} MB: carry a smaller corpus (--corpus), at most 60 MB in all")


if __name__ == "__main__":
    main()
