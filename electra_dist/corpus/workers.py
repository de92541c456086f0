"""Chunks through worker processes, results in order.

Guarantee: results come in the order of the chunks; at most two chunks per worker are in memory; workers end with their
parent, even one killed with -9.

How: a `ProcessPoolExecutor` of spawned processes (no locks or threads are inherited) and a window of futures. One
worker means this process. Each worker tokenises on one thread.
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

from electra_dist.corpus.chunks import Chunk, ChunkProcessor, ChunkRows, Rules
from electra_dist.errors import UserError

_processor: ChunkProcessor | None = None  # one per worker process, made by _start_worker


def process_in_order(chunks: Iterable[Chunk], rules: Rules, num_workers: int) -> Generator[tuple[Chunk, ChunkRows]]:
    """Each chunk, emptied of its documents, with its rows.

    Raises:
        UserError: a worker was killed from outside.
    """
    if num_workers == 1:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        processor = ChunkProcessor(rules)
        for chunk in chunks:
            yield _emptied(chunk), processor.process(chunk)
        return
    pool = ProcessPoolExecutor(
        num_workers, multiprocessing.get_context("spawn"), initializer=_start_worker, initargs=(rules,)
    )
    window: deque[tuple[Chunk, Future[ChunkRows]]] = deque()
    try:
        for chunk in chunks:
            window.append((_emptied(chunk), pool.submit(_process, chunk)))
            if len(window) >= 2 * num_workers:
                done, future = window.popleft()
                yield done, future.result()
        while window:
            done, future = window.popleft()
            yield done, future.result()
    except BrokenProcessPool:
        raise UserError(
            "a corpus worker was killed (out of memory?); start again with fewer --workers: finished shards are kept"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _emptied(chunk: Chunk) -> Chunk:
    return dataclasses.replace(chunk, documents=[])


def _start_worker(rules: Rules) -> None:
    global _processor
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business; it stops the pool
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _processor = ChunkProcessor(rules)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _process(chunk: Chunk) -> ChunkRows:
    assert _processor is not None
    return _processor.process(chunk)
