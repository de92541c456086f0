"""Show the progress of a corpus build as a bar or as lines of text; show its result and its report as tables."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from electra_dist.console import Console
from electra_dist.corpus.build_report import BuildReport, SkippedDocuments, remarks_on_shape
from electra_dist.corpus.counts import FIELDS_FOUND, SKIP_REASONS, line_on_inputs
from electra_dist.corpus.inputs.text_decoding import SKIPPED_KINDS

_LINE_EVERY_S = 10.0
# Reasons whose names are printed, because each may be a mistake.
_NAMED_REASONS = ("broken_link", "empty_file", "no_text_column")


class BuildConsole:
    """Display of the progress of a corpus build: a bar on a terminal, otherwise a line of text every ten seconds.

    A build has two stages: it reads the inputs, then turns the documents into rows. Use an instance as a context
    manager, which starts and stops the bar.
    """

    def __init__(self, console: Console | None = None) -> None:
        """Print to `console`, or to stdout if it is None; nothing is printed yet."""
        self._console = console or Console()
        self._bar: Progress | None = None  # None if the console is no terminal
        self.begin("", 0, 0)

    def __enter__(self) -> BuildConsole:
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(),
                TextColumn("{task.fields[counts]}"),  # the text that `_advance` passes as `counts`
                TimeRemainingColumn(),
                console=self._console,
            )
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        """Print a line; on a terminal it appears above the progress bar."""
        self._console.print(text, soft_wrap=True)

    def read(self, num_bytes: int, num_documents: int) -> None:
        """Count a group of input files as read, with its bytes on disk and its documents, and show the sums."""
        self._documents += num_documents
        self._advance(num_bytes, f"{self._documents:,} documents")

    def made_rows(self, num_bytes: int, num_documents: int, num_tokens: int) -> None:
        """Count documents that became rows, with their bytes before decoding and their tokens, and show the sums."""
        self._documents += num_documents
        self._tokens += num_tokens
        elapsed_s = max(time.monotonic() - self._started, 1e-9)  # not 0, because it is a divisor
        k_tokens_per_s = self._tokens / elapsed_s / 1e3
        counts = f"{self._documents:,} documents, {self._tokens / 1e6:,.1f} M tokens, {k_tokens_per_s:,.0f} k tokens/s"
        self._advance(num_bytes, counts)

    def begin(self, stage: str, total_bytes: int, done_bytes: int) -> None:
        """Begin the stage "reading" or "rows": set the counts and the clock to zero.

        `total_bytes` is the size of all input files on disk for "reading", and of all documents for "rows"; earlier
        calls of the build have done `done_bytes` of it.
        """
        self._stage = stage
        self._total_bytes = max(total_bytes, 1)
        self._resumed_bytes = done_bytes
        self._done_bytes = done_bytes
        self._documents = 0  # of this stage, without those of an earlier call
        self._tokens = 0
        self._started = time.monotonic()
        self._last_line = self._started  # when the last line of progress was printed
        if self._bar is not None:
            self._task = self._bar.add_task(stage, total=self._total_bytes, completed=done_bytes, counts="")

    def _advance(self, num_bytes: int, counts: str) -> None:
        self._done_bytes += num_bytes
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done_bytes, counts=counts)
        elif now - self._last_line >= _LINE_EVERY_S:
            self._last_line = now
            # The time that is left is estimated from the speed since this stage began.
            new_bytes = max(self._done_bytes - self._resumed_bytes, 1)
            remaining_s = (now - self._started) * (self._total_bytes - self._done_bytes) / new_bytes
            percent = 100 * self._done_bytes / self._total_bytes
            self.say(f"corpus, {self._stage}: {percent:.0f} %, {counts}, {remaining_s:.0f} s left")


def summary(totals: Mapping[str, Any], heldout: Mapping[str, Any] | None, seq_len: int) -> Table:
    """Return the table that a build prints at its end: documents by outcome, then text, tokens, rows and padding.

    `totals` is the field `totals` in corpus.json of the training corpus. `heldout` is this field of the held-out
    corpus; None if there is no held-out corpus.
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
    """Add six lines about a corpus to a table: MB of text, tokens, examples and rows, and the share of padding.

    `totals` is the field `totals` of its corpus.json. Each label begins with `prefix`, such as "held-out ".
    """
    num_places = max(totals["rows"] * seq_len, 1)  # tokens that the rows have room for
    padding = 1 - totals["tokens"] / num_places
    table.add_row(f"{prefix}text, MB", f"{totals['text_bytes'] / 1e6:,.1f}")
    table.add_row(f"{prefix}tokens of text", f"{totals['text_tokens']:,}")
    table.add_row(f"{prefix}tokens with [CLS] and [SEP]", f"{totals['tokens']:,}")
    table.add_row(f"{prefix}examples", f"{totals['examples']:,}")
    table.add_row(f"{prefix}rows", f"{totals['rows']:,}")
    table.add_row(f"{prefix}padding", f"{100 * padding:.2f} %")


def input_table(report: BuildReport) -> Table:
    """Return a table of the input files that were read, and of those left out with the reason, by file name ending."""
    table = Table(title="Inputs", title_justify="left", show_header=False)
    table.add_column(overflow="fold")
    table.add_column(justify="right")
    table.add_column(justify="right")
    for ending, counts in report.files_read.items():
        table.add_row(f"read: {ending}", plural(counts.files, "file"), f"{counts.bytes / 1e6:,.1f} MB")
    for ending, number in report.members_read.items():
        table.add_row(f"read in archives: {ending}", plural(number, "file"), "")
    table.add_section()
    for reason, numbers in report.inputs_skipped.items():
        for ending, number in numbers.items():
            table.add_row(f"left out: {ending} ({SKIP_REASONS[reason]})", f"{number:,}", "")
    return table


def source_table(report: BuildReport) -> Table:
    """Return a table of a corpus's sources, with a line for all: documents, tokens, share of [UNK] and licence."""
    table = Table(title="Sources", title_justify="left")
    table.add_column("source", overflow="fold")
    for heading in ("files", "documents", "left out", "tokens", "share", "tokens a document", "[UNK]"):
        table.add_column(heading, justify="right")
    table.add_column("licence", overflow="fold")
    all_tokens = max(report.text.tokens, 1)
    for source, counts in report.sources.items():
        table.add_row(
            source,
            f"{counts.files:,}",
            f"{counts.documents:,}",
            f"{counts.documents_skipped:,}",
            f"{counts.tokens:,}",
            f"{100 * counts.tokens / all_tokens:.1f} %",
            f"{counts.tokens_per_document:,.0f}",
            f"{100 * counts.unk_rate:.2f} %",
            counts.licence or "not stated",
        )
    table.add_section()
    text = report.text
    num_skipped = sum(skipped.documents for skipped in report.documents_skipped.values())
    table.add_row(
        "all",
        f"{sum(source.files for source in report.sources.values()):,}",
        f"{text.documents:,}",
        f"{num_skipped:,}",
        f"{text.tokens:,}",
        "100.0 %",
        f"{text.tokens_per_document:,.0f}",
        f"{100 * text.unk_rate:.2f} %",
    )
    return table


def length_line(report: BuildReport) -> str:
    """Return a line that describes how long documents are, such as "50 % have fewer than 512 tokens".

    The line gives such a limit for 10, 50 and 90 % of the documents. Each limit is a power of two, because the report
    counts documents in bins between powers of two. Where all three are equal, the line names that bin alone.
    """
    limits: dict[float, int] = {}
    for share in (0.1, 0.5, 0.9):
        num_documents = 0
        for power, count in report.document_lengths.items():
            num_documents += count
            if num_documents >= share * report.text.documents:
                limits[share] = 2 * int(power)
                break
    if len(set(limits.values())) == 1:
        return f"documents by length: most have {limits[0.5] // 2:,} to {limits[0.5] - 1:,} tokens"
    parts = [f"{100 * share:.0f} % have fewer than {limit:,} tokens" for share, limit in limits.items()]
    return f"documents by length: {', '.join(parts)}"


def remarks(report: BuildReport) -> list[str]:
    """Return a line for each finding of a build that a user may want to correct; [] if there is none.

    Findings are inputs and documents that were left out, bytes that are not UTF-8, sources that look like no text, and
    a corpus of which no document is held out.
    """
    lines = [
        line_on_inputs(reason, sum(report.inputs_skipped[reason].values()), report.skipped_names[reason])
        for reason in _NAMED_REASONS
        if report.skipped_names.get(reason)
    ]
    lines += [
        f"left out {plural(skipped.documents, 'document')}, {SKIPPED_KINDS[kind]}: {_worst_files(skipped)}"
        for kind, skipped in report.documents_skipped.items()
        if skipped.documents and kind != "undecodable"
    ]
    if report.other_fields:
        lines.append(
            f"{FIELDS_FOUND}: {', '.join(report.other_fields)}; all inputs of a build have one --text-field; if it "
            "differs between them, give each source its text_field in `electra-dist corpus prepare`, and build from "
            "its output"
        )
    if report.undecodable.documents:
        lines.append(_line_on_undecodable(report))
    lines += remarks_on_shape(report)
    if not report.documents_heldout:
        lines.append(
            "no document is held out, so a run has nothing to be evaluated on, unless data.heldout names another "
            "corpus; raise corpus.heldout_fraction (more for few documents), and build again into another folder, or "
            "train without evaluation: --set data.heldout=null"
        )
    return lines


def _line_on_undecodable(report: BuildReport) -> str:
    undecodable = report.undecodable
    documents = plural(undecodable.documents, "document")
    invalid = f"{plural(undecodable.bytes, 'byte')} that are not UTF-8"
    if undecodable.policy == "replace":
        return f"replaced {invalid} in {documents}; set corpus.undecodable: skip to leave such documents out"
    skipped = report.documents_skipped["undecodable"]
    return (
        f"left out {documents} of {skipped.bytes:,} bytes for {invalid}; set corpus.undecodable: replace to keep "
        f"them; in {_worst_files(skipped)}"
    )


def _worst_files(skipped: SkippedDocuments) -> str:
    """Name the files with most skipped documents: "in/a.jsonl 1,024, in/b.jsonl 1 and 3 files more"."""
    shown = ", ".join(f"{file} {number:,}" for file, number in skipped.worst_files.items())
    more = skipped.files - len(skipped.worst_files)
    return f"{shown} and {plural(more, 'file')} more" if more else shown


def plural(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless the number is 1: "1 file", "1,024 files"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
