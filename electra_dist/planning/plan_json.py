"""Return the plan of a run as a JSON value, for `electra-dist plan --json`, with the numbers of the printed tables."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from electra_dist.config import Config
from electra_dist.config.rules import keys_without_effect
from electra_dist.data.corpora import steps_of_phases
from electra_dist.engine.learning_rate import peak_learning_rate
from electra_dist.engine.state_layout import PARTS, state_layout
from electra_dist.planning.activation_memory import GPU_MEMORY_GB, micro_batch_limit
from electra_dist.planning.budget import make_budget
from electra_dist.planning.multi_node_scaling import Cluster, scale


def plan_json(config: Config, cluster: Cluster | None = None) -> dict[str, Any]:
    """Return what a run would take: parameters, rows, tokens, FLOPs, memory and time, as numbers that are not rounded.

    Memory is in bytes, the time of a step in seconds, the time of the run in days and GPU-hours. `compute` is
    null in fp32, for which no peak of a GPU is known. `cluster` adds predictions for 1, 2, 4, ... of its nodes. Raises
    UserError if the GPU is not known, or if the nodes cannot share the global batch.
    """
    budget = make_budget(config)
    peak_step, peak = peak_learning_rate(config.train.num_steps, config.optimizer)
    tree = {
        "run_dir": config.run_dir,
        "objective": config.objective.name,
        "steps": config.train.num_steps,
        "learning_rate": {"lr": config.optimizer.lr, "peak": peak, "peak_step": peak_step},
        **asdict(budget),
        "parameters": budget.parameters._asdict() | {"total": budget.parameters.total},
        "state_bytes_per_gpu": {f"zero_{stage}": _state_bytes(config, stage) for stage in range(4)},
        "largest_micro_batch": {
            gpu: micro_batch_limit(config, memory_gb).fitting_rows for gpu, memory_gb in GPU_MEMORY_GB.items()
        },
        "phases": _phases(config),
        "keys_without_effect": keys_without_effect(config),
    }
    if cluster is not None:
        tree["scaling"] = [
            asdict(prediction) | {"step_s": prediction.step_s, "efficiency": prediction.efficiency}
            for prediction in scale(config, cluster)
        ]
    return tree


def _phases(config: Config) -> list[dict[str, Any]]:
    """Return for each training corpus its name, first step, number of steps and number of tokens with padding."""
    corpora = config.data.training_corpora()
    steps = steps_of_phases([corpus.from_step for corpus in corpora], config.train.num_steps)
    tokens_per_step = config.train.global_batch * config.data.seq_len
    return [
        {
            "corpus": corpus.url,
            "from_step": corpus.from_step,
            "steps": num_steps,
            "tokens": num_steps * tokens_per_step,
        }
        for corpus, num_steps in zip(corpora, steps, strict=True)
    ]


def _state_bytes(config: Config, stage: int) -> dict[str, float]:
    """Return the bytes per GPU at a ZeRO stage, separately for weights, gradients, fp32 master copy and moments."""
    layout = state_layout(config.train.precision, stage, config.engine.offload_optimizer)
    num_parameters = make_budget(config).parameters.total
    return {part: layout.bytes_per_gpu(part, num_parameters, config.plan.num_gpus) for part in PARTS}
