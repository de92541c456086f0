"""Types of arguments and results that the plain-PyTorch operations and their kernels share.

They are in a file of their own so that both sides can import them: a kernel's file is not imported without Triton.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class SpecialIds(NamedTuple):
    """Ids of the five special tokens in a vocabulary."""

    pad: int
    unk: int
    cls: int
    sep: int
    mask: int

    @classmethod
    def from_tokens(cls, ids: Mapping[str, int]) -> SpecialIds:
        """Build from the ids of "[PAD]", "[CLS]" and so on, as in corpus.json; raise KeyError if one is missing."""
        return cls(pad=ids["[PAD]"], unk=ids["[UNK]"], cls=ids["[CLS]"], sep=ids["[SEP]"], mask=ids["[MASK]"])


class RowOptions(NamedTuple):
    """Options for computing loss, sampled token and gradient of each row of logits."""

    seed: int  # of the run, the key of the sampling noise
    step: int  # global step, in [0, 2**32)
    vocab_size: int  # tokens that exist; columns of the logits from there on are padding
    temperature: float  # divisor of the logits before sampling; the loss does not use it
    disallow_correct: bool  # whether the true token of a row is excluded from sampling
    with_gradient: bool  # whether the gradient of the logits overwrites the logits


class RowStats(NamedTuple):
    """Loss, most likely token and sampled token of each of M rows of logits."""

    loss_M: torch.Tensor  # cross-entropy of the true token, not multiplied by the row's weight
    best_M: torch.Tensor  # most likely token, int64
    sampled_M: torch.Tensor  # token drawn from the softmax, int64


SITES = 2  # number of places in a layer that drop elements before a residual sum
SERIES_BELOW = 1 << 27  # random bits below this number mean u < 1/32, where Gumbel noise is computed by a series


class LayerDropout(NamedTuple):
    """Dropout at one place in a layer of a network: its probability and the key of its random numbers.

    An element's random number is a function of seed, step, layer, place, the row's number within the global batch, and
    the element's index in the row.
    """

    # Seed of the network, step, and number of the layer: contiguous int64 [3], on the device under Triton, else on the
    # host. A tensor and not integers, so that one graph of torch.compile serves all layers and steps, and no argument
    # of a kernel's launch changes with the step.
    key_3: torch.Tensor
    row_B: torch.Tensor  # int64 numbers of the rows within the global batch
    backend: str  # "triton" or "reference"
    probability: float = 0.0  # chance of an element to be dropped, in [0, 1); at 0, no random number is drawn
    site: int = 0  # number of the place within the layer, in [0, SITES)
