"""Open the corpora of a run, one for each phase of `data.phases`, as if they were one corpus.

Guarantee: a run without phases gets the manifest, the store and the order of `data.corpus` themselves. A run with
phases gets a joined manifest that lists the shards of all corpora, a joined store that reads them, and an order that
takes each phase's rows from its corpus. The fingerprint of the joined manifest is a digest of the fingerprints of all
corpora and of the steps at which their phases begin. Corpora that do not fit together are refused when a run starts,
and so is a later corpus of which a shard is missing.

Cost: one manifest and one listing of the files for each later corpus.

Limits: the bytes of a later corpus's shards are verified when they are first read, as those of any shard.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from electra_dist.config import DataConfig, canonical_json
from electra_dist.data.corpus_manifest import CorpusManifest, read_manifest
from electra_dist.data.phases.joined_store import JoinedStore, phase_key
from electra_dist.data.phases.phased_order import PhasedOrder
from electra_dist.data.row_order import RowOrder, RowSequence
from electra_dist.errors import ManifestMismatch, StoreMissing
from electra_dist.store.interface import Store
from electra_dist.store.open_store import open_store
from electra_dist.store.retry import RetryPolicy


class JoinedManifest(CorpusManifest):
    """Manifest of all corpora of a run with phases; `builder` has the first step and the fingerprint of each phase."""

    @functools.cached_property
    def fingerprint(self) -> str:
        """Return the SHA-256 of the phases' first steps and corpus fingerprints in hexadecimal."""
        return hashlib.sha256(canonical_json(self.builder["phases"]).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class CorpusPhase:
    """A phase of a run: its first step, and the corpus from which its rows come."""

    from_step: int
    url: str  # as the config names it
    store: Store
    manifest: CorpusManifest


@dataclass(frozen=True, kw_only=True)
class RunCorpora:
    """All corpora that a run trains on, in the order of their phases; one without `data.phases`."""

    phases: tuple[CorpusPhase, ...]

    @functools.cached_property
    def store(self) -> Store:
        """Return the store of the only corpus, or one that reads the objects of all of them."""
        if len(self.phases) == 1:
            return self.phases[0].store
        return JoinedStore([phase.store for phase in self.phases])

    @functools.cached_property
    def manifest(self) -> CorpusManifest:
        """Return the manifest of the only corpus, or a joined one whose shards have their keys in `store`."""
        if len(self.phases) == 1:
            return self.phases[0].manifest
        return _join_manifests(self.phases)

    @property
    def phase_fingerprints(self) -> tuple[str, ...]:
        """Return the fingerprint of each phase's corpus; empty for a run without `data.phases`."""
        if len(self.phases) == 1:
            return ()
        return tuple(phase.manifest.fingerprint for phase in self.phases)

    def row_order(self, seed: int, window_shards: int, global_batch: int) -> RowSequence:
        """Return the sequence of the run's rows.

        Args:
            seed: config key `seed`.
            window_shards: config key `data.shuffle_window_shards`.
            global_batch: config key `train.global_batch`; a phase from step t on begins at position t * global_batch.
        """
        orders = [
            RowOrder([shard.rows for shard in phase.manifest.shards], seed, window_shards) for phase in self.phases
        ]
        if len(orders) == 1:
            return orders[0]
        return PhasedOrder(orders, [phase.from_step * global_batch for phase in self.phases])

    def phase_that_begins_at(self, step: int) -> CorpusPhase | None:
        """Return the later phase whose first step this is, counted from 0; None if none begins there."""
        return next((phase for phase in self.phases[1:] if phase.from_step == step), None)

    def sizes(self) -> dict[str, Any]:
        """Return the sizes of the corpora together, as environment.json records them: "rows", "tokens" and "seq_len".

        With `data.phases`, "phases" has from_step, fingerprint, rows and tokens of each.
        """
        manifest = self.manifest
        sizes: dict[str, Any] = {
            "rows": manifest.num_rows,
            "tokens": manifest.num_tokens,
            "seq_len": manifest.seq_len,
        }
        if len(self.phases) > 1:
            sizes["phases"] = [
                {
                    "from_step": phase.from_step,
                    "fingerprint": phase.manifest.fingerprint,
                    "rows": phase.manifest.num_rows,
                    "tokens": phase.manifest.num_tokens,
                }
                for phase in self.phases
            ]
        return sizes

    def check_shards_of_later_phases(self) -> None:
        """Refuse corpora of which a shard is missing, so that a run does not end where their phase begins.

        The first phase's corpus is left out, because its shards are read at once.

        Raises:
            StoreMissing: a shard is missing; the message names its corpus and the shard.
        """
        for phase in self.phases[1:]:
            keys = set(phase.store.list())
            missing = [shard.name for shard in phase.manifest.shards if shard.name not in keys]
            if missing:
                raise StoreMissing(
                    f"{phase.store.url}/{missing[0]}: missing, and {len(missing) - 1} more of the "
                    f"{len(phase.manifest.shards)} shards that the phase from step {phase.from_step} needs; restore "
                    f"them, or correct data.phases"
                )


def open_run_corpora(data: DataConfig, retry: RetryPolicy | None = None) -> RunCorpora:
    """Read the manifests of all corpora of a run and check that they fit together.

    Args:
        data: names the corpora, their first steps and the S3 endpoint.
        retry: how requests to S3 are repeated; None: as in training.

    Raises:
        ManifestMismatch: two corpora differ in tokenizer, row length or type of token ids, or are the same.
        UserError: a manifest cannot be read or is damaged.
    """
    phases = []
    for named in data.training_corpora():
        store = open_store(named.url, data.endpoint_url, retry=retry)
        manifest = read_manifest(store, named.key)
        phases.append(CorpusPhase(from_step=named.from_step, url=named.url, store=store, manifest=manifest))
    for number, phase in enumerate(phases):
        for earlier in phases[:number]:
            if earlier.manifest.fingerprint == phase.manifest.fingerprint:
                raise ManifestMismatch(
                    f"data.phases: {earlier.url} and {phase.url} are the same corpus, by their fingerprint; name each "
                    f"corpus once"
                )
        _check_alike(phases[0], phase)
    return RunCorpora(phases=tuple(phases))


def _check_alike(first: CorpusPhase, later: CorpusPhase) -> None:
    """Raise ManifestMismatch if the rows of two corpora cannot be trained on in one run."""
    for what, of_first, of_later in (
        ("tokenizer", _tokenizer_of(first), _tokenizer_of(later)),
        ("row length", first.manifest.seq_len, later.manifest.seq_len),
        ("type of token ids", first.manifest.dtype, later.manifest.dtype),
    ):
        if of_first != of_later:
            raise ManifestMismatch(
                f"data.phases: {later.url} has another {what} ({of_later}) than data.corpus {first.url} "
                f"({of_first}); build it again with the vocab.txt and the data.seq_len of data.corpus"
            )


def _tokenizer_of(phase: CorpusPhase) -> str:
    """Return what identifies a corpus's tokenizer, as text: the digest of its vocabulary, its case and special ids."""
    tokenizer = phase.manifest.tokenizer
    case = "lower case" if tokenizer.lowercase else "cased"
    special_ids = [tokenizer.special[token] for token in sorted(tokenizer.special)]
    return f"vocab.txt {tokenizer.sha256[:12]}, {case}, special ids {special_ids}"


def _join_manifests(phases: Sequence[CorpusPhase]) -> JoinedManifest:
    """Return one manifest that lists the shards of all corpora, under the keys that they have in a joined store."""
    first = phases[0].manifest
    shards = [
        shard.model_copy(update={"name": phase_key(number, shard.name)})
        for number, phase in enumerate(phases)
        for shard in phase.manifest.shards
    ]
    parts = [{"from_step": phase.from_step, "corpus_fingerprint": phase.manifest.fingerprint} for phase in phases]
    return JoinedManifest(
        seq_len=first.seq_len,
        dtype=first.dtype,
        tokenizer=first.tokenizer,
        builder={"phases": parts},
        totals=_join_totals(phases),
        shards=tuple(shards),
    )


def _join_totals(phases: Sequence[CorpusPhase]) -> dict[str, Any]:
    """Return how often each token occurs in all corpora together, if each of them has these counts."""
    counts = [phase.manifest.totals.get("token_counts") for phase in phases]
    if any(count is None for count in counts):
        return {}
    return {"token_counts": np.sum([np.asarray(count, np.int64) for count in counts], axis=0).tolist()}
