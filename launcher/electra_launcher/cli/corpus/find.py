"""Command `electra-dist corpus find`: rows with a text, a source or a document, and the steps that read these rows."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from electra_dist.errors import UserError
from electra_launcher.cli.command_output import open_console, print_json, tracked
from electra_launcher.cli.options import AsJson, EndpointUrl

if TYPE_CHECKING:  # Each command imports what it needs, so that its --help answers at once.
    from electra_dist.config import Config
    from electra_dist.corpus.evaluation_texts import EvaluationTexts
    from electra_dist.corpus.find.row_search import FoundRows, Query, RowSearch
    from electra_dist.data.corpora import Corpora

_DEFAULT_LEAST = 16  # consecutive tokens of a longer text that a row must contain, unless --least is given
_USAGE = 'give CORPUS [RUN] "TEXT", or CORPUS [RUN] with --source NAME, --document ID or --file FILE'


class Request(NamedTuple):
    """Arguments of the command: where to search, and what to search for."""

    corpus: str | None  # folder or s3:// prefix; None: the corpora of the run
    run: Path | None  # run folder; None: no steps are printed
    query: Query  # text, source or document


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
    file: Annotated[
        list[Path] | None,
        typer.Option(
            help="find all texts of this .txt, .tsv, .csv, .jsonl, .json or .parquet file, whatever their column, or "
            "of such files in this folder, for example BLiMP or a test set; may be repeated"
        ),
    ] = None,
    min_words: Annotated[
        int, typer.Option(min=1, help="with --file: words that a text must have; shorter ones are not looked for")
    ] = 8,
    corpus: Annotated[str | None, typer.Option(help="the same as CORPUS; default: the corpora of RUN")] = None,
    run: Annotated[Path | None, typer.Option(help="the same as RUN")] = None,
    least: Annotated[
        int | None,
        typer.Option(
            min=1, help=f"consecutive tokens of TEXT that a row must contain; default: all, at most {_DEFAULT_LEAST}"
        ),
    ] = None,
    endpoint_url: EndpointUrl = None,
    as_json: AsJson = False,
) -> None:
    """Find the rows that hold TEXT, a source, a document or texts of files and, for a run, the steps that use them.

    Texts are searched for in all shards. Sources and documents are looked up in the origin files that `corpus build`
    writes (corpus.origins). Exit codes: 0 the search is complete, also if no row was found; 78 wrong arguments, no
    origin files, or a damaged corpus.
    """
    import numpy as np

    from electra_dist.corpus.evaluation_texts import read_evaluation_texts
    from electra_dist.corpus.find.row_search import Query, RowSearch, rows_held_out
    from electra_dist.corpus.find.search_result import (
        MAX_SHOWN,
        SearchResult,
        found_texts,
        json_tree,
        print_result,
        print_texts,
        tree_of_texts,
        uses_of_found_rows,
    )
    from electra_dist.run.folder import open_run

    query = Query(source=source, document=document)
    corpus, run, query = _parse_request(words or [], query, corpus, run, has_files=bool(file))
    config = open_run(run) if run else None
    files_texts = read_evaluation_texts(file, min_words, "--file") if file else None
    corpora = _open(corpus, config, endpoint_url)
    search = RowSearch(query, corpora, partial(tracked, activity="searching"))
    if files_texts is not None:
        sought, forms = _with_tokens(files_texts, corpora)
        rows = search.rows_with_texts(forms, least or _DEFAULT_LEAST)
        texts = found_texts(sought, forms, rows, corpora, (config, run) if config and run else None)
        if as_json:
            print_json(tree_of_texts(texts, sought, corpora))
        else:
            print_texts(texts, sought, corpora, open_console())
        return
    found, num_tokens = _search(search, query, corpora, least)
    num_listed = len(found.rows) if as_json else min(len(found.rows), MAX_SHOWN)
    num_heldout = 0
    if not query.is_text:
        num_heldout = rows_held_out(query, corpora.phases[0].url, _endpoint_url(config, endpoint_url))
    sources: list[str] = []
    if query.source is not None and not len(found.rows):
        sources = search.sources()  # so that the user sees which names there are
    result = SearchResult(
        corpora=corpora,
        query=query,
        num_rows=len(found.rows),
        num_shards=len(np.unique(found.shards)),
        hits=search.hits(found, num_listed),
        num_tokens=num_tokens,
        heldout_rows=num_heldout,
        sources=sources,
    )
    if config is not None and run is not None:
        uses, step_counts = uses_of_found_rows(found, num_listed, corpora, config, run)
        result = result._replace(uses=uses, step_counts=step_counts, num_steps=config.train.num_steps)
    if as_json:
        print_json(json_tree(result))
    else:
        print_result(result, open_console())


def _search(search: RowSearch, query: Query, corpora: Corpora, least: int | None) -> tuple[FoundRows, int | None]:
    """Run the search; return the rows found and, for a text, how many tokens it has (else None)."""
    from electra_dist.corpus.find.row_search import tokens_of_texts

    if query.text is None:
        return search.rows_with_documents(), None
    [forms] = tokens_of_texts([query.text], corpora)
    if not forms:
        raise UserError(f"TEXT: {query.text} has no token; give at least one word")
    [found] = search.rows_with_texts([forms], least or _DEFAULT_LEAST)
    return found, max(map(len, forms))


def _with_tokens(texts: EvaluationTexts, corpora: Corpora) -> tuple[EvaluationTexts, list[list[list[int]]]]:
    """Return the texts that have a token in the corpora's vocabulary, and the forms of each: lists of token ids.

    A text has a form for each way to tokenize it, at the beginning of a document or within. Texts without a token are
    counted with those of too few words.
    """
    from electra_dist.corpus.find.row_search import tokens_of_texts

    forms = tokens_of_texts([text.text for text in texts.texts], corpora)
    kept = [(text, forms_of_text) for text, forms_of_text in zip(texts.texts, forms, strict=True) if forms_of_text]
    if not kept:
        raise UserError(f"--file: none of the {len(forms)} texts has a token of the corpus; name files with text")
    num_short = texts.num_short + len(forms) - len(kept)
    return texts._replace(texts=[text for text, _ in kept], num_short=num_short), [found for _, found in kept]


def _endpoint_url(config: Config | None, endpoint_url: str | None) -> str | None:
    return endpoint_url or (config.data.endpoint_url if config is not None else None)


def _open(corpus: str | None, config: Config | None, endpoint_url: str | None) -> Corpora:
    """Open the corpus at `corpus` or, if it is None, all corpora of the run."""
    from electra_dist.data.corpora import Corpora, open_corpora
    from electra_dist.data.manifest import read_manifest
    from electra_dist.store.open_store import open_store

    if config is not None and corpus is None:
        return open_corpora(config.data.model_copy(update={"endpoint_url": _endpoint_url(config, endpoint_url)}))
    if corpus is None:
        raise UserError(f"CORPUS is missing; {_USAGE}")
    if config is not None and config.data.phases:
        raise UserError(
            "CORPUS: the run reads several corpora (data.phases); leave CORPUS out to search all of them, or leave "
            "RUN out to search one"
        )
    store = open_store(corpus, _endpoint_url(config, endpoint_url))
    return Corpora.of(store, read_manifest(store, "CORPUS"), corpus)


def _is_corpus_or_run(word: str) -> bool:
    """Tell whether a word of the command line is the folder of a corpus or a run, and so no text to find."""
    from electra_dist.data.manifest import MANIFEST_KEY
    from electra_dist.run.folder import is_run_folder

    return os.path.isdir(word) and (is_run_folder(Path(word)) or Path(word, MANIFEST_KEY).exists())


def _parse_request(
    words: list[str], query: Query, corpus: str | None, run: Path | None, *, has_files: bool
) -> Request:
    """Decide which of the positional arguments `words` are CORPUS, RUN and TEXT, given the options of the command."""
    from electra_dist.run.folder import is_run_folder

    given = [("--source", query.source), ("--document", query.document), ("--file", has_files or None)]
    options = [name for name, value in given if value is not None]
    if len(options) > 1:
        raise UserError(f"{' and '.join(options)}: both are given; give one of them")
    remaining = list(words)
    if not options:
        if not remaining:
            raise UserError(f"nothing to find; {_USAGE}")
        if _is_corpus_or_run(remaining[-1]):
            raise UserError(f"TEXT is missing: {remaining[-1]} is the folder of a corpus or a run; {_USAGE}")
        if len(remaining) == 1 and corpus is None and "://" in remaining[0]:
            raise UserError(f"TEXT is missing after {remaining[0]}; {_USAGE}")
        query = query._replace(text=remaining.pop())
    if remaining and corpus is None:
        corpus = remaining.pop(0)
    if remaining and run is None:
        run = Path(remaining.pop(0))
    if remaining:
        raise UserError(f"{remaining[0]}: one argument too many; {_USAGE} (a text of several words in quotes)")
    if run is None and corpus is not None and "://" not in corpus and is_run_folder(Path(corpus)):
        return Request(None, Path(corpus), query)
    return Request(corpus, run, query)
