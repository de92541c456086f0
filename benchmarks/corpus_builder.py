"""How fast does the corpus builder make tokens, beside datatrove, Hugging Face datasets and tokenizers?

    python benchmarks/run.py corpus_builder            # 10 MB of prose that the Python installation contains

Four ways take turns, with 1 and with 2 workers, on the same documents and vocabulary (`corpus_builder_ways.py`). Each
way also runs once in a new process, whose memory is measured. `electra-dist corpus plan` measures the steps of a
build.

Guarantee: the benchmark ends before any timing if the ways do not find the same number of text tokens.

Limits: local files only; the interpreter's start and the training of a vocabulary are not timed.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import corpus_builder_ways as ways
from corpus_builder_ways import Text
from measure import REPOSITORY, Found, Json, ResultLine, alternate, format_summary, installed, print_table, rated

from electra_dist.config.load import load_config
from electra_dist.corpus.inputs.find_inputs import find_inputs
from electra_dist.corpus.inputs.text_decoding import decode
from electra_dist.corpus.inputs.text_readers import DocumentStream
from electra_dist.corpus.vocabulary import train_vocabulary

ROUNDS = 3
WORKERS = (1, 2)  # Numbers of workers with which each way is timed.


def installed_ways() -> dict[str, Callable[[Text, int], int]]:
    """Return name -> function of each way to make tokens whose packages are installed."""
    return {
        name: way
        for name, way in ways.WAYS.items()
        if name in ("ours", "tokenizers") or importlib.util.find_spec(name) is not None
    }


def compare(text: Text, rounds: int) -> Json:
    """Time every way to make tokens at each number of workers, in turn, and measure its peak memory."""
    counts = {name: way(text, 1) for name, way in installed_ways().items()}
    if len(set(counts.values())) > 1:
        sys.exit(
            f"the ways find different numbers of text tokens, {counts}: not the same work, so times cannot be "
            "compared; give the tokenizer in corpus_builder_ways.py the settings of electra_dist/wordpiece.py"
        )
    num_tokens = counts["ours"]
    text_bytes = sum(len(line.encode()) + 1 for line in text.lines)
    measured: Json = {"text_tokens": num_tokens, "text_bytes": text_bytes, "workers": {}}
    for workers in WORKERS:
        chosen = {name: partial(way, text, workers) for name, way in installed_ways().items()}
        measured["workers"][str(workers)] = {
            name: way | {"memory_bytes": ways.peak_memory(name, text, workers)}
            for name, way in rated(alternate(chosen, rounds, warm_up=0), num_tokens / workers).items()
        }
    return measured


def report_ways(by_way: Json, workers: str) -> ResultLine:
    """Print the table of all ways at one number of workers; return its row for docs/results.md."""
    rows = [
        [
            name,
            f"{way['rate'] / 1e6:.3f}",
            format_summary(way["ratio"]),
            f"{way['memory_bytes'] / 1e6:,.0f}",
        ]
        for name, way in by_way.items()
    ]
    rows += [[name, "not installed", "", ""] for name in ways.WAYS if name not in by_way]
    print_table([f"{workers} worker(s)", "M tokens / s core", "rate of ours / this", "memory, MB"], rows)
    rivals = [
        f"{way['ratio']['median']:.2f} x {name} ({way['memory_bytes'] / 1e6:,.0f} MB)"
        for name, way in by_way.items()
        if name != "ours"
    ]
    ours = by_way["ours"]
    value = f"{ours['rate'] / 1e6:.2f} M tokens/s a core, {ours['memory_bytes'] / 1e6:,.0f} MB"
    return ResultLine(f"corpus build, documents shuffled, {workers} worker(s)", value, ", ".join(rivals))


def make_text(smoke: bool, folder: Path) -> Text:
    """Write prose of the Python installation, or for the smoke run of docs/, and a vocabulary of it into a folder."""
    size = 300 if smoke else 30_522
    config = load_config(REPOSITORY / "configs/large_25pct_mask.yaml", [f"model.vocab_size={size}"])
    if smoke:
        documents = [page.read_text(encoding="utf-8") for page in sorted((REPOSITORY / "docs").glob("*.md"))]
    else:
        source = folder / "text"
        script = REPOSITORY / "examples" / "python_docs.py"
        subprocess.run([sys.executable, str(script), "--output", str(source)], check=True)
        documents = [decode(document) for document in DocumentStream(find_inputs([source]))]
    vocabulary = train_vocabulary(lambda: iter(documents), size, config.corpus.lowercase)
    print(f"{len(documents):,} documents, {vocabulary.size:,} entries")
    return Text.write(folder / "prepared", config, documents, vocabulary)


def measure(arguments: argparse.Namespace) -> Found:
    # A worker process imports the main module again if that module has a `__file__`. Without it, workers do not import
    # `run.py` and torch, which workers of `electra-dist` do not import either.
    main = sys.modules["__main__"]
    main_file = main.__dict__.pop("__file__", None)
    try:
        with tempfile.TemporaryDirectory(prefix="builder-") as name:
            text = make_text(arguments.smoke, Path(name))
            measured = compare(text, arguments.rounds)
            lines = [report_ways(by_way, workers) for workers, by_way in measured["workers"].items()]
    finally:
        if main_file is not None:
            main.__file__ = main_file
    return Found(lines, measured | {"packages": installed(("tokenizers", "datatrove", "datasets"))})
