"""Heads against the same formulas in NumPy float64, written out; the beam against all pairs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from electra_dist.finetune.finetune_config import FinetuneConfig
from electra_dist.finetune.squad.answer_spans import best_spans
from electra_dist.finetune.squad.passage_windows import AnswerWindow
from electra_dist.finetune.task_heads import Classifier, SpanHead, SpanModel
from electra_dist.model.encoder import DropoutKeys
from electra_dist.pretrained.load_encoder import Pretrained

SETTINGS = FinetuneConfig(head_dropout=0.0, span_width=12, beam=4)
CLS, SEP, PAD = 2, 3, 0
IDS = torch.tensor([[CLS, 60, 61, SEP, 70, 71, 72, 73, SEP], [CLS, 62, SEP, 74, 75, SEP, PAD, PAD, PAD]])


def gelu(x: np.ndarray) -> np.ndarray:
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def log_softmax(x: np.ndarray) -> np.ndarray:
    return x - np.log(np.exp(x - x.max()).sum()) - x.max()


def weights(module: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: p.detach().double().numpy() for name, p in module.named_parameters()}


@pytest.mark.parametrize("head", ["reference", "dense"])
def test_the_classifier_is_dense_layers_on_the_state_of_cls(encoder: Pretrained, head: str) -> None:
    settings = SETTINGS.model_copy(update={"head": head})
    model = Classifier(encoder.backbone(), 32, 3, settings, seed=1)
    model.eval()
    state = model.backbone(IDS).detach().double().numpy()[:, 0]
    w = weights(model.head)
    if head == "dense":
        state = gelu(state @ w["1.weight"].T + w["1.bias"])
    last = "1" if head == "reference" else "4"
    logits = state @ w[f"{last}.weight"].T + w[f"{last}.bias"]
    np.testing.assert_allclose(model.predict(IDS).detach().numpy(), logits, atol=1e-6)
    loss = model(IDS, torch.tensor([[2], [0]]), DropoutKeys.off(IDS))
    assert loss.item() == pytest.approx(-(log_softmax(logits[0])[2] + log_softmax(logits[1])[0]) / 2, abs=1e-6)


def test_a_regression_is_the_squared_error_of_one_output(encoder: Pretrained) -> None:
    model = Classifier(encoder.backbone(), 32, 1, SETTINGS, seed=1).eval()
    output = model.predict(IDS).detach().numpy()[:, 0]
    loss = model(IDS, torch.tensor([[0.2], [0.9]]), DropoutKeys.off(IDS))
    assert loss.item() == pytest.approx(((output - [0.2, 0.9]) ** 2).mean(), abs=1e-7)


def slow_span_logits(w: dict, state_SH: np.ndarray, allowed_S: np.ndarray, start: int) -> tuple[np.ndarray, ...]:
    """Start logits, end logits given `start`, and the no-answer logit of one row, token by token."""
    outside = np.where(allowed_S, 0.0, -1000.0)
    start_logits = state_SH @ w["start.weight"][0] + w["start.bias"][0] + outside
    end_logits = np.array(
        [
            gelu(w["end_hidden.weight"] @ np.concatenate([state_SH[start], token]) + w["end_hidden.bias"])
            @ w["end.weight"][0]
            + w["end.bias"][0]
            for token in state_SH
        ]
    )
    expected = np.exp(log_softmax(start_logits)) @ state_SH
    hidden = gelu(w["answer_hidden.weight"] @ np.concatenate([state_SH[0], expected]) + w["answer_hidden.bias"])
    return start_logits, end_logits + outside, hidden @ w["answer.weight"][0] + w["answer.bias"][0]


def test_the_span_loss_is_the_reference_s_formula(encoder: Pretrained) -> None:
    model = SpanModel(encoder.backbone(), 32, SETTINGS, seed=1).eval()
    state = model.backbone(IDS).detach().double().numpy()
    allowed = np.array([[1, 0, 0, 0, 1, 1, 1, 1, 1], [1, 0, 0, 1, 1, 1, 0, 0, 0]], bool)
    np.testing.assert_array_equal(model.allowed(IDS).numpy(), allowed)
    targets = [(5, 7, 0), (0, 0, 1)]
    expected = 0.0
    for row, (start, end, impossible) in enumerate(targets):
        starts, ends, no_answer = slow_span_logits(weights(model.head), state[row], allowed[row], start)
        span = -(log_softmax(starts)[start] + log_softmax(ends)[end]) / 2
        bce = np.log1p(np.exp(-no_answer if impossible else no_answer))
        expected += (span + 0.5 * bce) / 2
    loss = model(IDS, torch.tensor(targets), DropoutKeys.off(IDS))
    assert loss.item() == pytest.approx(expected, abs=1e-5)


def test_a_beam_as_wide_as_the_row_finds_the_best_of_all_spans() -> None:
    torch.manual_seed(0)
    S, offset, max_answer = 14, 4, 5
    settings = SETTINGS.model_copy(update={"beam": S})
    for seed in range(10):
        head = SpanHead(8, settings, seed)
        state = 3 * torch.randn(1, S, 8)
        allowed = torch.arange(S)[None] >= offset
        owned = (torch.rand(S - offset - 1) > 0.3).tolist()  # the last position is [SEP]
        window = AnswerWindow(0, list(range(S)), offset, first=100, owned=owned)
        with torch.no_grad():
            found = best_spans([window], head.search(state, allowed), max_answer)[0]
        w, best = weights(head), None
        for i in range(len(owned)):
            starts, ends, _ = slow_span_logits(w, state[0].double().numpy(), allowed[0].numpy(), offset + i)
            for j in range(i, min(i + max_answer, len(owned))):
                logp = log_softmax(starts)[offset + i] + log_softmax(ends)[offset + j]
                if owned[i] and (best is None or logp > best[0]):
                    best = (logp, 100 + i, 100 + j)
        assert found is not None and best is not None
        assert found[1:] == best[1:]
        assert found[0] == pytest.approx(best[0], abs=1e-4)


def test_a_head_starts_with_the_same_weights_for_a_seed_and_others_for_another() -> None:
    first, again, other = (SpanHead(8, SETTINGS, seed).end_hidden.weight for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.abs().max() <= math.sqrt(6 / (16 + 12))
