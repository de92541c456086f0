"""The corpora that a run trains on, one for each phase: the part of the run from a given step on (`data.phases`).

Guarantee: a run without `data.phases` has one phase. Shards and rows of all corpora are numbered one after another, in
the order of the phases, and each shard knows the store that it is in. When a run starts, it is refused if its corpora
do not fit together, or if a shard is missing (`check_shards`).

Limits: the bytes of a shard of a later corpus are verified only when the shard is first read, as for any corpus. How
much of a corpus a run has used is estimated: rows of skipped steps are counted, too, and tokens are the number of rows
times the mean number of tokens in a row of the corpus, [PAD] not counted. This module must not import torch, because
commands on a login node use it.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from electra_dist.config import Config, DataConfig
from electra_dist.data.manifest import CorpusManifest, ShardEntry, TokenizerEntry, place_of, read_manifest
from electra_dist.data.order import CorpusOrder, RowOrder
from electra_dist.errors import ManifestMismatch
from electra_dist.store.interface import Store
from electra_dist.store.json_file import canonical_json
from electra_dist.store.open_store import open_store
from electra_dist.store.patience import Patience


class StoredShard(NamedTuple):
    """Shard of a corpus: its entry in corpus.json, and the store that has its file."""

    store: Store
    entry: ShardEntry

    @property
    def local_path(self) -> Path | None:
        """Return the path of the shard's file, or None if it must be fetched because the corpus is on S3."""
        return self.store.local_path(self.entry.name)

    @property
    def url(self) -> str:
        """Return the URL or path of the file, for messages."""
        return f"{self.store.url}/{self.entry.name}"


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Part of a run that trains on one corpus (`data.phases`): the number of its first step, and the opened corpus."""

    from_step: int  # number of the phase's first step, from 0
    url: str  # as the config names it
    store: Store
    manifest: CorpusManifest


@dataclass(frozen=True, kw_only=True)
class Corpora:
    """All corpora that a run trains on, in the order of its phases; they share tokenizer and format of rows."""

    phases: tuple[Phase, ...]

    @classmethod
    def of(cls, store: Store, manifest: CorpusManifest, url: str | None = None) -> Corpora:
        """Return the corpora of a run that has only one, by default named by the URL of its store in messages."""
        return cls(phases=(Phase(from_step=0, url=url or store.url, store=store, manifest=manifest),))

    @property
    def url(self) -> str:
        """Return the corpora's name in messages: the only one's URL or folder, or "data.phases" for several."""
        return self.phases[0].store.url if len(self.phases) == 1 else "data.phases"

    @property
    def seq_len(self) -> int:
        """Return the number of tokens in each row."""
        return self.phases[0].manifest.seq_len

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """Return the NumPy type of the token ids in the shards, uint16 or uint32."""
        return self.phases[0].manifest.numpy_dtype

    @property
    def tokenizer(self) -> TokenizerEntry:
        """Return the entry of corpus.json about the tokenizer, which all corpora share."""
        return self.phases[0].manifest.tokenizer

    @property
    def num_rows(self) -> int:
        """Return the number of rows in all corpora."""
        return sum(phase.manifest.num_rows for phase in self.phases)

    @functools.cached_property
    def shards(self) -> tuple[StoredShard, ...]:
        """Return the shards of all corpora, in the order in which they and their rows are numbered."""
        return tuple(StoredShard(phase.store, entry) for phase in self.phases for entry in phase.manifest.shards)

    @functools.cached_property
    def fetched_shards(self) -> tuple[StoredShard, ...]:
        """Return the shards that a node must fetch: those of all corpora that are not in local folders."""
        return tuple(shard for shard in self.shards if shard.local_path is None)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Return the only corpus's fingerprint or, for several, a SHA-256 of all first steps and fingerprints."""
        if len(self.phases) == 1:
            return self.phases[0].manifest.fingerprint
        parts = [
            {"from_step": phase.from_step, "corpus_fingerprint": phase.manifest.fingerprint} for phase in self.phases
        ]
        return hashlib.sha256(canonical_json(parts).encode()).hexdigest()

    @property
    def patience(self) -> Patience:
        """Return the rule by which reading these corpora waits for storage that is away."""
        return self.phases[0].store.patience

    @property
    def phase_fingerprints(self) -> tuple[str, ...]:
        """Return the fingerprint of each phase's corpus; empty for a run without `data.phases`."""
        if len(self.phases) == 1:
            return ()
        return tuple(phase.manifest.fingerprint for phase in self.phases)

    def shard_name(self, shard: int) -> str:
        """Return the file name of a shard, an index in `shards`, with "phase-n/" before it after the first phase."""
        phase, _ = place_of(shard, [len(phase.manifest.shards) for phase in self.phases])
        name = self.shards[shard].entry.name
        return f"phase-{phase}/{name}" if phase else name

    def row_name(self, row_id: int) -> str:
        """Return where the row with this id is, for messages: its shard and its number there, from 0.

        The result is "shard-000001.tar row 17", for example; "phase-n/" precedes it in the n-th phase after the first.
        """
        phase, row_in_corpus = place_of(row_id, [phase.manifest.num_rows for phase in self.phases])
        name = self.phases[phase].manifest.row_name(row_in_corpus)
        return f"phase-{phase}/{name}" if phase else name

    def row_location(self, row_id: int) -> str:
        """Return where a row is, with the URL of its corpus, as in "s3://bucket/corpus/shard-000001.tar row 17"."""
        phase, row_in_corpus = place_of(row_id, [phase.manifest.num_rows for phase in self.phases])
        return f"{self.phases[phase].store.url}/{self.phases[phase].manifest.row_name(row_in_corpus)}"

    def row_order(self, seed: int, window_shards: int, global_batch: int) -> RowOrder:
        """Return the order in which the run reads rows. `window_shards` shards at a time are shuffled together.

        A step uses `global_batch` rows, so the phase from step t on begins at position t * global_batch of the order.
        """
        orders = [
            CorpusOrder([shard.rows for shard in phase.manifest.shards], seed, window_shards) for phase in self.phases
        ]
        return RowOrder(orders, [phase.from_step * global_batch for phase in self.phases])

    def phase_that_begins_at(self, step: int) -> Phase | None:
        """Return the phase that begins at a step (from 0), or None if none does; the first phase does not count."""
        return next((phase for phase in self.phases[1:] if phase.from_step == step), None)

    def sizes(self) -> dict[str, Any]:
        """Return the sizes of the run's corpora, in the form in which environment.json records them.

        "rows" and "tokens" are totals over all corpora; "seq_len" is in tokens. "phases" exists only with
        `data.phases`.
        """
        sizes: dict[str, Any] = {
            "rows": self.num_rows,
            "tokens": sum(phase.manifest.num_tokens for phase in self.phases),
            "seq_len": self.seq_len,
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

    def check_shards(self) -> None:
        """Raise ManifestMismatch if a shard is missing, which the run would notice only when it needs the shard.

        One listing shows it; sizes are not asked for. The first corpus is passed over if it is on S3, because there
        every rank's listing would be requests, and its shards are fetched ahead.
        """
        for number, phase in enumerate(self.phases):
            names = [shard.name for shard in phase.manifest.shards]
            if number == 0 and phase.store.local_path(names[0]) is None:
                continue
            missing = sorted({*names} - {*phase.store.list()})
            if missing:
                since = f" from step {phase.from_step} on" if phase.from_step else ""
                raise ManifestMismatch(
                    f"{phase.store.url}: {len(missing)} of the {len(names)} shards that the run reads{since} "
                    f"are missing, such as {missing[0]}; restore them from a copy, or delete "
                    "this corpus and build it again (the same text and settings give the same rows)"
                )


def open_corpora(data: DataConfig, patience: Patience | None = None) -> Corpora:
    """Open all corpora of a run; raise ManifestMismatch if two are equal or differ in tokenizer or row format."""
    phases = []
    for named in data.training_corpora():
        store = open_store(named.url, data.endpoint_url, patience)
        manifest = read_manifest(store, named.key)
        phases.append(Phase(from_step=named.from_step, url=named.url, store=store, manifest=manifest))
    for number, phase in enumerate(phases[1:], start=1):
        for earlier in phases[:number]:
            if earlier.manifest.fingerprint == phase.manifest.fingerprint:
                raise ManifestMismatch(
                    f"data.phases: {earlier.url} and {phase.url} are the same corpus, by their fingerprint; name each "
                    f"corpus once"
                )
        _check_alike(phases[0], phase)
    return Corpora(phases=tuple(phases))


def _check_alike(first: Phase, later: Phase) -> None:
    """Raise ManifestMismatch unless two corpora have the same tokenizer, row length and type of token ids."""
    for property_name, of_first, of_later in (
        ("tokenizer", describe_tokenizer(first.manifest.tokenizer), describe_tokenizer(later.manifest.tokenizer)),
        ("row length", first.manifest.seq_len, later.manifest.seq_len),
        ("type of token ids", first.manifest.dtype, later.manifest.dtype),
    ):
        if of_first != of_later:
            raise ManifestMismatch(
                f"data.phases: {later.url} has another {property_name} ({of_later}) than data.corpus {first.url} "
                f"({of_first}); build it again with the vocab.txt and the data.seq_len of data.corpus"
            )


def with_corpus_vocabulary(config: Config, manifest: CorpusManifest) -> tuple[Config, list[str]]:
    """Lower `model.vocab_size` to the size of the corpus's vocabulary; return the config and lines for the log.

    A small corpus has fewer entries than a config allows. Embedding tables are padded to a multiple of 128 rows.
    """
    size = manifest.tokenizer.vocab_size
    if size >= config.model.vocab_size:
        return config, []
    line = f"vocabulary: {size:,} entries, as in data.corpus, and not {config.model.vocab_size:,} (model.vocab_size)"
    return config.model_copy(update={"model": config.model.with_vocabulary_of(size)}), [line]


def check_corpus_fits(key: str, url: str, manifest: CorpusManifest, data: DataConfig, vocab_size: int) -> None:
    """Raise ManifestMismatch unless a corpus has rows of `data.seq_len` tokens and a vocabulary of `vocab_size`.

    Error messages name the corpus by its config key `key` and its `url`.
    """
    if manifest.seq_len != data.seq_len:
        raise ManifestMismatch(
            f"{key} {url} has rows of {manifest.seq_len} tokens, but data.seq_len is {data.seq_len}; set "
            f"data.seq_len: {manifest.seq_len}, or build the corpus again with data.seq_len: {data.seq_len}"
        )
    if manifest.tokenizer.vocab_size != vocab_size:
        raise ManifestMismatch(
            f"{key} {url} was built with a vocabulary of {manifest.tokenizer.vocab_size} entries, but "
            f"the model has {vocab_size}; set model.vocab_size: {manifest.tokenizer.vocab_size} or more, or set "
            f"{key} to a corpus with {vocab_size} entries"
        )


def describe_tokenizer(tokenizer: TokenizerEntry) -> str:
    """Describe a corpus's tokenizer for messages: digest of the vocabulary, casing and ids of special tokens."""
    case = "lower case" if tokenizer.lowercase else "cased"
    special_ids = [tokenizer.special[token] for token in sorted(tokenizer.special)]
    return f"vocab.txt {tokenizer.sha256[:12]}, {case}, special ids {special_ids}"


@dataclass(frozen=True, kw_only=True)
class PhaseUse:
    """How much of one phase's corpus a run has trained on up to some step."""

    from_step: int  # first step of the phase, from 0
    fingerprint: str  # of the corpus
    corpus_rows: int
    corpus_tokens: int  # without [PAD]
    rows: int  # rows trained on up to that step; a row of the corpus counts again in each epoch

    @property
    def tokens(self) -> float:
        """Return how many tokens of this corpus the run has trained on, estimated from the rows; [PAD] not counted."""
        return self.rows * self.corpus_tokens / self.corpus_rows

    @property
    def epochs(self) -> float:
        """Return how many times the run has trained on the whole corpus, with fractions."""
        return self.rows / self.corpus_rows


def steps_of_phases(from_steps: Sequence[int], num_steps: int) -> list[int]:
    """Return how many of a run's first `num_steps` steps each phase has; `from_steps` are the phases' first steps."""
    end_steps = [*from_steps[1:], num_steps]
    return [max(0, min(end, num_steps) - first) for first, end in zip(from_steps, end_steps, strict=True)]


def uses_of_phases(phases: Sequence[Mapping[str, Any]], num_steps: int, global_batch: int) -> list[PhaseUse]:
    """Return how much of each phase's corpus the first `num_steps` steps have used; [] without `data.phases`.

    `phases` is the entry "phases" of `Corpora.sizes()` or of environment.json. `global_batch` is in rows.
    """
    if not phases:
        return []
    steps = steps_of_phases([phase["from_step"] for phase in phases], num_steps)
    return [
        PhaseUse(
            from_step=phase["from_step"],
            fingerprint=phase["fingerprint"],
            corpus_rows=phase["rows"],
            corpus_tokens=phase["tokens"],
            rows=steps_of_phase * global_batch,
        )
        for phase, steps_of_phase in zip(phases, steps, strict=True)
    ]


def token_shares(uses: Sequence[PhaseUse]) -> list[float]:
    """Return which share of the run's tokens each phase has used, from 0 to 1; all 0 before the first step."""
    tokens = sum(use.tokens for use in uses)
    return [use.tokens / max(tokens, 1.0) for use in uses]
