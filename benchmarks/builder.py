"""Text to shards: tokens a second and core of the corpus builder, against the tokenizer it is made of.

    python benchmarks/builder.py                           # 10 MB of prose that the Python installation carries
    python benchmarks/builder.py --text DIR --vocab vocab.txt

In turn, with 1 and 2 workers, on the same documents and vocabulary:

    ours          build_corpus, what `electra-dist corpus build` runs: read, tokenise, make examples, pack, check,
                  write shards with digests; the start of worker processes included
    tokenizers    encode_batch_fast on the same lines in memory and nothing else (2: its own threads)
    datasets      Hugging Face datasets: map(tokenise), map(group into rows of 512), as its run_mlm example does

All must find the same number of text tokens. The rate of ours over that of tokenizers is to be 0.85 or more.
Where it stops: local files; the interpreter's start and the training of a vocabulary are not in it.
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
    installed,
    parser,
    print_table,
    ratio,
    summary,
    told,
)
from rich.console import Console

from electra_dist.config import Config
from electra_dist.config_file import load_config
from electra_dist.corpus.build import build_corpus
from electra_dist.corpus.console import BuildConsole
from electra_dist.corpus.documents import decode
from electra_dist.corpus.python_docs import write_python_docs
from electra_dist.corpus.readers import DocumentStream, find_inputs
from electra_dist.corpus.request import BuildRequest
from electra_dist.corpus.vocab import train_vocabulary
from electra_dist.tokenizer import MAX_WORD_CHARS, Vocabulary

LEAST = 0.85  # of tokenizers' own rate
LINES_A_CALL = 2048
WORKERS = (1, 2)


class Text:
    """Documents, their vocabulary and the folder that they are in."""

    def __init__(self, folder: Path, config: Config, vocab: Path | None) -> None:
        self.files, self.config = find_inputs([folder]), config
        self.documents = [decode(raw) for raw in DocumentStream(self.files, "text")]
        lowercase, size = config.corpus.lowercase, config.model.vocab_size
        if vocab:
            self.vocabulary = Vocabulary.read(vocab)
        else:
            self.vocabulary = train_vocabulary(lambda: iter(self.documents), size, lowercase)
        self.lines = list(itertools.chain.from_iterable(text.splitlines() for text in self.documents))
        self.num_bytes = sum(len(text.encode()) for text in self.documents)


def build(text: Text, folder: Path, num_workers: int) -> int:
    """Our build; text tokens, those held out with them."""
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
    with open(os.devnull, "w") as nowhere:
        console = BuildConsole(text.num_bytes, Console(file=nowhere))
        built = build_corpus(request, console)
    return sum(manifest.totals["text_tokens"] for manifest in (built.manifest, built.heldout) if manifest)


def encoder(text: Text) -> tokenizers.Tokenizer:
    """BERT's WordPiece, as ours is set up."""
    model = tokenizers.models.WordPiece(
        text.vocabulary.ids, unk_token="[UNK]", max_input_chars_per_word=MAX_WORD_CHARS
    )
    found = tokenizers.Tokenizer(model)
    found.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=text.config.corpus.lowercase)
    found.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    return found


def encode(tokenizer: tokenizers.Tokenizer, lines: list[str], num_threads: int) -> list[tokenizers.Encoding]:
    """The library's own batch call."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if num_threads > 1 else "false"
    found = []
    for start in range(0, len(lines), LINES_A_CALL):
        found += tokenizer.encode_batch_fast(lines[start : start + LINES_A_CALL], add_special_tokens=False)
    return found


def tokenise_and_group(text: Text, tokenizer: tokenizers.Tokenizer, num_processes: int) -> int:
    """Hugging Face datasets' way; text tokens."""
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
    """Seconds of every way at each number of workers."""
    tokenizer = encoder(text)
    num_tokens = build(text, folder / "corpus", 1)
    counts = {"tokenizers": sum(len(encoding) for encoding in encode(tokenizer, text.lines, 1))}
    with_datasets = importlib.util.find_spec("datasets") is not None
    if with_datasets:
        counts["datasets"] = tokenise_and_group(text, tokenizer, 1)
    if set(counts.values()) != {num_tokens}:
        sys.exit(f"ours finds {num_tokens} text tokens, others {counts}: not the same work")
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
    lines = []
    for workers, ways in found["workers"].items():
        rows = [
            [name, f"{way['tokens_per_core_s'] / 1e6:.3f}", told(way["rate_of_ours"])] for name, way in ways.items()
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
    """Some hundred documents for the smoke run."""
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdefgh"), rng.integers(2, 7))) for _ in range(400)]
    documents = ["\n".join(" ".join(rng.choice(words, 20)) for _ in range(8)) for _ in range(150)]
    (folder / "words.txt").write_text("\n\n".join(documents) + "\n")


def main(argv: Sequence[str] | None = None) -> Json:
    parse = parser(__doc__, rounds=3)
    parse.add_argument("--text", type=Path, help="folder of documents (as of `corpus build --input`)")
    parse.add_argument("--vocab", type=Path, help="vocab.txt; default: one is trained on the text")
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
    return finish("builder", arguments, argv, lines, packages=installed("tokenizers", "datasets"), **found)


if __name__ == "__main__":
    del __file__  # else each worker would import this script, and torch with it, which `electra-dist` spares them
    main()
