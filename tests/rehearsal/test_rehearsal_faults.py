"""The test of the rehearsal: faults that only a GPU would show are planted, and the rehearsal stops at each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import electra_kernels.triton.layer_passes as norm_kernels
import pytest
import torch
from support.rehearsal import Stray, build, rehearse, step_input
from support.rehearsal_cases import CASES

from electra_dist.objectives.rtd import ReplacedTokenDetection

Plant = Callable[[Any, torch.Tensor], torch.Tensor]


def _rehearse_small(hidden_dropout: float = 0.1) -> None:
    config = CASES["rtd fp32, 2 layers"].config()
    model = config.model.model_copy(update={"hidden_dropout": hidden_dropout})
    config = config.model_copy(update={"model": model})
    module = build(config)
    rehearse(module, lambda: step_input(config, module, 2))


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[[Plant], None]:
    """`plant(f)`: the discriminator's weights of a batch go through f(batch, weights)."""
    honest = ReplacedTokenDetection.detection_weights

    def put(fault: Plant) -> None:
        def detection_weights(self: Any, batch: Any, corruption: Any) -> torch.Tensor:
            return fault(batch, honest(self, batch, corruption))

        monkeypatch.setattr(ReplacedTokenDetection, "detection_weights", detection_weights)

    return put


def _reads_a_number(batch: Any, weight_BS: torch.Tensor) -> torch.Tensor:
    return weight_BS.float() / weight_BS.sum().item()


def _reads_a_list(batch: Any, weight_BS: torch.Tensor) -> torch.Tensor:
    return weight_BS * len(batch.row_B.tolist())


def _selects_by_booleans(batch: Any, weight_BS: torch.Tensor) -> torch.Tensor:
    return weight_BS * batch.ids_BS[weight_BS].sum()


def _branches_on_a_value(batch: Any, weight_BS: torch.Tensor) -> torch.Tensor:
    return weight_BS if weight_BS.any() else ~weight_BS


def _makes_a_tensor_on_the_host(batch: Any, weight_BS: torch.Tensor) -> torch.Tensor:
    return weight_BS & (torch.arange(weight_BS.shape[1]) > 3)


def _makes_one_element_on_the_host(batch: Any, weight_BS: torch.Tensor) -> torch.Tensor:
    return weight_BS * torch.ones(1)


@pytest.mark.parametrize(
    "fault",
    [
        _reads_a_number,
        _reads_a_list,
        _selects_by_booleans,
        _branches_on_a_value,
        _makes_a_tensor_on_the_host,
        _makes_one_element_on_the_host,
    ],
)
def test_a_rehearsal_stops_at_a_planted_host_read_or_tensor(plant: Callable[[Plant], None], fault: Plant) -> None:
    _rehearse_small()
    plant(fault)
    with pytest.raises((Stray, RuntimeError, NotImplementedError), match=r"meta|is on cpu"):
        _rehearse_small()


def test_a_rehearsal_stops_at_a_strided_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    forward_pass = norm_kernels.forward_pass

    def with_strides(x_TH: torch.Tensor, *rest: Any) -> Any:
        return forward_pass(x_TH.t().contiguous().t(), *rest)

    monkeypatch.setattr(norm_kernels, "forward_pass", with_strides)
    with pytest.raises(Stray, match=r"norm_forward_kernel\(x_ptr\): shape .* but strides"):
        _rehearse_small()


def test_a_rehearsal_stops_at_a_word_beyond_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threshold of dropout is 0.6 * 2**32, above the largest signed word."""
    _rehearse_small(hidden_dropout=0.6)
    monkeypatch.setattr(norm_kernels, "as_int32", lambda word: word)
    with pytest.raises(Stray, match=r"norm_forward_kernel\(limit\): \d+ does not fit into 32 bits"):
        _rehearse_small(hidden_dropout=0.6)


def test_a_rehearsal_stops_at_a_missing_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm_kernels, "_launch_options", lambda hidden: {"num_warps": 1})
    with pytest.raises(Stray, match="norm_forward_kernel: no argument BLOCK_H"):
        _rehearse_small()


def test_a_rehearsal_stops_at_a_parameter_without_gradient() -> None:
    config = CASES["rtd fp32, 2 layers"].config()
    module = build(config)
    module.towers.register_parameter("forgotten", torch.nn.Parameter(torch.empty(3, device="meta")))
    with pytest.raises(Stray, match=r"no gradient for towers\.forgotten"):
        rehearse(module, lambda: step_input(config, module, 2))
