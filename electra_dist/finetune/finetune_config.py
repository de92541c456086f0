"""Define the settings of a fine-tuning run, whose defaults are those of the ELECTRA paper for each size of model.

Guarantee: `settings_for` returns the values of the paper's Table 7 for a task and a model size: batches of 32
examples, 3 epochs, 10 for RTE and STS and 2 for SQuAD, no weight decay; lr 3e-4 for Small, 1e-4 for Base and 5e-5 for
Large, with layer decay 0.8, for Large 0.9. Lengths, which the paper does not state, are those of
google-research/electra: 128, 256 for tagging and 512 for SQuAD. `--set key=value` overrides are applied last.

How: the width of the encoder decides its size. Below 512 it counts as Small (the released one has 256), from 1024 on
as Large, between them as Base (768).

Limits: the code of google-research/electra differs from the paper in two values: it trains Small with lr 1e-4, and all
sizes with weight decay 0.01. Pass `--set lr=1e-4 --set weight_decay=0.01` to use these. The default heads are
those of Hugging Face's models (`head`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, field_validator

from electra_dist.config import NonNegative, Positive, Probability, Section
from electra_dist.config.keys import nearest_key
from electra_dist.config.load import parse_yaml
from electra_dist.errors import UserError

BASE_WIDTH = 512  # hidden size from which the settings for Base are used; ELECTRA-Small has 256, Base 768
LARGE_WIDTH = 1024  # hidden size from which the settings for Large are used

WITHOUT_EFFECT = {"max_unk_rate"}  # settings on which no result depends


class FinetuneConfig(Section):
    """Settings for fine-tuning an encoder on a task; the defaults are the ELECTRA paper's for a Base model on GLUE."""

    lr: Annotated[float, Field(gt=0)] = Field(
        default=1e-4,
        description="peak learning rate of the head; lower layers have a lower rate, see layer_decay. "
        "The default is that of the paper for Base, which uses 3e-4 for Small and 5e-5 for Large",
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
    early_stopping: NonNegative = Field(
        default=0,
        description="number of epochs without a better development score after which training stops; the score is "
        "computed after each epoch, and the weights of the best one are kept. 0: all epochs are trained, and the last "
        "weights are kept",
    )
    class_weights: Literal["none", "balanced"] | dict[str, Annotated[float, Field(gt=0)]] = Field(
        default="none",
        description="weight of the loss of each label or tag. balanced: examples / (labels * examples of the label), "
        "so that rare labels count as much as frequent ones; or {label: weight}, where other labels have 1",
    )
    batch: Positive = Field(default=32, description="examples per optimizer step (for SQuAD: windows per step)")
    warmup_fraction: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.1,
        description="share of all steps during which the learning rate rises linearly from 0; the linear decay to 0 "
        "runs over all steps, including these",
    )
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        default=0.0,
        description="decoupled weight decay (AdamW), multiplied by the learning rate; LayerNorm weights and biases "
        "are not decayed. The paper uses 0, the code of google-research/electra 0.01",
    )
    clip_norm: Annotated[float, Field(gt=0)] = Field(
        default=1.0, description="upper bound of the global gradient norm; larger gradients are scaled down to it"
    )
    beta1: Probability = Field(default=0.9, description="AdamW's decay rate of the first moment")
    beta2: Probability = Field(default=0.999, description="AdamW's decay rate of the second moment")
    eps: Annotated[float, Field(gt=0)] = Field(
        default=1e-6, description="AdamW's epsilon, added to the square root of the second moment"
    )
    head: Literal["transformers", "paper"] = Field(
        default="transformers",
        description="layers of the head. transformers: those of Hugging Face's classes, so that the model that is "
        "trained is the one that is written; paper: those of google-research/electra, to compare scores with the "
        "paper. They are one linear layer for texts and, for SQuAD, ends that depend on the start and a classifier of "
        "answerability. Of such a model only the predictions are written. The head of tags is the same in both",
    )
    pooling: Literal["cls", "mean"] = Field(
        default="cls",
        description="classification and regression: the states that the head reads. cls: that of the first token, "
        "[CLS], as in the paper; mean: the mean over all tokens, which can be better after a short pretraining. "
        "mean needs a ModernBERT or head paper, because transformers' class for ELECTRA reads [CLS] only",
    )
    head_dropout: Probability = Field(
        default=0.1, description="dropout probability before each linear layer of the head for texts"
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
    max_unk_rate: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.5,
        description="largest share of [UNK] among the tokens of the training examples; a task with more is refused, "
        "because the model's vocabulary does not fit its texts. 1: any share is accepted",
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
        default=512,
        description="SQuAD, head paper: width of the hidden layers for the answer's end and answerability",
    )
    answerable_weight: Annotated[float, Field(ge=0)] = Field(
        default=0.5,
        description="SQuAD, head paper: weight of the answerability loss, added to the loss of start and end",
    )

    @field_validator("class_weights", mode="before")
    @classmethod
    def _check_class_weights(cls, value: object) -> object:
        if isinstance(value, dict) and all(isinstance(label, str) for label in value):
            weights = value.values()
            if all(type(weight) in (int, float) and 0 < weight < math.inf for weight in weights):
                return value
        if isinstance(value, str) and value in ("none", "balanced"):
            return value
        raise ValueError("give none, balanced or {label: weight}, with a number above 0 for each label")

    def identity(self, only: Collection[str] | None = None) -> dict[str, Any]:
        """Return the settings, or those named in `only`, that become part of a result's digest, as JSON values.

        `max_unk_rate` is left out, because no result depends on it, and the `pooling` of versions without this key, so
        that their results are found.
        """
        excluded = WITHOUT_EFFECT | ({"pooling"} if self.pooling == "cls" else set())
        return self.model_dump(mode="json", include=None if only is None else set(only), exclude=excluded)


def settings_for(task: str, width: int, max_positions: int, overrides: Sequence[str] = ()) -> FinetuneConfig:
    """Return the ELECTRA paper's settings for a task and a model size, changed by `overrides`.

    `width` is the encoder's hidden size. `max_positions` is the largest number of tokens that the model can read at
    once: the default of `max_length` is lowered to this number, and an override above it raises UserError. `overrides`
    are texts such as "epochs=2", whose values are parsed as YAML.
    """
    settings = check_overrides(overrides, {**_values_of_size(width), **_values_of_task(task, max_positions)})
    if settings.max_length > max_positions:
        raise UserError(
            f"max_length {settings.max_length} is more than the {max_positions} positions of the model; "
            f"pass --set max_length={max_positions}, or less"
        )
    return settings


def check_overrides(overrides: Sequence[str], values: Mapping[str, Any] | None = None) -> FinetuneConfig:
    """Return the settings `values` with `overrides`; raise UserError for an unknown key or a wrong value."""
    changed = dict(values or {})
    for text in overrides:
        changed |= _parse_override(text)
    try:
        return FinetuneConfig.model_validate(changed)
    except ValidationError as error:
        first_error = error.errors()[0]
        key = ".".join(map(str, first_error["loc"]))
        reason = first_error["msg"].removeprefix("Value error, ")
        raise UserError(f"--set {key}={first_error['input']}: {reason}; correct the value") from None


def _values_of_size(width: int) -> dict[str, Any]:
    """Return the settings that depend on the hidden size, where they differ from the defaults; {} for a Base model."""
    if width < BASE_WIDTH:
        return {"lr": 3e-4}
    if width >= LARGE_WIDTH:
        return {"lr": 5e-5, "layer_decay": 0.9}
    return {}


def _values_of_task(task: str, max_positions: int) -> dict[str, Any]:
    # Epochs are those of Table 7 of the paper, lengths those of google-research/electra (configure_finetuning.py),
    # which trains chunking, a tagging task, at length 256.
    if task.startswith("squad"):  # squad1 or squad2: passages are longer than the texts of GLUE
        return {"epochs": 2.0, "max_length": min(512, max_positions)}
    if task in ("ner", "tagging"):
        return {"epochs": 3.0, "max_length": min(256, max_positions)}
    if task in ("rte", "stsb"):  # small tasks, which are trained for longer
        return {"epochs": 10.0, "max_length": min(128, max_positions)}
    return {"epochs": 3.0, "max_length": min(128, max_positions)}


def _parse_override(text: str) -> dict[str, Any]:
    """Parse a text such as "epochs=2" as {key: value}; raise UserError if its form, key or YAML value is not valid."""
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals:
        raise UserError(f"--set {text}: expected key=value; write it as in --set lr=3e-4")
    if key not in FinetuneConfig.model_fields:
        nearest = nearest_key("", key, FinetuneConfig.model_fields)
        hint = f"did you mean `{nearest}`?" if nearest else f"use one of {', '.join(FinetuneConfig.model_fields)}"
        raise UserError(f"--set {text}: unknown key `{key}`; {hint}")
    try:
        parsed = parse_yaml(value)
        if key == "class_weights" and isinstance(parsed, dict):
            labels = yaml.load(value, Loader=yaml.BaseLoader)  # as they are written: YAML takes yes for true
            parsed = dict(zip(labels, parsed.values(), strict=True))
        return {key: parsed}
    except yaml.YAMLError:
        raise UserError(f"--set {text}: the value is not valid YAML; put it in quotes") from None
