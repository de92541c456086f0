"""Class-balanced detection: loss and gradient against sums by hand, and metrics, which it does not change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.float64_truth import shaken

from electra_dist.objectives.base import StepInput, StepOutput, Sums
from electra_dist.objectives.rtd import balanced_weights

SCALES = (0.01, 0.02)


def step(module: Any, ids: torch.Tensor, rows: list[int]) -> StepOutput:
    output: StepOutput = module(StepInput(ids, torch.tensor(rows), 7, 5, *SCALES))
    return output


def loss_by_hand(logit_S: torch.Tensor, is_replaced_S: torch.Tensor, balance: float) -> float:
    """Return the weighted detection loss of one row without pads, one token at a time."""
    num_replaced = int(is_replaced_S.sum())
    num_original = len(is_replaced_S) - num_replaced
    weight_of = {True: 1.0, False: 1.0}
    if num_replaced and num_original:
        weight_of[True] = balance * len(is_replaced_S) / num_replaced
        weight_of[False] = (1 - balance) * len(is_replaced_S) / num_original
    total = 0.0
    for logit, is_replaced in zip(logit_S.tolist(), is_replaced_S.tolist(), strict=True):
        probability = 1 / (1 + torch.tensor(-logit, dtype=torch.float64).exp())
        total -= weight_of[is_replaced] * float((probability if is_replaced else 1 - probability).log())
    return total


@pytest.mark.parametrize("balance", [0.5, 0.2])
def test_the_loss_is_the_weighted_sum_by_hand_and_metrics_count_tokens(
    balance: float, make_model: Callable[..., Any], make_ids: Callable[..., torch.Tensor], special: Any
) -> None:
    module = shaken(make_model(rtd_balance=balance)[0]).double()
    plain = shaken(make_model()[0]).double()
    ids = make_ids([64, 50, 7, 33], seq_len=64)
    rows = [4, 5, 6, 7]

    balanced, ordinary = step(module, ids, rows), step(plain, ids, rows)

    assert torch.equal(balanced.rtd_logit_BS, ordinary.rtd_logit_BS)  # the weights change the loss alone
    assert torch.equal(balanced.label_BS, ordinary.label_BS)
    is_real_BS = ids != special.pad
    parts = zip(balanced.rtd_logit_BS.double(), balanced.label_BS, is_real_BS, strict=True)
    by_hand = sum(loss_by_hand(logit_S[is_real], label_S[is_real], balance) for logit_S, label_S, is_real in parts)
    sums, ordinary_sums = Sums(*balanced.sums.tolist()), Sums(*ordinary.sums.tolist())
    assert sums.rtd_loss_sum == pytest.approx(by_hand, rel=1e-6)
    assert sums.rtd_weight == pytest.approx(int(is_real_BS.sum()), rel=1e-6)
    for name in ("replaced", "replaced_correct", "original", "original_correct", "mlm_loss_sum"):
        assert getattr(sums, name) == getattr(ordinary_sums, name), name
    assert sums.rtd_loss_sum != pytest.approx(ordinary_sums.rtd_loss_sum, rel=1e-3)


def test_each_class_has_its_share_of_the_gradient(
    make_model: Callable[..., Any], make_ids: Callable[..., torch.Tensor]
) -> None:
    """With a head that says 0 for every token, each token pushes its logit by weight / 2."""
    module = make_model(rtd_balance=0.2)[0]
    torch.nn.init.zeros_(module.towers.discriminator_head.out.weight)
    ids = make_ids([64, 50], seq_len=64)

    step(module, ids, [0, 1]).loss.backward()

    # 0.8 of the weight of 114 tokens pushes towards "original", 0.2 towards "replaced".
    expected = module.objective.rtd_weight * SCALES[1] * 114 * (0.8 - 0.2) / 2
    assert module.towers.discriminator_head.out.bias.grad.item() == pytest.approx(expected, rel=1e-5)


def test_a_row_of_one_class_has_equal_weights_and_pads_have_none() -> None:
    label_BS = torch.tensor([[False, False, False], [True, True, False], [True, False, False]])
    is_real_BS = torch.tensor([[True, True, False], [True, True, False], [True, True, True]])

    weight_BS = balanced_weights(label_BS, is_real_BS, 0.5)

    assert weight_BS.tolist() == [[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [1.5, 0.75, 0.75]]


def test_the_loss_does_not_depend_on_how_the_rows_are_split(
    make_model: Callable[..., Any], make_ids: Callable[..., torch.Tensor]
) -> None:
    module = make_model(rtd_balance=0.5)[0]
    ids = make_ids([64, 50, 7, 33], seq_len=64)

    together = step(module, ids, [4, 5, 6, 7]).loss
    apart = step(module, ids[:1], [4]).loss + step(module, ids[1:], [5, 6, 7]).loss

    assert together.item() == pytest.approx(apart.item(), rel=1e-6)
