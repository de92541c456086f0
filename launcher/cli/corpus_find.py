"""`electra-dist corpus find`: rows of a corpus with a text, a source or a document, and the steps that read them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import pyarrow
import typer
from rich.console import Console
from rich.progress import track

from electra_dist.analysis.corpus_rows import rows_of_shards
from electra_dist.analysis.text_search import rows_with_tokens
from electra_dist.config import Config
from electra_dist.corpus.origins.document_search import (
    RowOfDocument,
    documents_of_rows,
    rows_of_document,
    rows_of_source,
    sources_of_table,
)
from electra_dist.corpus.origins.origin_files import Origins, open_origins
from electra_dist.corpus.origins.search_result import Hit, RowUse, SearchResult, json_tree, print_result
from electra_dist.data.corpus_manifest import MANIFEST_KEY, CorpusManifest, read_manifest
from electra_dist.errors import UserError
from electra_dist.run.folder import is_run_folder, open_run
from electra_dist.run.metrics_summary import newest_metrics
from electra_dist.store.interface import Store
from electra_dist.store.open_store import open_store
from electra_dist.tokenizer import Vocabulary, WordPieceTokenizer
from launcher.cli.console import open_console, print_json
from launcher.cli.options import AsJson

_PART = 16  # tokens of a longer text that a row must contain, unless --least is given
_USAGE = 'give CORPUS [RUN] "TEXT", or CORPUS [RUN] with --source NAME or --document ID'
# Modules that import torch are imported in the functions that use them, as in launcher/cli/corpus.py.


class Query(NamedTuple):
    """What is searched for: one of a text, a source and a document."""

    corpus: str | None  # None: the corpus of the run
    run: Path | None
    text: str | None
    source: str | None
    document: str | None


def find(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CORPUS] [RUN] [TEXT]",
            help="folder or s3:// prefix of the corpus; run folder, to print the steps that read the rows; text, in "
            "which line breaks separate sentences",
        ),
    ] = None,
    source: Annotated[
        str | None, typer.Option(help="find the rows with documents of this source (`corpus info` lists sources)")
    ] = None,
    document: Annotated[
        str | None, typer.Option(help="find the rows of this document: its id, or FILE#NUMBER (counted from 0)")
    ] = None,
    corpus: Annotated[str | None, typer.Option(help="CORPUS; default: that of RUN")] = None,
    run: Annotated[Path | None, typer.Option(help="RUN")] = None,
    least: Annotated[
        int | None,
        typer.Option(min=1, help=f"consecutive tokens that a row must contain; default: all, at most {_PART}"),
    ] = None,
    endpoint_url: Annotated[str | None, typer.Option(help="URL of the S3 endpoint; default: AWS")] = None,
    as_json: AsJson = False,
) -> None:
    """Find the rows with TEXT, a source or a document and, for a run, the steps that have read them or will.

    TEXT is searched in all shards; sources and documents are looked up in the side files that `corpus build` writes
    (corpus.origins). Exit codes: 0 found or not, 78 wrong arguments, no side files, or a damaged corpus.
    """
    query = _parse_query(words or [], source, document, corpus, run)
    config = open_run(query.run) if query.run else None
    location = query.corpus
    if config is not None:
        location = location or config.data.corpus
        endpoint_url = endpoint_url or config.data.endpoint_url
    if location is None:
        raise UserError(f"CORPUS is missing; {_USAGE}")
    store = open_store(location, endpoint_url)
    manifest = read_manifest(store)
    origins = open_origins(store, manifest)
    if query.text is not None:
        tokens = _tokens_of_text(query.text, store, manifest)
        hits = _rows_with_text(store, manifest, origins, tokens, min(least or _PART, len(tokens)))
        result = SearchResult(manifest, hits, f"the text ({len(tokens)} tokens)", num_tokens=len(tokens))
    else:
        result = _search_origins(query, location, endpoint_url, store, manifest, origins)
    if config is not None and query.run is not None:
        result = result._replace(
            uses=_uses(result.hits, manifest, config, query.run), num_steps=config.train.num_steps
        )
    if as_json:
        print_json(json_tree(result))
    else:
        print_result(result, open_console(markup=False))


def _parse_query(
    words: list[str], source: str | None, document: str | None, corpus: str | None, run: Path | None
) -> Query:
    """Return what the command line asks for.

    The last word is the text unless a source or a document is given; words before it are the corpus and the run. A run
    folder may stand alone, because its config names the corpus.

    Raises:
        UserError: there are too few or too many words, or both a source and a document.
    """
    if source is not None and document is not None:
        raise UserError("--source and --document: give one of the two")
    places = list(words)
    text = None
    if source is None and document is None:
        if not places:
            raise UserError(f"nothing to find; {_USAGE}")
        text = places.pop()
    if places and corpus is None:
        corpus = places.pop(0)
    if places and run is None:
        run = Path(places.pop(0))
    if places:
        raise UserError(f"{places[0]}: one argument too many; {_USAGE} (a text of several words in quotes)")
    if run is None and corpus is not None and "://" not in corpus and is_run_folder(Path(corpus)):
        return Query(None, Path(corpus), text, source, document)
    return Query(corpus, run, text, source, document)


def _rows_with_text(
    store: Store, manifest: CorpusManifest, origins: Origins | None, tokens: list[int], least: int
) -> list[Hit]:
    """Return the rows that contain at least `least` consecutive tokens, with the documents of each."""
    special_ids = {manifest.tokenizer.special[token] for token in ("[CLS]", "[SEP]", "[PAD]")}
    blocks = rows_of_shards(store, manifest, _progress(manifest))
    found = list(rows_with_tokens(blocks, tokens, special_ids, least))
    if origins is None:
        return [Hit(row.shard, row.row, row.num_tokens, None) for row in found]
    rows_of_shard: dict[int, list[int]] = defaultdict(list)
    for row in found:
        rows_of_shard[row.shard].append(row.row)
    documents = {
        shard: documents_of_rows(origins.table(manifest.shards[shard].name), rows)
        for shard, rows in rows_of_shard.items()
    }
    return [Hit(row.shard, row.row, row.num_tokens, documents[row.shard][row.row]) for row in found]


def _tokens_of_text(text: str, store: Store, manifest: CorpusManifest) -> list[int]:
    """Return the ids of a text in the vocabulary of a corpus, line by line as the builder tokenizes.

    Raises:
        UserError: the text has no token.
    """
    name = manifest.tokenizer.vocab_file
    vocabulary = Vocabulary(store.read(name).decode(), f"{store.url}/{name}")
    tokenizer = WordPieceTokenizer(vocabulary, manifest.tokenizer.lowercase)
    tokens = [token for line in tokenizer.encode(text.splitlines()) for token in line]
    if not tokens:
        raise UserError("TEXT: has no token; give at least one word")
    return tokens


def _search_origins(
    query: Query,
    location: str,
    endpoint_url: str | None,
    store: Store,
    manifest: CorpusManifest,
    origins: Origins | None,
) -> SearchResult:
    """Return the rows with a source or a document, by the side files of the corpus and of its held-out corpus.

    Raises:
        UserError: the corpus has no side files.
    """
    if origins is None:
        raise UserError(
            f"{store.url}: has no side files (origins.json), by which --source and --document search; build the "
            "corpus again with corpus.origins=true into another folder, or search for a TEXT"
        )
    hits = [Hit(row.shard, row.row, None, row.documents) for row in _rows_of(query, manifest, origins)]
    heldout = open_store(location.rstrip("/") + "/heldout", endpoint_url)
    num_heldout = 0
    if heldout.exists(MANIFEST_KEY):
        heldout_manifest = read_manifest(heldout)
        heldout_origins = open_origins(heldout, heldout_manifest)
        if heldout_origins is not None:
            num_heldout = sum(1 for _ in _rows_of(query, heldout_manifest, heldout_origins))
    sources: set[str] = set()
    if query.source is not None and not hits:
        for _, table in _tables(manifest, origins):
            sources |= sources_of_table(table)
    sought = f"the source {query.source}" if query.source is not None else f"the document {query.document}"
    return SearchResult(manifest, hits, sought, heldout_rows=num_heldout, sources=sorted(sources))


def _rows_of(query: Query, manifest: CorpusManifest, origins: Origins) -> Iterator[RowOfDocument]:
    """Yield the rows with the source or the document of a query, in the order of the corpus."""
    tables = _tables(manifest, origins)
    if query.source is not None:
        return rows_of_source(tables, query.source)
    assert query.document is not None
    return rows_of_document(tables, query.document)


def _tables(manifest: CorpusManifest, origins: Origins) -> Iterator[tuple[int, pyarrow.Table]]:
    """Yield the index of each shard with its side file, and show the progress."""
    for index in _progress(manifest):
        yield index, origins.table(manifest.shards[index].name)


def _progress(manifest: CorpusManifest) -> Iterator[int]:
    """Yield the index of each shard, and show a progress bar on stderr."""
    shards = range(len(manifest.shards))
    yield from track(shards, "searching", console=Console(stderr=True), transient=True)


def _uses(hits: list[Hit], manifest: CorpusManifest, config: Config, run: Path) -> list[list[RowUse]]:
    """Return for each row the steps of the run that use it, in order, up to the last step of the run.

    Args:
        hits: the rows.
        manifest: the corpus.
        config: config of the run.
        run: the run folder, whose records say how far the run is and which steps it skips.
    """
    uses: list[list[RowUse]] = [[] for _ in hits]
    if not hits:
        return uses
    from electra_dist.data.row_order import RowOrder
    from electra_dist.data.row_positions import positions_of_rows
    from electra_dist.train.skip_list_file import SkipList

    order = RowOrder([shard.rows for shard in manifest.shards], config.seed, config.data.shuffle_window_shards)
    skipped = SkipList(run, config.train.skip_steps).steps
    steps_done = max((record["step"] for record in newest_metrics(run).values()), default=0)
    shards = np.array([hit.shard for hit in hits])
    rows = np.array([hit.row for hit in hits])
    num_positions = config.train.num_steps * config.train.global_batch
    for epoch in range(-(-num_positions // order.rows_per_epoch)):
        for place, position in enumerate(positions_of_rows(order, epoch, shards, rows).tolist()):
            step = position // config.train.global_batch
            if step < config.train.num_steps:
                uses[place].append(RowUse(epoch, step, step in skipped, step < steps_done))
    return uses
