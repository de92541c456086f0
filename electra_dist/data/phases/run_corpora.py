"""Open all corpora that a run trains on, and present them as one corpus.

A run trains on `data.corpus`, and from given steps on, on the corpora that `data.phases` names. The part of a run that
trains on one corpus is a phase.

Guarantee: without `data.phases`, the manifest, the store and the order of rows are those of `data.corpus`. With
`data.phases`, a joined manifest lists the shards of all corpora, a joined store reads them, and a joined order takes
the rows of each phase from its corpus. The fingerprint of the joined manifest is a digest of the fingerprints of all
corpora and of the steps at which their phases begin. When a run starts, it is refused if its corpora do not fit
together, or if a shard of a later corpus is missing.

Limits: the bytes of a shard of a later corpus are verified only when the shard is first read, as for any corpus.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from electra_dist.config import DataConfig, canonical_json
from electra_dist.data.manifest import CorpusManifest, read_manifest
from electra_dist.data.order import RowOrder, RowSequence
from electra_dist.data.phases.joined_store import JoinedStore, phase_key
from electra_dist.data.phases.phased_order import PhasedOrder
from electra_dist.errors import ManifestMismatch, StoreMissing
from electra_dist.store.interface import Store
from electra_dist.store.open_store import open_store
from electra_dist.store.retry import RetryPolicy


class JoinedManifest(CorpusManifest):
    """One manifest for all corpora of a run; `builder["phases"]` has each corpus's first step and fingerprint."""

    @functools.cached_property
    def fingerprint(self) -> str:
        """Return a SHA-256 in hexadecimal over the first step and the corpus fingerprint of every phase."""
        return hashlib.sha256(canonical_json(self.builder["phases"]).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class CorpusPhase:
    """Part of a run that trains on one corpus: the number of its first step, and the opened corpus."""

    from_step: int  # number of the phase's first step, from 0
    url: str  # as the config names it
    store: Store
    manifest: CorpusManifest


@dataclass(frozen=True, kw_only=True)
class RunCorpora:
    """All corpora that a run trains on, in the order of its phases. Without `data.phases` there is one phase."""

    phases: tuple[CorpusPhase, ...]

    @functools.cached_property
    def store(self) -> Store:
        """Return one store for all corpora: the store of the only corpus or, with `data.phases`, a `JoinedStore`."""
        if len(self.phases) == 1:
            return self.phases[0].store
        return JoinedStore([phase.store for phase in self.phases])

    @functools.cached_property
    def manifest(self) -> CorpusManifest:
        """Return one manifest for all corpora; its shard names are keys of the property `store`."""
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
        """Return the order in which the run reads rows; a phase from step t on begins at position t * global_batch."""
        orders = [
            RowOrder([shard.rows for shard in phase.manifest.shards], seed, window_shards) for phase in self.phases
        ]
        if len(orders) == 1:
            return orders[0]
        return PhasedOrder(orders, [phase.from_step * global_batch for phase in self.phases])

    def phase_that_begins_at(self, step: int) -> CorpusPhase | None:
        """Return the phase that begins at a step (from 0); None if no phase, or only the first one, begins there."""
        return next((phase for phase in self.phases[1:] if phase.from_step == step), None)

    def sizes(self) -> dict[str, Any]:
        """Return the sizes of the run's corpora, in the form in which environment.json records them.

        "rows" and "tokens" are totals over all corpora; "seq_len" is in tokens. "phases" exists only with
        `data.phases`.
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
        """Raise StoreMissing if a shard of a later phase is missing, which the run would notice only in that phase."""
        for phase in self.phases[1:]:
            keys = set(phase.store.list())
            missing = [shard.name for shard in phase.manifest.shards if shard.name not in keys]
            if missing:
                raise StoreMissing(
                    f"{phase.store.url}: {len(missing)} of the {len(phase.manifest.shards)} shards that the run needs "
                    f"from step {phase.from_step} on are missing, such as {missing[0]}; restore them, or correct "
                    f"data.phases"
                )


def open_run_corpora(data: DataConfig, retry: RetryPolicy | None = None) -> RunCorpora:
    """Open all corpora of a run; raise ManifestMismatch if two are equal or differ in tokenizer or row format."""
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
    for property_name, of_first, of_later in (
        ("tokenizer", describe_tokenizer(first.manifest), describe_tokenizer(later.manifest)),
        ("row length", first.manifest.seq_len, later.manifest.seq_len),
        ("type of token ids", first.manifest.dtype, later.manifest.dtype),
    ):
        if of_first != of_later:
            raise ManifestMismatch(
                f"data.phases: {later.url} has another {property_name} ({of_later}) than data.corpus {first.url} "
                f"({of_first}); build it again with the vocab.txt and the data.seq_len of data.corpus"
            )


def describe_tokenizer(manifest: CorpusManifest) -> str:
    """Describe a corpus's tokenizer for messages: digest of the vocabulary, casing and ids of special tokens."""
    tokenizer = manifest.tokenizer
    case = "lower case" if tokenizer.lowercase else "cased"
    special_ids = [tokenizer.special[token] for token in sorted(tokenizer.special)]
    return f"vocab.txt {tokenizer.sha256[:12]}, {case}, special ids {special_ids}"


def _join_manifests(phases: Sequence[CorpusPhase]) -> JoinedManifest:
    """Return one manifest that lists the shards of all corpora, each named by its key in a `JoinedStore`."""
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
        shards=tuple(shards),
    )
