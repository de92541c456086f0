"""Defines the experiment that `one_gpu.sh` prepares and runs: its configuration, its arms and its toy version."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from electra_dist.config import Config
from electra_dist.config_file import load_config
from electra_dist.model.flops import run_flops, steps_of_flops

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIG = REPOSITORY / "configs" / "small_one_gpu.yaml"
CARRIED = REPOSITORY / "carried"
ARCHIVE = "one_gpu.tar.xz"  # in carried/: all that a leg reads
UNPACKED = "one_gpu"  # in carried/: the folder into which a leg unpacks it
CORPUS = "corpus"  # folders in the archive
PAIRS = "pairs"
TREEBANK = "treebank"

# The first arm sets the budget of FLOPs. Its run folder is the configuration's; the others append their names.
ARMS = {
    "rtd-curriculum": [],  # the configuration as it is
    "rtd": ["objective.temperature=1.0"],  # the paper's temperature
    "mlm": ["objective.name=mlm", "objective.temperature=1.0"],  # nothing is sampled
}
# Seconds on a CPU. The rows stay 128 tokens long.
SMOKE = [
    "run_dir=runs/small_one_gpu_smoke",
    "model.vocab_size=300",
    "model.embedding_size=16",
    "model.discriminator={hidden_size: 32, num_layers: 2, num_heads: 2, intermediate_size: 64}",
    "model.generator={hidden_size: 16, num_layers: 1, num_heads: 1, intermediate_size: 32}",
    "train.num_steps=20",
    "train.global_batch=4",
    "train.micro_batch=4",
    "train.precision=fp32",
    "optimizer.warmup_steps=2",
    "checkpoint.every_steps=10",
    "log.every_steps=5",
    "log.eval_rows=4",
    "corpus.heldout_fraction=0.1",
    "corpus.shard_size_mb=0.01",
]


def settings_of(arm: str, smoke: bool, corpus: Path | None, changes: Sequence[str]) -> list[str]:
    """Return the KEY=VALUE settings of an arm's run, to be applied to `CONFIG` in this order.

    Every arm trains for as many steps as have the FLOPs of the first arm. Its warm-up is the same share of its steps.

    Args:
        arm: a key of `ARMS`.
        smoke: whether to train the toy model.
        corpus: folder of the corpus, with held-out rows in `heldout/`; None for that of the configuration.
        changes: KEY=VALUE settings of the user, for all arms.

    Raises:
        UserError: a setting is not valid.
    """
    shared = list(SMOKE) if smoke else []
    if corpus is not None:
        shared += [f"data.corpus={json.dumps(str(corpus))}", f"data.heldout={json.dumps(str(corpus / 'heldout'))}"]
    shared += changes
    first_arm = next(iter(ARMS))
    if arm == first_arm:
        return shared
    budget = load_config(CONFIG, [*shared, *ARMS[first_arm]])
    config = load_config(CONFIG, [*shared, *ARMS[arm]])
    num_steps = steps_of_flops(config, run_flops(budget))
    warmup_share = budget.optimizer.warmup_steps / budget.train.num_steps
    return [
        *shared,
        *ARMS[arm],
        f"run_dir={json.dumps(f'{budget.run_dir}-{arm}')}",
        f"train.num_steps={num_steps}",
        f"optimizer.warmup_steps={round(warmup_share * num_steps)}",
    ]


def config_of(settings: Sequence[str]) -> Config:
    """Return the resolved configuration of a run with the settings of `settings_of`."""
    return load_config(CONFIG, settings)
