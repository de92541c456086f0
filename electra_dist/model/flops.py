"""FLOPs of a training token, tower by tower, and the dense peaks that they are measured against.

Convention: matrix multiplications only (2mn per m x n weight and token), backward = 2 x forward, hence 3 x forward;
attention over the whole of `seq_len`; vocabulary logits where the objective needs them: at the masked positions
(`mask_prob` of all), or at all of them (all_tokens_mlm, electric's noise model). Embedding look-ups, LayerNorm, GELU,
softmax and recomputation are not counted. ELECTRA-Large at 512: 2.169 GFLOP a token, of which the generator is 0.200;
the reference's own script counts backward as 1 x forward and gets less (`flops_paper.py`). A frozen generator costs
its forward only.

Peaks are vendors' dense 16-bit tensor figures with fp32 accumulation. A device that is not listed has no peak and no
MFU is shown for it, nor for fp32 runs: a guess would be worse than nothing.

Where it stops: rows are counted as full. Packed rows attend less than `seq_len` and padded ones carry tokens that are
not real, so MFU is that of the nominal shape.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from electra_dist.config import Config, ModelConfig, ObjectiveConfig, TowerConfig

BACKWARD_FACTOR = 3  # forward, gradient of the input, gradient of the weight


@dataclass(frozen=True)
class TokenFlops:
    """Training FLOPs of one token (forward and backward)."""

    discriminator: float
    generator: float

    @property
    def total(self) -> float:
        """Both towers."""
        return self.discriminator + self.generator


def token_flops(model: ModelConfig, seq_len: int, objective: ObjectiveConfig, step: int | None = None) -> TokenFlops:
    """Training FLOPs per token of a row of `seq_len` tokens.

    Args:
        step: matters for two-stage training only, whose stages cost differently; default: the second stage.
    """
    big, width = model.discriminator, model.embedding_size
    if objective.name in ("mlm", "replace_mlm", "all_tokens_mlm"):
        share = 1.0 if objective.name == "all_tokens_mlm" else objective.mask_prob
        head = share * _vocabulary_head(model, big.hidden_size, width)
        head += 2 * big.hidden_size if objective.name == "all_tokens_mlm" else 0  # the copy gate
    else:
        head = 2 * big.hidden_size**2 + 2 * big.hidden_size
    discriminator = BACKWARD_FACTOR * (_encoder(big, width, seq_len) + head)
    generator = _generator_forward(model, seq_len, objective)
    if objective.generator_only_steps == 0:
        return TokenFlops(discriminator, BACKWARD_FACTOR * generator)
    if step is not None and step < objective.generator_only_steps:
        return TokenFlops(0, BACKWARD_FACTOR * generator)
    return TokenFlops(discriminator, generator)


def run_flops(config: Config, num_steps: int | None = None) -> float:
    """Training FLOPs of a run's first `num_steps` steps (default: all), every row counted as full."""
    num_steps = config.train.num_steps if num_steps is None else num_steps
    first = min(config.objective.generator_only_steps, num_steps)
    before, after = _step_flops(config)
    return first * before + (num_steps - first) * after


def steps_of_flops(config: Config, flops: float) -> int:
    """The number of steps, at least 1, whose FLOPs are nearest to `flops`."""
    before, after = _step_flops(config)
    first = config.objective.generator_only_steps
    exact = flops / before if flops <= first * before else first + (flops - first * before) / after
    return max(1, round(exact))


def _step_flops(config: Config) -> tuple[float, float]:
    """Training FLOPs of a step while the generator trains alone, if it ever does, and of one after that."""
    objective, seq_len = config.objective, config.data.seq_len
    before, after = (token_flops(config.model, seq_len, objective, step).total for step in (0, None))
    tokens = config.train.global_batch * seq_len
    return tokens * before, tokens * after


def _generator_forward(model: ModelConfig, seq_len: int, objective: ObjectiveConfig) -> float:
    """Forward FLOPs per token of whatever network makes the replacements."""
    if objective.name == "mlm" or objective.generator != "trained":
        return 0.0
    small, width = model.generator, model.generator_embedding_width
    if objective.name == "electric":
        return 2 * _encoder(small, width, seq_len) + _vocabulary_head(model, 2 * small.hidden_size, width)
    return _encoder(small, width, seq_len) + objective.mask_prob * _vocabulary_head(model, small.hidden_size, width)


def _vocabulary_head(model: ModelConfig, hidden_size: int, embedding_size: int) -> int:
    return 2 * hidden_size * embedding_size + 2 * embedding_size * model.vocab_size


def _encoder(tower: TowerConfig, embedding_size: int, seq_len: int) -> int:
    """Forward FLOPs per token of the projection of the embeddings and of all layers."""
    hidden = tower.hidden_size
    projection = 2 * embedding_size * hidden if embedding_size != hidden else 0
    query_key_value_output = 4 * 2 * hidden**2
    scores_and_mix = 2 * 2 * seq_len * hidden
    feed_forward = 2 * 2 * hidden * tower.intermediate_size
    return projection + tower.num_layers * (query_key_value_output + scores_and_mix + feed_forward)


# Words that the device's name must contain -> dense TFLOP/s; the first match counts. From the vendor's data sheets;
# where those print figures with sparsity, half of it. V100 has no bf16: its figure is fp16.
_PEAK_TFLOPS = {
    "gb200": 2500.0,
    "b200": 2250.0,
    "gh200": 989.4,
    "h200 nvl": 835.5,
    "h200": 989.4,
    "h100 nvl": 835.5,
    "h100 pcie": 756.0,
    "h100 hbm2e": 756.0,
    "h100": 989.4,
    "h800 pcie": 756.0,
    "h800": 989.4,
    "h20": 148.0,
    "a100": 312.0,
    "a800": 312.0,
    "a40": 149.7,
    "a30": 165.0,
    "a10": 125.0,
    "l40s": 362.0,
    "l40": 181.0,
    "l4": 121.0,
    "v100 pcie": 112.0,
    "v100": 125.0,
}

KNOWN_GPUS = tuple(words.upper() for words in _PEAK_TFLOPS if " " not in words)


def peak_flops(device_name: str, precision: Literal["bf16", "fp32"] = "bf16") -> float | None:
    """Dense 16-bit FLOP/s of the device called `device_name` (as the driver says it, or just "H100").

    Returns:
        None for devices that are not listed, for slices of one (MIG), and for fp32.
    """
    words = set(re.split(r"[^a-z0-9]+", device_name.lower()))
    if precision != "bf16" or "mig" in words:
        return None
    return next((peak * 1e12 for needed, peak in _PEAK_TFLOPS.items() if words.issuperset(needed.split())), None)


def mfu(tokens_per_s: float, flops_per_token: float, num_gpus: int, peak: float | None) -> float | None:
    """Model FLOPs utilisation in [0, 1] of `num_gpus` GPUs of `peak` FLOP/s; None where the peak is not known."""
    return None if peak is None else tokens_per_s * flops_per_token / (num_gpus * peak)
