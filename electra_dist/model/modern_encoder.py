"""Define the embeddings and layers of the architecture `modern`, which is that of ModernBERT.

Guarantee: the same function as Hugging Face's ModernBertModel on the same weights (Warner et al. 2024, arXiv
2412.13663). Only tokens have an embedding table. LayerNorms stand after the embeddings, before each sub-layer (except
attention in the first layer), and after the last layer. Positions are rotary, the feed-forward network is gated
(GeGLU), and nothing has a bias. Every `model.global_every`-th layer attends to whole examples, the others to windows.
If the generator's width differs from that of the embeddings, a projection precedes its first layer, for which Hugging
Face has no counterpart.

How: layers are composed of separate operations that autograd or the compiler combines. `keyed_dropout`, 0 by default,
drops elements of the output of each sub-layer with a seed of its own, so that the result does not depend on how a
batch is split. Attention probabilities are dropped as in `encoder.SelfAttention`. On a GPU in eager mode, Triton's
kernels rotate queries and keys and compute GeGLU; compiled layers leave both to the compiler.

Shapes: B rows, S tokens, E embedding width, H hidden width, N heads, D features of a head, T = B * S.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from electra_kernels.keyed_dropout import keyed_dropout
from electra_kernels.keyed_random import Purpose, derive_seed
from electra_kernels.modern_layer import Rotation, geglu, rotate_in_place, rotate_query_and_key, rotation_of
from electra_kernels.operation_types import LayerDropout
from torch import nn
from torch.autograd.function import once_differentiable
from typing_extensions import override

from electra_dist.config import ModelConfig, TowerConfig
from electra_dist.model.attention import AttentionMask, AttentionScopes, LayerMask, RowLayout
from electra_dist.model.encoder import DropoutKeys, Embeddings, Encoder, SelfAttention
from electra_dist.model.fused_layer import (
    Linear,
    gradient_sums,
    input_gradient,
    linear,
    product_dtype,
    weight_gradient,
)


class LayerScope(NamedTuple):
    """Inputs of one layer's attention: which tokens each token sees, and the rotations that encode the positions."""

    mask: LayerMask
    rotation: Rotation


class ModernDropoutKeys(NamedTuple):
    """Dropout at the three places of a layer of `modern`, each with its key and probability."""

    attention: LayerDropout  # attention probabilities
    attention_output: LayerDropout  # output of the attention sub-layer
    feed_forward_output: LayerDropout  # output of the feed-forward sub-layer


class ModernEmbeddings(Embeddings):
    """Embeddings of the architecture `modern`: a table of tokens, a LayerNorm without bias, and dropout."""

    def __init__(self, model: ModelConfig, width: int) -> None:
        super().__init__()
        self.word = nn.Embedding(model.padded_vocab_size, width)
        self.layer_norm = nn.LayerNorm(width, eps=model.layer_norm_eps, bias=False)
        self.dropout = model.hidden_dropout

    @override
    def tables(self, ids_BS: torch.Tensor, layout: RowLayout) -> torch.Tensor:
        return self.word(ids_BS)  # positions and token types have no tables


class ModernAttention(SelfAttention):
    """Multi-head self-attention of the architecture `modern`: rotary positions, optional windows, no biases."""

    def __init__(self, model: ModelConfig, tower: TowerConfig) -> None:
        super().__init__(model, tower, bias=False)

    def forward(  # type: ignore[override]
        self, hidden_TH: torch.Tensor, scope: LayerScope, dropout_keys: LayerDropout
    ) -> torch.Tensor:
        """Return the output of attention after the output projection, [T, H]; the caller adds dropout and residual."""
        if dropout_keys.backend == "triton" and not torch.compiler.is_compiling():
            rotated = _RotatedProduct.apply(hidden_TH, self.qkv.weight, self.num_heads, *scope.rotation)
        else:
            qkv = self.qkv(hidden_TH)
            qkv_BS3ND = qkv.view(len(dropout_keys.row_B), -1, 3, self.num_heads, hidden_TH.shape[1] // self.num_heads)
            rotated = rotate_query_and_key(qkv_BS3ND, scope.rotation).view(qkv.shape)
        dropout = self.dropout if self.training else 0.0
        return self.out(scope.mask.attend(rotated, self.num_heads, dropout, dropout_keys))


class _RotatedProduct(torch.autograd.Function):
    """Product that gives query, key and value, of which Triton rotates the first two where the product wrote them.

    The backward pass rotates the gradient in place, too. Attention has made it, and nothing else reads it.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_TH: torch.Tensor, weight: torch.Tensor, num_heads: int, *rotation: torch.Tensor
    ) -> torch.Tensor:
        """Return query and key, rotated, and value, [T, 3 H]; `rotation` has the fields of `Rotation`."""
        dtype = product_dtype(hidden_TH)
        hidden_TH = hidden_TH.to(dtype)
        qkv = linear(hidden_TH, weight.to(dtype))
        rotate_in_place(qkv, num_heads, Rotation(*rotation))
        ctx.save_for_backward(hidden_TH, weight, *rotation)
        ctx.num_heads = num_heads
        (ctx.weight_sum,) = gradient_sums(weight)
        return qkv

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_qkv: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_TH, weight, *rotation = ctx.saved_tensors
        grad_qkv = grad_qkv.contiguous()
        rotate_in_place(grad_qkv, ctx.num_heads, Rotation(*rotation), is_gradient=True)
        grad_hidden_TH = input_gradient(grad_qkv, weight.to(grad_qkv.dtype))
        return grad_hidden_TH, weight_gradient(grad_qkv, hidden_TH, ctx.weight_sum), None, None, None


class ModernLayer(nn.Module):
    """Layer of `modern`: attention and a gated feed-forward network, each between a LayerNorm and a residual sum."""

    def __init__(self, model: ModelConfig, tower: TowerConfig, number: int) -> None:
        """Create layer `number`; layer 0 has no LayerNorm before attention, because the embeddings end with one."""
        super().__init__()
        width = tower.hidden_size
        self.attention_norm: nn.LayerNorm | None = None
        if number > 0:
            self.attention_norm = nn.LayerNorm(width, eps=model.layer_norm_eps, bias=False)
        self.attention = ModernAttention(model, tower)
        self.feed_forward_norm = nn.LayerNorm(width, eps=model.layer_norm_eps, bias=False)
        # The first half of the outputs are the inner values, the second half are the gates.
        self.gated_expand = Linear(width, 2 * tower.intermediate_size, bias=False)
        self.contract = Linear(tower.intermediate_size, width, bias=False)

    def forward(self, hidden_TH: torch.Tensor, scope: LayerScope, dropout_keys: ModernDropoutKeys) -> torch.Tensor:
        """Return the states after this layer, [T, H], from those before it; `scope` holds its mask and rotations."""
        normed_TH = hidden_TH if self.attention_norm is None else self.attention_norm(hidden_TH)
        attended_TH = self.attention(normed_TH, scope, dropout_keys.attention)
        hidden_TH = hidden_TH + _drop(attended_TH, dropout_keys.attention_output)
        expanded = self.gated_expand(self.feed_forward_norm(hidden_TH))
        output_TH = self.contract(geglu(expanded, dropout_keys.attention.backend))
        return hidden_TH + _drop(output_TH, dropout_keys.feed_forward_output)


def _drop(output_TH: torch.Tensor, dropout: LayerDropout) -> torch.Tensor:
    if not dropout.probability:
        return output_TH
    output_BSH = output_TH.view(len(dropout.row_B), -1, output_TH.shape[1])
    return keyed_dropout(output_BSH, dropout).view(output_TH.shape)


class ModernEncoder(Encoder):
    """Layers of one tower (generator or discriminator) of the architecture `modern`, with a final LayerNorm."""

    def __init__(self, model: ModelConfig, tower: TowerConfig, embedding_size: int) -> None:
        super().__init__(model, tower, embedding_size)
        if self.embeddings_project is not None:
            self.embeddings_project = Linear(embedding_size, tower.hidden_size, bias=False)
        self.final_norm = nn.LayerNorm(tower.hidden_size, eps=model.layer_norm_eps, bias=False)
        self.head_width = tower.hidden_size // tower.num_heads
        self.model = model

    @override
    def new_layer(self, model: ModelConfig, tower: TowerConfig, number: int) -> nn.Module:
        return ModernLayer(model, tower, number)

    @override
    def layer_inputs(
        self, attention_mask: AttentionMask, dropout_keys: DropoutKeys
    ) -> Iterable[tuple[LayerScope, ModernDropoutKeys]]:
        assert isinstance(attention_mask, AttentionScopes), "make the mask with new_attention_mask"
        model = self.model
        position_BS = attention_mask.position_BS
        global_rotation = rotation_of(position_BS, self.head_width, model.global_rope_theta)
        local_rotation = rotation_of(position_BS, self.head_width, model.local_rope_theta)
        global_scope = LayerScope(attention_mask.global_mask, global_rotation)
        local_scope = LayerScope(attention_mask.local_mask, local_rotation)

        inputs = []
        for number, attention_dropout in enumerate(dropout_keys.of_layers(len(self.layers))):
            scope = global_scope if model.is_global(number) else local_scope
            dropouts = ModernDropoutKeys(
                attention=attention_dropout,
                attention_output=self._output_dropout(dropout_keys, 2 * number, attention_dropout),
                feed_forward_output=self._output_dropout(dropout_keys, 2 * number + 1, attention_dropout),
            )
            inputs.append((scope, dropouts))
        return inputs

    def _output_dropout(self, dropout_keys: DropoutKeys, sub_layer: int, no_dropout: LayerDropout) -> LayerDropout:
        """Return the dropout on the output of a sub-layer; if nothing is dropped, `no_dropout`, which needs no seed.

        Layer i has the sub-layers 2 i and 2 i + 1.
        """
        if not (self.training and self.model.hidden_dropout):
            return no_dropout
        seed = derive_seed(dropout_keys.seed, Purpose.DROPOUT, sub_layer)
        dropout = dropout_keys._replace(seed=seed).of_layers(1)[0]
        return dropout._replace(probability=self.model.hidden_dropout)
