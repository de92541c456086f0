"""Both towers and what they share, as one module whose names are those of a checkpoint.

The token table has its rows padded to a multiple of 128: up to 127 rows that are zero at the start, never looked up,
never in a softmax, and so never train. `count.py` counts parameters without them.
"""

from __future__ import annotations

import torch
from torch import nn

from electra_dist.config import ModelConfig
from electra_dist.model.encoder import Encoder, SharedEmbeddings
from electra_dist.model.heads import DiscriminatorHead, GeneratorHead
from electra_dist.model.rows import RowLayout


class ElectraTowers(nn.Module):
    """Shared embeddings, generator, discriminator and their heads. Initialise with `electra_dist.model.init`."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.embeddings = SharedEmbeddings(model)
        self.generator = Encoder(model, model.generator)
        self.generator_head = GeneratorHead(model)
        self.discriminator = Encoder(model, model.discriminator)
        self.discriminator_head = DiscriminatorHead(model)

    def embed(self, ids_BS: torch.Tensor, layout: RowLayout) -> torch.Tensor:
        """[B, S, E] embeddings of the rows themselves or of masked or corrupted ones; the layout is the original's."""
        return self.embeddings(ids_BS, layout.position_BS, layout.token_type_BS)
