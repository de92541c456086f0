"""Show the report of a corpus build: tables of inputs and sources, and lines about what a user may want to change."""

from __future__ import annotations

from rich.table import Table

from electra_dist.corpus.inputs.skipped_inputs import SKIP_REASONS
from electra_dist.corpus.report.build_report import BuildReport

_NAMES_SHOWN = 10
# Reasons whose names are printed, because each may be a mistake.
_NAMED_REASONS = ("broken_link", "empty_file", "no_text_column")


def input_table(report: BuildReport) -> Table:
    """Return a table of the input files that were read and of all that was left out, by the ending of the names."""
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
    """Return a table of the documents and tokens of each source, and of all sources together."""
    table = Table(title="Sources", title_justify="left")
    table.add_column("source", overflow="fold")
    for heading in ("documents", "left out", "tokens", "share", "tokens a document", "[UNK]"):
        table.add_column(heading, justify="right")
    table.add_column("licence", overflow="fold")
    all_tokens = max(report.text.tokens, 1)
    for source, counts in report.sources.items():
        table.add_row(
            source,
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
    counts documents in bins between powers of two.
    """
    limits = []
    for share in (0.1, 0.5, 0.9):
        num_documents = 0
        for power, count in report.document_lengths.items():
            num_documents += count
            if num_documents >= share * report.text.documents:
                limits.append(f"{100 * share:.0f} % have fewer than {2 * int(power):,} tokens")
                break
    return f"documents by length: {', '.join(limits)}"


def remarks(report: BuildReport) -> list[str]:
    """Return one line for each finding that a user may want to correct; [] if there is none.

    Findings are broken links, empty files and tables without the text column, each with the first ten names, and bytes
    that are not UTF-8.
    """
    lines = []
    for reason in _NAMED_REASONS:
        names = report.skipped_names.get(reason, [])
        if names:
            number = sum(report.inputs_skipped[reason].values())
            shown = ", ".join(names[:_NAMES_SHOWN])
            more = f" and {number - _NAMES_SHOWN:,} more" if number > _NAMES_SHOWN else ""
            lines.append(f"left out, {SKIP_REASONS[reason]}: {shown}{more}")
    undecodable = report.undecodable
    if undecodable.documents and undecodable.policy == "skip":
        lost_bytes = report.documents_skipped["undecodable"].bytes
        lines.append(
            f"left out {plural(undecodable.documents, 'document')} of {lost_bytes:,} bytes for "
            f"{plural(undecodable.bytes, 'byte')} that are not UTF-8; set corpus.undecodable: replace to keep them"
        )
    elif undecodable.documents:
        lines.append(
            f"replaced {plural(undecodable.bytes, 'byte')} that are not UTF-8 in "
            f"{plural(undecodable.documents, 'document')}; set corpus.undecodable: skip to leave such documents out"
        )
    return lines


def plural(number: int, noun: str) -> str:
    """Return a number with its noun: "1 file", "1,024 files"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
