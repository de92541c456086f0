"""Holds a generator that was trained before, draws replacements and learns no more (`objective.generator: frozen`).

Guarantee: its parameters are no parameters of the objective, so neither the optimizer, nor ZeRO, nor a checkpoint has
them. It runs its forward pass only, without gradients and dropout, in the dtype and on the device of the towers.

How: the objective keeps the module outside torch's registry of submodules, so moving or casting the objective
leaves it as it is. `placed_like` moves and casts it where needed, which is in the first forward pass under an engine.

Cost: a forward pass in every step, and the weights once on every rank, whatever the ZeRO stage.

Limits: `engine.compile` and `engine.activation_checkpointing` leave this network as it is.

Source: Fast-ELECTRA (Dong et al., ICLR 2024, arXiv 2310.07347).
"""

from __future__ import annotations

import torch
from torch import nn

from electra_dist.config import ModelConfig
from electra_dist.model.dropout_keys import DropoutKeys
from electra_dist.model.row_layout import RowLayout
from electra_dist.model.towers import new_embeddings, new_encoder, new_token_head


class FrozenGenerator(nn.Module):
    """Generator that learns no more, with its own embeddings and head; submodules are named as in `ElectraTowers`."""

    def __init__(self, model: ModelConfig) -> None:
        """Create the modules in fp32 on the host, with weights of zero, which the caller overwrites."""
        super().__init__()
        width = model.generator_embedding_width
        # On the device "meta" torch's own initialisation costs nothing.
        with torch.device("meta"):
            self.embeddings = new_embeddings(model, width)
            self.generator = new_encoder(model, model.generator, width)
            self.generator_head = new_token_head(model, model.generator.hidden_size, width)
        self.requires_grad_(False)
        self.to_empty(device="cpu")
        for parameter in self.parameters():
            parameter.zero_()
        self.eval()

    def embed(self, ids_BS: torch.Tensor, layout: RowLayout, dropout_keys: DropoutKeys) -> torch.Tensor:
        """Return the embeddings of masked rows, [B, S, E], from the generator's own tables, without dropout."""
        embedded: torch.Tensor = self.embeddings(
            ids_BS, layout.position_BS, layout.token_type_BS, dropout_keys=dropout_keys
        )
        return embedded

    def placed_like(self, ids_BS: torch.Tensor, dtype: torch.dtype) -> FrozenGenerator:
        """Move this module to the device of `ids_BS` and cast it to `dtype`, where needed; return this module."""
        table = self.embeddings.word.weight
        if table.device != ids_BS.device or table.dtype != dtype:
            self.to(ids_BS.device, dtype)
        return self
