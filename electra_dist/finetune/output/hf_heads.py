"""Translate task heads into the heads of Hugging Face's models, without a change of what they compute.

Guarantee: the model that is written gives the logits of the model that was trained, to rounding. A regression gives
its predictions in the units of the labels, although it is trained on labels that are scaled to [0, 1].

How: Hugging Face's classifier is Dense(H -> H), GELU, Dense(H -> N). The paper's is Dense(H -> N) alone, z = W x + b.
It can be written in Hugging Face's form, because GELU(z) - GELU(-z) = z for every z: the rows of the first Dense are W
and -W, and the second Dense subtracts. The heads for tags and for spans are a single Dense in both. In models of the
architecture `modern` each head has the same layers as in Hugging Face's ModernBERT classes, so only names change.

Limits: the identity needs two rows for each label, so a linear head with more than H / 2 labels cannot be translated.
Hugging Face's models have no head that corresponds to google-research/electra's for SQuAD.

Shapes: H hidden width, N labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from electra_dist.finetune.finetune_config import FinetuneConfig
from electra_dist.model.heads import ModernFeatures
from electra_dist.pretrained.export import TaskHead

_NUM_LINEAR_LAYERS_OF_DENSE_HEAD = 2


def has_too_many_labels(num_labels: int, width: int, settings: FinetuneConfig) -> bool:
    """Return whether a head cannot be written in Hugging Face's form: it is linear and has over `width` / 2 labels."""
    return settings.head == "reference" and 2 * num_labels > width


def classifier_head(
    layers: nn.Sequential, labels: Sequence[str], span: tuple[float, float], dropout: float
) -> TaskHead:
    """Convert a `Classifier`'s head to that of ElectraForSequenceClassification or its counterpart for ModernBERT.

    `labels` are in the order of their numbers, and empty for a regression. `span` has the lowest and the highest label
    of a regression, in the units of the training files, to which its outputs are scaled. `dropout` is the dropout
    probability before each linear layer.
    """
    architecture = "ElectraForSequenceClassification"
    output_name = "classifier.out_proj"
    config: dict[str, Any] = {"classifier_dropout": dropout}
    linear_layers = [layer for layer in layers if isinstance(layer, nn.Linear)]
    if isinstance(layers[0], ModernFeatures):
        architecture = "ModernBertForSequenceClassification"
        output_name = "classifier"
        config["classifier_pooling"] = "cls"
        weights = _modern_weights(layers)
    elif len(linear_layers) == _NUM_LINEAR_LAYERS_OF_DENSE_HEAD:
        dense_layer, out_layer = linear_layers
        weights = {
            "classifier.dense.weight": _host(dense_layer.weight),
            "classifier.dense.bias": _host(dense_layer.bias),
            "classifier.out_proj.weight": _host(out_layer.weight),
            "classifier.out_proj.bias": _host(out_layer.bias),
        }
    else:
        weights = _linear_as_two_layers(linear_layers[0])
    if labels:
        config |= {"problem_type": "single_label_classification", **label_names(labels)}
    else:
        # The model was trained on labels scaled to [0, 1]; its output layer is scaled back to the units of the labels.
        low, high = span
        weights[f"{output_name}.weight"] *= high - low
        weights[f"{output_name}.bias"] = weights[f"{output_name}.bias"] * (high - low) + low
        config |= {"problem_type": "regression", **label_names(["LABEL_0"])}
    return TaskHead(architecture, weights, config)


def tag_head(head: nn.Module, tags: Sequence[str]) -> TaskHead:
    """Convert a tagging model's head to Hugging Face's token-classification head; `tags` names outputs in order."""
    # Tagging models are trained without dropout in the head, and would get Hugging Face's default otherwise.
    config = {"classifier_dropout": 0.0, **label_names(tags)}
    if isinstance(head, nn.Sequential):
        return TaskHead("ModernBertForTokenClassification", _modern_weights(head), config)
    assert isinstance(head, nn.Linear)
    weights = {"classifier.weight": _host(head.weight), "classifier.bias": _host(head.bias)}
    return TaskHead("ElectraForTokenClassification", weights, config)


def span_head(head: nn.Module) -> TaskHead:
    """Convert the linear SQuAD head to that of ElectraForQuestionAnswering or ModernBertForQuestionAnswering."""
    if isinstance(head, nn.Sequential):
        config = {"classifier_dropout": 0.0, **label_names(["START", "END"])}
        return TaskHead("ModernBertForQuestionAnswering", _modern_weights(head), config)
    assert isinstance(head, nn.Linear)
    weights = {"qa_outputs.weight": _host(head.weight), "qa_outputs.bias": _host(head.bias)}
    return TaskHead("ElectraForQuestionAnswering", weights, {})


def label_names(labels: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the entries `id2label` and `label2id` of Hugging Face's config.json; labels are numbered in order."""
    return {
        "id2label": {str(number): label for number, label in enumerate(labels)},
        "label2id": {label: number for number, label in enumerate(labels)},
    }


def _modern_weights(layers: nn.Sequential) -> dict[str, torch.Tensor]:
    """Return the weights of a head with `ModernFeatures` under the names of Hugging Face's ModernBERT classes."""
    features = layers[0]
    output_layer = layers[-1]
    assert isinstance(features, ModernFeatures) and isinstance(output_layer, nn.Linear)
    return {
        "head.dense.weight": _host(features.dense.weight),
        "head.norm.weight": _host(features.layer_norm.weight),
        "classifier.weight": _host(output_layer.weight),
        "classifier.bias": _host(output_layer.bias),
    }


def _linear_as_two_layers(linear: nn.Linear) -> dict[str, torch.Tensor]:
    """Return the weights of a two-layer classifier that computes the same as a linear layer [N, H]; needs 2 N <= H."""
    weight_NH = _host(linear.weight)
    bias_N = _host(linear.bias)
    num_labels, width = weight_NH.shape
    dense_weight_HH = torch.zeros(width, width)
    dense_weight_HH[:num_labels] = weight_NH
    dense_weight_HH[num_labels : 2 * num_labels] = -weight_NH
    dense_bias_H = torch.zeros(width)
    dense_bias_H[:num_labels] = bias_N
    dense_bias_H[num_labels : 2 * num_labels] = -bias_N
    out_weight_NH = torch.zeros(num_labels, width)
    out_weight_NH[:, :num_labels] = torch.eye(num_labels)
    out_weight_NH[:, num_labels : 2 * num_labels] = -torch.eye(num_labels)
    return {
        "classifier.dense.weight": dense_weight_HH,
        "classifier.dense.bias": dense_bias_H,
        "classifier.out_proj.weight": out_weight_NH,
        "classifier.out_proj.bias": torch.zeros(num_labels),
    }


def _host(parameter: torch.Tensor) -> torch.Tensor:
    """Return a copy of a parameter in fp32 on the host, without gradient."""
    return parameter.detach().float().cpu().clone()
