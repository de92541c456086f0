"""List the diagrams of the report: which fields of metrics.jsonl each one shows, and how.

Besides recorded fields, a line may show one of two baselines, which `baselines` computes from a record: what a
discriminator that has learnt nothing would reach. A curve that stays at its baseline shows that nothing was learnt.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from electra_dist.run.metrics import EvalRecord, StepRecord

GUESSED_REPLACED = "guessed_replaced"  # share of the replaced tokens that a random guess finds
CONSTANT_GUESS_LOSS = "constant_guess_loss"  # loss of the best guess that is the same for every token


@dataclass(frozen=True, kw_only=True)
class CurveLine:
    """Line of a diagram: which field of metrics.jsonl it shows, and how. A line without values is not drawn."""

    field: str  # of the records in metrics.jsonl, or a baseline of `baselines`
    label: str  # in the legend
    kind: Literal["train", "eval"] = "train"  # kind of the records; "eval" is drawn as a line with points
    is_second: bool = False  # drawn in the second color of the diagram
    is_baseline: bool = False  # drawn thin and dashed in grey
    raw: bool = True  # draw every record; only for "train"
    smooth: bool = True  # draw the smoothed line, over a faint raw one; only for "train"


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One diagram of the report: its lines over the optimizer steps and the format of its y axis."""

    name: str  # identifies the panel, and seeds the ids within its SVG
    title: str  # above the diagram, with the unit
    lines: tuple[CurveLine, ...]  # at most two colors
    scale: Literal["linear", "percent", "thousands", "scientific", "log"] = "linear"  # of the y axis
    chance: float | None = None  # value of a guess, drawn as a dashed horizontal line; None: no such line


def _loss_panel(field: str, title: str, baseline: CurveLine | None = None) -> Panel:
    """Return the diagram of one part of the loss, in training and on held-out rows."""
    held_out = CurveLine(field=field, label="held out", kind="eval", is_second=True)
    lines: tuple[CurveLine, ...] = (CurveLine(field=field, label="training"), held_out)
    if baseline is not None:
        lines = (*lines, baseline)
    return Panel(name=field, title=title, lines=lines)


PANELS = (
    _loss_panel("mlm_loss", "MLM loss (nats per masked token)"),
    _loss_panel(
        "rtd_loss",
        "RTD loss (nats per token)",
        CurveLine(field=CONSTANT_GUESS_LOSS, label="constant guess", is_baseline=True, raw=False),
    ),
    _loss_panel("token_loss", "Loss of the tokens that the discriminator predicts (nats per token)"),
    Panel(
        name="rtd_accuracy",
        title="Tokens that the discriminator classifies correctly",
        lines=(
            CurveLine(field="replaced_accuracy", label="replaced", is_second=True),
            CurveLine(field="original_accuracy", label="original"),
            CurveLine(field=GUESSED_REPLACED, label="random guess", is_baseline=True, raw=False),
        ),
        scale="percent",
    ),
    Panel(
        name="auc",
        title="ROC-AUC of the discriminator on held-out rows",
        lines=(CurveLine(field="auc", label="ROC-AUC", kind="eval"),),
        chance=0.5,
    ),
    Panel(
        name="context_auc",
        title="Context AUC on held-out rows",
        lines=(CurveLine(field="context_auc", label="context AUC", kind="eval", is_second=True),),
        chance=0.5,
    ),
    Panel(
        name="lr",
        title="Learning rate",
        lines=(
            CurveLine(field="lr", label="lr", smooth=False),
            CurveLine(field="generator_lr", label="generator's lr", is_second=True, smooth=False),
        ),
        scale="scientific",
    ),
    Panel(
        name="grad_norm",
        title="Gradient norm before clipping",
        lines=(CurveLine(field="grad_norm", label="global norm"),),
        scale="log",
    ),
    Panel(
        name="replaced_fraction",
        title="Tokens that the generator replaced",
        lines=(CurveLine(field="replaced_fraction", label="of all tokens"),),
        scale="percent",
    ),
    Panel(
        name="temperature",
        title="Temperature of the generator's samples",
        lines=(CurveLine(field="temperature", label="scheduled", smooth=False),),
    ),
    Panel(
        name="loss_weights",
        title="Weights of the losses",
        lines=(
            CurveLine(field="mlm_weight", label="generator", is_second=True, smooth=False),
            CurveLine(field="rtd_weight", label="discriminator", smooth=False),
        ),
    ),
    Panel(
        name="mask_shares",
        title="Masked tokens, and masked tokens replaced at random",
        lines=(
            CurveLine(field="mask_prob", label="masked, of all tokens", smooth=False),
            CurveLine(field="random_share", label="random, of the masked", is_second=True, smooth=False),
        ),
        scale="percent",
    ),
    Panel(
        name="generator_entropy",
        title="Entropy of the generator (nats per masked token)",
        lines=(CurveLine(field="generator_entropy", label="held out", kind="eval"),),
    ),
    Panel(
        name="sampled_correct",
        title="Samples of the generator that are right",
        lines=(CurveLine(field="sampled_correct", label="held out", kind="eval"),),
        scale="percent",
    ),
    Panel(
        name="tokens_per_s",
        title="Tokens per second",
        lines=(CurveLine(field="tokens_per_s", label="all ranks"),),
        scale="thousands",
    ),
    Panel(
        name="gpu_power",
        title="Power of the GPUs of the first node (W)",
        lines=(CurveLine(field="gpu_power_w", label="all GPUs of the node"),),
        scale="thousands",
    ),
)


def baselines(record: StepRecord) -> dict[str, float]:
    """Return the baselines of a training step: what a discriminator that has learnt nothing would reach.

    They are `guessed_replaced` and `constant_guess_loss`, named as the fields of diagrams.
    """
    return {
        GUESSED_REPLACED: guessed_replaced(record),
        CONSTANT_GUESS_LOSS: constant_guess_loss(record.replaced_fraction),
    }


def guessed_replaced(record: StepRecord) -> float:
    """Return the share of all tokens that the discriminator called replaced in a training step.

    A random guess that calls the same number of tokens replaced finds this share of the replaced tokens. NaN if no
    token or every token was replaced.
    """
    replaced = record.replaced_fraction
    if not 0 < replaced < 1:
        return math.nan
    rightly_called = replaced * record.replaced_accuracy
    wrongly_called = (1 - replaced) * (1 - record.original_accuracy)
    return rightly_called + wrongly_called


def guessed_by_recall(evaluation: EvalRecord) -> float:
    """Return the share of all tokens that the discriminator called replaced in an evaluation, as `guessed_replaced`.

    NaN if precision, recall and accuracy do not determine it: if all or none of its decisions were right.
    """
    precision, recall = evaluation.precision, evaluation.recall
    # With f the share of replaced tokens, wrong decisions are f * (1 - recall) of all tokens, which were missed, and
    # f * recall * (1 - precision) / precision, which were falsely called. Rightly called are f * recall.
    wrong_per_called = precision * (1 - recall) + recall * (1 - precision)  # times f / precision, all wrong decisions
    if not wrong_per_called > 0:
        return math.nan
    return recall * (1 - evaluation.accuracy) / wrong_per_called


def constant_guess_loss(replaced_fraction: float) -> float:
    """Return the loss, in nats per token, of a guess that gives every token the probability `replaced_fraction`.

    It is the entropy of this fraction: the lowest loss of a discriminator that cannot tell tokens apart. NaN for a
    fraction outside of (0, 1).
    """
    if not 0 < replaced_fraction < 1:
        return math.nan
    original_fraction = 1 - replaced_fraction
    return -replaced_fraction * math.log(replaced_fraction) - original_fraction * math.log(original_fraction)
