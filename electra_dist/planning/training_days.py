"""Compute the budget of a run, which is tokens, FLOPs and days, from its config alone.

Guarantee: FLOPs are counted as for the model FLOPs utilisation (MFU) that runs report. No GPU, no torch and no network
is needed. GPU, number of GPUs and utilisation come from the config's section `plan`.

How: a step takes the time of its FLOPs at `plan.utilisation`, but at least as long as the host needs to launch its
operators one after another. The launches are the limit of small models, however fast the GPU is. In two-stage training
(`objective.generator_only_steps`) the duration is that of both stages, and a step is one of the second.

Limits: the time of a launch is assumed, and a compiled model is treated like an eager one. Activations
(`activation_memory.py` computes them), communication (`multi_node_scaling.py`), fragmentation, evaluation, checkpoints
and stalls are not counted. A token is a position of a row, so padding counts as tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from electra_dist.config import Config
from electra_dist.errors import UserError
from electra_dist.gpu_models import KNOWN_GPUS, peak_flops
from electra_dist.model.counts import (
    ParameterCounts,
    TokenFlops,
    parameter_counts,
    run_flops,
    token_flops,
)

LAUNCH_S = 10e-6  # time in which the host launches one operator; assumed
# tests/rehearsal/recorded.json: 1,622 operators of a micro-batch of ELECTRA-Small, which has 24 layers in both towers,
# and 2,878 of ELECTRA-Large with 48.
_OPERATORS_PER_LAYER = 52
_OPERATORS_BESIDE_LAYERS = 380  # masks, embeddings, heads and losses
OPERATORS_OF_UPDATE = 80  # after the read of the norm; tests/engine/test_step_counts.py counts fewer


@dataclass(frozen=True, kw_only=True)
class Compute:
    """Predicted speed and duration of a run on the GPUs that the config's section `plan` states."""

    gpu: str
    num_gpus: int
    utilisation: float  # share of the peak (MFU): `plan.utilisation`, or less if the launches take longer
    peak: float  # dense FLOP/s of one GPU
    tokens_per_s: float  # of all GPUs
    step_s: float  # seconds of an optimizer step
    launch_s: float  # seconds in which the host launches the operators of a step; a step never takes less
    days: float  # of the whole run, with its first stage if it has two
    gpu_hours: float  # of the whole run


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Budget of a run, computed from its config: parameters, rows and tokens, FLOPs, time and epochs."""

    parameters: ParameterCounts
    rows_per_step: int
    tokens_per_step: int
    rows: int  # of the whole run
    tokens: int  # of the whole run; positions of rows
    accumulation: dict[int, int]  # world size -> micro-batches per step, for all world sizes that can share the batch
    flops: TokenFlops  # per token
    run_flops: float  # of the whole run
    compute: Compute | None  # None in fp32, for which no peak is assumed


def make_budget(config: Config) -> Budget:
    """Compute the budget of a run. Raises UserError if the peak of `plan.gpu` is not known.

    `plan.num_gpus` must be a number of GPUs that can share the global batch.
    """
    train = config.train
    seq_len = config.data.seq_len
    rows = train.num_steps * train.global_batch
    tokens = rows * seq_len
    flops_per_token = token_flops(config.model, seq_len, config.objective)
    return Budget(
        parameters=parameter_counts(config.model, config.objective),
        rows_per_step=train.global_batch,
        tokens_per_step=train.global_batch * seq_len,
        rows=rows,
        tokens=tokens,
        accumulation={ranks: _micro_batches(config, ranks) for ranks in train.possible_ranks()},
        flops=flops_per_token,
        run_flops=run_flops(config),
        compute=_predict_compute(config),
    )


def launch_seconds(config: Config, first_stage: bool = False) -> float:
    """Return the seconds that the host needs to launch the operators of one micro-batch, forward and backward.

    The number of operators is estimated from the number of layers, those of a generator that runs included. In the
    first stage of two-stage training, only the generator runs.
    """
    model = config.model
    num_layers = 0 if first_stage else model.discriminator.num_layers
    if config.objective.runs_generator:
        num_layers += model.generator.num_layers
    return (_OPERATORS_PER_LAYER * num_layers + _OPERATORS_BESIDE_LAYERS) * LAUNCH_S


def _micro_batches(config: Config, num_ranks: int) -> int:
    """Return how many micro-batches each rank processes per step; smaller ones if `train.micro_batch` does not fit."""
    train = config.train
    return train.global_batch // (num_ranks * train.fitting_micro_batch(num_ranks))


def _predict_compute(config: Config) -> Compute | None:
    """Predict how long a run takes; None in fp32, for which no peak of a GPU is known.

    Raises UserError if the GPU's peak is not known.
    """
    plan = config.plan
    if peak_flops(plan.gpu) is None:
        raise UserError(
            f"plan.gpu: no dense bf16 peak is known for {plan.gpu!r}; set plan.gpu (`electra-dist plan` also "
            f"takes --gpu) to one of {', '.join(KNOWN_GPUS)}"
        )
    peak = peak_flops(plan.gpu, config.train.precision)
    if peak is None:
        return None
    step = _predict_step(config, plan.num_gpus * peak, first_stage=False)
    num_first = min(config.objective.generator_only_steps, config.train.num_steps)
    run_s = (config.train.num_steps - num_first) * step.seconds
    if num_first:
        run_s += num_first * _predict_step(config, plan.num_gpus * peak, first_stage=True).seconds
    return Compute(
        gpu=plan.gpu,
        num_gpus=plan.num_gpus,
        utilisation=min(plan.utilisation, step.flops / step.seconds / (plan.num_gpus * peak)),
        peak=peak,
        tokens_per_s=config.train.global_batch * config.data.seq_len / step.seconds,
        step_s=step.seconds,
        launch_s=step.launch_s,
        days=run_s / 86_400,
        gpu_hours=plan.num_gpus * run_s / 3600,
    )


class _Step(NamedTuple):
    """Prediction of one optimizer step: its FLOPs, the time of its launches, and its time."""

    flops: float
    launch_s: float
    seconds: float


def _predict_step(config: Config, peak: float, first_stage: bool) -> _Step:
    """Predict a step on GPUs of `peak` FLOP/s together: the time of its FLOPs or of its launches, the longer one."""
    tokens = config.train.global_batch * config.data.seq_len
    stage = 0 if first_stage else None
    flops = tokens * token_flops(config.model, config.data.seq_len, config.objective, stage).total
    launch_s = _micro_batches(config, config.plan.num_gpus) * launch_seconds(config, first_stage)
    launch_s += OPERATORS_OF_UPDATE * LAUNCH_S
    return _Step(flops, launch_s, max(flops / (peak * config.plan.utilisation), launch_s))
