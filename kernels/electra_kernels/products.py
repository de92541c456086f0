"""Add the matrix product of two matrices in low precision to an fp32 matrix, without rounding the product.

Cost: on a GPU the sum is read and written once, by the product itself. On a CPU both factors are copied to fp32.

Limits: torch 2.8 or newer for low precision on a GPU.
"""

from __future__ import annotations

import functools

import torch


def add_product(total_MN: torch.Tensor, a_MK: torch.Tensor, b_KN: torch.Tensor) -> None:
    """Add `a_MK` @ `b_KN` to `total_MN` in place; the product is computed and added in the precision of the total."""
    if a_MK.dtype == total_MN.dtype:
        total_MN.addmm_(a_MK, b_KN)
    elif not a_MK.is_cuda and not a_MK.is_meta:
        total_MN.addmm_(a_MK.to(total_MN.dtype), b_KN.to(total_MN.dtype))
    elif _adds_low_precision_products(a_MK.device, a_MK.dtype):
        torch.addmm(total_MN, a_MK, b_KN, out_dtype=total_MN.dtype, out=total_MN)
    else:
        # torch 2.8 cannot add a product of low-precision matrices in place, so there is a temporary matrix as large as
        # the sum.
        total_MN += torch.mm(a_MK, b_KN, out_dtype=total_MN.dtype)


@functools.cache
def _adds_low_precision_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch can add a product of `dtype` matrices to an fp32 matrix in place, after one trial."""
    factor = torch.zeros(8, 8, device=device, dtype=dtype)
    total = torch.zeros(8, 8, device=device)
    try:
        torch.addmm(total, factor, factor, out_dtype=torch.float32, out=total)
    except RuntimeError:
        return False
    return True
