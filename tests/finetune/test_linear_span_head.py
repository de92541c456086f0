"""The linear head for SQuAD against its formulas in NumPy, over all spans of a row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.small_encoder import head_parameters

from electra_dist.finetune.finetune_config import FinetuneConfig
from electra_dist.finetune.models import LinearSpanModel, StockNetwork
from electra_dist.model.encoder import DropoutKeys
from electra_dist.pretrained.encoder import Pretrained

CLS, SEP, PAD = 2, 3, 0
# Rows of a question and a passage; passages with their [SEP] are at positions 4 to 8 and 3 to 5.
IDS = torch.tensor([[CLS, 60, 61, SEP, 70, 71, 72, 73, SEP], [CLS, 62, SEP, 74, 75, SEP, PAD, PAD, PAD]])
PLACES = [[0, 4, 5, 6, 7, 8], [0, 3, 4, 5]]  # where an answer may start or end; 0 stands for no answer
NUM_TOKENS = [9, 6]


def log_softmax(x: np.ndarray) -> np.ndarray:
    return x - np.log(np.exp(x - x.max()).sum()) - x.max()


def model_of(encoder: Pretrained, beam: int) -> LinearSpanModel:
    network = StockNetwork(encoder, "QuestionAnswering", {}, FinetuneConfig(), seed=1)
    model = LinearSpanModel(network, encoder.special, beam).eval()
    torch.nn.init.normal_(head_parameters(model)[-2], std=1.0, generator=torch.Generator().manual_seed(3))
    return model


def logits_by_hand(encoder: Pretrained, model: LinearSpanModel) -> np.ndarray:
    """Return the logits of start and end, [row, token, 2], from the states of this project's encoder."""
    states = encoder.backbone().eval()(IDS).detach().double().numpy()
    weight, bias = (parameter.detach().double().numpy() for parameter in head_parameters(model))
    return states @ weight.T + bias


def test_the_loss_is_the_mean_cross_entropy_of_start_and_end_over_all_tokens_but_padding(encoder: Pretrained) -> None:
    model = model_of(encoder, beam=4)
    targets = torch.tensor([[5, 6, 0], [0, 0, 1]])

    loss = model(IDS, targets, DropoutKeys.off(IDS))

    logits = logits_by_hand(encoder, model)
    losses = []
    for row, num_tokens in enumerate(NUM_TOKENS):
        for side in (0, 1):
            losses.append(-log_softmax(logits[row, :num_tokens, side])[targets[row, side]])
    assert loss.item() == pytest.approx(np.mean(losses), abs=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("cls_bonus", [0.0, 4.0, -4.0])
def test_candidates_and_the_no_answer_logit_are_those_of_all_spans_of_the_passage(
    encoder: Pretrained, cls_bonus: float
) -> None:
    """`cls_bonus` makes [CLS] a likely or an unlikely start, which must never count as the start of an answer."""
    model = model_of(encoder, beam=9)
    raw_logits = model.predict

    def logits_with_bonus(ids: torch.Tensor) -> torch.Tensor:
        logits = raw_logits(ids)
        logits[:, 0, 0] += cls_bonus
        return logits

    model.predict = logits_with_bonus  # type: ignore[method-assign]
    scores = model.search(IDS)

    logits = logits_by_hand(encoder, model)
    logits[:, 0, 0] += cls_bonus
    for row, places in enumerate(PLACES):
        start_logp = dict(zip(places, log_softmax(logits[row, places, 0])))
        end_logp = dict(zip(places, log_softmax(logits[row, places, 1])))
        found = {
            (int(start), int(end)): float(start_score + end_score)
            for start, start_score, ends, end_scores in zip(
                scores.start_BK[row], scores.start_logp_BK[row], scores.end_BKK[row], scores.end_logp_BKK[row]
            )
            for end, end_score in zip(ends, end_scores)
        }
        spans = {(s, e): start_logp[s] + end_logp[e] for s in places for e in places}
        for span, score in spans.items():
            assert found[span] == pytest.approx(score, abs=1e-4)
        best = max(score for (start, end), score in spans.items() if 0 < start <= end)
        no_answer = start_logp[0] + end_logp[0] - best
        assert scores.no_answer_B[row].item() == pytest.approx(no_answer, abs=1e-4)
