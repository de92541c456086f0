"""Count the towers' parameters and training FLOPs by arithmetic from the config, without a module and without torch.

Parameters: only those that train are counted, without the padding of the token table. ELECTRA-Large has 335.14 M in
the discriminator with embeddings and head, which is the model that is kept, and 19.51 M that only pretraining needs.

FLOPs: only matrix products count (2mn per m x n weight and token). Backward costs 2 x forward, hence 3 x forward
in all; a frozen generator costs its forward pass only. Attention is counted over all `seq_len` tokens of a row, in
local layers (`model.architecture: modern`) over the window. Logits over the vocabulary are counted where the objective
needs them: at the masked positions (`mask_prob` of all), or at all positions (all_tokens_mlm, electric's noise model).
If `mask_prob` is scheduled, its mean over the run is used for every step. Embedding look-ups, LayerNorm, GELU, softmax
and recomputation are not counted. ELECTRA-Large at 512: 2.169 GFLOP per token, of which the generator is 0.200. The
reference's own script counts backward as 1 x forward and gets less (`planning/training_days.py`).

Limits: every row counts as full. Packed examples attend to fewer than `seq_len` tokens, and pads are not real tokens,
so MFU is that of the nominal shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from electra_dist.config import Config, ModelConfig, ObjectiveConfig, TowerConfig
from electra_dist.config.schedule import mean_value

BACKWARD_FACTOR = 3  # training cost over forward cost: forward, gradient of the input, gradient of the weight


class ParameterCounts(NamedTuple):
    """Numbers of trainable parameters; those that both networks share count for the discriminator."""

    discriminator: int  # with its head and the embeddings that it trains
    generator_only: int  # parameters that only the generator's loss trains

    @property
    def total(self) -> int:
        """Return the number of all trainable parameters; those that both networks share count once."""
        return self.discriminator + self.generator_only


def parameter_counts(model: ModelConfig, objective: ObjectiveConfig | None = None) -> ParameterCounts:
    """Count the trainable parameters of both networks by arithmetic; None stands for replaced-token detection."""
    if objective is None:
        objective = ObjectiveConfig()
    width = model.embedding_size
    hidden = model.discriminator.hidden_size
    if objective.facts.predicts_tokens:
        head = _token_head_parameters(model, hidden, width)
    else:
        head = _detection_head_parameters(model)
    if objective.discriminator_mlm_weight:
        head += _token_head_parameters(model, hidden, width)
    if objective.facts.copies_tokens:
        head += _dense(hidden, 1)  # gate between copying the input token and predicting
    tables = _embedding_parameters(model, width)
    layers = _encoder_parameters(model, model.discriminator, width)
    return ParameterCounts(
        discriminator=tables + layers + head,
        generator_only=_generator_only(model, objective),
    )


def _generator_only(model: ModelConfig, objective: ObjectiveConfig) -> int:
    """Count the parameters that only the generator's loss trains; those shared by `model.sharing` do not count."""
    if not objective.trains_generator:
        return 0
    tower = model.generator
    width = model.generator_embedding_width
    num_towers = 2 if objective.facts.has_cloze_generator else 1
    count = _token_head_parameters(model, num_towers * tower.hidden_size, width)
    if model.sharing != "all":
        count += num_towers * _encoder_parameters(model, tower, width)
    if model.sharing in ("none", "gdes"):
        count += _embedding_parameters(model, width)
    if objective.facts.generator_estimates_reward:
        count += _dense(tower.hidden_size, 1)
    return count


def frozen_generator_parameters(model: ModelConfig, objective: ObjectiveConfig) -> int:
    """Count the parameters of a frozen generator, which `parameter_counts` leaves out; 0 if there is none."""
    if objective.generator != "frozen":
        return 0
    width = model.generator_embedding_width
    head = _token_head_parameters(model, model.generator.hidden_size, width)
    return _embedding_parameters(model, width) + _encoder_parameters(model, model.generator, width) + head


def _embedding_parameters(model: ModelConfig, width: int) -> int:
    if model.architecture == "modern":
        return model.vocab_size * width + _layer_norm(model, width)
    table_rows = model.vocab_size + model.max_positions + model.type_vocab_size
    return table_rows * width + _layer_norm(model, width)


def _token_head_parameters(model: ModelConfig, hidden: int, width: int) -> int:
    """Count the parameters of a head that predicts tokens, without its output matrix, which is the token table."""
    return _dense(hidden, width, has_bias=_has_biases(model)) + _layer_norm(model, width) + model.vocab_size


def _detection_head_parameters(model: ModelConfig) -> int:
    hidden = model.discriminator.hidden_size
    layer_norm = _layer_norm(model, hidden) if model.architecture == "modern" else 0
    return _dense(hidden, hidden, has_bias=_has_biases(model)) + layer_norm + _dense(hidden, 1)


def _encoder_parameters(model: ModelConfig, tower: TowerConfig, embedding_size: int) -> int:
    """Count the parameters of a tower's layers and of the projection before them, without embeddings and head."""
    hidden = tower.hidden_size
    intermediate = tower.intermediate_size
    has_bias = _has_biases(model)
    projection = _dense(embedding_size, hidden, has_bias) if embedding_size != hidden else 0
    attention = 4 * _dense(hidden, hidden, has_bias)  # query, key, value and output
    feed_forward = _dense(hidden, intermediate, has_bias) + _dense(intermediate, hidden, has_bias)
    # There are two per layer. With `modern` the first layer has only one, but one follows the last layer.
    layer_norms = 2 * tower.num_layers * _layer_norm(model, hidden)
    if model.architecture == "modern":
        feed_forward += _dense(hidden, intermediate, has_bias)  # the gate
    return projection + layer_norms + tower.num_layers * (attention + feed_forward)


def _has_biases(model: ModelConfig) -> bool:
    return model.architecture == "bert"


def _layer_norm(model: ModelConfig, width: int) -> int:
    return 2 * width if _has_biases(model) else width


def _dense(num_in: int, num_out: int, has_bias: bool = True) -> int:
    return num_in * num_out + (num_out if has_bias else 0)


@dataclass(frozen=True)
class TokenFlops:
    """Training FLOPs per token (forward and backward) of discriminator and generator, each with its head."""

    discriminator: float  # 0 while the generator trains alone
    generator: float  # 0 without a generator network; its forward pass only while it is frozen

    @property
    def total(self) -> float:
        """Return the training FLOPs per token of generator and discriminator together."""
        return self.discriminator + self.generator


def token_flops(model: ModelConfig, seq_len: int, objective: ObjectiveConfig, step: int | None = None) -> TokenFlops:
    """Return the training FLOPs per token at a step; None stands for a step of the second stage.

    In two-stage training the generator trains alone for the first `objective.generator_only_steps` steps.
    """
    tower_forward = _encoder_flops(model, model.discriminator, model.embedding_size, seq_len)
    head_forward = _discriminator_head_flops(model, objective)
    discriminator_training = BACKWARD_FACTOR * (tower_forward + head_forward)
    generator_forward = _generator_flops(model, seq_len, objective)
    generator_training = BACKWARD_FACTOR * generator_forward

    if objective.generator == "frozen":
        return TokenFlops(discriminator=discriminator_training, generator=generator_forward)
    if objective.generator_only_steps == 0:
        return TokenFlops(discriminator=discriminator_training, generator=generator_training)
    in_first_stage = step is not None and step < objective.generator_only_steps
    if in_first_stage:
        return TokenFlops(discriminator=0, generator=generator_training)
    return TokenFlops(discriminator=discriminator_training, generator=generator_forward)


def run_flops(config: Config, num_steps: int | None = None) -> float:
    """Return the training FLOPs of a run's first `num_steps` steps; None means all of `train.num_steps`."""
    if num_steps is None:
        num_steps = config.train.num_steps
    generator_only_steps = min(config.objective.generator_only_steps, num_steps)
    later_steps = num_steps - generator_only_steps
    generator_only_flops, later_flops = _step_flops(config)
    return generator_only_steps * generator_only_flops + later_steps * later_flops


def steps_of_flops(config: Config, flops: float) -> int:
    """Return the number of steps, at least 1, whose training FLOPs are nearest to `flops`; inverts `run_flops`."""
    generator_only_flops, later_flops = _step_flops(config)
    generator_only_steps = config.objective.generator_only_steps
    first_stage_flops = generator_only_steps * generator_only_flops
    if flops <= first_stage_flops:
        exact_steps = flops / generator_only_flops
    else:
        exact_steps = generator_only_steps + (flops - first_stage_flops) / later_flops
    return max(1, round(exact_steps))


def _step_flops(config: Config) -> tuple[float, float]:
    """Return the FLOPs of a training step in the first and in the second stage; without stages, both are equal."""
    objective = config.objective
    seq_len = config.data.seq_len
    generator_only_per_token = token_flops(config.model, seq_len, objective, step=0).total
    later_per_token = token_flops(config.model, seq_len, objective, step=None).total
    tokens_per_step = config.train.global_batch * seq_len
    return tokens_per_step * generator_only_per_token, tokens_per_step * later_per_token


def _discriminator_head_flops(model: ModelConfig, objective: ObjectiveConfig) -> float:
    """Return the forward FLOPs of the discriminator's head per token, as a mean over all positions of a row."""
    hidden = model.discriminator.hidden_size
    if objective.facts.copies_tokens:
        # Tokens are predicted at every position, and a gate of one unit decides between prediction and copy.
        copy_gate = 2 * hidden
        return float(_vocabulary_head_flops(model, hidden, model.embedding_size)) + copy_gate
    if objective.facts.predicts_tokens:
        # Tokens are predicted at the masked positions only.
        return mean_value(objective.mask_prob) * _vocabulary_head_flops(model, hidden, model.embedding_size)
    # All other objectives classify every token as original or replaced.
    dense = 2 * hidden**2
    logit = 2 * hidden
    joint_mlm = 0.0
    if objective.discriminator_mlm_weight:
        joint_mlm = mean_value(objective.mask_prob) * _vocabulary_head_flops(model, hidden, model.embedding_size)
    return dense + logit + joint_mlm


def _generator_flops(model: ModelConfig, seq_len: int, objective: ObjectiveConfig) -> float:
    """Return the forward FLOPs per token of the generator with its head; 0 if it is no network."""
    if not objective.runs_generator:
        return 0.0
    tower = model.generator
    width = model.generator_embedding_width
    tower_flops = _encoder_flops(model, tower, width, seq_len)
    if objective.facts.has_cloze_generator:
        # Two towers, one for each direction. The head reads the states of both, at every position.
        return 2 * tower_flops + _vocabulary_head_flops(model, 2 * tower.hidden_size, width)
    return tower_flops + mean_value(objective.mask_prob) * _vocabulary_head_flops(model, tower.hidden_size, width)


def _vocabulary_head_flops(model: ModelConfig, hidden_size: int, embedding_size: int) -> int:
    dense = 2 * hidden_size * embedding_size
    logits = 2 * embedding_size * model.vocab_size
    return dense + logits


def _encoder_flops(model: ModelConfig, tower: TowerConfig, embedding_size: int, seq_len: int) -> int:
    hidden = tower.hidden_size
    projection = 2 * embedding_size * hidden if embedding_size != hidden else 0
    query_key_value_output = 4 * 2 * hidden**2
    num_keys = model.visible_keys(tower.num_layers, seq_len)
    scores_and_weighted_values = 2 * 2 * num_keys * hidden  # of all layers
    num_matrices = 3 if model.architecture == "modern" else 2  # a gated feed-forward network has one matrix more
    feed_forward = 2 * num_matrices * hidden * tower.intermediate_size
    return projection + scores_and_weighted_values + tower.num_layers * (query_key_value_output + feed_forward)


def mfu(tokens_per_s: float, flops_per_token: float, num_gpus: int, peak: float) -> float:
    """Return the model FLOPs utilisation, in [0, 1]: the share of the GPUs' peak that the run uses.

    `tokens_per_s` counts all GPUs together. `peak` is the peak of one GPU in FLOP/s.
    """
    return tokens_per_s * flops_per_token / (num_gpus * peak)
