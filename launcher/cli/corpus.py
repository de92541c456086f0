"""Commands `electra-dist corpus build`, `info`, `vocab`, `index` and `python-docs`; `prepare` is in a file of its own.

A corpus is a folder or S3 prefix with rows of token ids, which are split into tar files (shards). Modules that import
torch are imported only in the command that uses them, because every worker process of a build imports this file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from electra_dist.config import Config
from electra_dist.config_file import load_config
from electra_dist.corpus.build_console import BuildConsole, summary
from electra_dist.corpus.python_docs import write_python_docs
from electra_dist.corpus.report.build_report import BuildReport, read_report
from electra_dist.corpus.report.report_tables import input_table, length_line, plural, remarks, source_table
from electra_dist.corpus.text_decoding import SkippedDocument, Undecodable, decode
from electra_dist.corpus.text_readers import DocumentStream, InputFile, find_inputs, search_inputs
from electra_dist.corpus.vocab import train_vocabulary
from electra_dist.errors import UserError
from electra_dist.store.atomic_files import replacing
from electra_dist.store.open_store import open_store
from electra_dist.tokenizer import VOCAB_FILE, Vocabulary
from launcher.cli.console import open_console
from launcher.cli.corpus_prepare import prepare

if TYPE_CHECKING:  # This module imports torch, which only the command `build` needs.
    from electra_dist.corpus.build_corpus import BuildResult

app = typer.Typer(
    help="Turn text into a corpus: rows of token ids in WebDataset shards.", no_args_is_help=True, add_completion=False
)
app.command()(prepare)

Inputs = Annotated[
    list[str],
    typer.Option(
        "--input",
        help="file, folder, s3:// URL or brace pattern (shard-{000..099}.tar) of text; may be repeated: .txt .md "
        ".json .jsonl .csv .tsv .wet .tar (also with .gz .bz2 .xz .zst), .parquet, .zip",
    ),
]
ConfigFile = Annotated[
    Path, typer.Option("--config", help="YAML of the run; data.seq_len, corpus.* and seed are used")
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="override a key of the config, for example corpus.packing=none")
]
TextField = Annotated[
    str,
    typer.Option(help="JSON field, column of a table, or ending of members of a tar or zip, that holds the text"),
]
EndpointUrl = Annotated[str | None, typer.Option(help="URL of the S3 endpoint; default: AWS")]


@app.command()
def build(
    inputs: Inputs,
    output: Annotated[str, typer.Option(help="folder or s3://bucket/prefix of the corpus")],
    config: ConfigFile,
    overrides: Overrides = None,
    vocab: Annotated[
        Path | None,
        typer.Option(help="vocab.txt; default: the one in OUTPUT, or a new one of model.vocab_size from the input"),
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="worker processes; default: one per usable core")] = None,
    text_field: TextField = "text",
) -> None:
    """Build a corpus (rows of token ids in WebDataset shards) from text files.

    A build that was interrupted is resumed; a finished corpus is left unchanged.
    """
    from electra_dist.corpus.build_corpus import build_corpus
    from electra_dist.corpus.build_request import BuildRequest

    settings = load_config(config, overrides or ())
    _refuse_output_among_inputs(inputs, output)
    files, skipped = search_inputs(inputs, settings.data.endpoint_url)
    console = open_console(soft_wrap=False)
    total_bytes = sum(file.size for file in files)
    size_text = f"input: {plural(len(files), 'file')}, {total_bytes / 1e6:,.1f} MB"
    left_out = skipped.summary()
    console.print(f"{size_text}; left out: {left_out}" if left_out else size_text, soft_wrap=True, markup=False)
    vocabulary = _find_vocabulary(vocab, files, settings, output, text_field, console)
    if vocabulary.size != settings.model.vocab_size:
        raise UserError(
            f"{vocab or output}: the vocabulary has {vocabulary.size} entries but model.vocab_size is "
            f"{settings.model.vocab_size}; set model.vocab_size to {vocabulary.size}, or give another --vocab"
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
        skipped_inputs=skipped,
    )
    result = build_corpus(request, BuildConsole(total_bytes, console))
    manifest = result.manifest
    heldout_totals = result.heldout.totals if result.heldout else None
    console.print(summary(manifest.totals, heldout_totals, request.seq_len))
    _print_report(result.report, console)
    console.print(f"{output}: {_outcome(result)}; {len(manifest.shards)} shards", soft_wrap=True)
    console.print(f"fingerprint {manifest.fingerprint}", soft_wrap=True)


def _outcome(result: BuildResult) -> str:
    """Return what a build has done: "built", "already built, nothing to do", or "built (...)" for a resumed build."""
    if result.was_there:
        return "already built, nothing to do"
    if result.resumed_shards:
        return f"built ({result.resumed_shards} shards were finished before)"
    return "built"


def _print_report(report: BuildReport | None, console: Console) -> None:
    """Print what a build has read and left out, each source, and what a user may want to change.

    Args:
        report: the report of the build; None if an earlier version built the corpus, for which one line is printed.
        console: where to print.
    """
    if report is None:
        console.print("no report of the inputs: the corpus was indexed, or built before builds wrote build.json")
        return
    console.print(input_table(report))
    console.print(source_table(report))
    console.print(length_line(report), soft_wrap=True)
    for line in remarks(report):
        console.print(line, soft_wrap=True, markup=False)


@app.command()
def info(
    corpus: Annotated[str, typer.Argument(help="folder or s3:// prefix of a finished corpus")],
    endpoint_url: EndpointUrl = None,
) -> None:
    """Show the size of a finished corpus, and what its build has read and left out (build.json)."""
    from electra_dist.data.corpus_manifest import read_manifest

    store = open_store(corpus, endpoint_url)
    manifest = read_manifest(store)
    console = open_console(soft_wrap=False)
    if "documents_in" in manifest.totals:  # an indexed corpus has no counts of documents
        heldout_totals = None
        if manifest.totals["documents_heldout"]:
            heldout_totals = read_manifest(open_store(corpus.rstrip("/") + "/heldout", endpoint_url)).totals
        console.print(summary(manifest.totals, heldout_totals, manifest.seq_len))
    _print_report(read_report(store), console)
    console.print(
        f"{corpus}: {len(manifest.shards)} shards, {manifest.num_rows:,} rows of {manifest.seq_len}, "
        f"{manifest.num_tokens:,} tokens, vocabulary of {manifest.tokenizer.vocab_size}\n"
        f"fingerprint {manifest.fingerprint}",
        soft_wrap=True,
    )


@app.command("vocab")
def train_vocab(
    inputs: Inputs,
    output: Annotated[Path, typer.Option(help="vocab.txt to write; an existing file is replaced")],
    size: Annotated[int, typer.Option(min=1, help="entries wanted; a small text may give fewer")] = 30522,
    cased: Annotated[bool, typer.Option("--cased", help="keep upper case and accents; default: remove both")] = False,
    text_field: TextField = "text",
    endpoint_url: EndpointUrl = None,
) -> None:
    """Train a WordPiece vocabulary on text files; the same input always gives the same vocabulary."""
    vocabulary = _train(find_inputs(inputs, endpoint_url), size, not cased, text_field, "skip")
    with replacing(output) as out:
        out.write(vocabulary.text.encode())
    open_console().print(f"{output}: {vocabulary.size} entries, sha256 {vocabulary.sha256}", soft_wrap=True)


@app.command()
def index(
    corpus: Annotated[str, typer.Argument(help="folder or s3:// prefix with *.tar of *.rows.npy members")],
    vocab: Annotated[Path, typer.Option(help="vocab.txt whose line numbers are the ids in the rows")],
    cased: Annotated[
        bool, typer.Option("--cased", help="the text of the rows kept its upper case and accents")
    ] = False,
    endpoint_url: EndpointUrl = None,
) -> None:
    """Make a corpus of shards that another WebDataset writer made: check them, and write corpus.json and vocab.txt.

    Both files are written into the folder of the shards. Nothing is written if a shard is refused, or if the folder
    has a corpus.json already.
    """
    from electra_dist.corpus.index_shards import index_corpus

    manifest = index_corpus(open_store(corpus, endpoint_url), Vocabulary.read(vocab), lowercase=not cased)
    open_console().print(
        f"{corpus}: {len(manifest.shards)} shards, {manifest.num_rows:,} rows of {manifest.seq_len}, "
        f"{manifest.num_tokens:,} tokens\nfingerprint {manifest.fingerprint}",
        soft_wrap=True,
    )


@app.command("python-docs")
def python_docs(output: Annotated[Path, typer.Option(help="folder in which to write python_docs.txt")]) -> None:
    """Write the docstrings and help topics of this Python installation to a text file, as input for `corpus build`.

    It is a small English text that needs no download.
    """
    path, num_documents = write_python_docs(output)
    size_mb = path.stat().st_size / 1e6
    open_console().print(f"{path}: {num_documents:,} documents, {size_mb:.1f} MB", soft_wrap=True)


def _refuse_output_among_inputs(inputs: list[str], output: str) -> None:
    """Raise an error if the output folder is inside an input folder.

    A second build would then read the vocab.txt and the shards of the first one as input text.

    Args:
        inputs: files and folders with text, local paths or s3:// URLs.
        output: local path or s3:// URL of the corpus.

    Raises:
        UserError: the output is an input, or below one.
    """
    for path in inputs:
        if "://" in output:
            is_inside = f"{output.rstrip('/')}/".startswith(f"{path.rstrip('/')}/")
        else:
            is_inside = "://" not in path and Path(output).resolve().is_relative_to(Path(path).resolve())
        if is_inside:
            raise UserError(f"--output {output} is inside the input {path}; choose a folder outside of {path}")


def _find_vocabulary(
    path: Path | None, files: list[InputFile], settings: Config, output: str, text_field: str, console: Console
) -> Vocabulary:
    """Return the vocabulary of a build: the one at `path`, or the one in the output, or a new one.

    Without `path`, the vocab.txt in the output is used, which an earlier build has written there. If there is none, a
    vocabulary is trained on `files`.

    Args:
        path: vocab.txt that the user gave with --vocab; None if there is none.
        files: text on which a new vocabulary is trained.
        settings: config with the size of the vocabulary and the S3 endpoint.
        output: local path or s3:// URL of the corpus.
        text_field: field of a JSON line, or parquet column, that holds the text.
        console: where to announce that a vocabulary is trained, which takes a while.

    Raises:
        UserError: the vocabulary cannot be read or trained.
    """
    if path is not None:
        return Vocabulary.read(path)
    store = open_store(output, settings.data.endpoint_url)
    if store.exists(VOCAB_FILE):
        return Vocabulary(store.read(VOCAB_FILE).decode(), f"{output}/{VOCAB_FILE}")
    console.print(f"training a vocabulary of {settings.model.vocab_size} entries")
    corpus = settings.corpus
    return _train(files, settings.model.vocab_size, corpus.lowercase, text_field, corpus.undecodable)


def _train(
    files: list[InputFile], size: int, lowercase: bool, text_field: str, undecodable: Undecodable
) -> Vocabulary:
    """Train a WordPiece vocabulary on text files; the same text and the same arguments give the same vocabulary.

    Args:
        files: text files; documents that a build would skip, such as empty ones, are left out.
        size: number of entries wanted; a small text may give fewer.
        lowercase: convert the text to lower case and remove accents first.
        text_field: field of a JSON line, or parquet column, that holds the text.
        undecodable: whether a document with bytes that are not UTF-8 is left out ("skip") or used without them.
    """

    def texts() -> Iterator[str]:
        """Yield the text of each document in `files`; skip documents that cannot be used, such as empty ones.

        Each call reads the files from the start, because the training goes through the text twice.
        """
        for document in DocumentStream(files, text_field):
            try:
                yield decode(document, text_field, undecodable)
            except SkippedDocument:
                continue

    return train_vocabulary(texts, size, lowercase)
