"""Everything that can be wrong with a run's inputs is found here, by every rank, before anything is written.

Each check is read-only and raises UserError with one line; the process then ends with exit code 78.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from electra_kernels import BackendUnavailable
from electra_kernels.backend import resolve

from electra_dist.checkpoint.targets import open_targets
from electra_dist.config import Config, DataConfig
from electra_dist.data.cache import ShardCache
from electra_dist.data.manifest import CorpusManifest, read_manifest
from electra_dist.engine.engine import check_world_size
from electra_dist.engine.optimizer import check_optimizer
from electra_dist.errors import ManifestMismatch, UserError
from electra_dist.objectives.build import check_objective
from electra_dist.pretrained.init_from import check_source, needs_source
from electra_dist.run.folder import (
    check_run_folder,
    run_identity,
)
from electra_dist.store.interface import Store
from electra_dist.store.open import open_store
from electra_dist.tokenizer import Vocabulary


@dataclass(frozen=True, kw_only=True)
class OpenCorpus:
    """An opened corpus."""

    store: Store
    manifest: CorpusManifest

    def open_cache(self, data: DataConfig, folder: Path) -> ShardCache:
        """Return this node's cache of the corpus's shards in `folder`, with the limits of `data`; close it."""
        limit_bytes = None if data.cache_limit_gb is None else round(data.cache_limit_gb * 1e9)
        return ShardCache(self.store, self.manifest, folder, data.fetch_threads, limit_bytes)


@dataclass(frozen=True, kw_only=True)
class RunInputs:
    """What a run reads."""

    corpus: OpenCorpus
    heldout: OpenCorpus | None


def check_inputs(config: Config, world_size: int) -> RunInputs:
    """All checks; returns the opened corpora.

    Raises:
        UserError: names the file, key or URL at fault and the next step.
    """
    check_world_size(config.train, world_size)
    check_objective(config.model, config.objective)
    check_optimizer(config.optimizer, config.engine.zero_stage)
    try:
        resolve(config.kernels.backend, "cuda" if torch.cuda.is_available() else "cpu")
    except BackendUnavailable as error:
        raise UserError(str(error)) from None
    corpus = _open_corpus("corpus", config.data.corpus, config.data, config.model.vocab_size)
    check_run_folder(Path(config.run_dir), run_identity(config, corpus.manifest.fingerprint))
    if needs_source(config.train, open_targets(config)):
        vocab_file = corpus.manifest.tokenizer.vocab_file
        check_source(
            config.train, Vocabulary(corpus.store.read(vocab_file).decode(), f"{config.data.corpus}/{vocab_file}")
        )
    heldout = None
    if config.data.heldout:
        heldout = _open_corpus("heldout", config.data.heldout, config.data, config.model.vocab_size)
    if heldout and heldout.manifest.tokenizer.sha256 != corpus.manifest.tokenizer.sha256:
        raise ManifestMismatch(
            f"data.heldout {config.data.heldout} was built with another vocabulary than data.corpus "
            f"{config.data.corpus}; rebuild it with the corpus's vocab.txt"
        )
    return RunInputs(corpus=corpus, heldout=heldout)


def _open_corpus(key: str, url: str, data: DataConfig, vocab_size: int) -> OpenCorpus:
    """Open the corpus that the config key data.`key` names; refuse one of other rows or of another vocabulary."""
    store = open_store(url, data.endpoint_url)
    manifest = read_manifest(store)
    if manifest.seq_len != data.seq_len:
        raise ManifestMismatch(
            f"data.{key} {url} has rows of {manifest.seq_len} tokens, data.seq_len is {data.seq_len}; "
            f"set data.seq_len or build the corpus with it"
        )
    if manifest.tokenizer.vocab_size != vocab_size:
        raise ManifestMismatch(
            f"data.{key} {url} was built with a vocabulary of {manifest.tokenizer.vocab_size} entries, "
            f"model.vocab_size is {vocab_size}; set model.vocab_size or take the corpus of this tokenizer"
        )
    return OpenCorpus(store=store, manifest=manifest)
