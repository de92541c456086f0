"""Measure the corpus builder in tokens per second and core, against the tokenizer library that it uses.

    python benchmarks/corpus_builder.py            # 10 MB of prose that the Python installation contains
    python benchmarks/corpus_builder.py --text DIR --vocab vocab.txt

Three ways take turns, with 1 and with 2 workers, on the same documents and vocabulary:

    ours          build_corpus, which `electra-dist corpus build` runs: read, tokenise, make examples, pack, check, and
                  write shards with digests; includes the start of the worker processes
    tokenizers    encode_batch_fast on the same lines in memory, and nothing more; two workers are two of its threads
    datasets      Hugging Face datasets: map(tokenise), then map(group into rows of 512), like its run_mlm example

Guarantee: the script exits before any timing if the ways do not find the same number of text tokens. The goal for our
rate divided by that of tokenizers, 0.85, is printed and does not make the script fail.

Limits: local files only; the interpreter's start and the training of a vocabulary are not timed.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import tokenizers
from measure import (
    REPOSITORY,
    Json,
    ResultLine,
    alternate,
    finish,
    format_summary,
    installed,
    parser,
    print_table,
    ratio,
    summary,
)
from rich.console import Console

from electra_dist.config import Config
from electra_dist.config_file import load_config
from electra_dist.corpus.build_console import BuildConsole
from electra_dist.corpus.build_corpus import build_corpus
from electra_dist.corpus.build_request import BuildRequest
from electra_dist.corpus.python_docs import write_python_docs
from electra_dist.corpus.text_decoding import decode
from electra_dist.corpus.text_readers import DocumentStream, find_inputs
from electra_dist.corpus.vocab import train_vocabulary
from electra_dist.tokenizer import MAX_WORD_CHARS, Vocabulary

LEAST = 0.85  # Goal for our rate, as a share of the rate of tokenizers.
LINES_A_CALL = 2048  # Lines that tokenizers gets in one batch.
WORKERS = (1, 2)


class Text:
    """The documents of a benchmark, in memory and as files, and their vocabulary."""

    def __init__(self, folder: Path, config: Config, vocab: Path | None) -> None:
        """Read all documents of a folder.

        Args:
            folder: Folder of text files, as for `corpus build --input`.
            config: Settings of the corpus and size of the vocabulary.
            vocab: A vocab.txt; None trains a vocabulary on the documents.
        """
        self.files = find_inputs([folder])
        self.config = config
        self.documents = [decode(raw) for raw in DocumentStream(self.files, "text")]
        lowercase, size = config.corpus.lowercase, config.model.vocab_size
        if vocab:
            self.vocabulary = Vocabulary.read(vocab)
        else:
            self.vocabulary = train_vocabulary(lambda: iter(self.documents), size, lowercase)
        self.lines = list(itertools.chain.from_iterable(text.splitlines() for text in self.documents))
        self.num_bytes = sum(len(text.encode()) for text in self.documents)


def build(text: Text, folder: Path, num_workers: int) -> int:
    """Build a corpus with our builder and return the number of its text tokens, including the held-out ones.

    Args:
        text: Documents and vocabulary.
        folder: Folder of the corpus; an existing one is deleted first.
        num_workers: Worker processes.
    """
    shutil.rmtree(folder, ignore_errors=True)
    request = BuildRequest(
        inputs=text.files,
        vocabulary=text.vocabulary,
        output=str(folder),
        seq_len=text.config.data.seq_len,
        seed=text.config.seed,
        corpus=text.config.corpus,
        num_workers=num_workers,
    )
    with open(os.devnull, "w") as null_device:
        console = BuildConsole(Console(file=null_device))
        built = build_corpus(request, console)
    return sum(manifest.totals["text_tokens"] for manifest in (built.manifest, built.heldout) if manifest)


def encoder(text: Text) -> tokenizers.Tokenizer:
    """Return the library's WordPiece tokenizer with our vocabulary and BERT's normalisation and word splitting."""
    model = tokenizers.models.WordPiece(
        text.vocabulary.ids, unk_token="[UNK]", max_input_chars_per_word=MAX_WORD_CHARS
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=text.config.corpus.lowercase)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    return tokenizer


def encode(tokenizer: tokenizers.Tokenizer, lines: list[str], num_threads: int) -> list[tokenizers.Encoding]:
    """Tokenise lines with the library's batch call and return their encodings.

    Args:
        tokenizer: The library's tokenizer.
        lines: Lines of text.
        num_threads: 1, or any larger number to let the library use threads, whose number it chooses itself.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if num_threads > 1 else "false"
    encodings = []
    for start in range(0, len(lines), LINES_A_CALL):
        encodings += tokenizer.encode_batch_fast(lines[start : start + LINES_A_CALL], add_special_tokens=False)
    return encodings


def tokenise_and_group(text: Text, tokenizer: tokenizers.Tokenizer, num_processes: int) -> int:
    """Tokenise all lines and group the tokens into rows with Hugging Face datasets; return the number of text tokens.

    Args:
        text: Documents.
        tokenizer: The library's tokenizer.
        num_processes: Worker processes of `map`.
    """
    import datasets

    datasets.disable_progress_bars()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    seq_len = text.config.data.seq_len

    def tokenise(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {"ids": [encoding.ids for encoding in tokenizer.encode_batch_fast(batch["text"])]}

    def group(batch: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        ids = list(itertools.chain.from_iterable(batch["ids"]))
        return {"ids": [ids[start : start + seq_len] for start in range(0, len(ids), seq_len)]}

    options = {"batched": True, "num_proc": num_processes, "load_from_cache_file": False}
    rows = datasets.Dataset.from_dict({"text": text.lines}).map(tokenise, remove_columns=["text"], **options)
    rows = rows.map(group, **options)
    return sum(len(ids) for ids in rows["ids"])


def measure(text: Text, folder: Path, rounds: int) -> Json:
    """Time every way at each number of workers, the ways in turn.

    The program exits before any timing if the ways do not find the same number of text tokens.

    Args:
        text: Documents and vocabulary.
        folder: Folder for the corpora of our builder.
        rounds: Timed runs of each way.

    Returns:
        Number of tokens and bytes, and by number of workers and name of the way: seconds, tokens per second and core,
        and our rate relative to its own.
    """
    tokenizer = encoder(text)
    num_tokens = build(text, folder / "corpus", 1)
    counts = {"tokenizers": sum(len(encoding) for encoding in encode(tokenizer, text.lines, 1))}
    with_datasets = importlib.util.find_spec("datasets") is not None
    if with_datasets:
        counts["datasets"] = tokenise_and_group(text, tokenizer, 1)
    if set(counts.values()) != {num_tokens}:
        sys.exit(
            f"ours finds {num_tokens} text tokens, the others {counts}: not the same work, so times cannot be "
            "compared; give the tokenizer in benchmarks/corpus_builder.py the settings of electra_dist/tokenizer.py"
        )
    found: Json = {"text_tokens": num_tokens, "text_bytes": text.num_bytes, "workers": {}}
    for workers in WORKERS:
        ways: dict[str, Callable[[], object]] = {
            "ours": lambda workers=workers: build(text, folder / "corpus", workers),
            "tokenizers": lambda workers=workers: encode(tokenizer, text.lines, workers),
        }
        if with_datasets:
            ways["datasets"] = lambda workers=workers: tokenise_and_group(text, tokenizer, workers)
        seconds = alternate(ways, rounds, warm_up=0)
        found["workers"][workers] = {
            name: {
                "seconds": seconds[name],
                "tokens_per_core_s": num_tokens / summary(seconds[name])["median"] / workers,
                "rate_of_ours": ratio(seconds[name], seconds["ours"]),
            }
            for name in ways
        }
    return found


def report(found: Json) -> list[ResultLine]:
    """Print a table for each number of workers and return the rows for docs/results.md.

    Args:
        found: Result of `measure`.
    """
    lines = []
    for workers, ways in found["workers"].items():
        rows = [
            [name, f"{way['tokens_per_core_s'] / 1e6:.3f}", format_summary(way["rate_of_ours"])]
            for name, way in ways.items()
        ]
        if "datasets" not in ways:
            rows.append(["datasets", "not installed", ""])
        print_table([f"{workers} worker(s)", "M tokens / s core", "rate of ours / this"], rows)
        rivals = [f"{way['rate_of_ours']['median']:.2f} x {name}" for name, way in ways.items() if name != "ours"]
        value = f"{ways['ours']['tokens_per_core_s'] / 1e6:.2f} M tokens/s a core"
        lines.append(ResultLine(f"corpus build, {workers} worker(s)", value, ", ".join(rivals)))
        rate = ways["tokenizers"]["rate_of_ours"]["median"]
        print(f"ours / tokenizers: {rate:.2f} (goal: {LEAST})\n")
    return lines


def write_random_words(folder: Path) -> None:
    """Write 150 documents of random words to FOLDER/words.txt, for the smoke run."""
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdefgh"), rng.integers(2, 7))) for _ in range(400)]
    documents = ["\n".join(" ".join(rng.choice(words, 20)) for _ in range(8)) for _ in range(150)]
    (folder / "words.txt").write_text("\n\n".join(documents) + "\n")


def main(argv: Sequence[str] | None = None) -> Json:
    """Measure all ways, print their tables and return the record."""
    parse = parser(__doc__, rounds=3)
    parse.add_argument(
        "--text",
        type=Path,
        metavar="FOLDER",
        help="folder of documents, as for `corpus build --input` (default: texts of the Python installation)",
    )
    parse.add_argument(
        "--vocab", type=Path, metavar="FILE", help="vocab.txt (default: a vocabulary is trained on the text)"
    )
    arguments = parse.parse_args(argv)
    size = 300 if arguments.smoke else 30_522
    config = load_config(REPOSITORY / "configs/large_25pct_mask.yaml", [f"model.vocab_size={size}"])
    with tempfile.TemporaryDirectory(prefix="builder-") as name:
        folder = Path(name)
        (folder / "text").mkdir()
        if arguments.smoke:
            write_random_words(folder / "text")
        elif not arguments.text:
            write_python_docs(folder / "text")
        text = Text(arguments.text or folder / "text", config, arguments.vocab)
        print(f"{len(text.documents):,} documents, {text.num_bytes / 1e6:.1f} MB, {text.vocabulary.size:,} entries\n")
        found = measure(text, folder, 1 if arguments.smoke else arguments.rounds)
    lines = report(found)
    return finish("corpus_builder", arguments, argv, lines, packages=installed("tokenizers", "datasets"), **found)


if __name__ == "__main__":
    # Worker processes import the main module by its file. Without `__file__` they do not import this script, and torch
    # with it, which workers of `electra-dist` do not import either.
    del __file__
    main()
