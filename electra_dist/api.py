"""What `import electra_dist` offers to notebooks and scripts: one process on one device, without DeepSpeed.

Open a corpus and read the rows of any step of a run on it; build the networks and the loss of a config, load the
weights of a run, read its curves, and score text.

Guarantee: the rows, masks, samples, dropout and losses of a step are those of a run with the same config, seed and
step, because order, verification and reading are the run's own. The first batch of a shuffle window verifies its
shards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from electra_kernels.operation_types import SpecialIds
from numpy.typing import NDArray

from electra_dist.argument_checks import Text, checked
from electra_dist.config import Config
from electra_dist.config.sections.base import NonNegative, Positive, Seed, Size
from electra_dist.data.corpora import Corpora, open_corpora
from electra_dist.data.loader import RowLoader
from electra_dist.data.manifest import read_corpus_vocabulary, read_manifest
from electra_dist.data.node_cache import SHARDS_DIR
from electra_dist.data.order import RowOrder
from electra_dist.data.shard_cache import ShardCache
from electra_dist.errors import ManifestMismatch, UserError
from electra_dist.model import towers as model_towers
from electra_dist.model.towers import ElectraTowers
from electra_dist.objectives import build_objective as objective_builder
from electra_dist.objectives.base import Objective, StepInput
from electra_dist.pretrained.encoder import Pretrained, TowerName, device_of_choice, load_pretrained
from electra_dist.pretrained.weights import load_frozen_generator, load_run_weights
from electra_dist.run.folder import is_run_folder, open_run, recorded_fingerprints
from electra_dist.run.metrics import EvalRecord, StepRecord, iter_evaluations, iter_steps
from electra_dist.scoring.text_scores import TextScore, TextScorer
from electra_dist.store.open_store import open_store, without_tilde
from electra_dist.store.user_cache import user_cache_folder
from electra_dist.tokenizer import Vocabulary

# Defaults of the config, for a corpus that is opened without one.
_SEED = 42
_WINDOW_SHARDS = 64


class Corpus:
    """Corpus whose rows can be read for any step, as a run reads them. Close it after use; it is not thread-safe."""

    def __init__(
        self,
        corpora: Corpora,
        seed: int,
        shuffle_window_shards: int,
        cache_dir: Path,
        global_batch: int | None,
    ) -> None:
        """Use `open_corpus` instead."""
        self.corpora = corpora  # one for each phase of a run
        self._seed = seed
        self._shuffle_window_shards = shuffle_window_shards
        self._orders: dict[int, RowOrder] = {}  # global batch -> sequence of the rows
        self._cache_dir = cache_dir
        self._global_batch = global_batch  # of the run or config from which the corpus was opened
        self._cache = self._open_cache()

    def __repr__(self) -> str:
        places = ", ".join(phase.url for phase in self.corpora.phases)
        return f"Corpus({places}: {self.corpora.num_rows:,} rows of {self.corpora.seq_len} tokens)"

    @property
    def fingerprint(self) -> str:
        """Return the digest of corpus.json (of all, with `data.phases`); a run resumes only if it is the same."""
        return self.corpora.fingerprint

    @property
    def special(self) -> SpecialIds:
        """Return the ids of the special tokens."""
        return SpecialIds.from_tokens(self.corpora.tokenizer.special)

    def vocabulary(self) -> Vocabulary:
        """Read the vocabulary of the corpus. Raises UserError if it is not the one that corpus.json names."""
        return read_corpus_vocabulary(self.corpora.phases[0].store, self.corpora.tokenizer)

    @checked
    def batch(self, step: NonNegative, global_batch: Size | None = None) -> torch.Tensor:
        """Return the rows of one step of a run, int64 token ids [global_batch, seq_len] on the host.

        `global_batch` is by default that of the run or config from which the corpus was opened.
        In a run of W ranks, rank r reads the r-th of W equal slices of these rows. Steps are counted from 0 and may be
        read in any order; step t is the one that metrics.jsonl records as step t + 1.
        Raises StoreError if a shard cannot be read, ManifestMismatch if a shard differs from the manifest's digest.
        """
        shard_of_row, row_in_shard = self._locate(step, self._rows_of_a_step(global_batch))
        distinct_shards = np.unique(shard_of_row)
        self._cache.keep_only(distinct_shards)
        self._cache.prefetch(distinct_shards)
        rows = self._cache.read_rows(shard_of_row, row_in_shard)
        return torch.from_numpy(rows.astype(np.int64))

    @checked
    def row_ids(self, step: NonNegative, global_batch: Size | None = None) -> torch.Tensor:
        """Return the corpus-wide number of each row of a step, int64 [global_batch], in the order of `batch`.

        Rows are numbered from 0 in the order of the shards in corpus.json; with `data.phases`, numbers go on from
        corpus to corpus. A run records checksums of its rows' numbers (`electra_dist.data.receipt`).
        """
        global_batch = self._rows_of_a_step(global_batch)
        shard_of_row, row_in_shard = self._locate(step, global_batch)
        return torch.from_numpy(self._order(global_batch).row_ids(shard_of_row, row_in_shard))

    @checked
    def batches(self, global_batch: Size | None = None, first_step: NonNegative = 0) -> Iterator[torch.Tensor]:
        """Yield what `batch` returns for `first_step` and all later steps, without end; a thread reads ahead."""
        global_batch = self._rows_of_a_step(global_batch)
        _rows_before(first_step, global_batch)
        with contextlib.closing(self._open_cache()) as cache:
            order = self._order(global_batch)
            loader = RowLoader(cache, order, global_batch, rank=0, world_size=1, start_step=first_step)
            with contextlib.closing(loader):
                while True:
                    yield torch.from_numpy(loader.next().ids.astype(np.int64))

    def token_counts(self) -> NDArray[np.int64]:
        """Read the whole corpus, and return how often each token id, [PAD] included, occurs in it, int64 [V]."""
        with contextlib.closing(self._open_cache()) as cache:
            return cache.count_tokens(range(len(self.corpora.shards)))

    def close(self) -> None:
        """Close the shards and end the threads that read them."""
        self._cache.close()

    def __enter__(self) -> Corpus:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_cache(self) -> ShardCache:
        return ShardCache(self.corpora, self._cache_dir / SHARDS_DIR)

    def _rows_of_a_step(self, global_batch: int | None) -> int:
        """Return `global_batch` or, if it is None, that of the run or config; raise UserError if there is none."""
        rows = global_batch or self._global_batch
        if rows is None:
            raise UserError(
                f"{self}: the number of rows of a step is not known; pass global_batch, or open the corpus by the "
                f"folder of a run or by a config"
            )
        return rows

    def _order(self, global_batch: int) -> RowOrder:
        if global_batch not in self._orders:
            self._orders[global_batch] = self.corpora.row_order(self._seed, self._shuffle_window_shards, global_batch)
        return self._orders[global_batch]

    def _locate(self, step: int, global_batch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return for each row of a step its shard's index and its index in the shard, int64 [global_batch] each."""
        first_position = _rows_before(step, global_batch)
        positions = np.arange(first_position, first_position + global_batch)
        _, shard_of_row, row_in_shard = self._order(global_batch).locate(positions)
        return shard_of_row, row_in_shard


def _rows_before(step: int, global_batch: int) -> int:
    """Return how many rows a run reads before `step`; raise UserError if there are 2**62 or more."""
    first_position = int(step) * int(global_batch)
    if first_position >= 2**62:
        raise UserError(
            f"step {step} with global_batch {global_batch} is farther than any run comes; pass a smaller step"
        )
    return first_position


def open_corpus(
    source: str | Path | Config,
    *,
    seed: Seed | None = None,
    shuffle_window_shards: Positive | None = None,
    endpoint_url: str | None = None,
    cache_dir: str | Path | None = None,
) -> Corpus:
    """Open a corpus, to read the rows of any step of a run on it.

    `source` is a corpus (folder or s3:// prefix), a run folder, or a `Config`. With the latter two, the run's corpora
    are opened as one, and arguments that are None come from the config. Without a config, None stands for seed 42, a
    window of 64 shards, AWS as the S3 service, and ~/.cache/electra-dist as the folder for shards fetched from there.

    Raises UserError if there is no such corpus, ManifestMismatch if it has changed since the run began, or if
    corpus.json contradicts the vocabulary.
    """
    config = None
    if isinstance(source, Config):
        config = source
    elif is_run_folder(Path(source)):
        config = open_run(Path(source))
    if config is not None:
        seed = config.seed if seed is None else seed
        shuffle_window_shards = shuffle_window_shards or config.data.shuffle_window_shards
        endpoint_url = endpoint_url or config.data.endpoint_url
        cache_dir = cache_dir or config.cache_folder
        corpora = open_corpora(config.data.model_copy(update={"endpoint_url": endpoint_url}))
        _check_fingerprints(Path(config.run_dir), corpora)
    else:
        store = open_store(str(source), endpoint_url)
        corpora = Corpora.of(store, read_manifest(store))
    read_corpus_vocabulary(corpora.phases[0].store, corpora.tokenizer)  # refuses ids that are not those of vocab.txt
    return Corpus(
        corpora,
        seed=_SEED if seed is None else seed,
        shuffle_window_shards=shuffle_window_shards or _WINDOW_SHARDS,
        cache_dir=without_tilde(cache_dir) if cache_dir else user_cache_folder(),
        global_batch=None if config is None else config.train.global_batch,
    )


def _check_fingerprints(run_dir: Path, corpora: Corpora) -> None:
    """Raise ManifestMismatch if a corpus has changed since the run in `run_dir` began; pass if it has not begun."""
    fingerprints = recorded_fingerprints(run_dir, len(corpora.phases))
    if fingerprints is None:
        return
    for phase, fingerprint in zip(corpora.phases, fingerprints, strict=True):
        if fingerprint != phase.manifest.fingerprint:
            raise ManifestMismatch(
                f"{phase.url}: the corpus has changed since the run {run_dir} began: its fingerprint is "
                f"{phase.manifest.fingerprint[:16]} and was {fingerprint[:16]}; restore it, or open the corpus by its "
                f"own path"
            )


def build_towers(config: Config) -> ElectraTowers:
    """Build generator and discriminator with their heads and the random weights that a run of this config starts from.

    Weights that `train.init_from` names are not loaded.
    """
    return model_towers.build_towers(config.model, config.seed, config.objective)


def build_objective(config: Config, corpus: Corpus) -> Objective:
    """Build the torch module that holds both towers and computes the loss of a step, on the CPU.

    Call it with the result of `step_input`. Its weights are random, except those of a frozen generator; `load_weights`
    loads the weights of a run. The embedding tables have the size of the corpus's vocabulary. Raises ManifestMismatch
    if that is larger than `model.vocab_size`, UserError if the weights of a frozen generator cannot be used.
    """
    num_tokens = corpus.corpora.tokenizer.vocab_size
    if num_tokens > config.model.vocab_size:
        raise ManifestMismatch(
            f"build_objective: the corpus was built with a vocabulary of {num_tokens} entries, but model.vocab_size "
            f"is {config.model.vocab_size}; pass a config with model.vocab_size: {num_tokens}, or another corpus"
        )
    config = config.model_copy(update={"model": config.model.with_vocabulary_of(num_tokens)})
    count_V = corpus.token_counts() if objective_builder.needs_token_counts(config.objective) else None
    objective = objective_builder.build_objective(
        config.model, config.objective, corpus.special, config.seed, config.kernels.backend, count_V
    )
    load_frozen_generator(objective, config)
    return objective


def step_input(objective: Objective, ids: torch.Tensor, step: NonNegative = 0, seed: Seed = 42) -> StepInput:
    """Return the argument with which `objective` computes the losses of a step, all its rows as one batch.

    `ids` are int64 [global_batch, seq_len] on the module's device. The losses are means over the tokens of these rows.
    Masks, samples and dropout are those of a run with this seed at this step (counted from 0). Settings that follow a
    schedule have their values of the first step. Raises UserError if `ids` have another dtype or shape, or are not in
    the vocabulary.
    """
    if ids.dtype != torch.int64 or ids.dim() != 2 or not ids.numel():
        raise UserError(
            f"step_input: the argument ids is a tensor of {ids.dtype} and shape {tuple(ids.shape)}, but must be int64 "
            f"[global_batch, seq_len], as Corpus.batch returns it"
        )
    vocab_size = objective.towers.model.vocab_size
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise UserError(
            f"step_input: the argument ids has ids from {ids.min()} to {ids.max()}, but the vocabulary has 0 to "
            f"{vocab_size - 1}; pass rows of the corpus that the objective was built for"
        )
    scale_2 = 1.0 / objective.loss_counts(ids).sum(0).clamp(min=1)
    return objective.step_input(ids, ids.cpu().numpy(), 0, (seed, step), scale_2)


def load_weights(
    module: Objective | ElectraTowers, run_dir: str | Path, step: NonNegative | Literal["best"] | None = None
) -> int:
    """Copy a checkpoint's weights, after a check of their digests, into a module built from the run's config.

    `step` selects the checkpoint: a number, "best" on held-out rows, or None for the newest undamaged one. Returns the
    step of that checkpoint. Raises UserError if `run_dir` is not a run, has no such undamaged checkpoint, or has
    parameters of other names or shapes.
    """
    run = load_run_weights(Path(run_dir), "newest" if step is None else step)
    prefix = "" if isinstance(module, Objective) else "towers."
    parameters = dict(module.named_parameters())
    weights = {name.removeprefix(prefix): weight for name, weight in run.weights.items()}
    shapes = {name: parameter.shape for name, parameter in parameters.items()}
    if {name: weight.shape for name, weight in weights.items()} != shapes:
        raise UserError(
            f"{run_dir}: the parameters of the run are not those of the module; build the module with the run's own "
            f"config, `open_run({str(run_dir)!r})`"
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
    return run.state.step


def load(
    model: str | Path, tower: TowerName = "discriminator", step: NonNegative | Literal["best"] | None = None
) -> Pretrained:
    """Load the discriminator or the generator of a pretrained model, with its tokenizer.

    `model` is a run folder, a Hugging Face folder, "ORG/NAME" or "ORG/NAME@REVISION" on the Hub, or
    "random:CONFIG.yaml" for random weights. A Hugging Face folder holds one tower, which the default loads even if it
    is a generator. `step` is as for `load_weights`. Of the result, `.tokenizer.encode(texts)` gives token ids, and
    `.backbone()` is a torch module from ids to states.
    """
    return load_pretrained(str(model), tower, step=step)


def metrics(run_dir: str | Path, kind: Literal["train", "eval"] = "train") -> dict[str, list[Any]]:
    """Return the curves of a run as columns, name of a metric -> its values, which `pandas.DataFrame` takes.

    Values are of each logged step ("train"), or of each evaluation on held-out rows ("eval"), the oldest first. The
    column `step` counts optimizer steps; `electra_dist.run.metrics` describes all others.
    """
    open_run(run_dir)  # refuses a folder that holds no run
    records = iter_steps(Path(run_dir)) if kind == "train" else iter_evaluations(Path(run_dir))
    rows = [record.fields() for record in records]
    names = (StepRecord if kind == "train" else EvalRecord).model_fields
    return {name: [row[name] for row in rows] for name in names if name != "kind"}


def score_texts(model: Pretrained, texts: Sequence[Text]) -> list[TextScore]:
    """Return how plausible a model from `load` finds each text and its tokens, as `electra-dist score` prints it.

    Raises UserError if the model came without its pretraining head.
    """
    return list(TextScorer(model, device_of_choice()).score(texts))


def replaced_probability(model: Pretrained, texts: Sequence[Text]) -> list[list[tuple[str, float]]]:
    """Return for each text its tokens, each with the discriminator's probability that it was replaced, in [0, 1].

    Raises UserError if the model came without its pretraining head or does not detect replaced tokens.
    """
    scorer = TextScorer(model, device_of_choice())
    scorer.check_detects_replaced()
    return [list(zip(text.tokens, text.replaced_probability or [], strict=True)) for text in scorer.score(texts)]
