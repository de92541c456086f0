"""Define the records of a logged step and of an evaluation, which console, metrics.jsonl and report share.

All values are over the global batch. Losses are means per token, not multiplied by their weights in the objective;
only `loss` is the weighted sum that is minimised. Fractions are in [0, 1]. `None` means not known or not applicable,
for example without a GPU. NaN means undefined, for example an accuracy on replaced tokens if the batch has none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """Record of one logged optimizer step: losses, accuracies, speed, data and health of the GPUs."""

    step: int  # optimizer steps done when this was written, this one included
    mlm_loss: float  # nats per masked token
    rtd_loss: float  # nats per real token
    loss: float  # what is minimised; for replaced-token detection: mlm_weight * mlm_loss + rtd_weight * rtd_loss
    mlm_accuracy: float  # fraction of masked tokens whose most likely token is the true one
    replaced_accuracy: float  # fraction of replaced tokens that the discriminator classifies as replaced
    original_accuracy: float  # fraction of original tokens that the discriminator classifies as original
    replaced_fraction: float  # replaced tokens as a fraction of all real tokens
    lr: float  # learning rate of this step
    grad_norm: float  # before clipping; NaN if `overflow` is true
    tokens_per_s: float  # row tokens of all ranks, since the last logged step
    mfu: float | None  # model FLOPs as a fraction of the GPUs' dense peak
    data_wait: float  # fraction of the time since the last logged step that rank 0 waited for rows
    memory_gb: float | None  # peak device memory of rank 0, in 1e9 bytes
    eta_s: float | None  # estimated seconds to the last step of the run
    tokens_seen: int  # real tokens trained on since step 0, estimated from rows_seen
    step_s: float  # mean seconds per step since the last logged step
    rows_seen: int  # rows trained on since step 0, over all restarts
    receipt: str  # sum of the hashes of these rows' ids, 16 hexadecimal digits (data/receipt.py)
    store_retries: int  # store requests that all ranks together have repeated since this start of the run
    store_wait_s: float  # seconds waited before these repeats, summed over the ranks
    refetches: int  # shards fetched again because their bytes were wrong, since this start of the run
    gpu_temperature_c: int | None  # of the hottest GPU of rank 0's node
    gpu_power_w: float | None  # sum over all GPUs of that node
    gpu_sm_clock_mhz: int | None  # of the slowest GPU of that node
    gpu_throttle: list[str]  # reasons for reduced clocks that any GPU of that node reports
    slow_ranks: list[int]  # ranks that are slower than the others, the slowest first
    generator_lr: float | None = None  # learning rate of the generator's parameters; None if it is `lr`
    token_loss: float = 0.0  # nats per token that the discriminator predicts; 0 for objectives in which it does not
    loss_scale: float | None = None  # factor on the loss in the backward pass of this step; None unless in fp16
    overflow: bool = False  # whether the step made no update, because its gradients overflowed fp16
    # Values in this step of those config keys of the objective that follow a schedule; None for a constant key.
    temperature: float | None = None  # softmax temperature at which the generator's replacements are drawn
    mask_prob: float | None = None  # fraction of the tokens that is masked
    mlm_weight: float | None = None  # of mlm_loss in loss
    rtd_weight: float | None = None  # of rtd_loss in loss
    random_share: float | None = None  # fraction of the masked positions with a random replacement


@dataclass(frozen=True, kw_only=True)
class EvalRecord:
    """Record of one evaluation on held-out rows: losses and the discriminator's measures, over all of these rows.

    Replacements are the generator's samples at temperature 1, whatever the schedules are.
    """

    step: int  # optimizer steps done
    mlm_loss: float  # nats per masked token
    mlm_accuracy: float  # fraction of masked tokens whose most likely token is the true one
    rtd_loss: float  # nats per real token
    auc: float  # ROC-AUC of the discriminator's scores, with replaced tokens as the positive class
    accuracy: float  # of the discriminator at logit 0
    precision: float  # fraction of the tokens classified as replaced that are replaced
    recall: float  # fraction of the replaced tokens that are classified as replaced
    rows: int  # held-out rows evaluated, without the further ones for context_auc
    token_loss: float = 0.0  # nats per token that the discriminator predicts; 0 for objectives in which it does not
    # ROC-AUC on replacements that token frequency alone cannot tell from originals; NaN without a discriminator
    context_auc: float = math.nan
    context_auc_se: float = math.nan  # standard error of context_auc over held-out rows
    context_replaced: int = 0  # replaced tokens that context_auc compares with as many original ones
    generator_entropy: float = math.nan  # nats per masked token, at temperature 1; NaN without a trained generator
    sampled_correct: float = math.nan  # fraction of these samples that are the original token; NaN likewise
