"""Everything that can be wrong with a run's inputs is found here, by every rank, before anything is written.

Each check is read-only and raises UserError with one line; the process then ends with exit code 78.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from electra_kernels import BackendUnavailable
from electra_kernels.backend import resolve

from electra_dist.config import Config
from electra_dist.data.manifest import CorpusManifest, read_manifest
from electra_dist.engine.engine import check_world_size
from electra_dist.engine.optimizer import check_optimizer
from electra_dist.errors import ManifestMismatch, UserError
from electra_dist.objectives.build import check_objective
from electra_dist.pretrained.init_from import check_source, needs_source
from electra_dist.run.folder import (
    check_run_folder,
)
from electra_dist.store.interface import Store
from electra_dist.store.open import open_store
from electra_dist.tokenizer import Vocabulary


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """An opened corpus."""

    store: Store
    manifest: CorpusManifest


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a run reads."""

    corpus: Corpus
    heldout: Corpus | None


def check_inputs(config: Config, world_size: int) -> Inputs:
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
    corpus = _open_corpus(config, "corpus", config.data.corpus)
    check_run_folder(config, run_identity(config, corpus.manifest))
    if needs_source(config):
        vocab_file = corpus.manifest.tokenizer.vocab_file
        check_source(
            config.train, Vocabulary(corpus.store.read(vocab_file).decode(), f"{config.data.corpus}/{vocab_file}")
        )
    heldout = _open_corpus(config, "heldout", config.data.heldout) if config.data.heldout else None
    if heldout and heldout.manifest.tokenizer.sha256 != corpus.manifest.tokenizer.sha256:
        raise ManifestMismatch(
            f"data.heldout {config.data.heldout} was built with another vocabulary than data.corpus "
            f"{config.data.corpus}; rebuild it with the corpus's vocab.txt"
        )
    return Inputs(corpus=corpus, heldout=heldout)


def _open_corpus(config: Config, key: str, url: str) -> Corpus:
    store = open_store(url, config.data.endpoint_url)
    manifest = read_manifest(store)
    if manifest.seq_len != config.data.seq_len:
        raise ManifestMismatch(
            f"data.{key} {url} has rows of {manifest.seq_len} tokens, data.seq_len is {config.data.seq_len}; "
            f"set data.seq_len or build the corpus with it"
        )
    if manifest.tokenizer.vocab_size != config.model.vocab_size:
        raise ManifestMismatch(
            f"data.{key} {url} was built with a vocabulary of {manifest.tokenizer.vocab_size} entries, "
            f"model.vocab_size is {config.model.vocab_size}; set model.vocab_size or take the corpus of this tokenizer"
        )
    return Corpus(store=store, manifest=manifest)


def run_identity(config: Config, corpus: CorpusManifest) -> dict[str, Any]:
    """What a run folder is bound to: everything that defines the trajectory."""
    return {**config.identity(), "corpus_fingerprint": corpus.fingerprint}
