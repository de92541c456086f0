"""How many masked rows the head processes at a time on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from electra_kernels import mlm_head
from electra_kernels.mlm_head import _without_small_rest
from hypothesis import given
from hypothesis import strategies as st


def test_the_masked_rows_of_electra_large_are_one_chunk() -> None:
    masked_rows_of_32_rows = 32 * 130

    assert _without_small_rest(masked_rows_of_32_rows, chunk=4096) == 4160


@given(num_rows=st.integers(1, 100_000), chunk=st.integers(1024, 4096))
def test_chunks_cover_all_rows_and_the_last_one_is_not_small(num_rows: int, chunk: int) -> None:
    size = _without_small_rest(num_rows, chunk)

    assert chunk <= size < 2 * chunk
    rows_of_last_chunk = num_rows % size or size
    has_one_chunk = num_rows <= size
    assert has_one_chunk or rows_of_last_chunk >= chunk // 8


def test_the_head_takes_32_rows_of_electra_large_in_one_pass_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on "meta" stand for those of a GPU."""
    rows_of_passes = []
    row_pass = mlm_head.row_pass_reference

    def recorded(logits_MV: torch.Tensor, *rest: Any) -> Any:
        rows_of_passes.append(len(logits_MV))
        return row_pass(logits_MV, *rest)

    monkeypatch.setattr(mlm_head, "row_pass_reference", recorded)
    with torch.device("meta"):
        ids_M = torch.empty(32 * 130, dtype=torch.int64)
        mlm_head.mlm_head_loss_and_sample(
            x_MD=torch.empty(len(ids_M), 8, requires_grad=True),
            weight_VD=torch.empty(16, 8),
            bias_V=torch.empty(16),
            target_M=ids_M,
            weight_M=torch.empty(len(ids_M)),
            row_M=ids_M,
            seed=1,
            step=2,
            vocab_size=16,
            backend="reference",
        )

    assert rows_of_passes == [4160]
