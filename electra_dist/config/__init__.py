"""The configuration of a run: its sections and their keys, what contradicts what, and how it is read from YAML.

Other packages import the classes from here.
"""

from electra_dist.config.config import NUMERICS, Config
from electra_dist.config.sections.all_sections import CACHE_DIR, CHECKPOINTS_DIR
from electra_dist.config.sections.base import NonNegative, Positive, Probability, Section
from electra_dist.config.sections.model import ModelConfig, TowerConfig
from electra_dist.config.sections.objective import ObjectiveConfig
from electra_dist.config.sections.operation import (
    CheckpointConfig,
    ClusterConfig,
    CorpusConfig,
    LogConfig,
)
from electra_dist.config.sections.training import (
    DataConfig,
    EngineConfig,
    GuardConfig,
    OptimizerConfig,
    TrainConfig,
    divisors,
)

__all__ = [
    "CACHE_DIR",
    "CHECKPOINTS_DIR",
    "NUMERICS",
    "CheckpointConfig",
    "ClusterConfig",
    "Config",
    "CorpusConfig",
    "DataConfig",
    "EngineConfig",
    "GuardConfig",
    "LogConfig",
    "ModelConfig",
    "NonNegative",
    "ObjectiveConfig",
    "OptimizerConfig",
    "Positive",
    "Probability",
    "Section",
    "TowerConfig",
    "TrainConfig",
    "divisors",
]
