"""Make rows of a sample of a corpus, to estimate the size of all rows, which decides the number of shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from electra_dist.corpus.chunk_processor import Chunk, ChunkProcessor, Rules
from electra_dist.corpus.report.unknown_tokens import UnknownTokens
from electra_dist.corpus.stages.document_order import NUM_CELLS
from electra_dist.corpus.stages.spill_file import OrderedDocument, SpillFile, documents_of_spills
from electra_dist.corpus.text_decoding import RawDocument

SAMPLE_BYTES = 1_000_000  # size of the documents that are sampled; they take about half a second
_WITHOUT_ROWS = 0.5  # used if no document of the sample gives a row


class RowSample(NamedTuple):
    """What a sample of a corpus's documents shows about the size of the rows and the share of [UNK]."""

    row_bytes_per_document_byte: float  # 0.5 if no document of the sample gives a row
    unknown: UnknownTokens  # counts of its tokens and of [UNK]


def sample_rows(spills: Sequence[SpillFile], rules: Rules, seed: int) -> RowSample:
    """Make rows of the first documents of the shuffled corpus, at least 1 MB (`SAMPLE_BYTES`), and measure the rows.

    The documents are read in cells of 1/4096 of the corpus each, from all spill files. Of the last cell, only those
    are used that are needed.
    """
    documents: list[RawDocument] = []
    size = 0
    for entry in _first_documents(spills):
        documents.append(entry.document)
        size += len(entry.document.data or b"")
        if size >= SAMPLE_BYTES:
            break
    rows = ChunkProcessor(rules).process(Chunk(documents=documents, seed=seed, heldout_seed=seed))
    row_bytes = rows.train.block.nbytes + rows.heldout.block.nbytes
    counts = rows.sources.values()
    return RowSample(
        row_bytes_per_document_byte=row_bytes / size if row_bytes else _WITHOUT_ROWS,
        unknown=UnknownTokens(sum(count["tokens"] for count in counts), sum(count["unk_tokens"] for count in counts)),
    )


def _first_documents(spills: Sequence[SpillFile]) -> Iterator[OrderedDocument]:
    """Yield the documents of the shuffled corpus from its beginning on; each reading takes twice as many cells."""
    end = 0
    while end < NUM_CELLS:
        start = end
        end = min(2 * start + 1, NUM_CELLS)
        yield from sorted(documents_of_spills(spills, range(start, end)))
