"""How fast does the corpus builder make tokens, beside datatrove, Hugging Face datasets and tokenizers?

    python benchmarks/run.py corpus_builder            # 10 MB of prose that the Python installation contains
    python benchmarks/run.py corpus_builder --text DIR --vocab vocab.txt

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
import numpy as np
from corpus_builder_ways import Text
from measure import REPOSITORY, Found, Json, ResultLine, alternate, format_summary, print_table, ratio, summary

from electra_dist.config import Config
from electra_dist.config.load import load_config
from electra_dist.corpus.inputs.find_inputs import find_inputs
from electra_dist.corpus.inputs.text_decoding import decode
from electra_dist.corpus.inputs.text_readers import DocumentStream
from electra_dist.corpus.vocabulary import train_vocabulary
from electra_dist.tokenizer import Vocabulary

ROUNDS = 3
WORKERS = (1, 2)  # Numbers of workers with which each way is timed.


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--text", type=Path, help="folder of documents (default: texts of the Python installation)")
    parser.add_argument("--vocab", type=Path, help="vocab.txt (default: a vocabulary is trained on the text)")


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
            "compared; give the tokenizer in corpus_builder_ways.py the settings of electra_dist/tokenizer.py"
        )
    num_tokens = counts["ours"]
    text_bytes = sum(len(line.encode()) + 1 for line in text.lines)
    measured: Json = {"text_tokens": num_tokens, "text_bytes": text_bytes, "workers": {}}
    for workers in WORKERS:
        chosen = {name: partial(way, text, workers) for name, way in installed_ways().items()}
        seconds = alternate(chosen, rounds, warm_up=0)
        measured["workers"][str(workers)] = {
            name: {
                "seconds": seconds[name],
                "tokens_per_core_s": num_tokens / summary(seconds[name])["median"] / workers,
                "rate_of_ours": ratio(seconds[name], seconds["ours"]),
                "memory_bytes": ways.peak_memory(name, text, workers),
            }
            for name in chosen
        }
    return measured


def report_ways(by_way: Json, workers: str) -> ResultLine:
    """Print the table of all ways at one number of workers; return its row for docs/results.md."""
    rows = [
        [
            name,
            f"{way['tokens_per_core_s'] / 1e6:.3f}",
            format_summary(way["rate_of_ours"]),
            f"{way['memory_bytes'] / 1e6:,.0f}",
        ]
        for name, way in by_way.items()
    ]
    rows += [[name, "not installed", "", ""] for name in ways.WAYS if name not in by_way]
    print_table([f"{workers} worker(s)", "M tokens / s core", "rate of ours / this", "memory, MB"], rows)
    rivals = [
        f"{way['rate_of_ours']['median']:.2f} x {name} ({way['memory_bytes'] / 1e6:,.0f} MB)"
        for name, way in by_way.items()
        if name != "ours"
    ]
    ours = by_way["ours"]
    value = f"{ours['tokens_per_core_s'] / 1e6:.2f} M tokens/s a core, {ours['memory_bytes'] / 1e6:,.0f} MB"
    return ResultLine(f"corpus build, documents shuffled, {workers} worker(s)", value, ", ".join(rivals))


def write_random_words(folder: Path) -> None:
    """Write 150 documents of random words to FOLDER/words.txt, for the smoke run."""
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdefgh"), rng.integers(2, 7))) for _ in range(400)]
    documents = ["\n".join(" ".join(rng.choice(words, 20)) for _ in range(8)) for _ in range(150)]
    (folder / "words.txt").write_text("\n\n".join(documents) + "\n")


def make_text(arguments: argparse.Namespace, config: Config, folder: Path) -> Text:
    """Write the documents that the options choose, and their vocabulary, into an empty folder."""
    source = folder / "text"
    source.mkdir()
    if arguments.smoke:
        write_random_words(source)
    elif not arguments.text:
        script = REPOSITORY / "examples" / "python_docs.py"
        subprocess.run([sys.executable, str(script), "--output", str(source)], check=True)
    documents = [decode(document) for document in DocumentStream(find_inputs([arguments.text or source]))]
    if arguments.vocab:
        vocabulary = Vocabulary.read(arguments.vocab)
    else:
        vocabulary = train_vocabulary(lambda: iter(documents), config.model.vocab_size, config.corpus.lowercase)
    print(f"{len(documents):,} documents, {vocabulary.size:,} entries")
    return Text.write(folder / "prepared", config, documents, vocabulary)


def corpus_config(smoke: bool) -> Config:
    """Return the config whose sections decide the corpus."""
    size = 300 if smoke else 30_522
    return load_config(REPOSITORY / "configs/large_25pct_mask.yaml", [f"model.vocab_size={size}"])


def measure(arguments: argparse.Namespace) -> Found:
    # A worker process imports the main module again if that module has a `__file__`. Without it, workers do not import
    # `run.py` and torch, which workers of `electra-dist` do not import either.
    main = sys.modules["__main__"]
    main_file = main.__dict__.pop("__file__", None)
    try:
        with tempfile.TemporaryDirectory(prefix="builder-") as name:
            text = make_text(arguments, corpus_config(arguments.smoke), Path(name))
            measured = compare(text, arguments.rounds)
            lines = [report_ways(by_way, workers) for workers, by_way in measured["workers"].items()]
    finally:
        if main_file is not None:
            main.__file__ = main_file
    return Found(lines, measured, packages=("tokenizers", "datatrove", "datasets"))
