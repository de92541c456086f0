"""Write one page about a corpus: its sources, lengths, padding, what was left out, and samples of its text.

Guarantee: the page needs no other file and no network, and it is written atomically. A source is named by the last
folders of its path, as few as make the names differ; a document is named as the build recorded it. The page names no
user or host.

Limits: without build.json (the corpus was indexed), the page has no figures of sources
and documents. Without origin files, which record the documents of each row, it does not name the samples' documents.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from electra_dist.corpus.build_console import plural
from electra_dist.corpus.build_report import BuildReport, PreparedText, read_report
from electra_dist.corpus.counts import SKIP_REASONS
from electra_dist.corpus.inputs.text_decoding import SKIPPED_KINDS
from electra_dist.corpus.origins import open_origins
from electra_dist.corpus.stats.row_figures import NUM_BINS, RowFigures, RowSample, read_row_figures
from electra_dist.data.manifest import CorpusManifest, read_corpus_vocabulary, read_manifest
from electra_dist.escapes import html_text
from electra_dist.report.curves import SIZE_INCHES, svg_for_page
from electra_dist.report.overlay_page import shortest_endings
from electra_dist.report.pages import Tile, now, page, percent, table, tile_section, write_page
from electra_dist.report.plot_style import SERIES, svg_style
from electra_dist.run.number_formats import format_count
from electra_dist.store.interface import Store

_NOT_STATED = "not stated"
_MAX_TICKS = 9  # labels below the bars of a diagram, at most
_SAMPLE_CHARACTERS = 700  # characters of a sample example that are shown


def write_stats_page(
    store: Store, name: str, path: Path, progress: Callable[[Iterable[int]], Iterable[int]] = iter
) -> Path:
    """Write the HTML page about a corpus to `path`, create missing folders, and return `path`.
    `progress` wraps the indices of the shards, so that it can show a progress bar. Raises UserError if a file of
    the corpus is missing or damaged, or the page cannot be written.
    """
    manifest = read_manifest(store)
    vocabulary = read_corpus_vocabulary(store, manifest.tokenizer)
    report = read_report(store)
    figures = read_row_figures(store, manifest, vocabulary, open_origins(store, manifest), progress)
    text = stats_page(name, manifest, report, figures)
    write_page(path, text)
    return path


def stats_page(name: str, manifest: CorpusManifest, report: BuildReport | None, figures: RowFigures) -> str:
    """Return the HTML text of the page about a corpus. `report` is its build.json, or None if there is none."""
    title = html_text(name)
    short_names = _short_names(report)
    body = [
        f'<header><h1>Corpus {title}</h1><p style="overflow-wrap:anywhere">Fingerprint {manifest.fingerprint}. '
        f"This page was written {now()} UTC."
        "</p></header>\n",
        tile_section(_tiles(manifest, report, figures)),
    ]
    if report is None:
        body.append(
            '<p class="note">The corpus has no build.json: it was indexed. Figures of '
            "sources and documents are missing.</p>\n"
        )
    else:
        body.append(_sources(report, short_names))
    body.append(_record_sources(figures, report, short_names))
    body.append(_diagrams(manifest, report, figures))
    if report is not None:
        body += [_left_out(report), *(_preparation(text) for text in report.prepared.values())]
    body.append(_samples(figures.samples, short_names))
    return page(f"Corpus {title}", "".join(body))


def _tiles(manifest: CorpusManifest, report: BuildReport | None, figures: RowFigures) -> list[Tile]:
    num_positions = manifest.num_rows * manifest.seq_len
    num_examples = sum(number * rows for number, rows in figures.rows_by_examples.items())
    tiles = [
        ("Tokens", format_count(figures.tokens), "with [CLS] and [SEP], without [PAD]"),
        (
            "Rows",
            f"{manifest.num_rows:,}",
            f"of {manifest.seq_len} tokens, in {plural(len(manifest.shards), 'shard')}",
        ),
        ("Padding", f"{100 * (1 - figures.tokens / num_positions):.2f} %", "share of all positions in rows"),
        ("[UNK]", f"{100 * figures.unk_tokens / max(figures.tokens, 1):.3f} %", f"{figures.unk_tokens:,} tokens"),
        ("Examples", f"{num_examples:,}", f"{num_examples / manifest.num_rows:.2f} in a row"),
    ]
    if report is not None:
        num_left_out = sum(skipped.documents for skipped in report.documents_skipped.values())
        remark = f"{report.documents_heldout:,} held out, {num_left_out:,} left out"
        tiles.insert(1, ("Documents", f"{report.documents_used:,}", remark))
    return tiles


def _short_names(report: BuildReport | None) -> dict[str, str]:
    """Return source -> name on the page: as few of the last folders of the source's path as make the names differ."""
    if report is None or not report.sources:
        return {}
    endings = shortest_endings([source.split("/") for source in report.sources])
    return dict(zip(report.sources, endings, strict=True))


def _sources(report: BuildReport, short_names: Mapping[str, str]) -> str:
    rows = []
    for source, counts in report.sources.items():
        rows.append(
            [
                short_names[source],
                counts.licence or _NOT_STATED,
                f"{counts.documents:,}",
                f"{counts.documents_skipped:,}",
                f"{counts.tokens:,}",
                percent(counts.tokens / max(report.text.tokens, 1)),
                f"{counts.tokens_per_document:,.0f}",
                f"{100 * counts.unk_rate:.3f} %",
            ]
        )
    head = ["source", "licence", "documents", "left out", "tokens", "share", "tokens a document", "[UNK]"]
    note = "Documents that are used or held out, and their tokens of text. A document that is used twice counts twice."
    return f'<h2>Sources</h2>\n{table(rows, head)}<p class="note">{note}</p>\n'


def _record_sources(figures: RowFigures, report: BuildReport | None, short_names: Mapping[str, str]) -> str:
    """Return the table of tokens by the source in each document's record (`metadata.source`); "" if none has one.
    A licence is shown only for text that `corpus prepare` made.
    """
    prepared = {} if report is None else report.prepared
    rows = []
    by_name = sorted(figures.tokens_by_source.items(), key=lambda item: (item[0][0], item[0][1] or ""))
    for (source, record_source), tokens in by_name:
        if record_source is None:
            continue
        counts = prepared[source].sources.get(record_source) if source in prepared else None
        licence = _NOT_STATED if counts is None else counts.license
        share = percent(tokens / max(figures.tokens, 1))
        rows.append([record_source, licence, short_names.get(source, source), f"{tokens:,}", share])
    if not rows:
        return ""
    head = ["source in the record", "licence", "input", "tokens", "share"]
    note = "Training rows by the field metadata.source of their documents; tokens with [CLS] and [SEP]."
    return f'<h2>Sources in the records</h2>\n{table(rows, head)}<p class="note">{note}</p>\n'


def _diagrams(manifest: CorpusManifest, report: BuildReport | None, figures: RowFigures) -> str:
    seq_len = manifest.seq_len
    labels = [str(-(-number * (seq_len + 1) // NUM_BINS)) for number in range(NUM_BINS)]  # least length of each bin
    most_examples = max(figures.rows_by_examples)
    examples = range(1, most_examples + 1)
    diagrams = [
        _draw_bars("Rows by padding in tokens", labels, figures.rows_by_padding.tolist()),
        _draw_bars("Examples by length in tokens", labels, figures.examples_by_length.tolist()),
        _draw_bars(
            "Rows by number of examples",
            [str(number) for number in examples],
            [figures.rows_by_examples[number] for number in examples],
        ),
    ]
    if report is not None and report.document_lengths:
        lengths = report.document_lengths
        diagrams.insert(0, _draw_bars("Documents by length in tokens", list(lengths), list(lengths.values())))
    cards = "".join(f'<div class="card">{diagram}</div>\n' for diagram in diagrams)
    return f'<h2>Lengths and padding</h2>\n<section class="curves">\n{cards}</section>\n'


def _left_out(report: BuildReport) -> str:
    documents = [
        [SKIPPED_KINDS[kind], f"{skipped.documents:,}", f"{skipped.bytes:,}"]
        for kind, skipped in report.documents_skipped.items()
        if skipped.documents
    ]
    inputs = [
        [SKIP_REASONS[reason], ending, f"{number:,}"]
        for reason, numbers in report.inputs_skipped.items()
        for ending, number in numbers.items()
    ]
    if not documents and not inputs:
        return "<h2>Left out by the build</h2>\n<p>Nothing.</p>\n"
    tables = table(documents, ["documents with", "documents", "bytes"]) if documents else ""
    tables += table(inputs, ["inputs", "ending", "number"]) if inputs else ""
    return f'<h2>Left out by the build</h2>\n<section class="pair">\n{tables}</section>\n'


def _preparation(text: PreparedText) -> str:
    names = list(text.sources)
    kept = [
        [
            name,
            counts.license,
            f"{counts.documents_in:,}",
            f"{counts.documents_dropped:,}",
            f"{counts.documents_out:,}",
        ]
        for name, counts in text.sources.items()
    ]
    dropped = []
    for step, reasons in text.dropped.items():
        for reason, by_source in sorted(reasons.items(), key=lambda item: -_total(item[1])):
            numbers = [f"{by_source.get(name, 0):,}" for name in names]
            dropped.append([step, reason, f"{_total(by_source):,}", *numbers])
    tables = table(kept, ["source", "licence", "documents", "dropped", "kept"])
    if dropped:
        tables += table(dropped, ["step", "reason", "dropped", *names])
    return f"<h2>Dropped by the preparation</h2>\n{tables}"


def _total(numbers: Mapping[str, int]) -> int:
    return sum(numbers.values())


def _samples(samples: Sequence[RowSample], short_names: Mapping[str, str]) -> str:
    """Return the section with the text of the sample rows; each example has its document's name, if it is known."""
    paragraphs = ""
    for sample in samples:
        paragraphs += f"<p><b>{html_text(sample.shard)} row {sample.row}</b></p>\n"
        for number, text in enumerate(sample.texts):
            origin = ""
            if number < len(sample.documents):
                document = sample.documents[number]
                source = short_names.get(document.source, document.source)
                origin = f"<i>{html_text(source)}: {html_text(document.document)}</i><br>"
            shown = text if len(text) <= _SAMPLE_CHARACTERS else text[:_SAMPLE_CHARACTERS] + " ..."
            paragraphs += f"<p>{origin}{html_text(shown)}</p>\n"
    note = "Evenly spaced rows of the corpus, with the text that is left after tokenization."
    return f'<h2>Samples</h2>\n<div class="card samples">\n{paragraphs}</div>\n<p class="note">{note}</p>\n'


def _draw_bars(title: str, labels: Sequence[str], values: Sequence[int]) -> str:
    """Return a bar diagram as the text of an <svg> element; `title` must need no HTML escaping.
    If there are many bars, evenly spaced labels are shown, at most `_MAX_TICKS`.
    """
    with matplotlib.rc_context(svg_style() | {"svg.hashsalt": title}):
        figure = Figure(figsize=SIZE_INCHES, layout="constrained")
        axes = figure.add_subplot()
        axes.bar(range(len(values)), values, width=0.86, color=SERIES[0])
        axes.set_title(title, loc="left")
        bars_per_label = math.ceil(len(labels) / _MAX_TICKS)
        labelled_bars = range(0, len(labels), bars_per_label)
        axes.set_xticks(list(labelled_bars), [labels[bar] for bar in labelled_bars])
        axes.grid(visible=False, axis="x")
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        buffer = io.StringIO()
        FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None})
    return svg_for_page(buffer.getvalue(), title)
