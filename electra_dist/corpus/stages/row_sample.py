"""Make rows of a sample of a corpus: how many bytes its documents give decides the number of shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from electra_dist.corpus.chunk_processor import Chunk, ChunkProcessor, Rules
from electra_dist.corpus.report.unknown_tokens import UnknownTokens
from electra_dist.corpus.stages.document_order import NUM_CELLS
from electra_dist.corpus.stages.spill_file import SpillFile
from electra_dist.corpus.text_decoding import RawDocument

SAMPLE_BYTES = 1_000_000  # size of the documents that are sampled; they take about half a second
_WITHOUT_ROWS = 0.5  # used if no document of the sample gives a row


class RowSample(NamedTuple):
    """What the rows of a sample of a corpus show."""

    row_bytes_per_document_byte: float  # 0.5 if no document of the sample gives a row
    unknown: UnknownTokens  # counts of its tokens and of [UNK]


def sample_rows(spills: Sequence[SpillFile], rules: Rules, seed: int) -> RowSample:
    """Make rows of the first documents in the order of the corpus: whole cells, until they have `SAMPLE_BYTES`.

    A cell (1/4096 of the keys) is read from all spill files, so the sample of a huge corpus is larger than that.
    """
    documents: list[RawDocument] = []
    size = 0
    for cell in range(NUM_CELLS):
        for spill in spills:
            for entry in spill.documents(range(cell, cell + 1)):
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
