"""Operators and kernels are counted for the part of the step that they belong to."""

from __future__ import annotations

import pytest

from electra_dist.train.step_operators import OTHER, part_of


@pytest.mark.parametrize(
    ("operator", "part"),
    [
        ("aten::addmm", "matrix products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matrix products"),
        ("aten::_flash_attention_backward", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80", "attention"),
        ("norm_backward_kernel", "dropout + add + norm"),
        ("keyed_dropout_kernel", "dropout + add + norm"),
        ("mask_kernel", "random numbers and masks"),
        ("aten::native_layer_norm", "dropout + add + norm"),
        ("_MlmHeadBackward", "heads and sampling"),
        ("aten::gelu_backward", "GELU"),
        ("aten::copy_", "copies"),
        ("aten::_foreach_addcdiv_", "optimizer"),
        ("aten::_foreach_norm", "optimizer"),
        ("aten::linalg_vector_norm", "optimizer"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "communication"),
        ("aten::some_new_operator_of_torch", OTHER),
    ],
)
def test_an_operator_is_counted_for_its_part_of_the_step(operator: str, part: str) -> None:
    assert part_of(operator) == part
