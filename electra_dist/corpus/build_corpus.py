"""Build a training corpus from text files: shards of token rows, vocab.txt and the manifest corpus.json.

Guarantee: the inputs (contents and names), the vocabulary, the parameters and the seed determine every byte of the
corpus. The number of workers and interruptions of the build change nothing. corpus.json is written last: a folder
without it holds no finished corpus. Every document that was read is counted once: as used, held out or skipped. A
corpus that is already finished is not changed.

How: the main process reads the documents and cuts their stream into chunks, which are groups of consecutive documents;
worker processes turn chunks into rows of token ids (`chunk_processor.py`). The rows of the chunks, taken in order,
fill a shard until it reaches its size. The shard is written first, then a record that it is finished
(`finished_shards.py`). A build that resumes reads the inputs again, but does not tokenize what is in finished shards.
Held-out documents become a corpus of their own in OUTPUT/heldout. build.json, the report of what was read and what
was left out, is written before corpus.json (`report/build_report.py`).

Cost: 0.6 to 1 million tokens per second and worker; 250 MB of memory per worker, 400 MB in the main process.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from electra_kernels.keyed_random import Purpose, derive_seed

from electra_dist.corpus.build_console import BuildConsole
from electra_dist.corpus.build_request import PARAMETERS_LEFT_OUT, BuildRequest, tokenizer_entry
from electra_dist.corpus.chunk_processor import Chunk, ChunkRows
from electra_dist.corpus.finished_shards import BuildProgress, FinishedShard
from electra_dist.corpus.report.build_report import BuildReport, make_report, read_report, write_report
from electra_dist.corpus.report.document_counts import add_sources
from electra_dist.corpus.row_packing import row_dtype
from electra_dist.corpus.sentence_pairs import MIN_SEQ_LEN
from electra_dist.corpus.text_decoding import SKIPPED_KINDS, RawDocument
from electra_dist.corpus.text_readers import DocumentStream
from electra_dist.corpus.worker_processes import process_in_order
from electra_dist.data.corpus_manifest import CorpusManifest, ShardEntry, read_manifest, write_manifest
from electra_dist.data.shard import write_shard
from electra_dist.errors import ManifestMismatch, UserError
from electra_dist.store.interface import Store
from electra_dist.store.open_store import open_store
from electra_dist.tokenizer import VOCAB_FILE

_BLOCK_BYTES = 1 << 20  # size of the blocks of rows within a shard
_DOCUMENT_BYTES = 64  # added to the size of every document, so that many empty documents fill a chunk, too
_COUNTS = ("text_bytes", "text_tokens", "examples", "rows", "tokens")
_TRAIN_STREAM = 0  # numbers of the two random streams of a chunk, from which its seeds are derived
_HELDOUT_STREAM = 1


@dataclass(frozen=True)
class BuildResult:
    """Result of `build_corpus`: manifests and report of a finished corpus, and what of it existed before the call."""

    manifest: CorpusManifest
    heldout: CorpusManifest | None  # None if no document was held out
    was_there: bool  # True if the corpus was finished before this call, which then built nothing
    resumed_shards: int  # shards that were finished before this call
    report: BuildReport | None  # None if an earlier version built the corpus


def build_corpus(request: BuildRequest, console: BuildConsole | None = None) -> BuildResult:
    """Build the corpus that `request` describes, or resume its build, or return it if it is finished.

    The call may be killed at any time; a later call with an equal request resumes after the last finished shard. One
    build at a time may write to `request.output`.

    Args:
        request: inputs, vocabulary, parameters and output.
        console: receives the progress; the default prints to stdout.

    Raises:
        UserError: `seq_len` is too short, no document is usable, an input cannot be read to its end, or a worker was
            killed.
        ManifestMismatch: the output holds a corpus of other inputs or parameters, or the text that finished shards
            were built from has changed since.
        StoreError: the output cannot be read or written.
    """
    if request.seq_len < MIN_SEQ_LEN:
        raise UserError(f"data.seq_len {request.seq_len}: too short for an example; set it to {MIN_SEQ_LEN} or more")
    if console is None:
        console = BuildConsole(total_bytes=sum(file.size for file in request.inputs))
    return _Build(request, console).run()


class _Build:
    """State of one call of `build_corpus`, with one method for each stage of the build.

    It holds the request, the stores of the training and the held-out corpus, and the records of the shards that are
    finished, from which a killed build resumes.
    """

    def __init__(self, request: BuildRequest, console: BuildConsole) -> None:
        """Open the stores of the corpus and of its held-out part; nothing is written yet."""
        self._request = request
        self._console = console
        self._store = open_store(request.output, request.endpoint_url)
        self._heldout_store = open_store(request.output.rstrip("/") + "/heldout", request.endpoint_url)
        parameters = {**request.parameters(), "tokenizer": request.vocabulary.sha256}
        self._progress = BuildProgress(self._store, parameters, request.input_names(), PARAMETERS_LEFT_OUT)
        self._stream = DocumentStream(request.inputs, request.text_field)

    def run(self) -> BuildResult:
        """Build every shard that is not finished, then write corpus.json of the held-out and the training corpus.

        The training corpus gets its corpus.json last, because that file marks the whole build as finished. A corpus
        that is finished already is returned unchanged. `build_corpus` lists the errors.
        """
        manifest = self._progress.finished_corpus()
        if manifest is not None:
            return BuildResult(
                manifest=manifest,
                heldout=self._read_heldout(manifest),
                was_there=True,
                resumed_shards=len(manifest.shards),
                report=read_report(self._store),
            )

        resumed = self._progress.finished_shards()
        with self._console:
            if resumed:
                self._console.say(f"{self._store.url}: resuming the build after {len(resumed)} finished shards")
            shards = resumed + self._build_remaining_shards(resumed)

        # A shard has no entry if all of its documents were held out or skipped.
        entries = [shard.entry for shard in shards if shard.entry is not None]
        if not entries:
            self._release_folder()
            raise self._nothing_usable(shards)
        heldout = self._commit_heldout(shards)
        report = self._report(shards)
        write_report(self._store, report)
        manifest = self._commit(self._store, entries, _totals(shards, "train"))
        self._progress.clear()
        return BuildResult(
            manifest=manifest, heldout=heldout, was_there=False, resumed_shards=len(resumed), report=report
        )

    def _report(self, shards: Sequence[FinishedShard]) -> BuildReport:
        """Return the report of the build: what was read, what was left out, and what became of the documents.

        A resumed build reads all inputs again, so that its own counts of files are complete. The counts of documents
        and tokens are those that were recorded with the shards.

        Args:
            shards: records of all shards of the build.
        """
        request = self._request
        documents = add_sources(shard.sources for shard in shards if shard.sources is not None)
        return make_report(request.skipped_inputs, self._stream.counts, documents, request.corpus.undecodable)

    def _build_remaining_shards(self, finished: Sequence[FinishedShard]) -> list[FinishedShard]:
        """Build the shards that are not finished; return the records of these new shards, in order.

        Args:
            finished: records of the shards that earlier calls have built, in order from shard 0; empty for a new
                build.
        """
        chunks = self._unfinished_chunks(finished)
        results = process_in_order(chunks, self._request.rules(), self._request.num_workers)
        with contextlib.closing(results):  # stops the workers if this process fails
            shards = enumerate(self._group_into_shards(results), start=len(finished))
            return [self._finish_shard(number, shard_chunks) for number, shard_chunks in shards]

    def _unfinished_chunks(self, finished: Sequence[FinishedShard]) -> Iterator[Chunk]:
        """Yield the chunks of documents that follow the last finished shard, each with its random seeds.

        A chunk is a group of consecutive documents of the inputs, the unit of work of a worker process. A new build
        writes its parameters and vocab.txt to the output before it yields the first chunk.

        Args:
            finished: records of the finished shards, in order; empty for a new build.

        Raises:
            ManifestMismatch: the text from which finished shards were built has changed.
        """
        request = self._request
        stream = self._stream
        numbered_chunks = enumerate(cut_chunks(stream, request.chunk_bytes))
        if finished:
            self._skip_finished_chunks(numbered_chunks, finished[-1], stream)
        for number, (documents, stream_digest) in numbered_chunks:
            if number == 0:
                self._claim_folder()
            yield Chunk(
                number=number,
                documents=documents,
                seed=derive_seed(request.seed, Purpose.CORPUS, number, _TRAIN_STREAM),
                heldout_seed=derive_seed(request.seed, Purpose.CORPUS, number, _HELDOUT_STREAM),
                bytes_done=stream.bytes_done,
                stream_digest=stream_digest,
            )

    def _skip_finished_chunks(
        self,
        numbered_chunks: Iterator[tuple[int, tuple[list[RawDocument], str]]],
        last_shard: FinishedShard,
        stream: DocumentStream,
    ) -> None:
        """Read the chunks from which the finished shards were built, to find where a resumed build continues.

        A chunk is a group of consecutive documents. The chunks are not tokenized: only the digest of all documents up
        to the end of the last finished shard is compared with the one in the record of that shard.

        Args:
            numbered_chunks: chunks as `cut_chunks` yields them, with their numbers from 0; advanced to the first chunk
                that is in no finished shard.
            last_shard: record of the last finished shard.
            stream: the documents from which the chunks are cut.

        Raises:
            ManifestMismatch: the inputs hold other text than the shards were built from, or end earlier.
        """
        last_chunk = last_shard.end_chunk - 1
        for number, (_, stream_digest) in numbered_chunks:
            if number == last_chunk:
                if stream_digest != last_shard.stream_digest:
                    raise self._inputs_changed()
                self._console.resume_at(stream.bytes_done)
                return
        raise self._inputs_changed()  # the inputs end before the last finished shard does

    def _group_into_shards(
        self, results: Iterable[tuple[Chunk, ChunkRows]]
    ) -> Iterator[list[tuple[Chunk, ChunkRows]]]:
        """Yield groups of consecutive chunks whose training rows together fill a shard; the last group may be smaller.

        A chunk is a group of consecutive documents. A shard is full when its rows have at least `shard_bytes` bytes,
        so it may be larger by the rows of one chunk. The progress on the console is updated after every chunk.

        Args:
            results: chunks and their rows, in the order of the inputs.
        """
        group: list[tuple[Chunk, ChunkRows]] = []
        group_bytes = 0
        for chunk, rows in results:
            num_tokens = rows.train.counts["text_tokens"] + rows.heldout.counts["text_tokens"]
            self._console.update(chunk.bytes_done, num_documents=rows.documents["in"], num_tokens=num_tokens)
            group.append((chunk, rows))
            group_bytes += rows.train.block.nbytes
            if group_bytes >= self._request.shard_bytes:
                yield group
                group = []
                group_bytes = 0
        if group:
            yield group

    def _finish_shard(self, number: int, chunks: Sequence[tuple[Chunk, ChunkRows]]) -> FinishedShard:
        """Write the training rows of `chunks` as shard `number`, then record in the store that it is finished.

        If all documents of the chunks were held out or skipped, there is no training row: no shard is written, and the
        record has no entry for corpus.json.

        Args:
            number: position of the shard in the corpus, from 0.
            chunks: consecutive chunks (groups of documents) and their rows, in order; at least one.

        Returns:
            The record of the shard, which also counts its documents and held-out rows.
        """
        last_chunk, _ = chunks[-1]
        results = [rows for _, rows in chunks]
        train_rows = np.concatenate([rows.train.block for rows in results])
        heldout_rows = np.concatenate([rows.heldout.block for rows in results])
        train_counts = _sum_counts(rows.train.counts for rows in results)
        entry = None
        if len(train_rows):
            entry = _put_shard(self._store, number, train_rows, train_counts["tokens"])
        shard = FinishedShard(
            number=number,
            entry=entry,
            end_chunk=last_chunk.number + 1,
            stream_digest=last_chunk.stream_digest,
            heldout_rows=len(heldout_rows),
            documents=_sum_counts(rows.documents for rows in results),
            train=train_counts,
            heldout=_sum_counts(rows.heldout.counts for rows in results),
            sources=add_sources(rows.sources for rows in results),
        )
        self._progress.record(shard, heldout_rows)
        return shard

    def _commit_heldout(self, finished: Sequence[FinishedShard]) -> CorpusManifest | None:
        """Write all held-out rows as a corpus of their own; return its manifest, or None if no row was held out.

        Args:
            finished: records of all shards of the build, in order.
        """
        pad_id = self._request.vocabulary.special["[PAD]"]
        entries: list[ShardEntry] = []
        for rows in self._heldout_shards(finished):
            num_tokens = int(np.count_nonzero(rows != pad_id))
            entries.append(_put_shard(self._heldout_store, len(entries), rows, num_tokens))
        if not entries:
            return None
        self._heldout_store.write(VOCAB_FILE, self._request.vocabulary.text.encode())
        return self._commit(self._heldout_store, entries, _totals(finished, "heldout"))

    def _heldout_shards(self, finished: Sequence[FinishedShard]) -> Iterator[np.ndarray]:
        """Yield the rows of each shard of the held-out corpus, [rows, seq_len].

        For every training shard, the build stored the held-out rows of the same documents in a file of their own,
        which is much smaller than a shard. Consecutive files are joined until they reach the size of a shard; only the
        last shard may be smaller.

        Args:
            finished: records of all shards of the training corpus, in order.
        """
        blocks: list[np.ndarray] = []
        blocks_bytes = 0
        for shard in finished:
            if not shard.heldout_rows:
                continue
            block = self._progress.heldout_rows(shard)
            blocks.append(block)
            blocks_bytes += block.nbytes
            if blocks_bytes >= self._request.shard_bytes:
                yield np.concatenate(blocks)
                blocks = []
                blocks_bytes = 0
        if blocks:
            yield np.concatenate(blocks)

    def _commit(self, store: Store, entries: Sequence[ShardEntry], totals: dict[str, Any]) -> CorpusManifest:
        """Write corpus.json, which marks the corpus in `store` as finished, and return its content.

        Args:
            store: the training or the held-out corpus; its shards and vocab.txt must have been written.
            entries: entries of its shards (name, size, digest, counts), in order.
            totals: counts of its documents, tokens and rows.
        """
        request = self._request
        ids_are_uint16 = row_dtype(request.vocabulary.size) is np.uint16
        manifest = CorpusManifest(
            seq_len=request.seq_len,
            dtype="uint16" if ids_are_uint16 else "uint32",
            tokenizer=tokenizer_entry(request.vocabulary, request.corpus.lowercase),
            builder={**request.parameters(), **request.input_names()},
            totals=totals,
            shards=tuple(entries),
        )
        write_manifest(store, manifest)
        return manifest

    def _read_heldout(self, manifest: CorpusManifest) -> CorpusManifest | None:
        """Read corpus.json of the held-out corpus from OUTPUT/heldout; return None if no document was held out.

        Args:
            manifest: manifest of the finished training corpus, which counts the documents held out.
        """
        if not manifest.totals["documents_heldout"]:
            return None
        return read_manifest(self._heldout_store)

    def _claim_folder(self) -> None:
        """Write this build's parameters and vocab.txt to the output, before its first shard.

        From then on, a build with other parameters is refused in the same folder.
        """
        self._progress.begin()
        self._store.write(VOCAB_FILE, self._request.vocabulary.text.encode())

    def _release_folder(self) -> None:
        """Delete what a build without any training row has written: its parameters, records of shards and vocab.txt.

        A later build with other parameters may then use the folder.
        """
        self._progress.clear()
        self._store.delete(VOCAB_FILE)

    def _inputs_changed(self) -> ManifestMismatch:
        """Return the error for a resumed build whose inputs have changed since its finished shards were written."""
        return ManifestMismatch(
            f"{self._store.url}: holds a corpus half built from inputs that have changed since (the digest of their "
            "text differs from the recorded one); restore the inputs, delete this folder, or choose another --output"
        )

    def _nothing_usable(self, finished: Sequence[FinishedShard]) -> UserError:
        """Return the error for a build in which no document gave a training row.

        Its message counts the documents that were skipped, for each reason, those that were held out, and the inputs
        that were left out.

        Args:
            finished: records of all shards of the build; empty if the inputs hold no document.
        """
        totals = _totals(finished, "train")
        reasons = [f"{kind} {count}" for kind, count in totals["documents_skipped"].items() if count]
        if totals["documents_heldout"]:
            reasons.append(f"held out {totals['documents_heldout']}")
        if not reasons:
            reasons.append("the inputs are empty")
        left_out = self._request.skipped_inputs.joined(self._stream.counts.skipped).summary()
        if left_out:
            reasons.append(f"left out: {left_out}")
        return UserError(
            f"{self._store.url}: no usable document among {totals['documents_in']} ({', '.join(reasons)}); "
            "correct --input, --text-field or corpus.heldout_fraction"
        )


def cut_chunks(stream: Iterable[RawDocument], chunk_bytes: int) -> Iterator[tuple[list[RawDocument], str]]:
    """Cut a stream of documents into chunks (groups of consecutive documents), and yield them in order.

    A chunk ends with the document that brings it to `chunk_bytes`; only the last chunk may be smaller. Every document
    counts 64 bytes more than its data, which also bounds the number of empty documents in a chunk.

    Args:
        stream: undecoded documents.
        chunk_bytes: size at which a chunk ends.

    Yields:
        The documents of a chunk, and the BLAKE2b digest (hex) of all documents of the stream up to the end of the
        chunk. Equal digests mean that the stream has been the same from its start to this point.
    """
    digest = hashlib.blake2b(digest_size=16)
    documents: list[RawDocument] = []
    chunk_size = 0
    for document in stream:
        data = document.data or b""
        # The length before the data makes the digest depend on where a document ends; -1 stands for a null cell.
        length = -1 if document.data is None else len(data)
        digest.update(b"%d%d:" % (document.is_json, length))
        digest.update(data)
        documents.append(document)
        chunk_size += len(data) + _DOCUMENT_BYTES
        if chunk_size >= chunk_bytes:
            yield documents, digest.hexdigest()
            documents = []
            chunk_size = 0
    if documents:
        yield documents, digest.hexdigest()


def _put_shard(store: Store, number: int, rows: np.ndarray, num_tokens: int) -> ShardEntry:
    """Write rows as a shard (a tar file) of a corpus, and return the entry of the shard for corpus.json.

    Args:
        store: the training or the held-out corpus.
        number: position of the shard in the corpus, from 0; number 7 is written as shard-000007.tar.
        rows: ids, [rows, seq_len]; at least one row.
        num_tokens: number of ids in `rows` that are not [PAD].
    """
    row_bytes = rows[0].nbytes
    tar = io.BytesIO()
    write_shard(tar, rows, max(1, _BLOCK_BYTES // row_bytes))
    data = tar.getvalue()
    name = f"shard-{number:06d}.tar"
    store.write(name, data)
    return ShardEntry(
        name=name, rows=len(rows), tokens=num_tokens, bytes=len(data), sha256=hashlib.sha256(data).hexdigest()
    )


def _totals(finished: Sequence[FinishedShard], part: Literal["train", "heldout"]) -> dict[str, Any]:
    """Return the `totals` of corpus.json, added up over all shards of a build.

    Args:
        finished: records of all shards of the build.
        part: the corpus (training or held-out) whose bytes, tokens, examples and rows are counted. Documents are
            counted over both corpora, whichever part is given.
    """
    documents = _sum_counts(Counter(shard.documents) for shard in finished)
    if part == "train":
        counts = _sum_counts(Counter(shard.train) for shard in finished)
    else:
        counts = _sum_counts(Counter(shard.heldout) for shard in finished)
    return {
        "documents_in": documents["in"],
        "documents_used": documents["used"],
        "documents_heldout": documents["heldout"],
        "documents_skipped": {kind: documents[kind] for kind in SKIPPED_KINDS},
        **{key: counts[key] for key in _COUNTS},
    }


def _sum_counts(counters: Iterable[Counter[str]]) -> Counter[str]:
    """Return the sum of several counters, key by key; keys whose sum is 0 are left out."""
    return sum(counters, Counter[str]())
