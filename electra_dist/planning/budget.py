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


@dataclass(frozen=True)
class StateLayout:
    """Bytes per parameter of a training state and which of its parts are cut into one piece per GPU."""

    weights: int
    gradients: int
    master: int
    moments: int
    partitioned: frozenset[str]
    on_host: frozenset[str]

    def bytes_per_gpu(self, part: str, num_parameters: int, world_size: int) -> float:
        """Device bytes of `part` ("weights", "gradients", "master", "moments")."""
        if part in self.on_host:
            return 0.0
        return getattr(self, part) * num_parameters / (world_size if part in self.partitioned else 1)

    def formula(self) -> str:
        """The same in letters: P parameters, W GPUs."""
        terms = []
        for part in PARTS:
            if getattr(self, part) and part not in self.on_host:
                terms.append(f"{getattr(self, part)}P" + ("/W" if part in self.partitioned else ""))
        return " + ".join(terms)


PARTS = ("weights", "gradients", "master", "moments")


def state_layout(precision: str, zero_stage: int, offload_optimizer: bool) -> StateLayout:
    """How `train/engine.py` keeps the state at each ZeRO stage.

    bf16: 2-byte weights, 4-byte master and gradient sums, 8 bytes of Adam moments; stage 1 (BF16_Optimizer) keeps
    2-byte gradients beside the sums, stage 0 is autocast over 4-byte weights. fp32: DeepSpeed's stages 1 to 3 keep a
    master copy here, too.
    """
    partitioned = {0: (), 1: PARTS[2:], 2: PARTS[1:], 3: PARTS}[zero_stage]
    half = precision == "bf16" and zero_stage > 0
    return StateLayout(
        weights=2 if half else 4,
        gradients=6 if half and zero_stage == 1 else 4,
        master=4 if zero_stage else 0,
        moments=8,
        partitioned=frozenset(partitioned),
        on_host=frozenset(PARTS[2:] if offload_optimizer and zero_stage else ()),
    )


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
    units = train.global_batch // train.micro_batch
    tokens = train.num_steps * train.global_batch * seq_len
    flops = token_flops(config.model, seq_len, config.objective)
    return Budget(
        parameters=parameter_counts(config.model, config.objective),
        rows_per_step=train.global_batch,
        tokens_per_step=train.global_batch * seq_len,
        rows=train.num_steps * train.global_batch,
        tokens=tokens,
        accumulation={size: units // size for size in range(1, units + 1) if units % size == 0},
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
