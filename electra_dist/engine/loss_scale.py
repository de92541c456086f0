"""Scale the loss of a run in fp16, so that small gradients are not rounded to zero (`train.precision: fp16`).

Guarantee: the scale is a power of 2, so it changes gradients only where fp16 would lose them. A step whose gradients
overflow changes neither weights nor moments; it changes the scale alone. The state is three numbers, equal on all
ranks and independent of the number of ranks and of the ZeRO stage; a checkpoint holds it. A step that the guard stops
leaves the state as it was, as if the step had been skipped from the start.

How: the rule is that of DeepSpeed's `DynamicLossScaler` with DeepSpeed's default settings. The scale begins at 65,536.
The first overflow of a run, and the first one after the scale has grown, changes nothing. Each further overflow halves
the scale, down to 1. The first update after 1,000 updates without an overflow doubles it, and so does the first one
after each further 1,000. DeepSpeed changes the scale in the middle of a step, before it divides the gradients by it,
so that each step in which the scale grows would make half an update. Here the scale changes after the step. At ZeRO
stage 0, where DeepSpeed would use the scaler of torch with another rule, the engine multiplies and divides by this
scale.

Limits: a forward pass that overflows gives a loss that is not finite, which no scale can repair; the guard stops it.
"""

from __future__ import annotations

import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

from electra_dist.checkpoint.manifest import LossScaleState

INITIAL_SCALE = 2.0**16
STEPS_UNTIL_GROWTH = 1000
HYSTERESIS = 2  # number of the first overflow that halves the scale, counted since it last grew
LEAST_SCALE = 1.0


class LossScale(DynamicLossScaler):
    """DeepSpeed's dynamic loss scale for fp16, changed so that it moves only between steps and can be saved.

    Call `count_update` after a step that has updated the weights, or `lower` after one whose gradients overflowed.
    """

    def __init__(self) -> None:
        super().__init__(
            init_scale=INITIAL_SCALE,
            scale_window=STEPS_UNTIL_GROWTH,
            min_scale=LEAST_SCALE,
            delayed_shift=HYSTERESIS,
            consecutive_hysteresis=False,
            raise_error_at_min_scale=False,
            dtype=torch.float16,
        )

    def update_scale(self, overflow: bool) -> None:
        """Do nothing, because DeepSpeed calls this in the middle of a step, while the scale is still needed."""

    def count_update(self) -> None:
        """Count a step that has updated the weights; double the scale after enough steps without an overflow."""
        super().update_scale(False)

    def lower(self) -> bool:
        """Count an overflow, which may halve the scale, and return True; return False if the scale is 1 already."""
        if self.cur_scale <= LEAST_SCALE:
            return False
        super().update_scale(True)
        return True

    @property
    def state(self) -> LossScaleState:
        """The scale and its counters, from which `restore` continues exactly."""
        return LossScaleState(
            scale=float(self.cur_scale),
            stable_steps=self.cur_iter - self.last_overflow_iter - 1,
            hysteresis=self.cur_hysteresis,
        )

    def restore(self, state: LossScaleState | None) -> None:
        """Continue from a checkpoint's state, or from the initial state if `state` is None."""
        if state is None:
            state = LossScale().state
        self.cur_scale = state.scale
        self.cur_hysteresis = state.hysteresis
        # DeepSpeed uses the two counters only by their difference.
        self.cur_iter = state.stable_steps
        self.last_overflow_iter = -1
