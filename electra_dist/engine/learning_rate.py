"""Compute the learning rate of a step; by default warm-up and decay overlap, as in Google's reference code.

Source: google-research/electra, model/optimization.py: polynomial decay to 0 multiplied by min(1, t / warmup). The
decay begins at step 0 and not after the warm-up. With the settings of ELECTRA-Large (10,000 warm-up steps of 400,000
steps) the peak is therefore 0.975 * lr. The first update has lr 0.
"""

from __future__ import annotations

from electra_dist.config import OptimizerConfig


def learning_rate(step: int, num_steps: int, optimizer: OptimizerConfig) -> float:
    """Return the learning rate of the update that follows after `step` finished steps.

    It is `lr * min(1, step / warmup_steps) * (1 - step / num_steps) ** decay_power`, as in google-research/electra
    (model/optimization.py). The decay begins at step 0, so the peak is slightly below `lr`. With `shape: trapezoid`
    the last factor is `min(1, (num_steps - step) / decay_steps) ** decay_power`: the learning rate is `lr` after the
    warm-up, until the decay begins `decay_steps` before the end. With both shapes the first update has a learning rate
    of 0, unless `warmup_steps` is 0, and at `num_steps` and beyond it is 0, unless `decay_power` is 0.

    Args:
        step: optimizer steps done, from 0.
        num_steps: optimizer steps of the whole run.
        optimizer: section `optimizer` of the config, which sets `lr`, the shape and the lengths of warm-up and decay.
    """
    warmup_factor = 1.0
    if optimizer.warmup_steps:
        warmup_factor = min(1.0, step / optimizer.warmup_steps)
    remaining_fraction = max(0.0, 1.0 - step / num_steps)
    if optimizer.shape == "trapezoid":
        remaining_steps = max(0, num_steps - step)
        remaining_fraction = min(1.0, remaining_steps / optimizer.trapezoid_decay_steps(num_steps))
    return optimizer.lr * warmup_factor * remaining_fraction**optimizer.decay_power


def peak_learning_rate(num_steps: int, optimizer: OptimizerConfig) -> tuple[int, float]:
    """Return the step with the highest learning rate of a run, and that learning rate.

    With `shape: polynomial` the peak is below `optimizer.lr`, because the decay begins at step 0. During the warm-up
    the learning rate of step t is a constant times t * (1 - t / num_steps) ** decay_power, whose derivative is 0 at
    t = num_steps / (1 + decay_power). After the warm-up it only falls. With `shape: trapezoid` the peak is at the end
    of the warm-up, or at the beginning of the decay if that comes first.

    Args:
        num_steps: optimizer steps of the whole run.
        optimizer: section `optimizer` of the config, which sets `lr`, the shape and the lengths of warm-up and decay.
    """
    turning_point = num_steps / (1.0 + optimizer.decay_power)
    if optimizer.shape == "trapezoid":
        turning_point = num_steps - optimizer.trapezoid_decay_steps(num_steps)
    # The next smaller and the next larger whole step, if the curve turns before the warm-up ends.
    steps = {min(optimizer.warmup_steps, int(turning_point) + offset) for offset in (0, 1)}
    peak_step = max(steps, key=lambda step: learning_rate(step, num_steps, optimizer))
    return peak_step, learning_rate(peak_step, num_steps, optimizer)


def generator_learning_rate(step: int, num_steps: int, optimizer: OptimizerConfig) -> float | None:
    """Return the generator's learning rate of the update that follows after `step` finished steps.

    It follows the schedule of `learning_rate` with the generator's own `lr` and `warmup_steps`. None if
    `optimizer.generator` is not set, so that one learning rate holds for all parameters.

    Args:
        step: optimizer steps done, from 0.
        num_steps: optimizer steps of the whole run.
        optimizer: the config's section `optimizer`.
    """
    if optimizer.generator is None:
        return None
    return learning_rate(step, num_steps, optimizer.for_generator)
