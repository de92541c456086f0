"""How fast does the corpus builder make tokens, beside datatrove, Hugging Face datasets and tokenizers?

    python benchmarks/run.py corpus_builder            # 10 MB of prose that the Python installation contains
    python benchmarks/run.py corpus_builder --text DIR --vocab vocab.txt

Four ways take turns, with 1 and with 2 workers, on the same documents and vocabulary. Each way also runs once in a new
process, whose memory is measured. `electra-dist corpus plan` measures the steps of a build.

    ours          what `electra-dist corpus build` runs, from files to shards, with the start of the worker processes
    tokenizers    encode_batch_fast on the same lines in memory, and nothing more; two workers are two of its threads
    datatrove     DocumentTokenizer, which also shuffles the documents of a task (extra `corpus`)
    datasets      from_parquet, shuffle, map(tokenise), map(group into rows), like its run_mlm example (extra `bench`)

Guarantee: the benchmark ends before any timing if the ways do not find the same number of text tokens.

Limits: local files only; the interpreter's start and the training of a vocabulary are not timed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path

import psutil
import pyarrow
import pyarrow.compute
import pyarrow.parquet
import tokenizers
from measure import REPOSITORY, Found, Json, ResultLine, alternate, environment, format_summary, print_table, ratio
from rich.console import Console

from electra_dist.config import Config
from electra_dist.config.load import load_config
from electra_dist.corpus.build_console import BuildConsole
from electra_dist.corpus.builder.build_corpus import build_corpus
from electra_dist.corpus.builder.build_request import BuildRequest
from electra_dist.corpus.inputs.find_inputs import find_inputs
from electra_dist.corpus.inputs.text_decoding import decode
from electra_dist.corpus.inputs.text_readers import DocumentStream
from electra_dist.corpus.vocabulary import train_vocabulary
from electra_dist.tokenizer import MAX_WORD_CHARS, VOCAB_FILE, Vocabulary

ROUNDS = 3
WORKERS = (1, 2)  # Numbers of workers with which each way is timed.
LINES_A_CALL = 2048  # Lines in one call of the library tokenizers.
NUM_FILES = 8  # Files into which the documents are divided, so that several workers have work.
_SAMPLE_S = 0.05  # Seconds between two readings of the memory.


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--text", type=Path, help="folder of documents (default: texts of the Python installation)")
    parser.add_argument("--vocab", type=Path, help="vocab.txt (default: a vocabulary is trained on the text)")


def installed_ways() -> dict[str, Callable[[Text, int], int]]:
    """Return name -> function of each way to make tokens whose packages are installed."""
    return {name: way for name, way in WAYS.items() if name == "ours" or importlib.util.find_spec(name) is not None}


def compare(text: Text, rounds: int) -> Json:
    """Time every way to make tokens at each number of workers, in turn, and measure its peak memory."""
    ways = installed_ways()
    counts = {name: way(text, 1) for name, way in ways.items()}
    if len(set(counts.values())) > 1:
        sys.exit(
            f"the ways find different numbers of text tokens, {counts}: not the same work, so times cannot be "
            "compared; give the tokenizer in benchmarks/corpus_builder.py the settings of electra_dist/tokenizer.py"
        )
    num_tokens = counts["ours"]
    text_bytes = sum(len(line.encode()) + 1 for line in text.lines)
    measured: Json = {"text_tokens": num_tokens, "text_bytes": text_bytes, "workers": {}}
    for workers in WORKERS:
        seconds = alternate({name: partial(way, text, workers) for name, way in ways.items()}, rounds, warm_up=0)
        measured["workers"][str(workers)] = {
            name: {
                "seconds": seconds[name],
                "tokens_per_core_s": num_tokens / statistics.median(seconds[name]) / workers,
                "rate_of_ours": ratio(seconds[name], seconds["ours"]),
                "memory_bytes": peak_memory(name, text, workers),
            }
            for name in ways
        }
    return measured


def report_ways(by_way: Json, workers: str) -> ResultLine:
    """Print the table of all ways at one number of workers; return its row for docs/results.md."""
    rows, rivals = [], []
    for name, way in by_way.items():
        memory_mb = f"{way['memory_bytes'] / 1e6:,.0f}"
        rows.append([name, f"{way['tokens_per_core_s'] / 1e6:.3f}", format_summary(way["rate_of_ours"]), memory_mb])
        rivals.append(f"{way['rate_of_ours']['median']:.2f} x {name} ({memory_mb} MB)")
    rows += [[name, "not installed", "", ""] for name in WAYS if name not in by_way]
    print_table([f"{workers} worker(s)", "M tokens / s core", "rate of ours / this", "memory, MB"], rows)
    ours = by_way["ours"]
    value = f"{ours['tokens_per_core_s'] / 1e6:.2f} M tokens/s a core, {ours['memory_bytes'] / 1e6:,.0f} MB"
    return ResultLine(f"corpus build, documents shuffled, {workers} worker(s)", value, ", ".join(rivals[1:]))


def make_text(arguments: argparse.Namespace, config: Config, folder: Path) -> Text:
    """Write the documents that the options choose, and their vocabulary, into a folder; docs/ serves the smoke run."""
    if arguments.smoke and not arguments.text:
        documents = [page.read_text(encoding="utf-8") for page in sorted((REPOSITORY / "docs").glob("*.md"))]
    else:
        source = arguments.text or folder / "text"
        if not arguments.text:
            script = REPOSITORY / "examples" / "python_docs.py"
            subprocess.run([sys.executable, str(script), "--output", str(source)], check=True)
        documents = [decode(document) for document in DocumentStream(find_inputs([source]))]
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


class Text:
    """Documents of the benchmark in a folder, with their vocabulary and the settings of the corpus."""

    def __init__(self, folder: Path, config: Config) -> None:
        """Open a folder that `Text.write` has written."""
        self.folder = folder
        self.config = config
        self.vocabulary = Vocabulary.read(folder / VOCAB_FILE)
        self.files = find_inputs([folder / "inputs"])

    @classmethod
    def write(cls, folder: Path, config: Config, documents: Sequence[str], vocabulary: Vocabulary) -> Text:
        """Write documents and a vocabulary into a folder, and return the folder as a `Text`.

        Every line end is written as a line feed, so that all ways split the documents into the same lines.
        """
        (folder / "inputs").mkdir(parents=True)
        for number in range(NUM_FILES):
            texts = ["\n".join(document.splitlines()) for document in documents[number::NUM_FILES]]
            pyarrow.parquet.write_table(pyarrow.table({"text": texts}), folder / "inputs" / f"{number}.parquet")
        (folder / VOCAB_FILE).write_text(vocabulary.text, encoding="utf-8")
        encoder(vocabulary, config.corpus.lowercase).save(str(folder / "tokenizer.json"))
        return cls(folder, config)

    @cached_property
    def lines(self) -> list[str]:
        """Return the lines of all documents."""
        texts = (decode(document) for document in DocumentStream(self.files))
        return list(itertools.chain.from_iterable(text.splitlines() for text in texts))

    def fresh_folder(self, name: str) -> Path:
        """Return the path for the output of a way, after the output of an earlier round was deleted from it."""
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        return folder


def encoder(vocabulary: Vocabulary, lowercase: bool) -> tokenizers.Tokenizer:
    """Return a WordPiece tokenizer of the library tokenizers with our vocabulary and BERT's way to split words."""
    model = tokenizers.models.WordPiece(vocabulary.ids, unk_token="[UNK]", max_input_chars_per_word=MAX_WORD_CHARS)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    return tokenizer


def build(text: Text, num_workers: int) -> int:
    """Build a corpus with our builder; return the number of text tokens, held-out documents included."""
    request = BuildRequest(
        inputs=text.files,
        vocabulary=text.vocabulary,
        output=str(text.fresh_folder("corpus")),
        seq_len=text.config.data.seq_len,
        seed=text.config.seed,
        corpus=text.config.corpus,
        num_workers=num_workers,
    )
    with open(os.devnull, "w") as null_device:
        built = build_corpus(request, BuildConsole(Console(file=null_device)))
    return sum(manifest.totals["text_tokens"] for manifest in (built.manifest, built.heldout) if manifest)


def encode(text: Text, num_threads: int) -> int:
    """Tokenise all lines with the library's batch call and return the number of tokens.

    With more threads than one, the library chooses their number itself.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if num_threads > 1 else "false"
    tokenizer = encoder(text.vocabulary, text.config.corpus.lowercase)
    num_tokens = 0
    for start in range(0, len(text.lines), LINES_A_CALL):
        encodings = tokenizer.encode_batch_fast(text.lines[start : start + LINES_A_CALL], add_special_tokens=False)
        num_tokens += sum(len(encoding.ids) for encoding in encodings)
    return num_tokens


def tokenise_by_datatrove(text: Text, num_workers: int) -> int:
    """Tokenise all documents with datatrove's DocumentTokenizer and return the number of tokens in its files."""
    from datatrove.executor.local import LocalPipelineExecutor
    from datatrove.pipeline.readers import ParquetReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    folder = text.fresh_folder("datatrove")
    tokenizer = str(text.folder / "tokenizer.json")
    steps = [
        ParquetReader(str(text.folder / "inputs")),
        DocumentTokenizer(str(folder / "tokens"), tokenizer, seed=1, shuffle_documents=True),
    ]
    LocalPipelineExecutor(steps, num_workers, num_workers, logging_dir=str(folder / "logs")).run()
    id_bytes = 2 if text.vocabulary.size <= 1 << 16 else 4
    return sum(path.stat().st_size for path in (folder / "tokens").glob("*.ds")) // id_bytes


def tokenise_by_datasets(text: Text, num_workers: int) -> int:
    """Tokenise all documents with Hugging Face datasets and group the tokens into rows; return the number of tokens.

    The two calls of `map` are those of transformers' example run_mlm, with the faster call of the library.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    import datasets

    datasets.disable_progress_bars()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    seq_len = text.config.data.seq_len
    tokenizer = tokenizers.Tokenizer.from_file(str(text.folder / "tokenizer.json"))

    def tokenise(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {"ids": [encoding.ids for encoding in tokenizer.encode_batch_fast(batch["text"])]}

    def group(batch: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        ids = list(itertools.chain.from_iterable(batch["ids"]))
        return {"ids": [ids[start : start + seq_len] for start in range(0, len(ids), seq_len)]}

    paths = [file.location for file in text.files]
    options = {"batched": True, "load_from_cache_file": False, "num_proc": num_workers}
    documents = datasets.Dataset.from_parquet(paths, cache_dir=str(text.fresh_folder("datasets")))
    rows = documents.shuffle(seed=1).map(tokenise, remove_columns=["text"], **options).map(group, **options)
    return int(pyarrow.compute.sum(pyarrow.compute.list_value_length(rows.data.column("ids"))).as_py())


WAYS: dict[str, Callable[[Text, int], int]] = {
    "ours": build,
    "tokenizers": encode,
    "datatrove": tokenise_by_datatrove,
    "datasets": tokenise_by_datasets,
}


def peak_memory(name: str, text: Text, num_workers: int) -> int:
    """Run a way of `WAYS` in a new process; return the peak memory of this process and its descendants, in bytes.

    A page that several processes share counts for each of them in equal parts (PSS). A peak between two readings is
    missed.
    """
    code = f"from corpus_builder import run_alone; run_alone({name!r}, {str(text.folder)!r}, {num_workers})"
    (text.folder / "config.json").write_text(text.config.model_dump_json())
    command = [sys.executable, "-c", code]
    peak = 0
    with subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        root = psutil.Process(process.pid)
        while process.poll() is None:
            peak = max(peak, _memory_of(root))
            time.sleep(_SAMPLE_S)
    if process.returncode:
        sys.exit(f"{name} with {num_workers} workers ended with {process.returncode} in a process of its own")
    return peak


def run_alone(name: str, folder: str, num_workers: int) -> None:
    """Run one way once on the `Text` in a folder; `peak_memory` calls this function in a new process."""
    config = Config.model_validate_json((Path(folder) / "config.json").read_text())
    WAYS[name](Text(Path(folder), config), num_workers)


def _memory_of(root: psutil.Process) -> int:
    """Return the memory (PSS) of a process and all of its descendants, in bytes; an ended process counts 0."""
    total = 0
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, FileNotFoundError):
                total += process.memory_full_info().pss
    return total
