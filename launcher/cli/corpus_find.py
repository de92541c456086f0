"""`electra-dist corpus find`: the rows of a corpus that contain a text, and the steps in which a run reads them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from electra_dist.analysis.text_search import FoundRow, rows_with_tokens
from electra_dist.config import Config
from electra_dist.data.corpus_manifest import CorpusManifest, read_manifest
from electra_dist.data.phases.run_corpora import CorpusPhase, RunCorpora, open_run_corpora
from electra_dist.errors import UserError
from electra_dist.run.folder import open_run
from electra_dist.run.metrics_summary import newest_metrics
from electra_dist.store.interface import Store
from electra_dist.store.open_store import open_store
from electra_dist.tokenizer import Vocabulary, WordPieceTokenizer
from launcher.cli.console import open_console, print_json
from launcher.cli.options import AsJson

_PART = 16  # tokens of a longer text that a row must contain, unless --least is given
_MAX_SHOWN = 50  # rows that the table lists
# Modules that import torch are imported in the functions that use them, as in launcher/cli/corpus.py.


class RowUse(NamedTuple):
    """A use of a row by a run."""

    epoch: int
    step: int  # number of the step, from 0
    is_skipped: bool  # the step is one of those that make no update
    is_done: bool  # the run has passed the step


def find(
    text: Annotated[str, typer.Argument(help="the text; line breaks separate sentences")],
    corpus: Annotated[str | None, typer.Option(help="folder or s3:// prefix of the corpus; default: of RUN")] = None,
    run: Annotated[Path | None, typer.Option(help="run folder; also print the steps that read the rows")] = None,
    least: Annotated[
        int | None,
        typer.Option(min=1, help=f"consecutive tokens that a row must contain; default: all, at most {_PART}"),
    ] = None,
    endpoint_url: Annotated[str | None, typer.Option(help="URL of the S3 endpoint; default: AWS")] = None,
    as_json: AsJson = False,
) -> None:
    """Find the rows of a corpus that contain TEXT and, for a run, the steps that have read them or will read them.

    All shards are read once. Exit codes: 0 found or not, 78 wrong arguments or a damaged corpus.
    """
    config = open_run(run) if run else None
    corpora = _open(corpus, config, endpoint_url)
    store = corpora.store
    manifest = corpora.manifest
    tokens = _tokens_of_text(text, store, manifest)
    num_least = min(least or _PART, len(tokens))
    special_ids = {manifest.tokenizer.special[token] for token in ("[CLS]", "[SEP]", "[PAD]")}
    found = list(rows_with_tokens(_shards(store, manifest), tokens, special_ids, num_least))
    uses = _uses(found, corpora, config, run) if config is not None and run is not None else None
    if as_json:
        print_json(_json_tree(manifest, tokens, found, uses))
    else:
        _print_result(manifest, tokens, found, uses)


def _open(corpus: str | None, config: Config | None, endpoint_url: str | None) -> RunCorpora:
    """Open a corpus or, without one, all corpora of a run. Their shards are then listed as those of one corpus.

    Args:
        corpus: folder or s3:// prefix; None: the corpora of the run.
        config: config of the run; None without a run.
        endpoint_url: URL of the S3 endpoint; None: that of the run or, without a run, AWS.

    Raises:
        UserError: neither a corpus nor a run is given, or one corpus of a run that reads several.
    """
    if corpus is None and config is None:
        raise UserError("--corpus: give the folder of a corpus, or --run RUN for the corpus of a run")
    if config is not None:
        data = config.data
        data = data.model_copy(update={"endpoint_url": endpoint_url or data.endpoint_url})
        if corpus is None:
            return open_run_corpora(data)
        if data.phases:
            raise UserError(
                "--corpus: the run reads several corpora (data.phases); leave --corpus out to search all of them, or "
                "leave --run out to search one"
            )
        endpoint_url = data.endpoint_url
    assert corpus is not None
    store = open_store(corpus, endpoint_url)
    manifest = read_manifest(store, "--corpus")
    return RunCorpora(phases=(CorpusPhase(from_step=0, url=corpus, store=store, manifest=manifest),))


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


def _shards(store: Store, manifest: CorpusManifest) -> Iterator[tuple[int, Any]]:
    """Yield the index and the rows of each shard; a shard on S3 is downloaded to a temporary file first."""
    from electra_dist.data.shard import Shard

    with tempfile.TemporaryDirectory(prefix="electra-find-") as folder:
        entries = track(manifest.shards, "searching", console=Console(stderr=True), transient=True)
        for index, entry in enumerate(entries):
            path = store.local_path(entry.name)
            if path is None:
                path = Path(folder) / "shard.tar"
                store.fetch(entry.name, path, must_exist=True)
            shard = Shard(path, manifest.seq_len, manifest.numpy_dtype)
            try:
                yield index, shard.rows(np.arange(shard.num_rows))
            finally:
                shard.close()


def _uses(found: list[FoundRow], corpora: RunCorpora, config: Config, run: Path) -> list[list[RowUse]]:
    """Return for each row the steps of the run that use it, in order, up to the last step of the run.

    Args:
        found: the rows.
        corpora: the corpora of the run, in which the rows were found.
        config: config of the run.
        run: the run folder, whose records say how far the run is and which steps it skips.
    """
    if not found:
        return []
    from electra_dist.data.row_positions import uses_of_rows
    from electra_dist.train.skip_list_file import SkipList

    global_batch = config.train.global_batch
    order = corpora.row_order(config.seed, config.data.shuffle_window_shards, global_batch)
    skipped = SkipList(run, config.train.skip_steps).steps
    steps_done = max((record["step"] for record in newest_metrics(run).values()), default=0)
    shards = np.array([row.shard for row in found])
    rows = np.array([row.row for row in found])
    uses_of_run = []
    for positions in uses_of_rows(order, shards, rows, config.train.num_steps * global_batch):
        steps = [(use.epoch, use.position // global_batch) for use in positions]
        uses_of_run.append([RowUse(epoch, step, step in skipped, step < steps_done) for epoch, step in steps])
    return uses_of_run


def _json_tree(
    manifest: CorpusManifest, tokens: list[int], found: list[FoundRow], uses: list[list[RowUse]] | None
) -> dict[str, Any]:
    """Return the result as a JSON object; `uses` of a row is null without a run."""
    rows = []
    for place, row in enumerate(found):
        row_uses = [use._asdict() for use in uses[place]] if uses is not None else None
        name = manifest.shards[row.shard].name
        rows.append({"shard": name, "row": row.row, "tokens": row.num_tokens, "uses": row_uses})
    return {"corpus": manifest.fingerprint, "tokens": len(tokens), "rows": rows}


def _print_result(
    manifest: CorpusManifest, tokens: list[int], found: list[FoundRow], uses: list[list[RowUse]] | None
) -> None:
    """Print the rows, and the steps that use them if there is a run."""
    out = open_console()
    if not found:
        out.print(f"no row of {manifest.num_rows:,} contains the text ({len(tokens)} tokens)")
        return
    table = Table("shard", "row", "tokens of the text")
    if uses is not None:
        table.add_column("steps that use the row")
    for place, row in enumerate(found[:_MAX_SHOWN]):
        cells = [manifest.shards[row.shard].name, str(row.row), f"{row.num_tokens} of {len(tokens)}"]
        if uses is not None:
            cells.append("; ".join(_use_text(use) for use in uses[place]) or "none")
        table.add_row(*cells)
    out.print(table)
    if len(found) > _MAX_SHOWN:
        out.print(f"and {len(found) - _MAX_SHOWN:,} more rows; --json lists all")


def _use_text(use: RowUse) -> str:
    """Return a use of a row for people, such as "12 (epoch 0, read)"."""
    state = "read" if use.is_done else "to come"
    if use.is_skipped:
        state = "skipped"
    return f"{use.step} (epoch {use.epoch}, {state})"
