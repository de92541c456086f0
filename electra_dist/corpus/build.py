"""Text files -> a finished corpus: shards, vocab.txt, corpus.json.

Guarantee: the corpus is a function of (contents and names of the inputs, vocabulary, parameters, seed): the same for
any number of workers and any number of interruptions. corpus.json comes last, so a corpus exists or it does not.
Documents in = used + held out + each kind of skipped; a corpus that is there already is left alone.

How: this process reads and cuts the stream into chunks; workers make rows (`chunks.py`); chunks, taken in order, fill
a shard until it has its size. Shard, then note (`progress.py`); a build that goes on reads up to the first unfinished
shard without tokenising. Held-out documents become a corpus of their own in OUTPUT/heldout.

Cost: 0.6 to 1 million tokens a second and worker; 250 MB of memory a worker, 400 MB here.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from electra_kernels.keyed_random import Purpose, derive_seed

from electra_dist.corpus.chunks import Chunk, ChunkRows
from electra_dist.corpus.console import BuildConsole
from electra_dist.corpus.documents import SKIPPED_KINDS, RawDocument
from electra_dist.corpus.examples import MIN_SEQ_LEN
from electra_dist.corpus.progress import BuildProgress, FinishedShard
from electra_dist.corpus.readers import DocumentStream
from electra_dist.corpus.request import BuildRequest, tokenizer_entry
from electra_dist.corpus.rows import row_dtype
from electra_dist.corpus.workers import process_in_order
from electra_dist.data.manifest import CorpusManifest, ShardEntry, read_manifest, write_manifest
from electra_dist.data.shard import write_shard
from electra_dist.errors import ManifestMismatch, UserError
from electra_dist.store.interface import Store
from electra_dist.store.open import open_store
from electra_dist.tokenizer import VOCAB_FILE

_BLOCK_BYTES = 1 << 20
_DOCUMENT_BYTES = 64  # a document's cost beside its text: a million empty ones fill chunks too
_COUNTS = ("text_bytes", "text_tokens", "examples", "rows", "tokens")


@dataclass(frozen=True)
class BuildResult:
    """A finished corpus."""

    manifest: CorpusManifest
    heldout: CorpusManifest | None
    was_there: bool  # nothing was done
    resumed_shards: int  # finished before this call


def build_corpus(request: BuildRequest, console: BuildConsole | None = None) -> BuildResult:
    """Build, or go on building, or find finished, the corpus that `request` describes.

    Raises:
        UserError: nothing to read, an unwritable output, a folder of another corpus, inputs that changed.
    """
    if request.seq_len < MIN_SEQ_LEN:
        raise UserError(f"data.seq_len {request.seq_len}: at least {MIN_SEQ_LEN} tokens are needed for an example")
    return _Build(request, console or BuildConsole(sum(file.size for file in request.inputs))).run()


class _Build:
    def __init__(self, request: BuildRequest, console: BuildConsole) -> None:
        self._request = request
        self._console = console
        self._store = open_store(request.output, request.endpoint_url)
        self._heldout_store = open_store(request.output.rstrip("/") + "/heldout", request.endpoint_url)
        parameters = {**request.parameters(), "tokenizer": request.vocabulary.sha256}
        self._progress = BuildProgress(self._store, parameters, request.input_names())

    def run(self) -> BuildResult:
        there = self._progress.finished_corpus()
        if there is not None:
            return BuildResult(there, self._read_heldout(there), True, len(there.shards))
        notes = self._progress.finished_shards()
        num_resumed = len(notes)
        with self._console:
            if notes:
                self._console.say(f"{self._store.url}: going on after {num_resumed} finished shards")
            chunks = self._unfinished_chunks(notes)
            results = process_in_order(chunks, self._request.rules(), self._request.num_workers)
            with contextlib.closing(results):
                for group in self._shardfuls(results):
                    notes.append(self._finish_shard(len(notes), group))
        if not any(note.entry for note in notes):
            self._disclaim()
            raise self._nothing_usable(notes)
        heldout = self._commit_heldout(notes)
        manifest = self._commit(self._store, [note.entry for note in notes if note.entry], _totals(notes, "train"))
        self._progress.clear()
        return BuildResult(manifest, heldout, False, num_resumed)

    def _unfinished_chunks(self, notes: Sequence[FinishedShard]) -> Iterator[Chunk]:
        """Chunks after the last finished shard; those before are read, compared and dropped."""
        request = self._request
        start = notes[-1].end_chunk if notes else 0
        digest = notes[-1].stream_digest if notes else ""
        number = -1
        stream = DocumentStream(request.inputs, request.text_field)
        for number, (documents, stream_digest) in enumerate(cut_chunks(stream, request.chunk_bytes)):
            if number == start - 1:
                if stream_digest != digest:
                    raise self._inputs_changed()
                self._console.resume_at(stream.bytes_done)
            if number == 0 and not notes:
                self._claim()
            if number >= start:
                seed, heldout_seed = (derive_seed(request.seed, Purpose.CORPUS, number, part) for part in (0, 1))
                yield Chunk(number, documents, seed, heldout_seed, stream.bytes_done, stream_digest)
        if number < start - 1:
            raise self._inputs_changed()

    def _shardfuls(self, results: Iterable[tuple[Chunk, ChunkRows]]) -> Iterator[list[tuple[Chunk, ChunkRows]]]:
        """Consecutive chunks whose training rows fill a shard; the last group holds the rest."""
        group: list[tuple[Chunk, ChunkRows]] = []
        size = 0
        for chunk, rows in results:
            self._console.update(
                chunk.bytes_done,
                rows.documents["in"],
                rows.train.counts["text_tokens"] + rows.heldout.counts["text_tokens"],
            )
            group.append((chunk, rows))
            size += rows.train.block.nbytes
            if size >= self._request.shard_bytes:
                yield group
                group, size = [], 0
        if group:
            yield group

    def _finish_shard(self, number: int, chunks: Sequence[tuple[Chunk, ChunkRows]]) -> FinishedShard:
        last = chunks[-1][0]
        rows = np.concatenate([each.train.block for _, each in chunks])
        heldout = np.concatenate([each.heldout.block for _, each in chunks])
        train_counts = sum((each.train.counts for _, each in chunks), Counter[str]())
        note = FinishedShard(
            number=number,
            entry=_put_shard(self._store, number, rows, train_counts["tokens"]) if len(rows) else None,
            end_chunk=last.number + 1,
            stream_digest=last.stream_digest,
            heldout_rows=len(heldout),
            documents=sum((each.documents for _, each in chunks), Counter[str]()),
            train=train_counts,
            heldout=sum((each.heldout.counts for _, each in chunks), Counter[str]()),
        )
        self._progress.record(note, heldout)
        return note

    def _commit_heldout(self, notes: Sequence[FinishedShard]) -> CorpusManifest | None:
        """Held-out rows of all shards -> shards of their own corpus. None if no document was held out."""
        entries: list[ShardEntry] = []
        pad = self._request.vocabulary.special["[PAD]"]
        waiting: list[np.ndarray] = []
        with_rows = [note for note in notes if note.heldout_rows]
        for note in with_rows:
            waiting.append(self._progress.heldout_rows(note))
            if sum(rows.nbytes for rows in waiting) >= self._request.shard_bytes or note is with_rows[-1]:
                rows = np.concatenate(waiting)
                entries.append(_put_shard(self._heldout_store, len(entries), rows, int(np.count_nonzero(rows != pad))))
                waiting = []
        if not entries:
            return None
        self._heldout_store.write(VOCAB_FILE, self._request.vocabulary.text.encode())
        return self._commit(self._heldout_store, entries, _totals(notes, "heldout"))

    def _commit(self, store: Store, entries: Sequence[ShardEntry], totals: dict[str, Any]) -> CorpusManifest:
        request = self._request
        manifest = CorpusManifest(
            seq_len=request.seq_len,
            dtype="uint16" if row_dtype(request.vocabulary.size) is np.uint16 else "uint32",
            tokenizer=tokenizer_entry(request.vocabulary, request.corpus.lowercase),
            builder={**request.parameters(), **request.input_names()},
            totals=totals,
            shards=tuple(entries),
        )
        write_manifest(store, manifest)
        return manifest

    def _read_heldout(self, manifest: CorpusManifest) -> CorpusManifest | None:
        return read_manifest(self._heldout_store) if manifest.totals["documents_heldout"] else None

    def _claim(self) -> None:
        self._progress.begin()
        self._store.write(VOCAB_FILE, self._request.vocabulary.text.encode())

    def _disclaim(self) -> None:
        self._progress.clear()
        self._store.delete(VOCAB_FILE)

    def _inputs_changed(self) -> ManifestMismatch:
        return ManifestMismatch(
            f"{self._store.url}: half built from inputs that have changed since; delete it or choose another --output"
        )

    def _nothing_usable(self, notes: Sequence[FinishedShard]) -> UserError:
        totals = _totals(notes, "train")
        kinds = ", ".join(f"{kind} {count}" for kind, count in totals["documents_skipped"].items() if count)
        if totals["documents_heldout"]:
            kinds += f"{', ' if kinds else ''}held out {totals['documents_heldout']}"
        return UserError(
            f"no usable document among {totals['documents_in']} ({kinds or 'the inputs are empty'}); "
            "look at --input and --text-field"
        )


def cut_chunks(stream: Iterable[RawDocument], chunk_bytes: int) -> Iterator[tuple[list[RawDocument], str]]:
    """Runs of documents of about `chunk_bytes` (the last: the rest), each with the digest of all up to its end."""
    digest = hashlib.blake2b(digest_size=16)
    documents: list[RawDocument] = []
    size = 0
    for document in stream:
        data = document.data
        digest.update(b"%d%d:" % (document.is_json, -1 if data is None else len(data)))
        digest.update(data or b"")
        documents.append(document)
        size += len(data or b"") + _DOCUMENT_BYTES
        if size >= chunk_bytes:
            yield documents, digest.hexdigest()
            documents, size = [], 0
    if documents:
        yield documents, digest.hexdigest()


def _put_shard(store: Store, number: int, rows: np.ndarray, num_tokens: int) -> ShardEntry:
    tar = io.BytesIO()
    write_shard(tar, rows, max(1, _BLOCK_BYTES // rows[0].nbytes))
    data = tar.getvalue()
    name = f"shard-{number:06d}.tar"
    store.write(name, data)
    return ShardEntry(
        name=name, rows=len(rows), tokens=num_tokens, bytes=len(data), sha256=hashlib.sha256(data).hexdigest()
    )


def _totals(notes: Sequence[FinishedShard], part: str) -> dict[str, Any]:
    documents = sum((Counter(note.documents) for note in notes), Counter[str]())
    counts = sum((Counter(getattr(note, part)) for note in notes), Counter[str]())
    return {
        "documents_in": documents["in"],
        "documents_used": documents["used"],
        "documents_heldout": documents["heldout"],
        "documents_skipped": {kind: documents[kind] for kind in SKIPPED_KINDS},
        **{key: counts[key] for key in _COUNTS},
    }
