"""The learning rate as a pure function of the step: warm-up and decay overlap, as in the reference.

Source: google-research/electra, model/optimization.py: polynomial decay to 0 multiplied by min(1, t / warmup). The
peak of ELECTRA-Large (10,000 of 400,000 steps) is therefore 0.975 * lr, and the first update has lr 0.
"""

from __future__ import annotations

from electra_dist.config import OptimizerConfig


def learning_rate(step: int, num_steps: int, optimizer: OptimizerConfig) -> float:
    """Learning rate of the update that turns `step` finished steps into `step` + 1."""
    warmup = min(1.0, step / optimizer.warmup_steps) if optimizer.warmup_steps else 1.0
    return optimizer.lr * warmup * max(0.0, 1.0 - step / num_steps) ** optimizer.decay_power
