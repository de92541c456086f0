"""The post-LN BERT encoder and the embeddings that both towers share.

Guarantee: the same function as google-research/electra (and so as Hugging Face's ElectraModel) on the same weights:
post-LN layers, exact-erf GELU, LayerNorm eps from the config (1e-12), dropout on embeddings, attention probabilities
and sub-layer outputs, a projection with bias where the table's width is not the tower's. No pooler.

Query, key and value are one matmul (`qkv`): same numbers, a third of the launches. LayerNorm takes its statistics in
fp32 whatever the parameters' dtype (torch's kernels do).

Dropout on sub-layer outputs is keyed by (seed, step, global row, place) and fused with the residual and LayerNorm
(`electra_kernels.dropout_add_norm`): it does not depend on how a batch is cut.

Where it stops: dropout on embeddings, and on a GPU that of attention probabilities, draws from torch's generator,
which the training loop seeds for each micro-batch.

Shapes: B rows, S tokens, E embedding width, H hidden width, V rows of the token table (padded to 128).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from electra_kernels import custom_ops
from electra_kernels.dropout_add_norm import dropout_add_norm
from torch import nn
from torch.utils.checkpoint import checkpoint

from electra_dist.config import ModelConfig, TowerConfig
from electra_dist.model.attention import Scope, attend
from electra_dist.model.linear import Linear


class Noise(NamedTuple):
    """What a tower's dropout is keyed by, and the implementation that applies it."""

    seed: int  # of this tower
    step: int
    row_B: torch.Tensor  # int64 row numbers within the global batch
    backend: str

    @classmethod
    def off(cls, ids_BS: torch.Tensor) -> Noise:
        """For a model in evaluation mode, where nothing is dropped and no key is read."""
        return cls(0, 0, torch.arange(len(ids_BS), device=ids_BS.device), "auto")

    def of_layer(self, number: int) -> LayerNoise:
        """For layer `number` of the tower."""
        return LayerNoise(torch.tensor([self.seed, self.step, number]), self.row_B, self.backend)


class LayerNoise(NamedTuple):
    """What a layer's dropout is keyed by: numbers in a tensor, so that a compiled layer serves for all of them."""

    key_3: torch.Tensor  # int64 on the host: seed, step, number of the layer
    row_B: torch.Tensor
    backend: str


class DropoutAddNorm(nn.LayerNorm):
    """LayerNorm of a residual plus a sub-layer's output after dropout, in one pass."""

    def __init__(self, width: int, model: ModelConfig, site: int) -> None:
        """`site`: number of this place within its layer."""
        super().__init__(width, eps=model.layer_norm_eps)
        self.probability = model.hidden_dropout
        self.site = site

    def forward(self, x_BSH: torch.Tensor, residual_BSH: torch.Tensor, noise: LayerNoise) -> torch.Tensor:  # type: ignore[override]
        """[B, S, H]; nothing is dropped in evaluation."""
        probability = self.probability if self.training else 0.0
        residual_BSH = residual_BSH.to(x_BSH.dtype)  # under autocast the embeddings are fp32
        given = (x_BSH, residual_BSH, self.weight, self.bias)
        key_3, row_B, backend = noise
        if torch.compiler.is_compiling():
            return custom_ops.dropout_add_norm(*given, row_B, key_3, self.site, probability, self.eps, backend)[0]
        key = custom_ops.dropout_key(key_3, self.site, probability)
        return dropout_add_norm(*given, eps=self.eps, dropout=key, row_B=row_B, backend=backend)


class SharedEmbeddings(nn.Module):
    """Token, position and type tables and their LayerNorm: one set for both towers, as in Google's code."""

    def __init__(self, model: ModelConfig, width: int | None = None) -> None:
        """`width`: of a tower's own tables; default: the model's."""
        super().__init__()
        width = width or model.embedding_size
        self.word = nn.Embedding(model.padded_vocab_size, width)
        self.position = nn.Embedding(model.max_positions, width)
        self.token_type = nn.Embedding(model.type_vocab_size, width)
        self.layer_norm = nn.LayerNorm(width, eps=model.layer_norm_eps)
        self.dropout = nn.Dropout(model.hidden_dropout)

    def tables(self, ids_BS: torch.Tensor, position_BS: torch.Tensor, token_type_BS: torch.Tensor) -> torch.Tensor:
        """[B, S, E]: the sum of the three tables' entries."""
        return self.word(ids_BS) + self.token_type(token_type_BS) + self.position(position_BS)

    def forward(
        self,
        ids_BS: torch.Tensor,
        position_BS: torch.Tensor,
        token_type_BS: torch.Tensor,
        base_BSE: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[B, S, E]; dropout is drawn anew for each tower. `base_BSE`: what these tables are a difference to."""
        summed = self.tables(ids_BS, position_BS, token_type_BS)
        return self.dropout(self.layer_norm(summed if base_BSE is None else summed + base_BSE))


class SelfAttention(nn.Module):
    """Multi-head attention inside each example of a row."""

    def __init__(self, model: ModelConfig, tower: TowerConfig) -> None:
        super().__init__()
        self.num_heads = tower.num_heads
        self.dropout = model.attention_dropout
        self.qkv = Linear(tower.hidden_size, 3 * tower.hidden_size)
        self.out = Linear(tower.hidden_size, tower.hidden_size)

    def forward(self, hidden_BSH: torch.Tensor, scope: Scope, noise: LayerNoise) -> torch.Tensor:
        """[B, S, H]; `scope` says which keys a query sees."""
        B, S, H = hidden_BSH.shape
        qkv = self.qkv(hidden_BSH).view(B, S, 3, self.num_heads, H // self.num_heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        dropout, keep_BNSS = self.dropout if self.training else 0.0, None
        if dropout and hidden_BSH.device.type == "cpu":
            cells = self.num_heads * S * S
            kept = custom_ops.keep_attention(noise.key_3, noise.row_B, (cells + 3) // 4 * 4, dropout)
            keep_BNSS = kept[:, :cells].view(B, self.num_heads, S, S)
        context = attend(query, key, value, scope, dropout, keep_BNSS)
        return self.out(context.transpose(1, 2).reshape(B, S, H))


class EncoderLayer(nn.Module):
    """Attention and feed-forward, each followed by dropout, residual and LayerNorm."""

    def __init__(self, model: ModelConfig, tower: TowerConfig) -> None:
        super().__init__()
        width = tower.hidden_size
        self.attention = SelfAttention(model, tower)
        self.attention_norm = DropoutAddNorm(width, model, 0)
        self.expand = Linear(width, tower.intermediate_size)
        self.contract = Linear(tower.intermediate_size, width)
        self.output_norm = DropoutAddNorm(width, model, 1)

    def forward(self, hidden_BSH: torch.Tensor, scope: Scope, noise: LayerNoise) -> torch.Tensor:
        """[B, S, H]."""
        hidden_BSH = self.attention_norm(self.attention(hidden_BSH, scope, noise), hidden_BSH, noise)
        expanded = F.gelu(self.expand(hidden_BSH))
        return self.output_norm(self.contract(expanded), hidden_BSH, noise)


class Encoder(nn.Module):
    """A tower without its head: projection (if the widths differ) and layers."""

    def __init__(self, model: ModelConfig, tower: TowerConfig, embedding_size: int | None = None) -> None:
        """`embedding_size`: width of the tables that this tower reads; default: the model's."""
        super().__init__()
        width = embedding_size or model.embedding_size
        self.embeddings_project: nn.Linear | None = None
        if width != tower.hidden_size:
            self.embeddings_project = Linear(width, tower.hidden_size)
        self.layers = nn.ModuleList(EncoderLayer(model, tower) for _ in range(tower.num_layers))
        self.recompute = False  # keep only what goes in between layers; `engine.activation_checkpointing`

    def forward(self, embedded_BSE: torch.Tensor, scope: Scope, noise: Noise) -> torch.Tensor:
        """[B, S, E] of `SharedEmbeddings` -> [B, S, H]."""
        hidden = embedded_BSE if self.embeddings_project is None else self.embeddings_project(embedded_BSE)
        for number, layer in enumerate(self.layers):
            given = (hidden, scope, noise.of_layer(number))
            if self.recompute and torch.is_grad_enabled():
                hidden = checkpoint(layer, *given, use_reentrant=False)
            else:
                hidden = layer(*given)
        return hidden
