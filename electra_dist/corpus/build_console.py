"""Show the progress of a corpus build as a bar or as lines of text, and its result as a table."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from electra_dist.corpus.text_decoding import SKIPPED_KINDS

_LINE_EVERY_S = 10.0


class BuildConsole:
    """Display of the progress of a corpus build: a bar on a terminal, otherwise a line of text every ten seconds.

    Use it as a context manager, which starts and stops the bar.
    """

    def __init__(self, total_bytes: int, console: Console | None = None) -> None:
        """Prepare the display; nothing is printed yet.

        Args:
            total_bytes: size of all input files, as they are on disk; bytes read divided by this size is the progress.
            console: where to print; the default is stdout.
        """
        self._console = console or Console()
        self._total_bytes = max(total_bytes, 1)
        self._resumed_bytes = 0  # input bytes of the shards that an earlier build finished
        self._documents = 0  # of this build
        self._tokens = 0
        self._started = time.monotonic()
        self._last_line = self._started  # when the last line of progress was printed
        self._bar: Progress | None = None  # None if the console is no terminal

    def __enter__(self) -> BuildConsole:
        """Start the progress bar if the console is a terminal."""
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("corpus"),
                BarColumn(),
                DownloadColumn(),
                TextColumn("{task.fields[counts]}"),  # the text that `update` passes as `counts`
                TimeRemainingColumn(),
                console=self._console,
            )
            self._bar.start()
            self._task = self._bar.add_task("corpus", total=self._total_bytes, counts="")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: object) -> None:
        """Stop the progress bar; an exception of the block is not suppressed."""
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        """Print a line; on a terminal it appears above the progress bar."""
        self._console.print(text, highlight=False, soft_wrap=True)

    def resume_at(self, bytes_done: int) -> None:
        """Begin to measure the speed at this position of the input. Called at most once, and only in a resumed build.

        A resumed build first reads the input of the shards that an earlier build finished. It makes no rows from it,
        which is faster than building. The caller calls this when that input has been read, so that the speed and the
        remaining time are computed from the bytes that follow.

        Args:
            bytes_done: input bytes read so far, all of which belong to finished shards.
        """
        self._resumed_bytes = bytes_done
        self._started = time.monotonic()

    def update(self, bytes_done: int, num_documents: int, num_tokens: int) -> None:
        """Show the progress after the rows of another chunk (a group of consecutive documents) have been built.

        On a terminal the bar is updated; otherwise a line is printed, at most every ten seconds.

        Args:
            bytes_done: input bytes read since the first file, those of finished shards included.
            num_documents: documents of this chunk; they are added to the count.
            num_tokens: text tokens of this chunk; they are added to the count.
        """
        self._documents += num_documents
        self._tokens += num_tokens
        now = time.monotonic()
        elapsed_s = max(now - self._started, 1e-9)  # not 0, because it is a divisor
        k_tokens_per_s = self._tokens / elapsed_s / 1e3
        counts = f"{self._documents:,} documents, {self._tokens / 1e6:,.1f} M tokens, {k_tokens_per_s:,.0f} k tokens/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=bytes_done, counts=counts)
        elif now - self._last_line >= _LINE_EVERY_S:
            self._last_line = now
            # The time that is left is estimated from the speed since the build began or resumed.
            bytes_since_start = max(bytes_done - self._resumed_bytes, 1)
            remaining_s = elapsed_s * (self._total_bytes - bytes_done) / bytes_since_start
            percent = 100 * bytes_done / self._total_bytes
            self.say(f"corpus: {percent:.0f} % of the input read, {counts}, {remaining_s:.0f} s left")


def summary(totals: Mapping[str, Any], heldout: Mapping[str, Any] | None, seq_len: int) -> Table:
    """Return the table that a build prints at its end: documents by outcome, then text, tokens, rows and padding.

    The outcomes are used, held out, and each kind of skipped document that occurred.

    Args:
        totals: counts of the training corpus, the key `totals` of its corpus.json.
        heldout: the same counts of the held-out corpus; None if there is none.
        seq_len: ids of a row, from which the share of padding is computed.
    """
    table = Table(title=f"Corpus, rows of {seq_len}", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("documents in", f"{totals['documents_in']:,}")
    table.add_row("  used", f"{totals['documents_used']:,}")
    table.add_row("  held out", f"{totals['documents_heldout']:,}")
    for kind, count in totals["documents_skipped"].items():
        if count:
            table.add_row(f"  skipped: {kind} ({SKIPPED_KINDS[kind]})", f"{count:,}")
    table.add_section()
    _add_text_rows(table, "", totals, seq_len)
    if heldout is not None:
        _add_text_rows(table, "held-out ", heldout, seq_len)
    return table


def _add_text_rows(table: Table, prefix: str, totals: Mapping[str, Any], seq_len: int) -> None:
    """Add the size of one corpus to the table: its text, tokens, examples, rows and share of padding.

    An example is [CLS] A [SEP] B [SEP]; a row has `seq_len` ids and holds one example or several. The share of padding
    is the share of a row's ids that are [PAD].

    Args:
        table: the table, of two columns.
        prefix: begins the label of each added row, for example "held-out ".
        totals: counts of the corpus, the key `totals` of its corpus.json.
        seq_len: ids of a row.
    """
    num_places = max(totals["rows"] * seq_len, 1)  # tokens that the rows have room for
    padding = 1 - totals["tokens"] / num_places
    table.add_row(f"{prefix}text, MB", f"{totals['text_bytes'] / 1e6:,.1f}")
    table.add_row(f"{prefix}tokens of text", f"{totals['text_tokens']:,}")
    table.add_row(f"{prefix}tokens with [CLS] and [SEP]", f"{totals['tokens']:,}")
    table.add_row(f"{prefix}examples", f"{totals['examples']:,}")
    table.add_row(f"{prefix}rows", f"{totals['rows']:,}")
    table.add_row(f"{prefix}padding", f"{100 * padding:.2f} %")
