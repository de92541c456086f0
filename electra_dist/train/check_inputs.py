"""Check all inputs of a run, before anything is written: on every rank, and in `electra-dist train` before one starts.

Each check only reads, and raises UserError with a message of one line; the process then ends with exit code 78.

Limits: this module must not import torch, which takes the command seconds; a run that reads weights imports it.
"""

from __future__ import annotations

import contextlib
import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from electra_dist.checkpoint.stored_copies import (
    Owner,
    check_one_is_resumable,
    checkpoints,
    has_withdrawn,
    open_targets,
)
from electra_dist.config import Config
from electra_dist.config.rules import check_targets_are_separate, check_world_size
from electra_dist.corpus.build_report import (
    read_report,
    remarks_on_shape,
    remarks_on_unknown_tokens,
    unknown_tokens_of_report,
)
from electra_dist.data.corpora import (
    Corpora,
    check_corpus_fits,
    describe_tokenizer,
    open_corpora,
    with_corpus_vocabulary,
)
from electra_dist.data.manifest import CorpusManifest, heldout_of, read_corpus_vocabulary, read_manifest
from electra_dist.errors import ManifestMismatch, StoreMissing, UserError
from electra_dist.run.folder import check_recorded_inputs, check_run_folder, open_run, run_identity
from electra_dist.run.history import newest_checkpoint
from electra_dist.run.ledger import read_ledger
from electra_dist.store.interface import Store
from electra_dist.store.open_store import open_store
from electra_dist.store.patience import Patience, patient
from electra_dist.tokenizer import Vocabulary
from electra_dist.train.guard import SkipList


@dataclass(frozen=True, kw_only=True)
class RunInputs:
    """Checked inputs of a run: config, corpora, vocabulary, identity, checkpoint stores, and what the user accepts."""

    config: Config  # with what the inputs decide: the size of the vocabulary, the digest of a frozen generator
    notes: list[str]  # log lines about what the inputs have decided
    corpora: Corpora  # the training corpora: data.corpus, and the corpora of data.phases
    heldout: Corpora | None  # corpus for evaluations; None without data.heldout
    vocabulary: Vocabulary  # of the training corpus, verified against its manifest
    identity: dict[str, Any]  # what identity.json of the run folder must hold
    targets: list[Store]  # that receive every checkpoint
    accept_new_numerics: bool  # whether to continue a run of a version that draws or rounds differently
    from_scratch: bool = False  # whether the run begins again at step 0, even if there are checkpoints

    @property
    def heldout_digest(self) -> dict[str, str]:
        """Return what inputs.json records of the held-out corpus, as name -> fingerprint; {} without such a corpus."""
        if self.heldout is None:
            return {}
        return {f"data.heldout {self.heldout.url}": self.heldout.fingerprint}


@patient
def check_inputs(
    config: Config,
    world_size: int,
    accept_new_numerics: bool = False,
    from_scratch: bool = False,
    *,
    patience: Patience | None = None,
) -> RunInputs:
    """Check the config, the corpora, the run folder and the initial weights of a run; return what was opened and read.

    Nothing is written, and no process group is needed. `accept_new_numerics` allows a run to go on although another
    version, which draws random numbers or rounds differently, has begun it. `from_scratch` says that the run begins
    again at step 0, even if there are checkpoints.
    """
    # The cheap checks, which need no file, come first.
    check_world_size(config.train, world_size)
    check_targets_are_separate(config)
    config, corpora, notes = open_training_corpora(config, patience)
    if config.objective.generator == "frozen":
        from electra_dist.pretrained.weights import with_generator_digest

        config = with_generator_digest(config, patience=patience)
    identity = run_identity(config, corpora.fingerprint, corpora.phase_fingerprints)
    check_run_folder(Path(config.run_dir), identity, accept_new_numerics)
    vocabulary = read_corpus_vocabulary(corpora.phases[0].store, corpora.tokenizer)
    _check_casing(config.data.corpus, corpora.phases[0].manifest, vocabulary)
    targets = open_targets(config, patience)
    if config.train.init_from and (from_scratch or not checkpoints(targets)):
        from electra_dist.pretrained.weights import check_source

        check_source(config.starting_weights, vocabulary)
    if config.objective.generator == "frozen":
        from electra_dist.pretrained.weights import check_generator_vocabulary

        check_generator_vocabulary(config, vocabulary)
    heldout = _open_heldout(config, corpora, patience) if config.data.heldout else None
    inputs = RunInputs(
        config=config,
        notes=notes,
        corpora=corpora,
        heldout=heldout,
        vocabulary=vocabulary,
        identity=identity,
        targets=targets,
        accept_new_numerics=accept_new_numerics,
        from_scratch=from_scratch,
    )
    if not from_scratch:
        check_recorded_inputs(Path(config.run_dir), inputs.heldout_digest)
    return inputs


@patient
def begins_at_step_0(inputs: RunInputs, *, patience: Patience | None = None) -> bool:
    """Return whether a start has no checkpoint to go on from, so that it begins at step 0.

    Raises UserError if the run has saved checkpoints and none is in its targets, or if their manifests already tell
    that none can be used. Call it before anything is written into the run folder, and after a start from scratch has
    set the earlier checkpoints and records aside.
    """
    config = inputs.config
    run_dir = Path(config.run_dir)
    found = checkpoints(inputs.targets)
    if found:
        owner = Owner(
            identities=frozenset([config.identity_sha256(), *config.older_identities().values()]),
            corpora=frozenset([inputs.corpora.fingerprint]),
        )
        skips = SkipList(run_dir, config.train.skip_steps)
        check_one_is_resumable(found, owner, sorted(skips.steps), skips.stopped)
        return False
    saved_step = newest_checkpoint(read_ledger(run_dir))
    if saved_step and not has_withdrawn(inputs.targets):
        raise _checkpoints_are_elsewhere(config, saved_step)
    return True


def _checkpoints_are_elsewhere(config: Config, saved_step: int) -> UserError:
    """Return the error that the run has saved checkpoints, the newest of `saved_step`, and none is in its targets."""
    now = config.checkpoint_urls
    with contextlib.suppress(UserError):  # the config of the last start is lost, or of a version with other keys
        before = open_run(config.run_dir).checkpoint_urls
        if before != now:
            both = json.dumps([*now, *(url for url in before if url not in now)])
            return UserError(
                f"checkpoint.targets: the run has saved step {saved_step:,} in {', '.join(before)}, and there is no "
                f"checkpoint in {', '.join(now)}; to go on from that step, name the old place, too: --set "
                f"checkpoint.targets={shlex.quote(both)}, or copy its content"
            )
    return UserError(
        f"the run has saved step {saved_step:,}, and there is no checkpoint in {', '.join(now)}; mount or restore "
        f"that place (the current folder is {Path.cwd()}), or begin again at step 0 with the option --from-scratch of "
        f"launcher/pretrain.py, which deletes nothing"
    )


def open_training_corpora(config: Config, patience: Patience | None = None) -> tuple[Config, Corpora, list[str]]:
    """Open `data.corpus` and the corpora of `data.phases`, and check that they fit the config and one another.

    The config is returned with the size of their vocabulary, and log lines about it.
    """
    corpora = open_corpora(config.data, patience)
    config, notes = with_corpus_vocabulary(config, corpora.phases[0].manifest)
    for named, phase in zip(config.data.training_corpora(), corpora.phases, strict=True):
        check_corpus_fits(named.key, named.url, phase.manifest, config.data, config.model.vocab_size)
    corpora.check_shards()
    return config, corpora, notes


def remarks_on_corpora(config: Config, corpora: Corpora, begins: bool) -> list[str]:
    """Return log lines about the sources of text that have many unknown tokens ([UNK]) or do not look like text.

    If the run `begins` at step 0, raise UserError for a source whose share of unknown tokens exceeds
    `corpus.max_unk_rate`. The counts come from the report of the corpus build (build.json), if there is one.
    """
    max_rate = config.corpus.max_unk_rate if begins else 1.0
    lines = []
    for phase in corpora.phases:
        try:
            report = read_report(phase.store)
        except UserError:
            continue  # a damaged report: a run does not need it
        if report is not None:
            counts = unknown_tokens_of_report(report)
            lines += remarks_on_unknown_tokens(counts, max_rate, "corpus.max_unk_rate", phase.url)
            lines += [f"{phase.url}: {line}" for line in remarks_on_shape(report)]
    return lines


def _open_heldout(config: Config, corpora: Corpora, patience: Patience | None) -> Corpora:
    """Open the held-out corpus; raise ManifestMismatch if its tokenizer is another, or if the run trains on it."""
    assert config.data.heldout
    store = open_store(config.data.heldout, config.data.endpoint_url, patience)
    try:
        manifest = read_manifest(store, "data.heldout")
    except StoreMissing:
        is_lost = bool(corpora.phases[0].manifest.totals.get("documents_heldout"))
        if is_lost or config.data.heldout != heldout_of(config.data.corpus):
            raise
        raise StoreMissing(  # a build makes both corpora, so the advice to build this one would be wrong
            f"data.heldout {config.data.heldout}: {config.data.corpus} has no held-out rows; build the corpus again "
            "with a higher corpus.heldout_fraction, or train without evaluation: --set data.heldout=null"
        ) from None
    check_corpus_fits("data.heldout", config.data.heldout, manifest, config.data, config.model.vocab_size)
    tokenizer = describe_tokenizer(manifest.tokenizer)
    training_tokenizer = describe_tokenizer(corpora.tokenizer)
    if tokenizer != training_tokenizer:
        raise ManifestMismatch(
            f"data.heldout {config.data.heldout} was built with another tokenizer ({tokenizer}) than data.corpus "
            f"{config.data.corpus} ({training_tokenizer}); build data.heldout again with the vocab.txt and the casing "
            f"of data.corpus"
        )
    digests = {shard.sha256 for shard in manifest.shards}
    for phase in corpora.phases:
        shared = [shard.name for shard in phase.manifest.shards if shard.sha256 in digests]
        if shared:
            raise ManifestMismatch(
                f"data.heldout {config.data.heldout} has rows that the run trains on: {shared[0]} of {phase.url}; "
                "name the held-out corpus that the build of the training corpus has made, or set data.heldout=null"
            )
    heldout = Corpora.of(store, manifest)
    heldout.check_shards()
    return heldout


def _check_casing(url: str, manifest: CorpusManifest, vocabulary: Vocabulary) -> None:
    """Raise ManifestMismatch if a WordPiece corpus is marked as cased but was built from lower-cased text."""
    is_wordpiece = vocabulary.kind == "wordpiece"
    if is_wordpiece and not manifest.tokenizer.lowercase and manifest.builder.get("lowercase", False):
        raise ManifestMismatch(
            f"data.corpus {url}: in corpus.json, tokenizer.lowercase is false, but builder.lowercase is true; "
            f"restore corpus.json or build the corpus again"
        )
