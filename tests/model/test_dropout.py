"""Dropout on sub-layer outputs and, on a CPU, on attention belongs to the row, not to the batch that holds it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from electra_dist.model.encoder import DropoutKeys, Encoder


@pytest.mark.parametrize("place", ["hidden_dropout", "attention_dropout"])
def test_a_row_drops_the_same_units_in_any_batch(make_config: Callable[..., Any], place: str) -> None:
    model = make_config(32, 32, 32, **{place: 0.3})
    encoder = Encoder(model, model.discriminator).train()
    embedded, bias, rows = torch.randn(6, 10, 32), torch.zeros(6, 1, 10, 10), torch.arange(40, 46)

    def run(chosen: slice, step: int = 5) -> torch.Tensor:
        return encoder(embedded[chosen], bias[chosen], DropoutKeys(7, step, rows[chosen], "reference"))

    whole = run(slice(0, 6))
    torch.testing.assert_close(torch.cat([run(slice(0, 2)), run(slice(2, 6))]), whole, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(run(slice(0, 6), step=6), whole, atol=1e-2)  # another step drops others
