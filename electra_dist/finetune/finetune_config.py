"""Defines the settings of a fine-tuning run, whose defaults are the values of google-research/electra.

Guarantee: `settings_for` returns what google-research/electra (configure_finetuning.py) uses for a task and a model
size: 3 epochs of batches of 32 examples at length 128; 10 epochs for RTE and STS; 2 epochs at length 512 for SQuAD;
lr 1e-4 with layer decay 0.8, or 5e-5 and 0.9 from a width of 1024 on (Large). `--set key=value` overrides are applied
last.

Limits: for Small, the paper's Table 7 differs from the reference code (lr 3e-4, no weight decay). Pass
`--set lr=3e-4 --set weight_decay=0` to use the paper's values.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError

from electra_dist.config import Positive, Probability, Section
from electra_dist.errors import UserError

LARGE_WIDTH = 1024  # hidden size from which the reference's settings for Large are used


class FinetuneConfig(Section):
    """Settings of fine-tuning one encoder on one task: optimizer, schedule, head, dropout, lengths, SQuAD's windows.

    The defaults are those of google-research/electra for a Base-size model on a GLUE task; `settings_for` adapts them
    to the task and the model.
    """

    lr: Annotated[float, Field(gt=0)] = Field(
        default=1e-4,
        description="peak learning rate of the head; lower layers have a lower rate, see layer_decay. "
        "The default is that of google-research/electra for Small and Base, which uses 5e-5 for Large",
    )
    layer_decay: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.8,
        description="factor on the learning rate from each layer to the one below; 1: all layers have the same rate",
    )
    lr_decay_quirk: bool = Field(
        default=True,
        description="true: the top layer's rate is lr * layer_decay^2, as in the reference, which counts a pooler "
        "between the top layer and the head that does not exist; false: lr * layer_decay",
    )
    epochs: Annotated[float, Field(gt=0)] = Field(
        default=3.0, description="passes over the training examples; fractions are allowed"
    )
    batch: Positive = Field(default=32, description="examples per optimizer step (for SQuAD: windows per step)")
    warmup_fraction: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.1,
        description="share of all steps during which the learning rate rises linearly from 0; the linear decay to 0 "
        "runs over all steps, including these",
    )
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        default=0.01,
        description="decoupled weight decay (AdamW), multiplied by the learning rate; LayerNorm weights and biases "
        "are not decayed",
    )
    clip_norm: Annotated[float, Field(gt=0)] = Field(
        default=1.0, description="upper bound of the global gradient norm; larger gradients are scaled down to it"
    )
    beta1: Probability = Field(default=0.9, description="AdamW's decay rate of the first moment")
    beta2: Probability = Field(default=0.999, description="AdamW's decay rate of the second moment")
    eps: Annotated[float, Field(gt=0)] = Field(
        default=1e-6, description="AdamW's epsilon, added to the square root of the second moment"
    )
    head: Literal["reference", "dense"] = Field(
        default="reference",
        description="layers of the classification head. reference: dropout, linear; dense: dropout, linear, GELU, "
        "dropout, linear, as in Hugging Face's ElectraForSequenceClassification",
    )
    head_dropout: Probability = Field(
        default=0.1, description="dropout probability before each linear layer of the classification head"
    )
    hidden_dropout: Probability = Field(
        default=0.1, description="dropout probability on the encoder's embeddings and sub-layer outputs"
    )
    attention_dropout: Probability = Field(
        default=0.1, description="dropout probability on the encoder's attention probabilities"
    )
    max_length: Annotated[int, Field(ge=8)] = Field(
        default=128,
        description="longest example or SQuAD window, in tokens with [CLS] and [SEP]; longer examples are truncated. "
        "At most the model's max_positions",
    )
    both_orders: bool = Field(
        default=True,
        description="for tasks with symmetric pairs (MRPC, STS): train on (A, B) and on (B, A), which doubles the "
        "training examples",
    )
    max_query: Positive = Field(
        default=64, description="SQuAD: longest question, in tokens; longer questions are truncated"
    )
    doc_stride: Positive = Field(
        default=128, description="SQuAD: distance between the starts of neighbouring windows of a passage, in tokens"
    )
    max_answer: Positive = Field(default=30, description="SQuAD: longest answer that is predicted, in tokens")
    beam: Positive = Field(
        default=20,
        description="SQuAD: number of answer starts that are tried, and of answer ends for each start",
    )
    span_width: Positive = Field(
        default=512, description="SQuAD: width of the hidden layers for the answer's end and for answerability"
    )
    answerable_weight: Annotated[float, Field(ge=0)] = Field(
        default=0.5, description="SQuAD: weight of the answerability loss, added to the loss of start and end"
    )


def settings_for(task: str, width: int, max_positions: int, overrides: Sequence[str] = ()) -> FinetuneConfig:
    """Return google-research/electra's settings for a task and a model size, with overrides applied last.

    Args:
        task: name of the task on the command line, such as `squad1` or `rte`.
        width: hidden size of the encoder, in features; for 1024 or more, the settings for Large are used.
        max_positions: rows of the model's position table. The default of `max_length`, in tokens, is lowered to it; a
            larger override is an error.
        overrides: `key=value` texts from `--set`; values are parsed as YAML.

    Raises:
        UserError: an override has an unknown key or a value that is not valid, or sets `max_length` above
            `max_positions`.
    """
    values = _reference_values(task, width, max_positions)
    for text in overrides:
        values |= _parse_override(text)
    try:
        settings = FinetuneConfig.model_validate(values)
    except ValidationError as error:
        first_error = error.errors()[0]
        key = ".".join(map(str, first_error["loc"]))
        raise UserError(f"--set {key}={first_error['input']}: {first_error['msg']}; correct the value") from None
    if settings.max_length > max_positions:
        raise UserError(
            f"max_length {settings.max_length} is more than the {max_positions} positions of the model; "
            f"pass --set max_length={max_positions}, or less"
        )
    return settings


def _reference_values(task: str, width: int, max_positions: int) -> dict[str, Any]:
    """Return the settings of google-research/electra that depend on the task or the model size.

    Args:
        task: name of the task on the command line, such as `squad1` or `rte`.
        width: hidden size of the encoder, in features; 1024 or more counts as Large.
        max_positions: rows of the model's position table; `max_length`, in tokens, is lowered to it if it would be
            more.

    Returns:
        Field of `FinetuneConfig` -> value. Fields that the mapping lacks keep their defaults, which are those of Base.
    """
    values: dict[str, Any] = {}
    if width >= LARGE_WIDTH:
        values |= {"lr": 5e-5, "layer_decay": 0.9}
    if task.startswith("squad"):  # squad1 or squad2: passages are longer than the texts of GLUE
        values |= {"epochs": 2.0, "max_length": min(512, max_positions)}
    elif task in ("rte", "stsb"):  # small tasks, which the reference trains for longer
        values |= {"epochs": 10.0, "max_length": min(128, max_positions)}
    else:
        values |= {"epochs": 3.0, "max_length": min(128, max_positions)}
    return values


def _parse_override(text: str) -> dict[str, Any]:
    """Parse one `key=value` override into {key: value}, the value read as YAML.

    Raises:
        UserError: no `=`, an unknown key (the nearest valid one is suggested), or a value that is not YAML.
    """
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals:
        raise UserError(f"--set {text}: expected key=value; write it as in --set lr=3e-4")
    if key not in FinetuneConfig.model_fields:
        similar_keys = difflib.get_close_matches(key, FinetuneConfig.model_fields, n=1, cutoff=0.5)
        if similar_keys:
            hint = f"did you mean `{similar_keys[0]}`?"
        else:
            hint = f"use one of {', '.join(FinetuneConfig.model_fields)}"
        raise UserError(f"--set {text}: unknown key `{key}`; {hint}")
    try:
        return {key: yaml.safe_load(value)}
    except yaml.YAMLError:
        raise UserError(f"--set {text}: the value is not valid YAML; put it in quotes") from None
