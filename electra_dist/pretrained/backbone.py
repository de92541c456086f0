"""Embeddings and encoder of one tower as a module of its own, for fine-tuning, probes of states, and text scores.

Shapes: B rows, S tokens, H hidden width.
"""

from __future__ import annotations

import torch
from torch import nn

from electra_dist.config import ModelConfig, TowerConfig
from electra_dist.model.attention import new_attention_mask
from electra_dist.model.dropout_keys import DropoutKeys
from electra_dist.model.row_layout import SpecialIds, derive
from electra_dist.model.towers import new_embeddings, new_encoder


class Backbone(nn.Module):
    """Embeddings and encoder of one tower (generator or discriminator): token ids in, states of the last layer out.

    Each row of its input holds one example, `[CLS] A [SEP]` or `[CLS] A [SEP] B [SEP]`, then [PAD] up to its end.
    """

    def __init__(self, model: ModelConfig, tower: TowerConfig, special: SpecialIds) -> None:
        """Create the module with torch's own initialisation; `Pretrained.backbone` loads weights into it."""
        super().__init__()
        self.model = model
        self.special = special
        self.embeddings = new_embeddings(model, model.embedding_size)
        self.encoder = new_encoder(model, tower, model.embedding_size)

    def forward(self, ids_BS: torch.Tensor, dropout_keys: DropoutKeys | None = None) -> torch.Tensor:
        """Return the states of the last layer, [B, S, H]; `dropout_keys` (random keys) are needed in training only."""
        if dropout_keys is None:
            dropout_keys = DropoutKeys.off(ids_BS)
        layout = derive(ids_BS, self.special)
        embedded = self.embeddings(ids_BS, layout.position_BS, layout.token_type_BS, dropout_keys)
        mask = new_attention_mask(self.model, layout, embedded.dtype)
        return self.encoder(embedded, mask, dropout_keys)

    def layer_states(self, ids_BS: torch.Tensor) -> list[torch.Tensor]:
        """Return the input of the first layer and the output of each of the L layers, L + 1 tensors [B, S, H].

        The last tensor is what `forward` returns; with the architecture `modern` it is after the final LayerNorm. Call
        this in evaluation mode only.
        """
        states: list[torch.Tensor] = []  # [B * S, H]: the layers work on flattened rows

        def keep_input(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            states.append(inputs[0])

        def keep_output(_: nn.Module, __: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            states.append(output)

        hooks = [self.encoder.layers[0].register_forward_pre_hook(keep_input)]
        hooks += [layer.register_forward_hook(keep_output) for layer in self.encoder.layers]
        try:
            final_BSH = self(ids_BS)
        finally:
            for hook in hooks:
                hook.remove()
        states_BSH = [state_TH.unflatten(0, ids_BS.shape) for state_TH in states]
        return [*states_BSH[:-1], final_BSH]
