"""Turn text into tokens in the four ways that `corpus_builder.py` compares, and measure the memory of each way.

All ways read one folder. It holds the documents as parquet files in `inputs/`, `vocab.txt`, and the same vocabulary as
`tokenizer.json` for the libraries.

    ours          what `electra-dist corpus build` runs, from files to shards, with the start of the worker processes
    tokenizers    encode_batch_fast on the same lines in memory, and nothing more; two workers are two of its threads
    datatrove     DocumentTokenizer, which also shuffles the documents of a task (extra `corpus`)
    datasets      from_parquet, shuffle, map(tokenise), map(group into rows), like its run_mlm example (extra `bench`)
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path

import psutil
import pyarrow
import pyarrow.compute
import pyarrow.parquet
import tokenizers
from rich.console import Console

from electra_dist.config import Config
from electra_dist.corpus.build_console import BuildConsole
from electra_dist.corpus.builder.build_corpus import build_corpus
from electra_dist.corpus.builder.build_request import BuildRequest
from electra_dist.corpus.inputs.find_inputs import InputFile, find_inputs
from electra_dist.corpus.inputs.text_decoding import decode
from electra_dist.corpus.inputs.text_readers import DocumentStream
from electra_dist.tokenizer import MAX_WORD_CHARS, VOCAB_FILE, Vocabulary

LINES_A_CALL = 2048  # Lines in one call of the library tokenizers.
NUM_FILES = 8  # Files into which the documents are divided, so that several workers have work.
_SAMPLE_S = 0.05  # Seconds between two readings of the memory.
# Options of `Dataset.map`.
_OPTIONS = {"batched": True, "load_from_cache_file": False}


class Text:
    """Documents of the benchmark in a folder, with their vocabulary and the settings of the corpus."""

    def __init__(self, folder: Path, config: Config) -> None:
        """Open a folder that `Text.write` has written."""
        self.folder = folder
        self.config = config
        self.vocabulary = Vocabulary.read(folder / VOCAB_FILE)

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
    def files(self) -> list[InputFile]:
        """Return the parquet files of the documents."""
        return find_inputs([self.folder / "inputs"])

    @cached_property
    def lines(self) -> list[str]:
        """Return the lines of all documents."""
        texts = (decode(document) for document in DocumentStream(self.files))
        return list(itertools.chain.from_iterable(text.splitlines() for text in texts))

    def request(self, output: Path, num_workers: int) -> BuildRequest:
        """Return the request of a build of these documents into the folder `output`."""
        return BuildRequest(
            inputs=self.files,
            vocabulary=self.vocabulary,
            output=str(output),
            seq_len=self.config.data.seq_len,
            seed=self.config.seed,
            corpus=self.config.corpus,
            num_workers=num_workers,
        )

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
    with open(os.devnull, "w") as null_device:
        console = BuildConsole(Console(file=null_device))
        built = build_corpus(text.request(text.fresh_folder("corpus"), num_workers), console)
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
    documents = datasets.Dataset.from_parquet(paths, cache_dir=str(text.fresh_folder("datasets")))
    rows = documents.shuffle(seed=1).map(tokenise, remove_columns=["text"], num_proc=num_workers, **_OPTIONS)
    rows = rows.map(group, num_proc=num_workers, **_OPTIONS)
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
    code = f"from corpus_builder_ways import run_alone; run_alone({name!r}, {str(text.folder)!r}, {num_workers})"
    (text.folder / "config.json").write_text(text.config.model_dump_json())
    paths = [str(Path(__file__).parent), *sys.path]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", code]
    peak = 0
    with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
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
