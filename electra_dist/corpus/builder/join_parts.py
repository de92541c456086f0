"""Stage 3 of a corpus build: join the records of all parts to a finished corpus.

Guarantee: no byte of a shard is rewritten. The result is the same for any number of parts. If a part is missing,
nothing is written. corpus.json of the training corpus is written last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, StrictBool, TypeAdapter
from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12

from electra_dist.corpus.build_report import (
    BuildReport,
    make_report,
    read_report,
    remarks_on_unknown_tokens,
    unknown_tokens_of_report,
    write_report,
)
from electra_dist.corpus.builder.build_records import BuildOrder, BuildRecords, FinishedBucket, read_output_vocabulary
from electra_dist.corpus.builder.chunk_processor import in_groups
from electra_dist.corpus.builder.examples import row_dtype
from electra_dist.corpus.builder.worker_stages import put_shard
from electra_dist.corpus.counts import SKIPPED, Counts
from electra_dist.corpus.inputs.text_decoding import SKIPPED_KINDS, Undecodable
from electra_dist.corpus.origins import OriginFile, join_tables, put_origins, write_origins
from electra_dist.data.manifest import (
    CorpusManifest,
    ShardEntry,
    TokenizerEntry,
    check_files,
    heldout_of,
    read_manifest,
    write_manifest,
)
from electra_dist.errors import UserError
from electra_dist.store.json_file import DamagedJson, validate_json
from electra_dist.store.open_store import open_store
from electra_dist.tokenizer import VOCAB_FILE

_COUNTS = ("text_bytes", "text_tokens", "examples", "rows", "tokens")
_MAX_NAMED = 5  # missing buckets that an error names


class _UsedParameters(TypedDict):
    """Recorded parameters of a build (progress/build.json), as far as joining its parts needs them."""

    seq_len: Annotated[int, Field(strict=True, gt=0)]
    lowercase: StrictBool
    shard_size_mb: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    undecodable: Undecodable


_USED_PARAMETERS = TypeAdapter(_UsedParameters)


@dataclass(frozen=True)
class JoinedCorpus:
    """A finished corpus: manifests, report, and how much of it earlier calls had finished."""

    manifest: CorpusManifest
    heldout: CorpusManifest | None  # None if no document was held out
    was_finished: bool  # True if the corpus was finished before the call, which then built nothing
    resumed_shards: int  # shards that were finished before the call
    report: BuildReport | None  # None if the corpus was indexed


def take_joined(output: str, endpoint_url: str | None) -> JoinedCorpus:
    """Return a corpus that is finished already, and delete records of its build that are still in progress/.

    A build or merge that is killed after it has written corpus.json leaves its records there. Raises UserError if the
    held-out corpus or a shard is missing.
    """
    store = open_store(output, endpoint_url)
    manifest = read_manifest(store)
    BuildRecords(store).clear()
    check_files(store, manifest)
    heldout = None
    if manifest.totals.get("documents_heldout"):
        heldout_store = open_store(heldout_of(output), endpoint_url)
        heldout = read_manifest(heldout_store)
        check_files(heldout_store, heldout)
    return JoinedCorpus(
        manifest=manifest,
        heldout=heldout,
        was_finished=True,
        resumed_shards=len(manifest.shards),
        report=read_report(store),
    )


def join_parts(output: str, endpoint_url: str | None, resumed_shards: int = 0) -> JoinedCorpus:
    """Write the held-out corpus, build.json and corpus.json of a corpus whose parts are all finished.

    `resumed_shards`, the shards that were finished before this build began, is only passed on in the result. Raises
    UserError if a part is missing, no document gave a row, or a source has too many [UNK].
    """
    return _Join(output, endpoint_url).run(resumed_shards)


class _Join:
    """State of one call of `join_parts`, which makes a finished corpus of the shards that all parts have written."""

    def __init__(self, output: str, endpoint_url: str | None) -> None:
        """Read all records of the build; raise UserError if a part is missing."""
        self._store = open_store(output, endpoint_url)
        self._heldout_store = open_store(heldout_of(output), endpoint_url)
        self._records = BuildRecords(self._store)
        self._parameters = self._records.parameters()
        try:
            validate_json(_USED_PARAMETERS, self._parameters)
        except DamagedJson as error:
            raise self._records.damaged_parameters(error) from None
        self._order = self._find_order()
        self._buckets = self._find_buckets()
        groups = [group.counts for _, group in sorted(self._records.groups().items())]
        self._counts = Counts.total([self._order.search, *groups, *(bucket.counts for bucket in self._buckets)])
        self._vocabulary = read_output_vocabulary(self._store)

    def run(self, resumed_shards: int) -> JoinedCorpus:
        """Write the held-out corpus, build.json and, last, corpus.json; then delete the records in progress/."""
        entries = [entry for bucket in self._buckets for entry in bucket.entries]
        if not entries:
            self._records.give_up()
            advice = self._counts.nothing_usable("correct --input, --text-field or corpus.heldout_fraction")
            raise UserError(f"{self._store.url}: {advice}")
        notes = self._records.notes()
        report = make_report(self._counts, self._parameters["undecodable"], notes.sources)
        remarks_on_unknown_tokens(
            unknown_tokens_of_report(report), notes.max_unk_rate, "corpus.max_unk_rate", self._store.url
        )
        heldout = self._write_heldout(notes.with_origins)
        write_report(self._store, report)
        manifest = self._make_manifest(entries, self._totals("train"))
        if notes.with_origins:
            write_origins(self._store, manifest, [file for bucket in self._buckets for file in bucket.origins])
        write_manifest(self._store, manifest)
        self._records.clear()
        return JoinedCorpus(
            manifest=manifest, heldout=heldout, was_finished=False, resumed_shards=resumed_shards, report=report
        )

    def _find_order(self) -> BuildOrder:
        order = self._records.order()
        if order is None:
            raise UserError(
                f"{self._store.url}: no part has read all inputs; run `electra-dist corpus build --part` until every "
                "part is finished"
            )
        return order

    def _find_buckets(self) -> list[FinishedBucket]:
        """Return the records of all buckets (ranges of the documents), in order; raise UserError if one is missing."""
        finished = self._records.buckets()
        missing = [number for number in range(self._order.num_buckets) if number not in finished]
        if missing:
            labels = ", ".join(self._records.parts()) or "none"
            some = ", ".join(str(number) for number in missing[:_MAX_NAMED])
            if len(missing) > _MAX_NAMED:
                some += ", ..."
            raise UserError(
                f"{self._store.url}: {len(missing)} of {self._order.num_buckets} buckets have no shards yet (bucket "
                f"{some}; finished parts: {labels}); run the other parts of `electra-dist corpus build --part`, then "
                "merge again"
            )
        return [finished[number] for number in range(self._order.num_buckets)]

    def _write_heldout(self, with_origins: bool) -> CorpusManifest | None:
        """Write the held-out corpus; return its manifest, or None if no row was held out."""
        pad_id = self._vocabulary.special["[PAD]"]
        entries: list[ShardEntry] = []
        origin_files: list[OriginFile] = []
        for buckets, rows in self._heldout_shards():
            name = f"shard-{len(entries):06d}.tar"
            entries.append(put_shard(self._heldout_store, name, rows, pad_id))
            if with_origins:
                table = join_tables((self._records.heldout_origins(bucket), bucket.heldout_rows) for bucket in buckets)
                origin_files.append(put_origins(self._heldout_store, name, table))
        if not entries:
            return None
        self._heldout_store.write(VOCAB_FILE, self._vocabulary.text.encode())
        manifest = self._make_manifest(entries, self._totals("heldout"))
        if with_origins:
            write_origins(self._heldout_store, manifest, origin_files)
        write_manifest(self._heldout_store, manifest)
        return manifest

    def _heldout_shards(self) -> Iterator[tuple[list[FinishedBucket], np.ndarray]]:
        """Yield the rows of each held-out shard, [rows, seq_len], after the records of the buckets they come from.

        A bucket (a range of the documents) has far fewer held-out rows than a shard, so those of several are joined.
        """
        shard_bytes = int(self._parameters["shard_size_mb"] * 1e6)
        row_bytes = self._parameters["seq_len"] * np.dtype(row_dtype(self._vocabulary.size)).itemsize
        with_rows = [bucket for bucket in self._buckets if bucket.heldout_rows]
        for buckets in in_groups(with_rows, lambda bucket: bucket.heldout_rows * row_bytes, shard_bytes):
            yield buckets, np.concatenate([self._records.heldout_rows(bucket) for bucket in buckets])

    def _make_manifest(self, entries: Sequence[ShardEntry], totals: dict[str, Any]) -> CorpusManifest:
        """Return the content of corpus.json for the training or the held-out corpus; nothing is written."""
        builder = {key: value for key, value in self._parameters.items() if key != "tokenizer"}
        ids_are_uint16 = row_dtype(self._vocabulary.size) is np.uint16
        return CorpusManifest(
            seq_len=self._parameters["seq_len"],
            dtype="uint16" if ids_are_uint16 else "uint32",
            tokenizer=TokenizerEntry.of(self._vocabulary, self._parameters["lowercase"]),
            builder={**builder, "num_inputs": self._order.num_inputs, "inputs_sha256": self._order.inputs_sha256},
            totals=totals,
            shards=tuple(entries),
        )

    def _totals(self, corpus: Literal["train", "heldout"]) -> dict[str, Any]:
        """Return the `totals` of a corpus.json: documents of both corpora together, other counts of `corpus` alone."""
        documents = self._counts.all_sources()
        rows = self._counts.rows.get(corpus, Counter())
        return {
            "documents_in": documents["documents"],
            "documents_used": documents["used"],
            "documents_heldout": documents["heldout"],
            "documents_skipped": {kind: documents[SKIPPED + kind] for kind in SKIPPED_KINDS},
            **{key: rows[key] for key in _COUNTS},
        }
