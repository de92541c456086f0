"""Define the whole tree of a config's keys, without the rules that `Config` adds (`config/rules.py`)."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from electra_dist.config.sections.base import LocalFolder, Section, Seed
from electra_dist.config.sections.model import ModelConfig
from electra_dist.config.sections.objective import ObjectiveConfig
from electra_dist.config.sections.operation import (
    CheckpointConfig,
    ClusterConfig,
    CorpusConfig,
    KernelsConfig,
    LogConfig,
    PlanConfig,
)
from electra_dist.config.sections.training import DataConfig, EngineConfig, GuardConfig, OptimizerConfig, TrainConfig

CHECKPOINTS_DIR = "checkpoints"  # Name inside the run folder; checkpoint.targets replaces it.
CACHE_DIR = "cache"  # Name inside the run folder; data.cache_dir replaces it.


class AllSections(Section):
    """Every key of a run's config, with one field for each section."""

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

    @property
    def starting_weights(self) -> TrainConfig:
        """Return section `train`, whose `init_from` and `init_generator_from` name the weights that a run starts from.

        A frozen generator is also named by `init_generator_from`. It is not trained, so the key is then unset here.
        """
        if self.objective.generator != "frozen":
            return self.train
        return self.train.model_copy(update={"init_generator_from": None})

    @property
    def cache_folder(self) -> Path:
        """Return the folder for shards fetched from S3 and for compiled code, used by commands and runs on one node.

        Runs on several nodes call `choose_cache_folder` (data/node_cache.py) instead.
        """
        return Path(self.data.cache_dir or Path(self.run_dir) / CACHE_DIR)

    @property
    def checkpoint_urls(self) -> tuple[str, ...]:
        """Return the folders or S3 prefixes that every checkpoint is written to, the preferred one first."""
        return self.checkpoint.targets or (str(Path(self.run_dir) / CHECKPOINTS_DIR),)
