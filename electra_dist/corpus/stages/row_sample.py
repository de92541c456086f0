"""Estimate from a sample how many bytes of rows the documents of a corpus give, to choose the number of shards."""

from __future__ import annotations

from collections.abc import Sequence

from electra_dist.corpus.chunk_processor import Chunk, ChunkProcessor, Rules
from electra_dist.corpus.stages.document_order import NUM_CELLS
from electra_dist.corpus.stages.spill_file import SpillFile
from electra_dist.corpus.text_decoding import RawDocument

SAMPLE_BYTES = 1_000_000  # size of the documents that are sampled; they take about half a second
_WITHOUT_ROWS = 0.5  # used if no document of the sample gives a row


def row_bytes_per_document_byte(spills: Sequence[SpillFile], rules: Rules, seed: int) -> float:
    """Return how many bytes of rows one byte of documents gives, measured on a sample.

    The sample is about the first megabyte of documents in the order of the corpus. If it gives no row, the result is
    0.5.

    Args:
        spills: all spill files of the build.
        rules: parameters of the rows.
        seed: seed of the examples' random draws.
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
    return row_bytes / size if row_bytes else _WITHOUT_ROWS
