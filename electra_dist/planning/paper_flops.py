"""Count the training FLOPs of a run by the ELECTRA paper's method, beside which `model/counts.py` counts for MFU.

Guarantee: the count of the paper's models is that of google-research/electra's published script,
flops_computation.py, written as the sum of what a token costs.

The paper's method: a matrix product costs 2mn per token. Backward costs as much as forward, so training is 2 x
forward. An embedding look-up counts as a product with a one-hot vector. Small operations count (GELU 8 per feature,
softmax 5, dropout 4, LayerNorm 5). The softmax over the vocabulary counts at 15.625 % of the positions, also for the
Large models, which mask 25 %.

Limits: for ELECTRA-Small the paper prints 1.4e18, where its script gives 1.29e18; with a generator of half the width,
not a quarter, the script gives 1.42e18.
"""

from __future__ import annotations

from pathlib import Path

from electra_dist.config import Config, TowerConfig
from electra_dist.model.counts import run_flops
from electra_dist.run.folder import is_run_folder, open_run

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
