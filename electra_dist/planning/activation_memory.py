"""Compute how many bytes of activations a row takes on a GPU, and the largest micro-batch that fits, by arithmetic.

Guarantee: nothing is built and torch is not imported. For replaced-token detection with ELECTRA-Small, -Base and
-Large, in bf16 and fp32, with and without recomputation, the result is within 3 % of the bytes that a whole
micro-batch allocates when it is run without real memory, on torch's device `meta` (tests/rehearsal). The same holds
for the architecture `modern` in bf16. No GPU has confirmed either number yet.

How: activations are what autograd keeps for the backward pass, with the fused operations that run on a GPU. The peak
is at the beginning of the discriminator's backward pass, where the activations of both networks are alive. A value
takes 2 bytes in bf16 and fp16, and 4 in fp32.

Limits: the allocator's fragmentation, cuBLAS workspaces and communication buffers are not counted. `FREE_FRACTION` of
the memory is left for them. For objectives other than replaced-token detection, what the heads keep is approximated.
"""

from __future__ import annotations

from typing import NamedTuple

from electra_dist.config import Config, ModelConfig, ObjectiveConfig, TowerConfig, divisors
from electra_dist.config.schedule import largest_value
from electra_dist.engine.state_layout import PARTS, state_layout
from electra_dist.model.counts import frozen_generator_parameters, parameter_counts

FREE_FRACTION = 0.1  # of the GPU's memory, not used; the same as for `train.micro_batch: auto`
FIXED_BYTES = 1e9  # CUDA context and the libraries' workspaces; an estimate
HEAD_CHUNK_ROWS = 4096  # masked positions whose logits over the vocabulary exist at the same time


class MicroBatchLimit(NamedTuple):
    """Largest micro-batch that fits on one GPU, and the bytes of memory from which it was computed."""

    rows: int  # a divisor of the rows per GPU and step; 0 if not one row fits
    fitting_rows: int  # rows that fit, whether or not they divide the batch
    row_bytes: float  # activations of a row
    fixed_bytes: float  # training state, the head's buffers and `FIXED_BYTES`


def activation_bytes_per_row(
    model: ModelConfig,
    objective: ObjectiveConfig,
    seq_len: int,
    *,
    precision: str = "bf16",
    recompute: bool = False,
) -> float:
    """Return the bytes by which the peak memory of forward and backward grows with every row of `seq_len` tokens.

    ELECTRA-Large at 512 tokens takes 0.52 GB in bf16, 0.41 GB of it for the discriminator. With `recompute`
    (`engine.activation_checkpointing`) only the layers' inputs are kept, and the backward pass computes one layer's
    activations at a time.
    """
    value_bytes = 4 if precision == "fp32" else 2
    # These are bytes per token: what a network keeps, and the peak, which a layer's backward pass reaches above that.
    discriminator = _kept_bytes(model, model.discriminator, model.embedding_size, recompute, value_bytes)
    discriminator += value_bytes * _discriminator_head_values(model, objective, seq_len)
    peak = discriminator + value_bytes * _layer_gradient_values(model, model.discriminator, recompute)
    if objective.trains_generator:
        num_networks = 2 if objective.facts.has_cloze_generator else 1
        width = model.generator_embedding_width
        generator = num_networks * _kept_bytes(model, model.generator, width, recompute, value_bytes)
        generator += value_bytes * _generator_head_values(model, objective, seq_len)
        if objective.generator_only_steps:
            # The generator trains alone first; later it is frozen and keeps nothing.
            generator_peak = generator + value_bytes * _layer_gradient_values(model, model.generator, recompute)
            peak = max(peak, generator_peak)
        else:
            # The generator's activations are kept while the discriminator's layers run backward.
            peak += generator
    # FlashAttention, which a GPU takes in 16 bits, needs no bias of [seq_len, seq_len] in every row.
    has_bias = precision == "fp32" or objective.facts.has_cloze_generator
    attention_bias = seq_len * value_bytes if has_bias else 0
    return seq_len * (peak + attention_bias)


def micro_batch_limit(config: Config, memory_gb: float, recompute: bool | None = None) -> MicroBatchLimit:
    """Return the largest micro-batch for a GPU with `memory_gb` x 1e9 bytes, in a run on `plan.num_gpus` GPUs.

    The training state per GPU, the weights of a frozen generator, the head's buffers, `FIXED_BYTES` and
    `FREE_FRACTION` of the memory are subtracted first. `recompute` replaces the config's
    `engine.activation_checkpointing` unless it is None.
    """
    engine = config.engine
    precision = config.train.precision
    row_bytes = activation_bytes_per_row(
        config.model,
        config.objective,
        config.data.seq_len,
        precision=precision,
        recompute=engine.activation_checkpointing if recompute is None else recompute,
    )
    num_gpus = config.plan.num_gpus
    num_parameters = parameter_counts(config.model, config.objective).total
    layout = state_layout(precision, engine.zero_stage, engine.offload_optimizer)
    state_bytes = sum(layout.bytes_per_gpu(part, num_parameters, num_gpus) for part in PARTS)
    has_16_bit_weights = precision != "fp32" and engine.zero_stage > 0  # stage 0 runs autocast over fp32 weights
    bytes_of_a_weight = 2 if has_16_bit_weights else 4
    frozen_bytes = frozen_generator_parameters(config.model, config.objective) * bytes_of_a_weight
    fixed_bytes = state_bytes + frozen_bytes + _head_buffers(config.model, precision) + FIXED_BYTES

    usable_bytes = (1 - FREE_FRACTION) * memory_gb * 1e9 - fixed_bytes
    fitting_rows = max(0, int(usable_bytes / row_bytes))
    rows_per_gpu = max(1, config.train.global_batch // num_gpus)
    fitting_sizes = [size for size in divisors(rows_per_gpu) if size <= fitting_rows]
    return MicroBatchLimit(max(fitting_sizes, default=0), fitting_rows, row_bytes, fixed_bytes)


def _kept_bytes(
    model: ModelConfig, tower: TowerConfig, embedding_width: int, recompute: bool, value_bytes: int
) -> float:
    """Return the bytes per token that a network and its embeddings keep for the backward pass.

    A layer keeps 8 x hidden values: its input (1), query, key and value (3), the attention's output before and after
    its projection (2), the first LayerNorm's output (1) and the feed-forward network's output (1). It also keeps
    2 x intermediate: the feed-forward network's inner values before and after GELU. With the architecture `modern` it
    keeps 3 x intermediate: inner values, gates, and what GELU makes of both. With `recompute` it keeps its input only.

    The embeddings keep the sum of the three tables' entries, and the input of a projection to `hidden` if there is
    one. Their dropout factors are not kept: the backward pass draws them again.
    """
    hidden = tower.hidden_size
    embedding_values = embedding_width if embedding_width == hidden else 2 * embedding_width
    layer_values = hidden
    layer_statistics = 0  # in fp32
    if not recompute:
        layer_values = 8 * hidden + _kept_inner_values(model, tower)
        layer_statistics = tower.num_heads + 2 * 2  # log-sum-exp of each head; mean and variance of two LayerNorms
    kept_bytes = value_bytes * (embedding_values + tower.num_layers * layer_values)
    kept_bytes += 4 * tower.num_layers * layer_statistics
    if model.architecture == "modern":
        # fp32 cosines and sines of global and of local layers, for half the features of a head. All layers share them.
        kept_bytes += 8 * (hidden // tower.num_heads)
    return float(kept_bytes)


def _kept_inner_values(model: ModelConfig, tower: TowerConfig) -> int:
    return (3 if model.architecture == "modern" else 2) * tower.intermediate_size


def _layer_gradient_values(model: ModelConfig, tower: TowerConfig, recompute: bool) -> int:
    """Return how many values per token the backward pass of one layer needs in addition to the kept activations.

    The peak is in the second matrix product of the feed-forward network. At this point three gradients are alive: that
    of the product's output (hidden), of the residual (hidden) and of the product's input (intermediate). The kept
    output of the product (hidden) is freed by then, so hidden + intermediate values are added. With the architecture
    `modern` it is the same: the gradients of inner values and gates replace these.
    """
    hidden = tower.hidden_size
    gradients = hidden + tower.intermediate_size
    if recompute:
        # A layer's activations are computed again, except its input, which is kept.
        return gradients + 7 * hidden + _kept_inner_values(model, tower)
    return gradients


def _masked_share(objective: ObjectiveConfig, seq_len: int) -> float:
    """Return the largest share of a row's tokens that may be masked (`masking.num_slots` is their number)."""
    return min(max(1, int((largest_value(objective.mask_prob) + 0.005) * seq_len)), seq_len) / seq_len


def _token_head_values(hidden: int, embedding_width: int) -> int:
    """Return how many values a head that predicts tokens keeps for one token that it predicts.

    They are the state, the dense layer's output before and after GELU, the LayerNorm's output, and its gradient, which
    the head computes in the forward pass.
    """
    return hidden + 4 * embedding_width


def _generator_head_values(model: ModelConfig, objective: ObjectiveConfig, seq_len: int) -> float:
    """Return how many values the generator's head keeps for its backward pass, as a mean per token of a row.

    It keeps values for masked tokens only, except with the objective `electric`, which predicts all tokens.
    """
    width = model.generator_embedding_width
    if objective.facts.has_cloze_generator:
        return float(_token_head_values(2 * model.generator.hidden_size, width))
    return _masked_share(objective, seq_len) * _token_head_values(model.generator.hidden_size, width)


def _discriminator_head_values(model: ModelConfig, objective: ObjectiveConfig, seq_len: int) -> float:
    """Return how many values, as a mean per token, the discriminator's head keeps while its layers run backward.

    A head that detects replaced tokens has freed its values by then; only one that predicts tokens keeps some. With
    the objective `mlm` the discriminator is the only network.
    """
    values = _token_head_values(model.discriminator.hidden_size, model.embedding_size)
    if objective.facts.copies_tokens:
        return float(values)
    if objective.facts.predicts_tokens or objective.discriminator_mlm_weight:
        return _masked_share(objective, seq_len) * values
    return 0.0


def _head_buffers(model: ModelConfig, precision: str) -> float:
    """Return the bytes of the buffers of a head that predicts tokens, which do not depend on the number of rows.

    They are the logits of as many masked tokens as are computed at a time, in the run's precision, and the fp32
    gradient of the token embeddings, which are the head's output matrix as well.
    """
    value_bytes = 4 if precision == "fp32" else 2
    logits = HEAD_CHUNK_ROWS * model.padded_vocab_size * value_bytes
    table_gradient = 4 * model.padded_vocab_size * model.embedding_size
    return float(logits + table_gradient)
