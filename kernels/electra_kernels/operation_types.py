"""Types of arguments and results that the plain-PyTorch operations and their Triton kernels share.

They are in a file of their own so that both sides can import them: a kernel's file is not imported without Triton.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from electra_kernels.keyed_random import key_on_device


class MaskIds(NamedTuple):
    """Ids of [PAD], [CLS], [SEP] and [MASK], the tokens that are never masked."""

    pad: int
    cls: int
    sep: int
    mask: int

    def is_candidate(self, ids_BS: torch.Tensor) -> torch.Tensor:
        """Return which tokens may be masked, bool [B, S]: all but [PAD], [CLS], [SEP] and [MASK]."""
        return (ids_BS != self.pad) & (ids_BS != self.cls) & (ids_BS != self.sep) & (ids_BS != self.mask)


class RowOptions(NamedTuple):
    """Scalar arguments of the masked-token head's row pass: loss, sample and gradient of each row of logits."""

    seed: int
    step: int
    vocab_size: int
    temperature: float | torch.Tensor
    disallow_correct: bool
    with_gradient: bool
    key_2: torch.Tensor | None = None


class RowStats(NamedTuple):
    """Results of the row pass of the masked-token head, one element for each of M rows."""

    loss_M: torch.Tensor
    best_M: torch.Tensor
    sampled_M: torch.Tensor


class DropoutKey(NamedTuple):
    """Dropout probability, and the key of the random numbers that decide which elements are dropped.

    An element's random number is a function of seed, step, site (the place in the model that applies dropout), the
    row's number within the global batch, and the element's place in the row.
    """

    probability: float
    seed: int
    step: int
    site: int


class LayerDropout(NamedTuple):
    """Dropout at one place of a layer, with the key of its random numbers in a tensor.

    It holds the same numbers as `DropoutKey`, but a kernel can read them from the device's memory.
    `DropoutKey.site`, the number of the place within the tower, is layer * sites_per_layer + site.
    """

    probability: float
    key_3: torch.Tensor
    site: int
    sites_per_layer: int

    @classmethod
    def of_key(cls, dropout: DropoutKey, device: torch.device) -> LayerDropout:
        """Return the dropout of a key of integers, with the key as a tensor on `device`.

        The key's site takes the place of the layer: the result has one site per layer.
        """
        key_3 = key_on_device(torch.tensor([dropout.seed, dropout.step, dropout.site]), device)
        return cls(dropout.probability, key_3, site=0, sites_per_layer=1)

    def on_host(self) -> DropoutKey:
        """Return the key as integers, for the plain-PyTorch reference; a key on a GPU makes the host wait."""
        seed, step, layer = self.key_3.tolist()
        return DropoutKey(self.probability, seed, step, self.sites_per_layer * layer + self.site)
