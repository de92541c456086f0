"""Takes the place of the package flash-attn-3: operators that check what torch hands to them and compute nothing.

The real package registers the operators `flash_attn_3::fwd` and `flash_attn_3::bwd`; torch asks for these names.
"""

from __future__ import annotations

import torch

_CU_QUERY, _CU_KEY = 7, 8  # places of the sequences' bounds among the forward operator's arguments
_FORWARD_ARGUMENTS, _BACKWARD_ARGUMENTS = 34, 22


def forward(*arguments: object) -> tuple[torch.Tensor, torch.Tensor, None, None]:
    """Return an output and logarithms of sums, [N, T], of the right shapes."""
    assert len(arguments) == _FORWARD_ARGUMENTS
    query, key, value = _tensors(arguments[:3])
    assert query.shape == key.shape == value.shape
    for bounds in _tensors(arguments[_CU_QUERY : _CU_KEY + 1]):
        assert bounds.dtype == torch.int32 and bounds.dim() == 1
    num_tokens, num_heads, _ = query.shape
    return torch.empty_like(query), query.new_empty(num_heads, num_tokens, dtype=torch.float32), None, None


def backward(*arguments: object) -> None:
    """Check the shapes of the gradients that the real operator writes."""
    assert len(arguments) == _BACKWARD_ARGUMENTS
    _grad, query, key, value, _out, _sums, *gradients = _tensors(arguments[:9])
    assert [gradient.shape for gradient in gradients] == [query.shape, key.shape, value.shape]


def _tensors(values: tuple[object, ...]) -> list[torch.Tensor]:
    assert all(isinstance(value, torch.Tensor) for value in values)
    return [value for value in values if isinstance(value, torch.Tensor)]


torch.ops.flash_attn_3.fwd = forward
torch.ops.flash_attn_3.bwd = backward
