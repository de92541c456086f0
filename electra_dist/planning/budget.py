"""What a run will take: tokens, memory, FLOPs and days, as a pure function of its config.

Guarantee: the same arithmetic that MFU uses, no GPU, no torch, no network; nothing is estimated that is not stated
(GPU, count and utilisation come from `plan`). Cost: microseconds.

Where it stops: activations, communication buffers, fragmentation, evaluation, checkpoints and stalls are not counted,
nor is dropped or padded text: a token is a position of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

from electra_dist.config import Config
from electra_dist.data.manifest import CorpusManifest
from electra_dist.errors import UserError
from electra_dist.model.flops import KNOWN_GPUS, TokenFlops, peak_flops, run_flops, token_flops
from electra_dist.model.parameters import ParameterCounts, parameter_counts


@dataclass(frozen=True, kw_only=True)
class Compute:
    """Time on the GPUs that `plan` states."""

    gpu: str
    num_gpus: int
    utilisation: float
    peak: float  # FLOP/s of one GPU
    tokens_per_s: float
    step_s: float
    days: float
    gpu_hours: float


@dataclass(frozen=True, kw_only=True)
class Budget:
    """All numbers of a plan."""

    parameters: ParameterCounts
    rows_per_step: int
    tokens_per_step: int
    rows: int
    tokens: int
    accumulation: dict[int, int]  # world size -> micro-batches per step; all world sizes that divide the batch
    flops: TokenFlops
    run_flops: float
    compute: Compute | None  # None in fp32, for which no peak is assumed
    epochs: float | None  # None when the corpus was not read


def make_budget(config: Config, corpus: CorpusManifest | None = None) -> Budget:
    """The budget of a run, with epochs if its corpus is known.

    Raises:
        UserError: no peak is known for `plan.gpu`.
    """
    train, seq_len = config.train, config.data.seq_len
    tokens = train.num_steps * train.global_batch * seq_len
    flops = token_flops(config.model, seq_len, config.objective)
    return Budget(
        parameters=parameter_counts(config.model, config.objective),
        rows_per_step=train.global_batch,
        tokens_per_step=train.global_batch * seq_len,
        rows=train.num_steps * train.global_batch,
        tokens=tokens,
        accumulation={ranks: train.micro_batches(ranks) for ranks in train.possible_ranks()},
        flops=flops,
        run_flops=run_flops(config),
        compute=_compute(config, flops.total, tokens),
        epochs=train.num_steps * train.global_batch / corpus.num_rows if corpus else None,
    )


def _compute(config: Config, flops_per_token: float, tokens: int) -> Compute | None:
    plan = config.plan
    if peak_flops(plan.gpu) is None:
        raise UserError(f"plan.gpu: no dense bf16 peak is known for {plan.gpu!r}; use one of {', '.join(KNOWN_GPUS)}")
    peak = peak_flops(plan.gpu, config.train.precision)
    if peak is None:
        return None
    tokens_per_s = plan.num_gpus * peak * plan.utilisation / flops_per_token
    return Compute(
        gpu=plan.gpu,
        num_gpus=plan.num_gpus,
        utilisation=plan.utilisation,
        peak=peak,
        tokens_per_s=tokens_per_s,
        step_s=config.train.global_batch * config.data.seq_len / tokens_per_s,
        days=tokens / tokens_per_s / 86_400,
        gpu_hours=plan.num_gpus * tokens / tokens_per_s / 3600,
    )
