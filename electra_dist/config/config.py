"""Define the configuration of a run: one frozen pydantic tree, with its sections from `sections/`.

Guarantee: an unknown key, a value of the wrong type and a contradiction between keys are errors when the config is
loaded. A loaded config never changes.

How: `load.py` reads the tree from YAML, and `engine/engine.py` derives DeepSpeed's JSON from it. Each component
receives only the section that it needs. The field descriptions are the user's manual: `electra-dist config FILE
--describe` prints them, and the error for an invalid or missing key quotes the key's description.

Limits: this module must not import torch, because commands on a login node load a config without it.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from electra_dist.config.sections.base import LocalFolder, Section, Seed
from electra_dist.config.sections.model import ModelConfig
from electra_dist.config.sections.objective import ObjectiveConfig, check_sharing
from electra_dist.config.sections.operation import (
    CheckpointConfig,
    ClusterConfig,
    CorpusConfig,
    KernelsConfig,
    LogConfig,
    PlanConfig,
)
from electra_dist.config.sections.training import (
    DataConfig,
    EngineConfig,
    GuardConfig,
    OptimizerConfig,
    TrainConfig,
)

CHECKPOINTS_DIR = "checkpoints"  # Name inside the run folder; checkpoint.targets replaces it.
CACHE_DIR = "cache"  # Name inside the run folder; data.cache_dir replaces it.
# Numerics version: a number that is raised whenever the random draws (masks, samples, dropout) or the rounding of a
# run change. A run that began with a lower number then continues only with --accept-new-numerics.
NUMERICS = 1


class Config(Section):
    """Whole configuration of a run, with one field for each section. `load.load_config` reads it from YAML."""

    run_dir: LocalFolder = Field(
        description="Folder of the run, for its config, checkpoints, metrics and report. The same folder resumes the "
        "run."
    )
    seed: Seed = Field(
        default=42,
        description="Seed of everything random: initial weights, order of rows, masks, samples and dropout.",
    )
    model: ModelConfig = Field(description="Section with the shapes of both towers.")
    objective: ObjectiveConfig = ObjectiveConfig()
    data: DataConfig = Field(description="Section that names the corpus.")
    train: TrainConfig = Field(description="Section with the number of steps and the size of a step.")
    optimizer: OptimizerConfig = OptimizerConfig()
    engine: EngineConfig = EngineConfig()
    guard: GuardConfig = GuardConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    corpus: CorpusConfig = CorpusConfig()
    kernels: KernelsConfig = KernelsConfig()
    cluster: ClusterConfig = ClusterConfig()
    plan: PlanConfig = PlanConfig()

    @model_validator(mode="after")
    def _sections_agree(self) -> Config:
        if self.data.seq_len > self.model.max_positions:
            raise ValueError(
                f"data.seq_len {self.data.seq_len} exceeds model.max_positions {self.model.max_positions}; lower "
                f"data.seq_len or raise model.max_positions"
            )
        if self.train.global_batch % self.train.micro_batch:
            raise ValueError(
                f"train.micro_batch {self.train.micro_batch} does not divide "
                f"train.global_batch {self.train.global_batch}; change one of them"
            )
        is_one_way = self.objective.facts.has_cloze_generator
        if self.engine.attention == "flex" and (self.model.attention_dropout or is_one_way):
            raise ValueError(
                "engine.attention: flex supports neither attention dropout nor the one-directional attention of "
                "objective electric; set model.attention_dropout: 0 and another objective.name, or set "
                "engine.attention: auto"
            )
        if self.engine.attention == "flash" and is_one_way:
            raise ValueError(
                "engine.attention: flash does not support the one-directional attention of objective electric; set "
                "engine.attention: auto or another objective.name"
            )
        if self.model.architecture == "modern":
            self._check_modern()
        elif self.model.type_vocab_size < 2:
            raise ValueError(
                f"model.type_vocab_size is {self.model.type_vocab_size}, but the rows of a corpus have examples of "
                f"two segments, whose tokens are of two types; set model.type_vocab_size: 2"
            )
        if self.engine.attention == "flash" and self.train.precision == "fp32":
            raise ValueError(
                "engine.attention: flash computes in bf16 or fp16 only, but train.precision is fp32; set "
                "train.precision: bf16 or engine.attention: auto"
            )
        check_sharing(self.model, self.objective)
        check_optimizer(self.optimizer, self.engine.zero_stage)
        has_own_layers = self.objective.trains_generator and self.model.sharing != "all"
        if self.optimizer.generator is not None and not has_own_layers:
            raise ValueError(
                "optimizer.generator needs a generator that is trained and has layers of its own; remove "
                "optimizer.generator, or set objective.generator: trained, another objective.name than mlm, and "
                "another model.sharing than all"
            )
        if self.engine.overlap_communication and self.train.precision != "bf16":
            raise ValueError(
                f"engine.overlap_communication: true needs train.precision: bf16, not {self.train.precision}; set "
                f"engine.overlap_communication: false"
            )
        if self.checkpoint.keep_best and not self.data.heldout:
            raise ValueError(
                f"checkpoint.keep_best is {self.checkpoint.keep_best}, but without data.heldout no checkpoint is "
                f"evaluated and none is the best; set data.heldout to a held-out corpus, or checkpoint.keep_best: 0"
            )
        return self

    def _check_modern(self) -> None:
        if self.objective.facts.has_cloze_generator:
            raise ValueError(
                "objective.name: electric needs attention in one direction, which model.architecture: modern does not "
                "have; set model.architecture: bert or another objective.name"
            )
        if self.engine.attention == "flash":
            raise ValueError(
                "engine.attention: flash cannot limit attention to a window, which the local layers of "
                "model.architecture: modern need; set engine.attention: auto"
            )
        if self.engine.compile and self.model.hidden_dropout:
            raise ValueError(
                "engine.compile: true with model.architecture: modern needs model.hidden_dropout: 0; set "
                "model.hidden_dropout: 0 or engine.compile: false"
            )

    @model_validator(mode="after")
    def _generator_has_a_source(self) -> Config:
        """Require `train.init_generator_from` for a frozen generator; for any other, it also needs `init_from`."""
        is_frozen = self.objective.generator == "frozen"
        if is_frozen and not self.train.init_generator_from:
            raise ValueError(
                "objective.generator: frozen needs train.init_generator_from; set it to the folder of a run with "
                "objective.name: mlm, or of a Hugging Face ElectraForMaskedLM"
            )
        if self.train.init_generator_from and not self.train.init_from and not is_frozen:
            raise ValueError(
                "train: init_generator_from needs init_from; set train.init_from to the folder of the discriminator, "
                "or objective.generator: frozen"
            )
        return self

    @property
    def starting_weights(self) -> TrainConfig:
        """Return section `train`, which names the initial weights. A frozen generator's weights are left out."""
        if self.objective.generator != "frozen":
            return self.train
        return self.train.model_copy(update={"init_generator_from": None})

    @property
    def cache_folder(self) -> Path:
        """Return the folder for shards fetched from S3 and for compiled code, used by commands and runs on one node.
        Runs on several nodes call `choose_cache_folder` (data/cache_folder.py) instead.
        """
        return Path(self.data.cache_dir or Path(self.run_dir) / CACHE_DIR)

    @property
    def checkpoint_urls(self) -> tuple[str, ...]:
        """Return the folders or S3 prefixes that every checkpoint is written to, the preferred one first."""
        return self.checkpoint.targets or (str(Path(self.run_dir) / CHECKPOINTS_DIR),)

    @property
    def numerics(self) -> int:
        """Return the version of random draws and rounding that this program uses; see `NUMERICS`."""
        return NUMERICS

    def identity(self, numerics: int | None = None) -> dict[str, Any]:
        """Return the values that determine a run's results, as a JSON tree; a run resumes only if none has changed.
        Other values, such as micro-batch, ZeRO stage and logging, may change at a restart. `numerics` is the version
        of random draws and rounding (None: `self.numerics`); a lower one gives what an older program recorded.
        """
        if numerics is None:
            numerics = self.numerics
        tree = self.model_dump(mode="json")
        train_keys = ["num_steps", "global_batch", "precision"]
        train_keys += [key for key in ("init_from", "init_generator_from") if tree["train"][key]]
        objective = _without_new_defaults(tree["objective"])
        if not self.objective.draws_at_random:
            # Left out, so that runs that began before these keys existed keep their identity.
            objective = {key: value for key, value in objective.items() if key not in ("random_share", "random_from")}
        data = {key: tree["data"][key] for key in ("seq_len", "shuffle_window_shards")}
        if self.data.phases:
            # The corpora of the phases are left out, like data.corpus: a run records their fingerprints separately.
            data["phase_steps"] = [phase.from_step for phase in self.data.phases]
        identity = {
            "seed": tree["seed"],
            "model": _model_identity(tree["model"]),
            "objective": objective,
            "optimizer": self._optimizer_identity(),
            "data": data,
            "train": {key: tree["train"][key] for key in train_keys},
            "numerics": numerics,
        }
        return identity

    def _optimizer_identity(self) -> dict[str, Any]:
        excluded = {"implementation", "generator"}
        if self.optimizer.shape == "polynomial":
            excluded |= {"shape", "decay_steps"}  # so that runs of versions without these keys keep their identity
        section = self.optimizer.model_dump(mode="json", exclude=excluded)
        if self.optimizer.generator is not None:
            section["generator"] = self.optimizer.generator.model_dump(mode="json", exclude_none=True)
        return section

    def identity_sha256(self, numerics: int | None = None) -> str:
        """Return the hexadecimal SHA-256 of `identity(numerics)`, by which a run recognises its own checkpoints."""
        return hashlib.sha256(canonical_json(self.identity(numerics)).encode()).hexdigest()

    def older_identities(self) -> dict[int, str]:
        """Return the `identity_sha256` that older programs would record for this config: `NUMERICS` -> digest."""
        return {numerics: self.identity_sha256(numerics) for numerics in range(1, self.numerics)}


def check_optimizer(config: OptimizerConfig, zero_stage: int) -> None:
    """Raise ValueError for an implementation that the optimizer lacks, and for LAMB or Muon above ZeRO stage 0."""
    if config.name in ("lamb", "muon") and zero_stage > 0:
        raise ValueError(
            f"optimizer.name {config.name} needs whole parameters, but engine.zero_stage is {zero_stage}; "
            f"set engine.zero_stage: 0 (at ELECTRA-Large's size all state takes 5.7 GB per GPU)"
        )
    if config.name == "lamb" and config.implementation == "deepspeed":
        raise ValueError(
            "optimizer.implementation deepspeed is not available for optimizer.name lamb, which has the "
            "implementations apex and foreach; set optimizer.implementation: auto"
        )
    if config.name == "muon" and config.implementation not in ("auto", "foreach"):
        raise ValueError(
            f"optimizer.implementation {config.implementation} is not available for optimizer.name muon, which "
            f"has the implementation foreach; set optimizer.implementation: auto"
        )


# Keys of section `objective` that were added after runs had begun without them. A key with the value given here
# changes nothing in a run.
_NEW_DEFAULTS: dict[str, Any] = {"discriminator_mlm_weight": 0.0, "generator_sha256": None}


# Keys of section `model` that only the architecture `modern` reads.
MODERN_KEYS = ("global_every", "local_window", "global_rope_theta", "local_rope_theta")


def _model_identity(section: dict[str, Any]) -> dict[str, Any]:
    """Return section `model`; with architecture `bert` without keys of `modern`, so that old digests stay the same."""
    if section["architecture"] != "bert":
        return section
    return {key: value for key, value in section.items() if key not in ("architecture", *MODERN_KEYS)}


def _without_new_defaults(section: dict[str, Any]) -> dict[str, Any]:
    """Leave out newer keys that have their default (`_NEW_DEFAULTS`), so that older runs' digests stay the same."""
    return {key: value for key, value in section.items() if key not in _NEW_DEFAULTS or value != _NEW_DEFAULTS[key]}


def canonical_json(tree: Any) -> str:
    """Return a value as JSON with sorted keys, without spaces, in ASCII, so that equal values have equal digests.
    Raises ValueError if the tree holds NaN or an infinity, which JSON does not have.
    """
    return json.dumps(tree, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
