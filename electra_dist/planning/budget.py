"""Compute the budget of a run, which is tokens, FLOPs and days, from its config alone.

Guarantee: FLOPs are counted as for the model FLOPs utilisation (MFU) that runs report. No GPU, no torch and no network
is needed. Every assumption is stated in the config: GPU, number of GPUs and utilisation come from its section `plan`.

Limits: activations (`activation_memory.py` computes them), communication buffers, fragmentation, evaluation,
checkpoints and stalls are not counted. A token is a position of a row, so padding counts as tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from electra_dist.config import Config
from electra_dist.data.manifest import CorpusManifest
from electra_dist.errors import UserError
from electra_dist.model.counts import (
    KNOWN_GPUS,
    ParameterCounts,
    TokenFlops,
    parameter_counts,
    peak_flops,
    run_flops,
    token_flops,
)


@dataclass(frozen=True, kw_only=True)
class Compute:
    """Predicted speed and duration of a run on the GPUs that the config's section `plan` states."""

    gpu: str
    num_gpus: int
    utilisation: float  # assumed share of the peak (MFU)
    peak: float  # dense FLOP/s of one GPU
    tokens_per_s: float  # of all GPUs
    step_s: float  # seconds of an optimizer step
    days: float  # of the whole run
    gpu_hours: float  # of the whole run


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Budget of a run, computed from its config: parameters, rows and tokens, FLOPs, time and epochs."""

    parameters: ParameterCounts
    rows_per_step: int
    tokens_per_step: int
    rows: int  # of the whole run
    tokens: int  # of the whole run; positions of rows
    accumulation: dict[int, int]  # world size -> micro-batches per step, for all world sizes that divide the batch
    flops: TokenFlops  # per token
    run_flops: float  # of the whole run
    compute: Compute | None  # None in fp32, for which no peak is assumed
    epochs: float | None  # None when the corpus was not read


def make_budget(config: Config, corpus: CorpusManifest | None = None) -> Budget:
    """Compute the budget of a run; `corpus`, the manifest of its corpus, is needed for the field `epochs` only.

    Raises UserError if the peak of `plan.gpu` is not known.
    """
    train = config.train
    seq_len = config.data.seq_len
    rows = train.num_steps * train.global_batch
    tokens = rows * seq_len
    flops_per_token = token_flops(config.model, seq_len, config.objective)
    epochs = rows / corpus.num_rows if corpus else None
    return Budget(
        parameters=parameter_counts(config.model, config.objective),
        rows_per_step=train.global_batch,
        tokens_per_step=train.global_batch * seq_len,
        rows=rows,
        tokens=tokens,
        accumulation={ranks: train.micro_batches(ranks) for ranks in train.possible_ranks()},
        flops=flops_per_token,
        run_flops=run_flops(config),
        compute=_compute(config, flops_per_token.total, tokens),
        epochs=epochs,
    )


def _compute(config: Config, flops_per_token: float, tokens: int) -> Compute | None:
    """Predict the time of a run at the share `plan.utilisation` of its GPUs' dense 16-bit peak; None in fp32."""
    plan = config.plan
    if peak_flops(plan.gpu) is None:
        raise UserError(
            f"plan.gpu: no dense bf16 peak is known for {plan.gpu!r}; set plan.gpu to one of {', '.join(KNOWN_GPUS)}"
        )
    peak = peak_flops(plan.gpu, config.train.precision)
    if peak is None:
        return None
    tokens_per_s = plan.num_gpus * peak * plan.utilisation / flops_per_token
    tokens_per_step = config.train.global_batch * config.data.seq_len
    return Compute(
        gpu=plan.gpu,
        num_gpus=plan.num_gpus,
        utilisation=plan.utilisation,
        peak=peak,
        tokens_per_s=tokens_per_s,
        step_s=tokens_per_step / tokens_per_s,
        days=tokens / tokens_per_s / 86_400,
        gpu_hours=plan.num_gpus * tokens / tokens_per_s / 3600,
    )
