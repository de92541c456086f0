"""Commands `electra-dist corpus build`, `merge`, `info`, `index` and `stats`.

A corpus is a folder or S3 prefix with rows of token ids, which are split into tar files (shards).
"""

from __future__ import annotations

import os
import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from electra_dist.console import Console
from electra_dist.errors import UserError
from electra_launcher.cli.command_output import open_console, resumable, tracked
from electra_launcher.cli.options import Corpus, EndpointUrl

if TYPE_CHECKING:  # Each command imports what it needs, so that its --help answers at once.
    from electra_dist.config import Config
    from electra_dist.corpus.build_report import BuildReport
    from electra_dist.corpus.builder.build_corpus import Part
    from electra_dist.corpus.builder.build_request import BuildRequest
    from electra_dist.corpus.builder.join_parts import JoinedCorpus
    from electra_dist.corpus.inputs.find_inputs import InputFile

_KEPT = "inputs that were read and shards that were written are kept"  # of a build that is interrupted
_DEFAULT_STATS = Path("corpus_stats.html")

Inputs = Annotated[
    list[str],
    typer.Option(
        "--input",
        help="file, folder, URL (s3://, hf://datasets/ORG/NAME, https:// ...) or brace pattern (shard-{000..099}.tar) "
        "of text; may be repeated: .txt .md .json .jsonl .csv .tsv .wet .tar (also with .gz .bz2 .xz .zst), .parquet, "
        ".zip",
    ),
]
ConfigFile = Annotated[
    Path,
    typer.Option(
        "--config", help="YAML of the run (`electra-dist init` writes one); data.seq_len, corpus.* and seed are used"
    ),
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="override a key of the config, for example corpus.packing=none")
]
TextField = Annotated[
    str,
    typer.Option(
        help="JSON field, column of a table, or ending of members of a tar or zip, that holds the text in all inputs; "
        "where it differs between them, `corpus prepare` takes a text_field for each source"
    ),
]


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
    part: Annotated[
        str | None,
        typer.Option(
            help="build one of several parts, such as 2/4, on any machine that shares OUTPUT; all parts have the same "
            "other options, and `corpus merge OUTPUT` joins them; default: the whole corpus"
        ),
    ] = None,
) -> None:
    """Build a corpus (rows of token ids in WebDataset shards) from text files.

    A build that was interrupted is resumed; a finished corpus is left unchanged.
    """
    from electra_dist.config.load import load_config
    from electra_dist.corpus.inputs.find_inputs import num_with_content, refuse_output_among_inputs, search_inputs

    settings = load_config(config, overrides or ())
    refuse_output_among_inputs(output, inputs)
    files, skipped = search_inputs(inputs, settings.data.endpoint_url)
    if vocab is not None and any(_is_same_file(file, vocab) for file in files):
        raise UserError(f"--vocab {vocab} is one of the inputs and would be read as text; move it out of --input")

    # Only now, because these modules take seconds, and a wrong path should be named at once.
    from electra_dist.corpus.build_console import BuildConsole, plural
    from electra_dist.corpus.build_report import find_preparations
    from electra_dist.corpus.builder.build_corpus import build_corpus, parse_part
    from electra_dist.corpus.builder.build_request import BuildRequest
    from electra_dist.store.open_store import open_store
    from electra_dist.tokenizer import VOCAB_FILE
    from electra_launcher.cli.corpus.vocab import find_vocabulary

    chosen_part = parse_part(part) if part else None
    console = open_console(soft_wrap=False)
    total_bytes = sum(file.size for file in files)
    size_text = f"input: {plural(num_with_content(files), 'file')}, {total_bytes / 1e6:,.1f} MB"
    left_out = skipped.summary_of_skipped()
    console.print(f"{size_text}; left out: {left_out}" if left_out else size_text, soft_wrap=True)
    if part and vocab is None and not open_store(output, settings.data.endpoint_url).exists(VOCAB_FILE):
        raise UserError(
            f"--part {part}: {output} has no vocab.txt, and each part would train one; train it once with "
            "`electra-dist corpus vocab`, and give it to every part with --vocab"
        )
    vocabulary = find_vocabulary(vocab, files, settings, output, text_field, console)
    if vocabulary.size > settings.model.vocab_size:
        raise UserError(
            f"{vocab or output}: the vocabulary has {vocabulary.size} entries, more than model.vocab_size "
            f"({settings.model.vocab_size}); set model.vocab_size to {vocabulary.size}, or give another --vocab"
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
        prepared=find_preparations(inputs, settings.data.endpoint_url),
    )
    if chosen_part is not None:
        _build_part(request, chosen_part, console)
        return
    with resumable(_KEPT):
        result = build_corpus(request, BuildConsole(console))
    _print_result(output, result, console)
    if vocab is None:
        console.print(f"vocabulary {output.rstrip('/')}/{VOCAB_FILE}", soft_wrap=True)
    console.print(f"next: {_train_command(config, settings, output, result)}", soft_wrap=True)


def _is_same_file(file: InputFile, path: Path) -> bool:
    return file.location.endswith(path.name) and Path(file.location).resolve() == path.resolve()


def _build_part(request: BuildRequest, part: Part, console: Console) -> None:
    """Build one of several parts of a corpus, and print how to join them."""
    from electra_dist.corpus.build_console import BuildConsole
    from electra_dist.corpus.builder.build_corpus import build_part
    from electra_dist.corpus.builder.join_parts import take_joined

    output = request.output
    with resumable(_KEPT):
        resumed_shards = build_part(request, part, BuildConsole(console))
    if resumed_shards is None:
        take_joined(output, request.endpoint_url)
        console.print(f"{output}: already built, nothing to do", soft_wrap=True)
        return
    console.print(
        f"{output}: part {part.label} is finished; when all parts are, run `electra-dist corpus merge "
        f"{shlex.quote(output)}`",
        soft_wrap=True,
    )


def merge(
    corpus: Annotated[str, typer.Argument(help="the --output of the parts")], endpoint_url: EndpointUrl = None
) -> None:
    """Join the parts of a corpus that `corpus build --part` has built; no shard is rewritten.

    The corpus, with its fingerprint, is the same for any number of parts. A part that is missing is reported.
    """
    from electra_dist.corpus.builder.build_records import BuildRecords
    from electra_dist.data.manifest import MANIFEST_KEY
    from electra_dist.store.open_store import open_store

    store = open_store(corpus, endpoint_url)
    is_merged = store.exists(MANIFEST_KEY)
    if not is_merged:
        BuildRecords(store).parameters()
    # Only now, because it imports torch, and a wrong path should be named at once.
    from electra_dist.corpus.builder.join_parts import join_parts, take_joined

    result = take_joined(corpus, endpoint_url) if is_merged else join_parts(corpus, endpoint_url)
    _print_result(corpus, result, open_console(soft_wrap=False))


def _train_command(config: Path, settings: Config, output: str, result: JoinedCorpus) -> str:
    """Return the command that trains the run of a config on a corpus that was built."""
    from electra_dist.data.manifest import heldout_of

    command = ["electra-dist", "train", str(config)]
    if settings.data.corpus.rstrip("/") != output.rstrip("/"):
        command += ["--set", f"data.corpus={output}"]
    if settings.data.heldout == heldout_of(settings.data.corpus) and result.heldout is None:
        command += ["--set", "data.heldout=null"]
    return shlex.join(command)


def _print_result(output: str, result: JoinedCorpus, console: Console) -> None:
    """Print counts, build report and fingerprint of the corpus at `output`, and whether an earlier call built it."""
    from electra_dist.corpus.build_console import plural, summary

    manifest = result.manifest
    heldout_totals = result.heldout.totals if result.heldout else None
    console.print(summary(manifest.totals, heldout_totals, manifest.seq_len))
    _print_report(result.report, console)
    console.print(f"{output}: {_outcome(result)}; {plural(len(manifest.shards), 'shard')}", soft_wrap=True)
    console.print(f"fingerprint {manifest.fingerprint}", soft_wrap=True)


def _outcome(result: JoinedCorpus) -> str:
    if result.was_finished:
        return "already built, nothing to do"
    if result.resumed_shards:
        number = "1 shard was" if result.resumed_shards == 1 else f"{result.resumed_shards:,} shards were"
        return f"built ({number} finished before)"
    return "built"


def _print_report(report: BuildReport | None, console: Console) -> None:
    """Print two tables (what the build read and left out; the figures of each source) and hints on what to change."""
    from electra_dist.corpus.build_console import input_table, length_line, remarks, source_table
    from electra_dist.corpus.build_report import remarks_on_unknown_tokens, unknown_tokens_of_report

    if report is None:
        console.print("no report of the inputs: the corpus was indexed")
        return
    console.print(input_table(report))
    console.print(source_table(report))
    console.print(length_line(report), soft_wrap=True)
    unknown = unknown_tokens_of_report(report)
    for line in [*remarks(report), *remarks_on_unknown_tokens(unknown, 1.0, "corpus.max_unk_rate", "sources")]:
        console.print(line, soft_wrap=True)


def info(
    corpus: Corpus,
    endpoint_url: EndpointUrl = None,
) -> None:
    """Show the size of a finished corpus, and what its build has read and left out (build.json).

    Exit code 78: the held-out corpus or a shard is missing; `verify --bytes CORPUS` reads every byte.
    """
    from electra_dist.corpus.build_console import plural, summary
    from electra_dist.corpus.build_report import read_report
    from electra_dist.data.manifest import check_files, heldout_of, read_manifest
    from electra_dist.errors import StoreMissing
    from electra_dist.store.open_store import open_store

    store = open_store(corpus, endpoint_url)
    manifest = read_manifest(store)
    console = open_console(soft_wrap=False)
    heldout_fault = None
    if "documents_in" in manifest.totals:  # an indexed corpus has no counts of documents
        heldout_totals = None
        if manifest.totals["documents_heldout"]:
            try:
                heldout_totals = read_manifest(open_store(heldout_of(corpus), endpoint_url)).totals
            except StoreMissing as error:
                heldout_fault = error
        console.print(summary(manifest.totals, heldout_totals, manifest.seq_len))
    _print_report(read_report(store), console)
    console.print(
        f"{corpus}: {plural(len(manifest.shards), 'shard')}, {manifest.num_rows:,} rows of {manifest.seq_len}, "
        f"{manifest.num_tokens:,} tokens, vocabulary of {manifest.tokenizer.vocab_size}",
        soft_wrap=True,
    )
    console.print(f"fingerprint {manifest.fingerprint}", soft_wrap=True)
    check_files(store, manifest)
    if heldout_fault is not None:
        raise heldout_fault


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
    from electra_dist.store.open_store import open_store
    from electra_dist.tokenizer import Vocabulary

    store, vocabulary = open_store(corpus, endpoint_url), Vocabulary.read(vocab)

    from electra_dist.corpus.build_console import plural
    from electra_dist.corpus.index_shards import index_corpus

    manifest = index_corpus(store, vocabulary, lowercase=not cased)
    console = open_console()
    console.print(
        f"{corpus}: {plural(len(manifest.shards), 'shard')}, {manifest.num_rows:,} rows of {manifest.seq_len}, "
        f"{manifest.num_tokens:,} tokens"
    )
    console.print(f"fingerprint {manifest.fingerprint}")


def stats(
    corpus: Corpus,
    output: Annotated[Path, typer.Option(help="HTML file to write")] = _DEFAULT_STATS,
    endpoint_url: EndpointUrl = None,
) -> None:
    """Write one HTML page about a corpus: sources, licences, lengths, padding, [UNK], left-out text, samples.

    All shards are read once. The page needs no other file and no network. Exit codes: 0 the page was written, 78 the
    corpus is missing or damaged.
    """
    from electra_dist.data.manifest import read_manifest
    from electra_dist.store.open_store import open_store

    store = open_store(corpus, endpoint_url)
    read_manifest(store)
    # Only now, because the module imports matplotlib and torch, and a wrong path should be named at once.
    from electra_dist.report.corpus_page import write_stats_page

    name = corpus.rstrip("/").rpartition("/")[2]
    path = write_stats_page(store, name, output, partial(tracked, activity="reading"))
    open_console().print(str(path))
