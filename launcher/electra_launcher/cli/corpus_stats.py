"""Command `electra-dist corpus stats`, which writes one HTML page about a corpus."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import track

from electra_dist.console import Console
from electra_dist.store.open_store import open_store
from electra_launcher.cli.console import open_console

_DEFAULT_OUTPUT = Path("corpus_stats.html")


def stats(
    corpus: Annotated[str, typer.Argument(help="folder or s3:// prefix of a finished corpus")],
    output: Annotated[Path, typer.Option(help="HTML file to write")] = _DEFAULT_OUTPUT,
    endpoint_url: Annotated[str | None, typer.Option(help="URL of the S3 endpoint; default: AWS")] = None,
) -> None:
    """Write one HTML page about a corpus: sources, licences, lengths, padding, [UNK], left-out text, samples.

    All shards are read once. The page needs no other file and no network. Exit codes: 0 the page was written, 78 the
    corpus is missing or damaged.
    """
    # The module imports matplotlib and torch, which take seconds and which `electra-dist --help` does not need.
    from electra_dist.corpus.stats.stats_page import write_stats_page

    def progress(shards: Iterable[int]) -> Iterable[int]:
        return track(list(shards), "reading", console=Console(stderr=True), transient=True)

    name = corpus.rstrip("/").rpartition("/")[2]
    path = write_stats_page(open_store(corpus, endpoint_url), name, output, progress)
    open_console().print(str(path))
