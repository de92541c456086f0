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
    """Scalar arguments of the masked-token head's row pass: loss, sample and gradient of each row of logits.

    Attributes:
        seed: Seed of the run, the key of the sampling noise.
        step: Global step, in [0, 2**32).
        vocab_size: Number of tokens that exist; columns of the logits from there on are padding.
        temperature: Divisor of the logits before sampling, a number or a float64 scalar tensor on the device of the
            logits. The loss does not use it.
        disallow_correct: Whether the true token of a row is excluded from sampling.
        with_gradient: Whether the gradient of the logits overwrites the logits.
        key_2: int64 seed and step on the device of the logits, which a kernel reads instead of the two integers; None:
            made from them.
    """

    seed: int
    step: int
    vocab_size: int
    temperature: float | torch.Tensor
    disallow_correct: bool
    with_gradient: bool
    key_2: torch.Tensor | None = None


class RowStats(NamedTuple):
    """Results of the row pass of the masked-token head, one element for each of M rows.

    Attributes:
        loss_M: Cross-entropy of the true token, not multiplied by the row's weight.
        best_M: Most likely token, int64.
        sampled_M: Token drawn from the softmax, int64.
    """

    loss_M: torch.Tensor
    best_M: torch.Tensor
    sampled_M: torch.Tensor


class DropoutKey(NamedTuple):
    """Dropout probability, and the key of the random numbers that decide which elements are dropped.

    An element's random number is a function of seed, step, site (the place in the model that applies dropout), the
    row's number within the global batch, and the element's place in the row.

    Attributes:
        probability: Chance of an element to be dropped, in [0, 1). At 0, no random number is drawn.
        seed: Seed of the tower, which the model derives from the seed of the run.
        step: Global step, in [0, 2**32).
        site: Number of the place in the model that applies dropout, from 0. Two places of a tower must not share one.
    """

    probability: float
    seed: int
    step: int
    site: int


class LayerDropout(NamedTuple):
    """Dropout at one place of a layer, with the key of its random numbers in a tensor.

    It holds the same numbers as `DropoutKey`, but a kernel can read them from the device's memory. `DropoutKey.site`,
    the number of the place within the tower, is layer * sites_per_layer + site.

    Attributes:
        probability: Chance of an element to be dropped, in [0, 1). At 0, no random number is drawn.
        key_3: int64 [3], contiguous: seed, step and number of the layer. It is on the device where a kernel reads it,
            and on the host for the plain-PyTorch reference.
        site: Number of the place within the layer, from 0.
        sites_per_layer: Number of places of a layer.
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
