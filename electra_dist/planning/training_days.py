"""Compute the budget of a run, which is tokens, FLOPs and days, from its config alone.

Guarantee: FLOPs are counted as for the model FLOPs utilisation (MFU) that runs report. No GPU, no torch and no network
is needed. GPU, number of GPUs and utilisation come from the config's section `plan`. `run_flops_by_paper` gives for
the paper's models the count of google-research/electra's published script, flops_computation.py.

How: a step takes the time of its FLOPs at `plan.utilisation`, but at least as long as the host needs to launch its
operators one after another. The launches are the limit of small models, however fast the GPU is. In two-stage training
(`objective.generator_only_steps`) the duration is that of both stages, and a step is one of the second.

The paper's method: a matrix product costs 2mn per token. Backward costs as much as forward, so training is 2 x
forward. An embedding look-up counts as a product with a one-hot vector. Small operations count (GELU 8 per feature,
softmax 5, dropout 4, LayerNorm 5). The softmax over the vocabulary counts at 15.625 % of the positions, also for the
Large models, which mask 25 %. For ELECTRA-Small the paper prints 1.4e18, where its script gives 1.29e18; with a
generator of half the width, not a quarter, the script gives 1.42e18.

Limits: the time of a launch is assumed, and a compiled model is treated like an eager one. Activations
(`activation_memory.py` computes them), communication (`multi_node_scaling.py`), fragmentation, evaluation, checkpoints
and stalls are not counted. A token is a position of a row, so padding counts as tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from electra_dist.config import Config, TowerConfig
from electra_dist.errors import UserError
from electra_dist.gpu_models import KNOWN_GPUS, peak_flops
from electra_dist.model.counts import ParameterCounts, TokenFlops, parameter_counts, run_flops, token_flops
from electra_dist.run.folder import is_run_folder, open_run

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


# Operations per feature (for softmax: per score) as the paper's script counts them.
GELU = 8
SOFTMAX = 5
DROPOUT = 4
LAYER_NORM = 5
_BIAS = 1
_SUM = 1  # residual connection, or one more embedding
_SCALE = 1  # division of an attention score by sqrt(width of a head)
_CROSS_ENTROPY = 2
_NUM_SEGMENTS = 2

_SCRIPT_OUTPUT_SHARE = 0.15625  # share of positions at which the script counts a softmax over the vocabulary


def run_flops_by_paper(config: Config) -> float | None:
    """Return the training FLOPs of a whole run as the ELECTRA paper counts them; None if its method does not cover it.

    The method covers `mlm` (one network) and `rtd` (the discriminator, and the generator if it is trained), but not
    `model.architecture: modern`, other objectives, a frozen generator, two-stage training and joint MLM.
    """
    model = config.model
    objective = config.objective
    is_plain_rtd = objective.name == "rtd" and objective.generator != "frozen"
    if model.architecture == "modern":
        return None
    has_more_parts = objective.generator_only_steps > 0 or objective.discriminator_mlm_weight > 0
    if objective.name == "mlm":
        per_token = _forward(config, model.discriminator, model.embedding_size, detects=False)
    elif is_plain_rtd and not has_more_parts:
        per_token = _forward(config, model.discriminator, model.embedding_size, detects=True)
        if objective.generator == "trained":
            per_token += _forward(config, model.generator, model.generator_embedding_width, detects=False)
    else:
        return None
    return 2 * per_token * config.data.seq_len * config.train.global_batch * config.train.num_steps


def _forward(config: Config, tower: TowerConfig, embedding: int, *, detects: bool) -> float:
    """Return the forward FLOPs per token of a network whose embeddings are `embedding` features wide.

    Its head detects replaced tokens or, if not `detects`, predicts tokens.
    """
    hidden, vocab, seq_len = tower.hidden_size, config.model.vocab_size, config.data.seq_len
    layers = tower.num_layers * _layer(tower, seq_len)
    return layers + _embeddings(hidden, embedding, vocab, seq_len) + _head(hidden, embedding, vocab, detects)


def _layer(tower: TowerConfig, seq_len: int) -> int:
    """Return the forward FLOPs per token of one layer, as get_block_flops in the paper's flops_computation.py.

    A token attends to all tokens of its row.
    """
    hidden, inner = tower.hidden_size, tower.intermediate_size
    query_key_value = 3 * (2 * hidden * hidden + _BIAS * hidden)
    scores = 2 * hidden * seq_len
    softmax = (SOFTMAX + DROPOUT + _SCALE) * seq_len * tower.num_heads
    weighted_values = 2 * hidden * seq_len
    # The LayerNorm after the attention lacks a factor `hidden` in the script.
    output_projection = 2 * hidden * hidden + (_BIAS + DROPOUT + _SUM) * hidden + LAYER_NORM
    expand = 2 * hidden * inner + (_BIAS + GELU) * inner
    contract = 2 * hidden * inner + (_BIAS + DROPOUT + _SUM + LAYER_NORM) * hidden
    return query_key_value + scores + softmax + weighted_values + output_projection + expand + contract


def _embeddings(hidden: int, embedding: int, vocab: int, seq_len: int) -> int:
    """Return the forward FLOPs per token of embeddings of this width, as get_embedding_flops in the paper's script."""
    look_ups = 2 * embedding * (vocab + seq_len + _NUM_SEGMENTS)
    flops = look_ups + (2 * _SUM + LAYER_NORM + DROPOUT) * embedding
    if embedding != hidden:
        flops += 2 * hidden * embedding + _BIAS * hidden  # projection to the width of the states
    return flops


def _head(hidden: int, embedding: int, vocab: int, detects: bool) -> float:
    """Return the forward FLOPs per token of a head: with one logit if it `detects`, otherwise over the vocabulary.

    As in the paper's script, the latter is computed for 15.6 % of the tokens only.
    """
    if detects:
        return 2 * hidden * hidden + (_BIAS + GELU) * hidden + 2 * hidden
    dense = 2 * hidden * embedding + (_BIAS + GELU + LAYER_NORM) * embedding
    logits = 2 * embedding * vocab
    softmax = (SOFTMAX + _CROSS_ENTROPY) * vocab
    return _SCRIPT_OUTPUT_SHARE * (dense + logits + softmax)


def generator_training(config: Config) -> tuple[str, str]:
    """Return two texts: the FLOPs that the training of a frozen generator took, and how they were counted.

    All steps of the run that trained the generator count. For a Hugging Face folder the number is "not known".
    """
    folder = Path(config.train.init_generator_from or "")
    if not is_run_folder(folder):
        return "not known", f"not in the run's FLOP; {folder} is not a run folder"
    source = open_run(folder)
    return f"{run_flops(source):.2e} FLOP", f"not in the run's FLOP; {source.train.num_steps:,} steps of {folder}"
