"""The settings of a fine-tuning run: one frozen section, with the reference's values as defaults.

Guarantee: `settings_for` gives what google-research/electra (configure_finetuning.py) uses for a task and a size: 3
epochs of batches of 32 at length 128; RTE and STS 10 epochs; SQuAD 2 epochs at length 512; lr 1e-4 with layer decay
0.8, from a width of 1024 on (Large) 5e-5 and 0.9. `--set key=value` comes last.

Where it stops: the paper's Table 7 differs from the code for Small (lr 3e-4, no weight decay): give it by --set.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError

from electra_dist.config import Positive, Probability, Section
from electra_dist.errors import UserError

LARGE_WIDTH = 1024


class FinetuneConfig(Section):
    """How an encoder is fine-tuned."""

    lr: Annotated[float, Field(gt=0)] = Field(default=1e-4, description="peak learning rate of the head")
    layer_decay: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.8, description="factor of lr from each layer to the one below it"
    )
    lr_decay_quirk: bool = Field(
        default=True,
        description="the reference's: the top layer gets layer_decay^2, as if a pooler lay between it and the head; "
        "false: layer_decay",
    )
    epochs: Annotated[float, Field(gt=0)] = Field(default=3.0, description="passes over the training examples")
    batch: Positive = Field(default=32, description="examples (SQuAD: windows) per step")
    warmup_fraction: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.1, description="share of the steps with linear warm-up; overlaps the linear decay to 0"
    )
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        default=0.01, description="decoupled, times lr; not on LayerNorm and bias"
    )
    clip_norm: Annotated[float, Field(gt=0)] = Field(default=1.0, description="bound of the global gradient norm")
    beta1: Probability = Field(default=0.9, description="decay of the first moment")
    beta2: Probability = Field(default=0.999, description="decay of the second moment")
    eps: Annotated[float, Field(gt=0)] = Field(default=1e-6, description="added to the root of the second moment")
    head: Literal["reference", "dense"] = Field(
        default="reference",
        description="reference: dropout, out; dense: dropout, dense, GELU, dropout, out (Hugging Face's)",
    )
    head_dropout: Probability = Field(default=0.1, description="dropout before the head's last layer")
    hidden_dropout: Probability = Field(default=0.1, description="the encoder's dropout on sub-layer outputs")
    attention_dropout: Probability = Field(default=0.1, description="the encoder's dropout on attention")
    max_length: Annotated[int, Field(ge=8)] = Field(default=128, description="tokens per example or window")
    both_orders: bool = Field(default=True, description="MRPC and STS: train on (A, B) and on (B, A)")
    max_query: Positive = Field(default=64, description="SQuAD: tokens of a question that are used")
    doc_stride: Positive = Field(default=128, description="SQuAD: tokens from one window's start to the next one's")
    max_answer: Positive = Field(default=30, description="SQuAD: longest answer, in tokens")
    beam: Positive = Field(default=20, description="SQuAD: starts tried, and ends tried for each")
    span_width: Positive = Field(default=512, description="SQuAD: width of the hidden layers of the head")
    answerable_weight: Annotated[float, Field(ge=0)] = Field(
        default=0.5, description="SQuAD: weight of the answerability loss"
    )


def settings_for(task: str, width: int, max_positions: int, overrides: Sequence[str] = ()) -> FinetuneConfig:
    """The reference's settings for `task` (`squad1`, `rte`, ...) with `key=value` overrides.

    Args:
        task: name on the command line.
        width: the encoder's hidden size.
        max_positions: rows of its position table, a bound of `max_length`.
        overrides: as given to --set.

    Raises:
        UserError: an unknown key, a value that does not fit, or a length that the model lacks.
    """
    values: dict[str, Any] = {}
    if width >= LARGE_WIDTH:
        values |= {"lr": 5e-5, "layer_decay": 0.9}
    if task.startswith("squad"):
        values |= {"epochs": 2.0, "max_length": min(512, max_positions)}
    else:
        values |= {"epochs": 10.0 if task in ("rte", "stsb") else 3.0, "max_length": min(128, max_positions)}
    for text in overrides:
        values |= _parse(text)
    try:
        settings = FinetuneConfig.model_validate(values)
    except ValidationError as error:
        fault = error.errors()[0]
        raise UserError(f"--set {'.'.join(map(str, fault['loc']))}: {fault['msg']}") from None
    if settings.max_length > max_positions:
        raise UserError(
            f"max_length {settings.max_length}: the model has {max_positions} positions; "
            f"--set max_length={max_positions}"
        )
    return settings


def _parse(text: str) -> dict[str, Any]:
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals:
        raise UserError(f"--set {text}: expected key=value, for example --set lr=3e-4")
    if key not in FinetuneConfig.model_fields:
        near = difflib.get_close_matches(key, FinetuneConfig.model_fields, n=1, cutoff=0.5)
        hint = f"did you mean `{near[0]}`?" if near else f"valid: {', '.join(FinetuneConfig.model_fields)}"
        raise UserError(f"--set {text}: unknown key `{key}`; {hint}")
    try:
        return {key: yaml.safe_load(value)}
    except yaml.YAMLError:
        raise UserError(f"--set {text}: the value is not valid YAML; quote it") from None
