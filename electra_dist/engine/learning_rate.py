"""Compute the learning rate of a step; by default warm-up and decay overlap, as in Google's reference code.

    polynomial   lr * min(1, t / warmup_steps) * (1 - t / num_steps) ** decay_power
    trapezoid    lr * min(1, t / warmup_steps) * min(1, (num_steps - t) / decay_steps) ** decay_power

t is the number of finished steps. The polynomial decay begins at step 0 and not after the warm-up, so with the
settings of ELECTRA-Large (10,000 warm-up steps of 400,000 steps) the peak is 0.975 * lr. The first update has lr 0,
unless there is no warm-up. From `num_steps` on the learning rate is 0, unless `decay_power` is 0.

Source: google-research/electra, model/optimization.py, for the polynomial.
"""

from __future__ import annotations

from electra_dist.config import OptimizerConfig


def learning_rate(step: int, num_steps: int, optimizer: OptimizerConfig) -> float:
    """Return the learning rate of the update after `step` finished steps, in a run of `num_steps` steps."""
    warmup_factor = 1.0
    if optimizer.warmup_steps:
        warmup_factor = min(1.0, step / optimizer.warmup_steps)
    remaining_fraction = max(0.0, 1.0 - step / num_steps)
    if optimizer.shape == "trapezoid":
        remaining_steps = max(0, num_steps - step)
        remaining_fraction = min(1.0, remaining_steps / optimizer.trapezoid_decay_steps(num_steps))
    return optimizer.lr * warmup_factor * remaining_fraction**optimizer.decay_power


def peak_learning_rate(num_steps: int, optimizer: OptimizerConfig) -> tuple[int, float]:
    """Return the step with the highest learning rate of a run, and that learning rate."""
    # During the warm-up the polynomial is a constant times t * (1 - t / num_steps) ** decay_power, whose derivative is
    # 0 here. After the warm-up it only falls.
    turning_point = num_steps / (1.0 + optimizer.decay_power)
    if optimizer.shape == "trapezoid":
        turning_point = num_steps - optimizer.trapezoid_decay_steps(num_steps)
    # The next smaller and the next larger whole step, if the curve turns before the warm-up ends.
    steps = {min(optimizer.warmup_steps, int(turning_point) + offset) for offset in (0, 1)}
    peak_step = max(steps, key=lambda step: learning_rate(step, num_steps, optimizer))
    return peak_step, learning_rate(peak_step, num_steps, optimizer)


def generator_learning_rate(step: int, num_steps: int, optimizer: OptimizerConfig) -> float | None:
    """Return the learning rate of the generator's parameters; None if `optimizer.generator` is not set."""
    if optimizer.generator is None:
        return None
    return learning_rate(step, num_steps, optimizer.for_generator)
