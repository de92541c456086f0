"""Defines the embeddings and layers of the architecture `modern`, which is that of ModernBERT.

Guarantee: the same function as Hugging Face's ModernBertModel on the same weights: LayerNorm of the token's entry and
no further table, LayerNorm before each sub-layer (in the first layer not before attention) and after the last layer,
rotary positions, a gated feed-forward network (GeGLU), global attention in every third layer and windows in the
others, no biases. A generator whose width is not that of the tables has a projection before its first layer, for which
Hugging Face has no counterpart.

How: layers are composed of separate operations that autograd or the compiler combines. Dropout is 0 by default. Where
it is not, the output of each sub-layer is dropped by `electra_kernels.keyed_dropout` with a seed of its own, so it
does not depend on how a batch is split; attention probabilities are dropped as in `encoder.SelfAttention`.

Source: Warner et al. 2024 (arXiv 2412.13663).

Shapes: B rows, S tokens, E embedding width, H hidden width, N heads, D features of a head, T = B * S.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from electra_kernels.keyed_dropout import keyed_dropout
from electra_kernels.keyed_random import Purpose, derive_seed
from torch import nn
from torch.nn.attention.flex_attention import BlockMask

from electra_dist.config import ModelConfig, TowerConfig
from electra_dist.model.architectures.attention_scopes import attend_in_windows
from electra_dist.model.architectures.rotary import Rotation, rotate_query_and_key, rotation_of
from electra_dist.model.attention import AttentionMask, AttentionScopes
from electra_dist.model.encoder import DropoutKeys, Embeddings, Encoder, LayerDropoutKeys, SelfAttention
from electra_dist.model.matrix_products import Linear


class LayerScope(NamedTuple):
    """Which tokens a token of one layer sees, and how its queries and keys are turned."""

    mask: torch.Tensor | BlockMask
    rotation: Rotation
    reach: int | None  # of a local layer: the largest distance in tokens of a query and a key


class ModernDropoutKeys(NamedTuple):
    """Keys that determine which elements one layer drops; those of sub-layer outputs are None where none is."""

    attention: LayerDropoutKeys  # of the attention probabilities
    attention_output: LayerDropoutKeys | None
    feed_forward_output: LayerDropoutKeys | None


class ModernEmbeddings(Embeddings):
    """Token table, whose entries are normalised by a LayerNorm without bias."""

    def __init__(self, model: ModelConfig, width: int) -> None:
        """Create the token table of `width` features and the LayerNorm; `model` gives vocabulary, eps and dropout."""
        super().__init__()
        self.word = nn.Embedding(model.padded_vocab_size, width)
        self.layer_norm = nn.LayerNorm(width, eps=model.layer_norm_eps, bias=False)
        self.dropout = model.hidden_dropout

    def tables(self, ids_BS: torch.Tensor, position_BS: torch.Tensor, token_type_BS: torch.Tensor) -> torch.Tensor:
        """Return the entries of the token table, [B, S, E]; positions and token types have no table."""
        return self.word(ids_BS)


class ModernAttention(SelfAttention):
    """Multi-head self-attention with rotary positions and without biases."""

    def __init__(self, model: ModelConfig, tower: TowerConfig) -> None:
        """Create the linear layers; `tower` gives the sizes, `model` the dropout of attention probabilities."""
        super().__init__(model, tower, bias=False)

    def forward(  # type: ignore[override]
        self, hidden_TH: torch.Tensor, scope: LayerScope, dropout_keys: LayerDropoutKeys
    ) -> torch.Tensor:
        """Return the projected attention output, [T, H], before dropout and residual.

        Args:
            hidden_TH: normalised states of B rows laid end to end.
            scope: what the tokens see, and their positions.
            dropout_keys: keys of the attention probabilities.
        """
        qkv = self.qkv(hidden_TH)
        qkv_BS3ND = qkv.view(len(dropout_keys.row_B), -1, 3, self.num_heads, hidden_TH.shape[1] // self.num_heads)
        turned = rotate_query_and_key(qkv_BS3ND, scope.rotation)
        if not self._goes_by_blocks(scope, num_tokens=turned.shape[1]):
            return self.out(self.attend(turned.view(qkv.shape), scope.mask, dropout_keys))
        assert isinstance(scope.mask, torch.Tensor) and scope.reach is not None
        query, key, value = (part_BSND.transpose(1, 2) for part_BSND in turned.unbind(2))
        context_BNSD = attend_in_windows(query, key, value, scope.mask, scope.reach)
        return self.out(context_BNSD.transpose(1, 2).reshape(hidden_TH.shape))

    def _goes_by_blocks(self, scope: LayerScope, num_tokens: int) -> bool:
        """Return whether attention is computed by blocks of queries: in local layers with a bias and without dropout.

        In rows of up to two windows the blocks would attend to as much as the whole row, so they are computed at once.
        """
        if scope.reach is None or not isinstance(scope.mask, torch.Tensor):
            return False
        has_dropout = self.training and self.dropout > 0
        return not has_dropout and num_tokens > 4 * scope.reach


class ModernLayer(nn.Module):
    """Transformer layer: attention and gated feed-forward network, each with a LayerNorm before it and a residual."""

    def __init__(self, model: ModelConfig, tower: TowerConfig, number: int) -> None:
        """Create the sub-layers.

        Args:
            model: dropout and eps.
            tower: sizes of the sub-layers.
            number: place of the layer in the tower; layer 0 has no LayerNorm before attention, because the embeddings
                are normalised already.
        """
        super().__init__()
        width = tower.hidden_size
        self.dropout = model.hidden_dropout
        self.attention_norm: nn.LayerNorm | None = None
        if number > 0:
            self.attention_norm = nn.LayerNorm(width, eps=model.layer_norm_eps, bias=False)
        self.attention = ModernAttention(model, tower)
        self.feed_forward_norm = nn.LayerNorm(width, eps=model.layer_norm_eps, bias=False)
        self.gated_expand = Linear(width, 2 * tower.intermediate_size, bias=False)  # inner values, then gates
        self.contract = Linear(tower.intermediate_size, width, bias=False)

    def forward(self, hidden_TH: torch.Tensor, scope: LayerScope, dropout_keys: ModernDropoutKeys) -> torch.Tensor:
        """Return the states after this layer, [T, H].

        Args:
            hidden_TH: states of the previous layer, or the (projected) embeddings, of B rows laid end to end.
            scope: what the tokens see in this layer, and their positions.
            dropout_keys: keys of this layer.
        """
        normed_TH = hidden_TH if self.attention_norm is None else self.attention_norm(hidden_TH)
        attended_TH = self.attention(normed_TH, scope, dropout_keys.attention)
        hidden_TH = hidden_TH + self._drop(attended_TH, dropout_keys.attention_output)
        inner, gate = self.gated_expand(self.feed_forward_norm(hidden_TH)).chunk(2, dim=-1)
        output_TH = self.contract(F.gelu(inner) * gate)
        return hidden_TH + self._drop(output_TH, dropout_keys.feed_forward_output)

    def _drop(self, output_TH: torch.Tensor, dropout_keys: LayerDropoutKeys | None) -> torch.Tensor:
        """Return the output of a sub-layer after dropout, or unchanged without keys."""
        if dropout_keys is None:
            return output_TH
        row_B = dropout_keys.row_B
        output_BSH = output_TH.view(len(row_B), -1, output_TH.shape[1])
        dropped_BSH = keyed_dropout(output_BSH, dropout_keys.key_3, row_B, self.dropout, backend=dropout_keys.backend)
        return dropped_BSH.view(output_TH.shape)


class ModernEncoder(Encoder):
    """Layers of one tower of the architecture `modern`, with a LayerNorm after the last one."""

    def __init__(self, model: ModelConfig, tower: TowerConfig, embedding_size: int) -> None:
        """Create the layers, the last LayerNorm and, if the widths differ, a projection without bias.

        Args:
            model: dropout, eps, scopes of the layers and bases of the rotary positions.
            tower: number and sizes of the layers.
            embedding_size: width of the embeddings.
        """
        super().__init__(model, tower, embedding_size)
        if self.embeddings_project is not None:
            self.embeddings_project = Linear(embedding_size, tower.hidden_size, bias=False)
        self.final_norm = nn.LayerNorm(tower.hidden_size, eps=model.layer_norm_eps, bias=False)
        self.head_width = tower.hidden_size // tower.num_heads
        self.model = model

    def new_layer(self, model: ModelConfig, tower: TowerConfig, number: int) -> nn.Module:
        """Return a new layer; `number` is its place in the tower, from 0."""
        return ModernLayer(model, tower, number)

    def layer_inputs(
        self, attention_mask: AttentionMask, dropout_keys: DropoutKeys
    ) -> Iterable[tuple[LayerScope, ModernDropoutKeys]]:
        """Return the scope and the dropout keys of each layer.

        Args:
            attention_mask: the two masks of a batch and the tokens' positions, by `new_attention_mask`.
            dropout_keys: keys of this tower.
        """
        assert isinstance(attention_mask, AttentionScopes), "make the mask with new_attention_mask"
        model = self.model
        position_BS = attention_mask.position_BS
        global_rotation = rotation_of(position_BS, self.head_width, model.global_rope_theta)
        local_rotation = rotation_of(position_BS, self.head_width, model.local_rope_theta)
        global_scope = LayerScope(attention_mask.global_mask, global_rotation, reach=None)
        local_scope = LayerScope(attention_mask.local_mask, local_rotation, reach=model.local_window // 2)

        inputs = []
        for number, attention_keys in enumerate(dropout_keys.of_layers(len(self.layers))):
            keys = ModernDropoutKeys(
                attention=attention_keys,
                attention_output=self._output_keys(dropout_keys, 2 * number),
                feed_forward_output=self._output_keys(dropout_keys, 2 * number + 1),
            )
            scope = global_scope if model.is_global(number) else local_scope
            inputs.append((scope, keys))
        return inputs

    def _output_keys(self, dropout_keys: DropoutKeys, sub_layer: int) -> LayerDropoutKeys | None:
        """Return the dropout keys of the output of one sub-layer; None where nothing is dropped.

        Args:
            dropout_keys: keys of this tower.
            sub_layer: number of the sub-layer in the tower, from which the seed is derived.
        """
        if not self.training or not self.model.hidden_dropout:
            return None
        seed = derive_seed(dropout_keys.seed, Purpose.DROPOUT, sub_layer)
        return dropout_keys._replace(seed=seed).of_layers(1)[0]

    def finish(self, hidden_TH: torch.Tensor) -> torch.Tensor:
        """Return the normalised states of the last layer, [T, H]."""
        return self.final_norm(hidden_TH)
