"""What rank 0 knows about a step and about an evaluation: the one shape that console, metrics and report share.

All values are over the global batch. Losses are token means without their weights (`loss` is the weighted sum that is
minimised). Fractions are in [0, 1]. `None` means not known or not applicable here (no peak known, no GPU); NaN means
undefined (no replaced token in the batch).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One logged optimizer step."""

    step: int  # optimizer steps done when this was written, this one included
    mlm_loss: float  # nats per masked token
    rtd_loss: float  # nats per real token
    loss: float  # what is minimised; with rtd: mlm_weight * mlm_loss + rtd_weight * rtd_loss
    mlm_accuracy: float  # masked tokens whose most likely token is the true one
    replaced_accuracy: float  # replaced tokens that the discriminator calls replaced
    original_accuracy: float  # original tokens that it calls original
    replaced_fraction: float  # replaced tokens of all real tokens
    lr: float
    grad_norm: float  # before clipping
    tokens_per_s: float  # row tokens over all ranks, since the last line
    mfu: float | None  # model FLOPs used, of the GPUs' dense peak
    data_wait: float  # part of the time since the last line that rank 0 waited for rows
    memory_gb: float | None  # peak device memory of rank 0, in 1e9 bytes
    eta_s: float | None  # to the last step
    tokens_seen: int  # real tokens trained on since step 0, estimated from rows_seen
    step_s: float  # mean seconds per step since the last line
    rows_seen: int  # rows trained on since step 0, over all restarts
    receipt: str  # sum of their hashes, 16 hexadecimal digits (data/receipt.py)
    store_retries: int  # store requests repeated by all ranks since this start
    store_wait_s: float  # seconds that they waited before them, added up
    refetches: int  # shards fetched again because their bytes were wrong, since this start
    gpu_temperature_c: int | None  # of the hottest GPU of rank 0's node
    gpu_power_w: float | None  # of all its GPUs
    gpu_sm_clock_mhz: int | None  # of its slowest GPU
    gpu_throttle: list[str]  # reasons that any of them gives for running slowly
    slow_ranks: list[int]  # stragglers, the slowest first
    token_loss: float = 0.0  # nats per token that the large tower predicts beside a generator


@dataclass(frozen=True, kw_only=True)
class EvalRecord:
    """One evaluation on held-out rows."""

    step: int
    mlm_loss: float
    mlm_accuracy: float
    rtd_loss: float
    auc: float  # of the discriminator's scores, replaced against original tokens
    accuracy: float
    precision: float
    recall: float
    rows: int
    token_loss: float = 0.0  # as of a step
