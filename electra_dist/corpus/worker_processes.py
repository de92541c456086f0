"""Turn chunks of documents into rows in worker processes, and return the results in the order of the chunks.

Guarantee: results come in the order of the chunks (groups of consecutive documents); at most two chunks per worker are
in memory; the workers end with the main process, even if that is killed with SIGKILL.

How: a `ProcessPoolExecutor` of spawned processes, which inherit no locks or threads. Two chunks per worker are
submitted ahead; a next one is submitted when the oldest result has been returned. With one worker the calling process
does the work itself. Each worker tokenizes in one thread.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from electra_dist.corpus.chunk_processor import Chunk, ChunkProcessor, ChunkRows, Rules
from electra_dist.errors import UserError

_CHUNKS_PER_WORKER = 2  # chunks that are submitted to the pool, per worker
_processor: ChunkProcessor | None = None  # one per worker process, created by _start_worker


def process_in_order(chunks: Iterable[Chunk], rules: Rules, num_workers: int) -> Generator[tuple[Chunk, ChunkRows]]:
    """Return a generator that turns chunks of documents into rows, and yields each chunk with its rows, in order.

    The yielded chunks have no documents, to save memory. At most two chunks per worker are read ahead from `chunks`.
    Close the generator if you do not exhaust it, which ends the workers.

    Args:
        chunks: the chunks, read in the calling process.
        rules: parameters of the rows.
        num_workers: processes; 1 means that the calling process does the work.

    Raises:
        UserError: a worker process was killed, for example because memory ran out.
    """
    if num_workers == 1:
        return _process_in_this_process(chunks, rules)
    return _process_in_workers(chunks, rules, num_workers)


def _process_in_this_process(chunks: Iterable[Chunk], rules: Rules) -> Generator[tuple[Chunk, ChunkRows]]:
    """Yield each chunk with its rows, which the calling process computes; used if there is one worker.

    A chunk is a group of consecutive documents. It is yielded without its documents, to save memory.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    processor = ChunkProcessor(rules)
    for chunk in chunks:
        yield _without_documents(chunk), processor.process(chunk)


def _process_in_workers(chunks: Iterable[Chunk], rules: Rules, num_workers: int) -> Generator[tuple[Chunk, ChunkRows]]:
    """Yield each chunk with its rows, which worker processes compute, in the order of the chunks.

    A chunk is a group of consecutive documents; it is yielded without them, to save memory. Two chunks per worker are
    submitted ahead: a worker that finishes early has a next chunk, and the memory stays bounded.

    Args:
        chunks: the chunks, read in the calling process.
        rules: parameters of the rows, sent once to every worker.
        num_workers: number of processes.

    Raises:
        UserError: a worker process was killed, for example because memory ran out.
    """
    pool = ProcessPoolExecutor(
        max_workers=num_workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(rules,),
    )
    submitted: deque[tuple[Chunk, Future[ChunkRows]]] = deque()  # oldest first
    try:
        for chunk in chunks:
            submitted.append((_without_documents(chunk), pool.submit(_process, chunk)))
            if len(submitted) >= _CHUNKS_PER_WORKER * num_workers:
                oldest_chunk, rows = submitted.popleft()
                yield oldest_chunk, rows.result()
        while submitted:
            oldest_chunk, rows = submitted.popleft()
            yield oldest_chunk, rows.result()
    except BrokenProcessPool:
        raise UserError(
            "a corpus worker was killed (out of memory?); run the command again with fewer --workers: finished "
            "shards are kept"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _without_documents(chunk: Chunk) -> Chunk:
    """Return a copy of a chunk without its documents; its number, seeds and digest stay.

    The text of the documents then need not stay in the memory of the main process until the rows are ready.
    """
    return dataclasses.replace(chunk, documents=[])


def _start_worker(rules: Rules) -> None:
    """Set up a worker process before its first chunk.

    It builds the tokenizer, ignores SIGINT (the main process handles Ctrl-C), and starts a thread that ends the worker
    when the main process has ended, even if that was killed.

    Args:
        rules: parameters of the rows, the same for all workers.
    """
    global _processor
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the main process stops the pool
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    _processor = ChunkProcessor(rules)


def _exit_with_parent() -> None:
    """Wait until the main process has ended, then end this worker process at once; runs in a thread of its own."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)  # sys.exit would end this thread only


def _process(chunk: Chunk) -> ChunkRows:
    """Return the rows of a chunk of documents. Runs in a worker process that `_start_worker` has set up."""
    assert _processor is not None
    return _processor.process(chunk)
