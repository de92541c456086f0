"""`electra-dist corpus ...`: build, vocab, index, python-docs.

What needs torch (keyed randomness) is imported by the command that uses it: worker processes load this file again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from electra_dist.config import Config
from electra_dist.config_file import load_config
from electra_dist.corpus.console import BuildConsole, summary
from electra_dist.corpus.documents import SkippedDocument, decode
from electra_dist.corpus.python_docs import write_python_docs
from electra_dist.corpus.readers import DocumentStream, InputFile, find_inputs
from electra_dist.corpus.vocab import train_vocabulary
from electra_dist.errors import UserError
from electra_dist.store.files import replacing
from electra_dist.store.open import open_store
from electra_dist.tokenizer import VOCAB_FILE, Vocabulary

app = typer.Typer(help="Text to rows to shards.", no_args_is_help=True, add_completion=False)

Inputs = Annotated[
    list[str],
    typer.Option("--input", help="file or folder; repeat it: .txt .jsonl .wet (also .gz .zst .xz), .parquet"),
]
ConfigFile = Annotated[Path, typer.Option("--config", help="YAML of the run; its data.seq_len, corpus, seed count")]
Overrides = Annotated[list[str] | None, typer.Option("--set", help="override, such as corpus.packing=none")]
TextField = Annotated[str, typer.Option(help="field of a JSON line, or parquet column, that holds the text")]


@app.command()
def build(
    inputs: Inputs,
    output: Annotated[str, typer.Option(help="folder or s3://bucket/prefix of the corpus")],
    config: ConfigFile,
    overrides: Overrides = None,
    vocab: Annotated[
        Path | None, typer.Option(help="vocab.txt; without it one of model.vocab_size is trained on the input")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="processes; default: all cores")] = None,
    text_field: TextField = "text",
) -> None:
    """Build a corpus, or go on with one that was interrupted."""
    from electra_dist.corpus.build import build_corpus
    from electra_dist.corpus.request import BuildRequest

    settings = load_config(config, overrides or ())
    files = find_inputs(inputs)
    _refuse_output_among_inputs(inputs, output)
    console = Console(highlight=False)
    vocabulary = _vocabulary(vocab, files, settings, output, text_field, console)
    if vocabulary.size != settings.model.vocab_size:
        raise UserError(
            f"{vocab or output}: the vocabulary has {vocabulary.size} entries but model.vocab_size is "
            f"{settings.model.vocab_size}; make them equal"
        )
    request = BuildRequest(
        inputs=files,
        vocabulary=vocabulary,
        output=output,
        seq_len=settings.data.seq_len,
        seed=settings.seed,
        corpus=settings.corpus,
        text_field=text_field,
        num_workers=workers or len(os.sched_getaffinity(0)),
        endpoint_url=settings.data.endpoint_url,
    )
    result = build_corpus(request, BuildConsole(sum(file.size for file in files), console))
    heldout = result.heldout.totals if result.heldout else None
    console.print(summary(result.manifest.totals, heldout, request.seq_len))
    state = "already built, nothing to do" if result.was_there else "built"
    if result.resumed_shards and not result.was_there:
        state += f" ({result.resumed_shards} shards were finished before)"
    console.print(f"{output}: {state}; {len(result.manifest.shards)} shards", soft_wrap=True)
    console.print(f"fingerprint {result.manifest.fingerprint}", soft_wrap=True)


@app.command("vocab")
def train_vocab(
    inputs: Inputs,
    output: Annotated[Path, typer.Option(help="vocab.txt to write")],
    size: Annotated[int, typer.Option(min=1, help="entries")] = 30522,
    cased: Annotated[bool, typer.Option("--cased", help="keep case and accents")] = False,
    text_field: TextField = "text",
) -> None:
    """Train a WordPiece vocabulary."""
    vocabulary = _train(find_inputs(inputs), size, not cased, text_field)
    with replacing(output) as out:
        out.write(vocabulary.text.encode())
    Console(highlight=False).print(f"{output}: {vocabulary.size} entries, sha256 {vocabulary.sha256}", soft_wrap=True)


@app.command()
def index(
    corpus: Annotated[str, typer.Argument(help="folder or s3:// prefix with *.tar of *.rows.npy members")],
    vocab: Annotated[Path, typer.Option(help="vocab.txt that the ids mean")],
    cased: Annotated[bool, typer.Option("--cased", help="the text kept case and accents")] = False,
    endpoint_url: Annotated[str | None, typer.Option(help="S3 endpoint other than AWS's")] = None,
) -> None:
    """Write corpus.json for shards that another WebDataset writer made."""
    from electra_dist.corpus.index import index_corpus

    manifest = index_corpus(open_store(corpus, endpoint_url), Vocabulary.read(vocab), lowercase=not cased)
    Console(highlight=False).print(
        f"{corpus}: {len(manifest.shards)} shards, {manifest.num_rows:,} rows of {manifest.seq_len}, "
        f"{manifest.num_tokens:,} tokens\nfingerprint {manifest.fingerprint}",
        soft_wrap=True,
    )


@app.command("python-docs")
def python_docs(output: Annotated[Path, typer.Option(help="folder for python_docs.txt")]) -> None:
    """Write the prose that this Python installation carries: a small corpus that needs no network."""
    path, num_documents = write_python_docs(output)
    size_mb = path.stat().st_size / 1e6
    Console(highlight=False).print(f"{path}: {num_documents:,} documents, {size_mb:.1f} MB", soft_wrap=True)


def _refuse_output_among_inputs(inputs: list[str], output: str) -> None:
    """The corpus's own vocab.txt would be read as text the next time."""
    for given in inputs:
        if "://" not in output and Path(output).resolve().is_relative_to(Path(given).resolve()):
            raise UserError(f"--output {output}: lies in the input {given}; choose a folder outside")


def _vocabulary(
    path: Path | None, files: list[InputFile], settings: Config, output: str, text_field: str, console: Console
) -> Vocabulary:
    """The one that was named, else the one already in the output, else a new one."""
    if path is not None:
        return Vocabulary.read(path)
    store = open_store(output, settings.data.endpoint_url)
    if store.exists(VOCAB_FILE):
        return Vocabulary(store.read(VOCAB_FILE).decode(), f"{output}/{VOCAB_FILE}")
    console.print(f"training a vocabulary of {settings.model.vocab_size} entries")
    return _train(files, settings.model.vocab_size, settings.corpus.lowercase, text_field)


def _train(files: list[InputFile], size: int, lowercase: bool, text_field: str) -> Vocabulary:
    def texts() -> Iterator[str]:
        for document in DocumentStream(files, text_field):
            try:
                yield decode(document, text_field)
            except SkippedDocument:
                continue

    return train_vocabulary(texts, size, lowercase)
