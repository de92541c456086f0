"""Heads against their formulas written out in NumPy float64, and the beam search against all spans."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from support.small_encoder import head_parameters

from electra_dist.errors import UserError
from electra_dist.finetune.finetune_config import FinetuneConfig
from electra_dist.finetune.models import Classifier, Network, StockNetwork, labels_config
from electra_dist.finetune.paper_heads import PaperClassifier, PaperSpanModel, SpanHead
from electra_dist.finetune.passage_windows import AnswerWindow
from electra_dist.finetune.squad_task import best_spans
from electra_dist.finetune.training_loop import predict
from electra_dist.model.encoder import DropoutKeys
from electra_dist.pretrained.encoder import Pretrained

SETTINGS = FinetuneConfig(head_dropout=0.0, span_width=12, beam=4)
CLS, SEP, PAD = 2, 3, 0
# Two rows of a question and a passage; the passages are at positions 4 to 7 and 3 to 4.
IDS = torch.tensor([[CLS, 60, 61, SEP, 70, 71, 72, 73, SEP], [CLS, 62, SEP, 74, 75, SEP, PAD, PAD, PAD]])

Weights = dict[str, np.ndarray]


def gelu(x: np.ndarray) -> np.ndarray:
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def log_softmax(x: np.ndarray) -> np.ndarray:
    return x - np.log(np.exp(x - x.max()).sum()) - x.max()


def weights_of(module: torch.nn.Module) -> Weights:
    return {name: parameter.detach().double().numpy() for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("head", ["paper", "transformers"])
def test_a_classifier_is_one_or_two_dense_layers_on_the_state_of_cls_with_cross_entropy(
    encoder: Pretrained, head: str
) -> None:
    network: Network = PaperClassifier(encoder, 3, SETTINGS, seed=1)
    if head == "transformers":
        network = StockNetwork(encoder, "SequenceClassification", labels_config("abc"), SETTINGS, seed=1)
    model = Classifier(network, encoder.special).eval()

    logits = encoder.backbone().eval()(IDS).detach().double().numpy()[:, 0]
    parameters = [parameter.detach().double().numpy() for parameter in head_parameters(model)]
    assert len(parameters) == (2 if head == "paper" else 4)
    for number in range(0, len(parameters), 2):
        logits = logits if number == 0 else gelu(logits)
        logits = logits @ parameters[number].T + parameters[number + 1]
    cross_entropy = -(log_softmax(logits[0])[2] + log_softmax(logits[1])[0]) / 2  # the labels are 2 and 0

    np.testing.assert_allclose(model.predict(IDS).detach().numpy(), logits, atol=1e-6)
    loss = model(IDS, torch.tensor([[2], [0]]), DropoutKeys.off(IDS))
    assert loss.item() == pytest.approx(cross_entropy, abs=1e-6)


@pytest.mark.parametrize("head", ["paper", "transformers"])
def test_rows_as_long_as_the_model_has_positions_are_padded_beyond_them(encoder: Pretrained, head: str) -> None:
    """Rows are padded to a multiple of 8, here to 64 tokens for 61 positions; padding changes no output."""
    state = encoder.state | {"embeddings.position.weight": encoder.state["embeddings.position.weight"][:61]}
    short = dataclasses.replace(encoder, model=encoder.model.model_copy(update={"max_positions": 61}), state=state)
    network: Network = PaperClassifier(short, 3, SETTINGS, seed=1)
    if head == "transformers":
        network = StockNetwork(short, "SequenceClassification", labels_config("abc"), SETTINGS, seed=1)
    model = Classifier(network, short.special).eval()
    row = [CLS, *range(60, 119), SEP]

    ((_, padded_logits),) = predict(model.predict, [row], PAD, batch=1, device=torch.device("cpu"))

    torch.testing.assert_close(padded_logits, model.predict(torch.tensor([row])), atol=1e-6, rtol=0)


def test_the_papers_classifier_reads_the_mean_of_all_states_but_padding_where_it_is_asked_to(
    encoder: Pretrained,
) -> None:
    settings = SETTINGS.model_copy(update={"pooling": "mean"})
    model = Classifier(PaperClassifier(encoder, 3, settings, seed=1), encoder.special).eval()

    states = encoder.backbone().eval()(IDS).detach().double().numpy()
    weight, bias = (parameter.detach().double().numpy() for parameter in head_parameters(model))
    means = np.stack([states[0].mean(0), states[1, :6].mean(0)])  # the second row has six tokens

    np.testing.assert_allclose(model.predict(IDS).detach().numpy(), means @ weight.T + bias, atol=1e-6)


def test_the_loss_of_a_regression_is_the_mean_squared_error_of_one_output(encoder: Pretrained) -> None:
    model = Classifier(PaperClassifier(encoder, 1, SETTINGS, seed=1), encoder.special, (0.0, 1.0)).eval()

    loss = model(IDS, torch.tensor([[0.2], [0.9]]), DropoutKeys.off(IDS))

    outputs = model.predict(IDS).detach().numpy()[:, 0]
    squared_errors = (outputs - [0.2, 0.9]) ** 2
    assert loss.item() == pytest.approx(squared_errors.mean(), abs=1e-7)


@pytest.mark.parametrize("damage", ["lack encoder.layers.1.expand.weight", "encoder.layers.1.expand.weight has the"])
def test_weights_that_are_missing_or_of_another_shape_are_one_line(encoder: Pretrained, damage: str) -> None:
    name = "encoder.layers.1.expand.weight"
    state = {key: weight for key, weight in encoder.state.items() if key != name}
    if "has the" in damage:
        state[name] = encoder.state[name][1:]
    damaged = dataclasses.replace(encoder, state=state)
    for build in (
        lambda: StockNetwork(damaged, "SequenceClassification", {}, SETTINGS, seed=1),
        lambda: PaperClassifier(damaged, 2, SETTINGS, seed=1),
    ):
        with pytest.raises(UserError, match=damage) as error:
            build()
        assert "\n" not in str(error.value)


class SpanLogits(NamedTuple):
    """Logits of one row of S positions: starts [S], ends given one start [S], and "no answer" (a number)."""

    starts: np.ndarray
    ends: np.ndarray
    no_answer: np.ndarray


def span_logits_by_hand(weights: Weights, state_SH: np.ndarray, allowed_S: np.ndarray, start: int) -> SpanLogits:
    """Return the logits of the SQuAD head for one row, computed position by position.

    Args:
        weights: parameters of the head.
        state_SH: states of the encoder.
        allowed_S: positions at which an answer may start or end; the others get -1000.
        start: the start on which the logits of the ends depend.
    """
    penalty = np.where(allowed_S, 0.0, -1000.0)
    start_logits = state_SH @ weights["start.weight"][0] + weights["start.bias"][0] + penalty

    end_logits = []
    for state in state_SH:
        both_states = np.concatenate([state_SH[start], state])
        hidden = gelu(weights["end_hidden.weight"] @ both_states + weights["end_hidden.bias"])
        end_logits.append(hidden @ weights["end.weight"][0] + weights["end.bias"][0])

    mean_start_state = np.exp(log_softmax(start_logits)) @ state_SH
    cls_and_mean = np.concatenate([state_SH[0], mean_start_state])
    hidden = gelu(weights["answer_hidden.weight"] @ cls_and_mean + weights["answer_hidden.bias"])
    no_answer = hidden @ weights["answer.weight"][0] + weights["answer.bias"][0]
    return SpanLogits(start_logits, np.array(end_logits) + penalty, no_answer)


def test_the_span_loss_equals_the_references_formula(encoder: Pretrained) -> None:
    """Cross-entropy of start and end, halved, plus half the binary cross-entropy of "no answer"; mean over rows."""
    settings = SETTINGS.model_copy(update={"hidden_dropout": 0.0, "attention_dropout": 0.0})
    model = PaperSpanModel(encoder, settings, seed=1).eval()
    states = model.network.backbone(IDS).detach().double().numpy()
    # [CLS] stands for "no answer"; the passage and the [SEP] after it are allowed.
    allowed = np.array([[1, 0, 0, 0, 1, 1, 1, 1, 1], [1, 0, 0, 1, 1, 1, 0, 0, 0]], bool)
    np.testing.assert_array_equal(model.allowed(IDS).numpy(), allowed)
    targets = [(5, 7, 0), (0, 0, 1)]  # start, end, whether there is no answer

    loss = model(IDS, torch.tensor(targets), DropoutKeys.off(IDS))

    row_losses = []
    for row, (start, end, impossible) in enumerate(targets):
        logits = span_logits_by_hand(weights_of(model.network.head), states[row], allowed[row], start)
        span_loss = -(log_softmax(logits.starts)[start] + log_softmax(logits.ends)[end]) / 2
        sign = -1 if impossible else 1
        answer_loss = np.log1p(np.exp(sign * logits.no_answer))
        row_losses.append(span_loss + 0.5 * answer_loss)
    assert loss.item() == pytest.approx(np.mean(row_losses), abs=1e-5)


def best_span_by_hand(
    head: SpanHead, state_SH: torch.Tensor, allowed_S: torch.Tensor, window: AnswerWindow, max_answer: int
) -> tuple[float, int, int]:
    """Return the best span of a window, found by scoring all allowed ones: log-probability, first and last token."""
    weights = weights_of(head)
    num_passage_tokens = len(window.owned)
    spans = []
    for first in range(num_passage_tokens):
        if not window.owned[first]:
            continue
        start = window.offset + first
        logits = span_logits_by_hand(weights, state_SH.double().numpy(), allowed_S.numpy(), start)
        start_logp = log_softmax(logits.starts)[start]
        end_logps = log_softmax(logits.ends)
        for last in range(first, min(first + max_answer, num_passage_tokens)):
            logp = start_logp + end_logps[window.offset + last]
            spans.append((logp, window.first + first, window.first + last))
    return max(spans)


def test_a_beam_as_wide_as_the_row_finds_the_best_of_all_spans() -> None:
    torch.manual_seed(0)
    num_positions, offset, max_answer = 14, 4, 5
    num_passage_tokens = num_positions - offset - 1  # the last position is [SEP]
    settings = SETTINGS.model_copy(update={"beam": num_positions})
    for seed in range(10):
        head = SpanHead(8, settings, seed)
        states = 3 * torch.randn(1, num_positions, 8)
        allowed = torch.arange(num_positions)[None] >= offset
        owned = (torch.rand(num_passage_tokens) > 0.3).tolist()
        window = AnswerWindow(0, list(range(num_positions)), offset, first=100, owned=owned)

        with torch.no_grad():
            [found] = best_spans([window], head.search(states, allowed), max_answer)

        best = best_span_by_hand(head, states[0], allowed[0], window, max_answer)
        assert found is not None
        assert found[1:] == best[1:]
        assert found[0] == pytest.approx(best[0], abs=1e-4)


def test_the_initial_weights_of_a_head_depend_on_the_seed_only_and_have_glorots_bound() -> None:
    first, repeated, other_seed = (SpanHead(8, SETTINGS, seed).end_hidden.weight for seed in (1, 1, 2))

    assert torch.equal(first, repeated)
    assert not torch.equal(first, other_seed)
    inputs, outputs = 16, 12  # two states of width 8; span_width
    assert first.abs().max() <= math.sqrt(6 / (inputs + outputs))
