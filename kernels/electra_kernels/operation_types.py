"""Types of arguments and results that the plain-PyTorch operations and their Triton kernels share.

They are in a file of their own so that both sides can import them: a kernel's file is not imported without Triton.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


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
    """Options for computing loss, sampled token and gradient of each row of logits."""

    seed: int  # of the run, the key of the sampling noise
    step: int  # global step, in [0, 2**32)
    vocab_size: int  # tokens that exist; columns of the logits from there on are padding
    temperature: float  # divisor of the logits before sampling; the loss does not use it
    disallow_correct: bool  # whether the true token of a row is excluded from sampling
    with_gradient: bool  # whether the gradient of the logits overwrites the logits
    key_2: torch.Tensor | None = None  # int64 seed and step on the device of the logits, for kernels; None: copied


class RowStats(NamedTuple):
    """Loss, most likely token and sampled token of each of M rows of logits."""

    loss_M: torch.Tensor  # cross-entropy of the true token, not multiplied by the row's weight
    best_M: torch.Tensor  # most likely token, int64
    sampled_M: torch.Tensor  # token drawn from the softmax, int64


class DropoutKey(NamedTuple):
    """Dropout probability, and the key of the random numbers that decide which elements are dropped.

    An element's random number is a function of seed, step, site (the place in the model that applies dropout), the
    row's number within the global batch, and the element's place in the row.
    """

    probability: float  # chance of an element to be dropped, in [0, 1); at 0, no random number is drawn
    seed: int  # of the network (tower); the model derives it from the seed of the run
    step: int  # global step, in [0, 2**32)
    site: int  # number of the place in the network, from 0; no two places of a network share one


class LayerDropout(NamedTuple):
    """Dropout at one place of a layer: like `DropoutKey`, with a tensor that a kernel reads from device memory.

    `DropoutKey.site`, the number of the place within the network, is layer * sites_per_layer + site.
    """

    probability: float  # chance of an element to be dropped, in [0, 1); at 0, no random number is drawn
    # int64 [3], contiguous: seed, step and number of the layer. It is on the device where a kernel reads it, and
    # on the host for the plain-PyTorch reference.
    key_3: torch.Tensor
    site: int  # number of the place within the layer, from 0
    sites_per_layer: int  # number of places of a layer

    def on_host(self) -> DropoutKey:
        """Return the key as integers, for the plain-PyTorch reference; a key on a GPU makes the host wait."""
        seed, step, layer = self.key_3.tolist()
        return DropoutKey(self.probability, seed, step, self.sites_per_layer * layer + self.site)
