"""Judge by its context AUC whether a run's discriminator has learnt more than how frequent tokens are.

The context AUC is the ROC-AUC of the discriminator's scores on held-out rows whose replacements come from the unigram
distribution (`train/detection_measures.py`). Token frequency alone gives 0.5. With a generator at temperature
1 the discriminator may stay at 0.5: within some hundred steps the generator samples by frequency, and then there is
nothing more to learn from its samples. A falling temperature avoids this.

This module imports neither torch nor numpy, so that `electra-dist status` answers quickly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from electra_dist.config import Config
from electra_dist.config.schedule import Schedule
from electra_dist.run.metrics import EvalRecord

NUM_REPLACED = 5000  # replaced tokens that an evaluation compares, unless the held-out corpus has fewer
STUCK_BELOW = 0.52  # context AUC below which a run is warned about
_JUDGED_AFTER_SHARE = 0.3  # of the steps in which the discriminator trains
_JUDGED_AFTER_TOKENS = 1e9  # or after these tokens, pads included, if that is earlier


def first_judged_step(config: Config) -> int:
    """Return the step from which a low context AUC is reported with a warning.

    This step comes after 30 % of the discriminator's steps, or after 1e9 tokens (pads included) if that is earlier.
    """
    # In two-stage training the discriminator begins to learn with the second stage.
    stage_begin = config.objective.generator_only_steps
    discriminator_steps = config.train.num_steps - stage_begin
    tokens_per_step = config.train.global_batch * config.data.seq_len
    steps = min(_JUDGED_AFTER_SHARE * discriminator_steps, _JUDGED_AFTER_TOKENS / tokens_per_step)
    return stage_begin + math.ceil(steps)


def is_stuck(record: EvalRecord, config: Config) -> bool:
    """Return whether an evaluation record has a context AUC below 0.52 at `first_judged_step` or later."""
    return record.step >= first_judged_step(config) and record.context_auc < STUCK_BELOW


def was_reported(evaluations: Iterable[EvalRecord], config: Config) -> bool:
    """Return whether an earlier evaluation of the run was stuck, so that the warning was printed before."""
    return any(is_stuck(record, config) for record in evaluations)


def stuck_warning(record: EvalRecord, config: Config) -> str:
    """Return one line that says that the context AUC is stuck near 0.5, and what to change in a new run."""
    share = 100 * record.step / config.train.num_steps
    return (
        f"step {record.step:,}: context AUC {record.context_auc:.3f} (standard error "
        f"{record.context_auc_se:.3f}) is below {STUCK_BELOW} after {share:.0f} % of the run, so the discriminator "
        f"knows token frequencies and no context yet; if it stays there, {_advice(config)}"
    )


def _advice(config: Config) -> str:
    objective = config.objective
    if isinstance(objective.temperature, Schedule):
        return "start a new run with a higher `from` or `tau` of objective.temperature, or with more steps"
    falling = "objective.temperature={from: 4, to: 1, shape: exponential, tau: 0.15}"
    if objective.generator != "trained":
        return f"start a new run with objective.generator=trained and a falling temperature, {falling}"
    return f"start a new run with a falling temperature, {falling}"
