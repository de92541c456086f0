"""What a user sees of a build: a progress bar on a terminal, elsewhere a line every ten seconds; then a table."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from electra_dist.corpus.documents import SKIPPED_KINDS

_LINE_EVERY_S = 10.0


class BuildConsole:
    """Shows how far a build is. Use as a context manager."""

    def __init__(self, total_bytes: int, console: Console | None = None) -> None:
        """`total_bytes`: size of all input files."""
        self._console = console or Console()
        self._total_bytes = max(total_bytes, 1)
        self._resumed_bytes = 0
        self._documents = 0
        self._tokens = 0
        self._started = self._last_line = time.monotonic()
        self._bar: Progress | None = None

    def __enter__(self) -> BuildConsole:
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("corpus"), BarColumn(), DownloadColumn(), TextColumn("{task.fields[counts]}"),
                TimeRemainingColumn(), console=self._console,
            )  # fmt: skip
            self._bar.start()
            self._task = self._bar.add_task("corpus", total=self._total_bytes, counts="")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: object) -> None:
        if self._bar:
            self._bar.stop()

    def say(self, text: str) -> None:
        """A line above the progress bar."""
        self._console.print(text, highlight=False, soft_wrap=True)

    def resume_at(self, bytes_done: int) -> None:
        """That many input bytes belong to shards that were finished before; the clock starts now."""
        self._resumed_bytes = bytes_done
        self._started = time.monotonic()

    def update(self, bytes_done: int, num_documents: int, num_tokens: int) -> None:
        """Add documents and tokens; `bytes_done` input bytes are read in all."""
        self._documents += num_documents
        self._tokens += num_tokens
        now = time.monotonic()
        elapsed = max(now - self._started, 1e-9)
        counts = f"{self._documents:,} documents, {self._tokens / 1e6:,.1f} M tokens, "
        counts += f"{self._tokens / elapsed / 1e3:,.0f} k tokens/s"
        if self._bar:
            self._bar.update(self._task, completed=bytes_done, counts=counts)
        elif now - self._last_line >= _LINE_EVERY_S:
            self._last_line = now
            left = elapsed * (self._total_bytes - bytes_done) / max(bytes_done - self._resumed_bytes, 1)
            self.say(f"corpus: {100 * bytes_done / self._total_bytes:.0f} % read, {counts}, {left:.0f} s left")


def summary(totals: Mapping[str, Any], heldout: Mapping[str, Any] | None, seq_len: int) -> Table:
    """The closing table of a build, from the totals of corpus.json and of the held-out corpus."""
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
    for name, part in (("", totals), ("held-out ", heldout)):
        if part is not None:
            padding = 1 - part["tokens"] / max(part["rows"] * seq_len, 1)
            table.add_row(f"{name}text, MB", f"{part['text_bytes'] / 1e6:,.1f}")
            table.add_row(f"{name}tokens of text", f"{part['text_tokens']:,}")
            table.add_row(f"{name}tokens with [CLS] and [SEP]", f"{part['tokens']:,}")
            table.add_row(f"{name}examples", f"{part['examples']:,}")
            table.add_row(f"{name}rows", f"{part['rows']:,}")
            table.add_row(f"{name}padding", f"{100 * padding:.2f} %")
    return table
