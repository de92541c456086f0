"""Define the post-LN BERT encoder, and the embeddings that generator and discriminator share.

Guarantee: the same function as google-research/electra (and so as Hugging Face's ElectraModel) on the same weights:
post-LN layers, exact-erf GELU, LayerNorm eps from the config (1e-12), dropout on embeddings, attention probabilities
and sub-layer outputs, and a projection with bias where the width of the tables is not the tower's. There is no pooler.

How: query, key and value are one matrix product (`qkv`), which gives the same numbers with a third of the launches. In
eager mode a layer has two autograd functions of its own, one for what precedes attention and one for what follows it
(`fused_layer.py`). LayerNorm takes its statistics in fp32 whatever the dtype of the parameters. Dropout on embeddings
and on sub-layer outputs is keyed by (seed, step, global row, position), so it does not depend on how a batch is split.

With `engine.compile`, layers of one kind share one graph for training and one for evaluation, whatever their number
and the step, because everything that differs between them is passed in tensors. There are no graph breaks. The
compiler treats the fused operations and the keyed random draws as opaque operators, and fuses what is between them.
The first step compiles for a minute or more; later starts find the code in the node's cache folder and only trace.
Compiling does not pay on a CPU: steps of ELECTRA-Small are 5 % faster (2 cores of an AMD EPYC 7003, fp32). The effect
on a GPU was not measured.

Limits: compiled layers need whole parameters (ZeRO 0 to 2). Dropout of attention probabilities on a GPU draws from
torch's generator, which the training loop seeds for each micro-batch. Nothing draws from it on a CPU.

Shapes: B rows, S tokens, L layers, E embedding width, H hidden width, N heads, V padded vocabulary, T = B * S tokens,
R rows of a small table.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from electra_kernels.backend_choice import resolve
from electra_kernels.keyed_dropout import keyed_dropout
from electra_kernels.keyed_random import device_keys
from electra_kernels.layer_passes import dropout_add_norm
from electra_kernels.operation_types import LayerDropout
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from electra_dist.config import ModelConfig, TowerConfig
from electra_dist.model.attention import AttentionMask, LayerMask, RowLayout
from electra_dist.model.compile_options import compile_options
from electra_dist.model.fused_layer import AfterAttention, Linear, Parameters, QkvProduct, Settings


class DropoutKeys(NamedTuple):
    """Keys that determine which elements a network drops in one forward pass, and the backend that applies dropout."""

    seed: int  # seed of this tower, derived from the run's
    step: int  # number of the optimizer step
    row_B: torch.Tensor  # int64 numbers of the rows within the global batch
    backend: str  # `kernels.backend` of the config

    @classmethod
    def off(cls, ids_BS: torch.Tensor) -> DropoutKeys:
        """Return placeholder keys for evaluation mode, where no key is read; only the number of rows is used."""
        row_B = torch.arange(len(ids_BS), device=ids_BS.device)
        return cls(seed=0, step=0, row_B=row_B, backend="auto")

    def of_layers(self, num_layers: int) -> list[LayerDropout]:
        """Return one `LayerDropout` for each layer, with a key of its own; its probability stays 0 until it is set."""
        backend = resolve(self.backend, self.row_B.device.type, in_cuda_library=False)
        if backend == "triton":
            key_L3 = device_keys(self.seed, self.step, self.row_B.device, num_layers)
        else:
            key_L3 = torch.tensor([[self.seed, self.step, number] for number in range(num_layers)])
        return [LayerDropout(key_3, self.row_B, backend) for key_3 in key_L3.unbind(0)]


class DropoutAddNorm(nn.LayerNorm):
    """LayerNorm(residual + dropout(x)) as one fused operation, with the parameter names of nn.LayerNorm."""

    def __init__(self, width: int, model: ModelConfig, site: int) -> None:
        """Create the module; `site`, 0 after attention and 1 after feed-forward, selects separate random numbers."""
        super().__init__(width, eps=model.layer_norm_eps)
        self.probability = model.hidden_dropout
        self.site = site

    def forward(  # type: ignore[override]
        self, x_BSH: torch.Tensor, residual_BSH: torch.Tensor, dropout_keys: LayerDropout
    ) -> torch.Tensor:
        """Return layer_norm(residual + dropout(x)), [B, S, H]; the residual is cast to the dtype of `x_BSH` first."""
        probability = self.probability if self.training else 0.0
        # The first layer's residual is the embeddings, which are fp32 under autocast, while `x_BSH` is bf16.
        residual_BSH = residual_BSH.to(x_BSH.dtype)
        normed_BSH, _statistics = dropout_add_norm(
            x_BSH,
            residual_BSH,
            self.weight,
            self.bias,
            dropout_keys.row_B,
            dropout_keys.key_3,
            self.site,
            probability,
            self.eps,
            dropout_keys.backend,
        )
        return normed_BSH

    def dropout(self, dropout_keys: LayerDropout) -> LayerDropout:
        """Return a layer's dropout with this module's place and probability, which is 0 in evaluation mode."""
        return dropout_keys._replace(probability=self.probability if self.training else 0.0, site=self.site)


class SmallEmbedding(nn.Embedding):
    """Embedding table with few rows; on a GPU its gradient is a matrix product, instead of atomic additions."""

    # Many tokens share an entry of these tables, most of all the first positions of packed rows, in which positions
    # restart. A review of torch 2.13 found that torch adds the gradients of these tables with atomic operations. The
    # token table keeps torch's gradient: according to older sources of torch (Embedding.cu), torch sorts its indices
    # and adds each segment in a fixed order.

    @override
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if input.device.type == "cpu":
            return F.embedding(input, self.weight)
        return lookup_with_product_gradient(self.weight, input)


def lookup_with_product_gradient(table_RE: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Look up entries whose gradient is the product of a one-hot matrix, T x R, with the upstream gradient.

    The product is a sum in fp32 (fp64 for fp64) that is rounded once, and repeats bit for bit where matrix products
    do. It has no second derivative. Cost: 34 GFLOP for 32,768 tokens, 512 positions and width 1024; the one-hot matrix
    has 34 MB in bf16.
    """
    entries: torch.Tensor = _Lookup.apply(table_RE, index)
    return entries


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table_RE: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.num_rows = len(table_RE)
        return F.embedding(index, table_RE)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (index,) = ctx.saved_tensors
        row_R = torch.arange(ctx.num_rows, device=index.device)
        one_hot_TR = (index.flatten()[:, None] == row_R).to(grad.dtype)
        return one_hot_TR.t() @ grad.flatten(0, -2), None


class Embeddings(nn.Module):
    """Base class of modules that embed token ids; a subclass sets the three attributes and implements `tables`."""

    word: nn.Embedding  # token table
    layer_norm: nn.LayerNorm
    dropout: float  # probability
    # With `model.sharing: gdes` the discriminator's tables hold differences to the generator's, which are this module.
    # They get no gradient from here.
    base: Embeddings | None = None

    def tables(self, ids_BS: torch.Tensor, layout: RowLayout) -> torch.Tensor:
        """Return the sum of the table entries of each token, [B, S, E]."""
        raise NotImplementedError

    def forward(
        self, ids_BS: torch.Tensor, layout: RowLayout, dropout_keys: DropoutKeys | None = None
    ) -> torch.Tensor:
        """Return the embeddings of rows, masked or not, [B, S, E]: dropout(layer_norm(sum of the table entries)).

        `layout` has the positions and token types of the original rows. `dropout_keys` belong to the network that
        reads the embeddings; evaluation needs none.
        """
        summed = self.tables(ids_BS, layout)
        if self.base is not None:
            summed = summed + self.base.tables(ids_BS, layout).detach()
        normed = self.layer_norm(summed)
        if not self.training or not self.dropout:
            return normed
        assert dropout_keys is not None, "embeddings in training mode need dropout_keys"
        dropout = dropout_keys.of_layers(1)[0]._replace(probability=self.dropout)
        return keyed_dropout(normed, dropout)


class SharedEmbeddings(Embeddings):
    """Token, position and type tables; by default generator and discriminator share them, as in Google's code."""

    def __init__(self, model: ModelConfig, width: int) -> None:
        super().__init__()
        self.word = nn.Embedding(model.padded_vocab_size, width)
        self.position = SmallEmbedding(model.max_positions, width)
        self.token_type = SmallEmbedding(model.type_vocab_size, width)
        self.layer_norm = nn.LayerNorm(width, eps=model.layer_norm_eps)
        self.dropout = model.hidden_dropout

    @override
    def tables(self, ids_BS: torch.Tensor, layout: RowLayout) -> torch.Tensor:
        return self.word(ids_BS) + self.token_type(layout.token_type_BS) + self.position(layout.position_BS)


class SelfAttention(nn.Module):
    """Multi-head self-attention inside each example of a row."""

    def __init__(self, model: ModelConfig, tower: TowerConfig, bias: bool = True) -> None:
        super().__init__()
        self.num_heads = tower.num_heads
        self.dropout = model.attention_dropout
        self.qkv = Linear(tower.hidden_size, 3 * tower.hidden_size, bias=bias)
        self.out = Linear(tower.hidden_size, tower.hidden_size, bias=bias)

    def forward(self, hidden_BSH: torch.Tensor, attention_mask: LayerMask, dropout_keys: LayerDropout) -> torch.Tensor:
        """Return the output of attention after its projection, [B, S, H]; the caller adds dropout and residual."""
        qkv = self.qkv(hidden_BSH).flatten(0, 1)
        dropout = self.dropout if self.training else 0.0
        context_TH = attention_mask.attend(qkv, self.num_heads, dropout, dropout_keys)
        return self.out(context_TH.view(hidden_BSH.shape))


class EncoderLayer(nn.Module):
    """Transformer layer: self-attention and feed-forward, each with dropout, residual sum and LayerNorm after it."""

    def __init__(self, model: ModelConfig, tower: TowerConfig) -> None:
        super().__init__()
        width = tower.hidden_size
        self.attention = SelfAttention(model, tower)
        self.attention_norm = DropoutAddNorm(width, model, site=0)
        self.expand = Linear(width, tower.intermediate_size)
        self.contract = Linear(tower.intermediate_size, width)
        self.output_norm = DropoutAddNorm(width, model, site=1)

    def forward(self, hidden_TH: torch.Tensor, attention_mask: LayerMask, dropout_keys: LayerDropout) -> torch.Tensor:
        """Return the hidden states of all tokens after this layer, [T, H]; `hidden_TH` are those before it."""
        if torch.compiler.is_compiling():
            return self.compose(hidden_TH, attention_mask, dropout_keys)
        attention = self.attention
        bias = attention.qkv.bias
        # Where attention joins the gradients of query, key and value by a pass, that pass also sums them for the bias.
        sums_bias = attention_mask.sums_bias
        qkv, residual_TH = QkvProduct.apply(hidden_TH, attention.qkv.weight, bias, not sums_bias)
        context_TH = attention_mask.attend(
            qkv,
            attention.num_heads,
            attention.dropout if self.training else 0.0,
            dropout_keys,
            bias if sums_bias else None,
        )
        parameters = Parameters(
            out_weight=attention.out.weight,
            out_bias=attention.out.bias,
            attention_norm_weight=self.attention_norm.weight,
            attention_norm_bias=self.attention_norm.bias,
            expand_weight=self.expand.weight,
            expand_bias=self.expand.bias,
            contract_weight=self.contract.weight,
            contract_bias=self.contract.bias,
            output_norm_weight=self.output_norm.weight,
            output_norm_bias=self.output_norm.bias,
        )
        settings = Settings(
            eps=self.output_norm.eps,
            attention_dropout=self.attention_norm.dropout(dropout_keys),
            output_dropout=self.output_norm.dropout(dropout_keys),
        )
        states_TH: torch.Tensor = AfterAttention.apply(context_TH, residual_TH, settings, *parameters)
        return states_TH

    def compose(self, hidden_TH: torch.Tensor, attention_mask: LayerMask, dropout_keys: LayerDropout) -> torch.Tensor:
        """Compute the same as `forward` by separate operations: the layer's definition, which torch.compile traces."""
        num_tokens, width = hidden_TH.shape
        hidden_BSH = hidden_TH.view(len(dropout_keys.row_B), -1, width)
        attended_BSH = self.attention(hidden_BSH, attention_mask, dropout_keys)
        hidden_BSH = self.attention_norm(attended_BSH, hidden_BSH, dropout_keys)
        expanded = F.gelu(self.expand(hidden_BSH))
        states_BSH = self.output_norm(self.contract(expanded), hidden_BSH, dropout_keys)
        return states_BSH.view(num_tokens, width)


class Encoder(nn.Module):
    """Transformer layers of one tower (generator or discriminator), after a projection if the widths differ.

    Other architectures override `new_layer` and `layer_inputs`, and may set `final_norm`.
    """

    def __init__(self, model: ModelConfig, tower: TowerConfig, embedding_size: int) -> None:
        super().__init__()
        self.embeddings_project: nn.Linear | None = None
        if embedding_size != tower.hidden_size:
            self.embeddings_project = Linear(embedding_size, tower.hidden_size)
        self.layers = nn.ModuleList(self.new_layer(model, tower, number) for number in range(tower.num_layers))
        self.final_norm: nn.LayerNorm | None = None  # of the last layer's states
        # `engine.activation_checkpointing` sets this: only the layers' inputs are kept, and the backward pass
        # computes the other activations again.
        self.recompute = False

    def new_layer(self, model: ModelConfig, tower: TowerConfig, number: int) -> nn.Module:
        """Return a new layer; `number` is its place in the tower, from 0."""
        return EncoderLayer(model, tower)

    def layer_inputs(self, attention_mask: AttentionMask, dropout_keys: DropoutKeys) -> Iterable[tuple[Any, Any]]:
        """Return, for each layer, the arguments of its `forward` after the hidden states: mask and dropout keys."""
        return [(attention_mask, layer_keys) for layer_keys in dropout_keys.of_layers(len(self.layers))]

    def forward(
        self, embedded_BSE: torch.Tensor, attention_mask: AttentionMask, dropout_keys: DropoutKeys
    ) -> torch.Tensor:
        """Return the tower's states of all tokens, [B, S, H]; pass `DropoutKeys.off` in evaluation mode."""
        hidden = embedded_BSE
        if self.embeddings_project is not None:
            hidden = self.embeddings_project(embedded_BSE)
        shape_BSH = hidden.shape
        hidden = hidden.flatten(0, 1)
        recompute = self.recompute and torch.is_grad_enabled()
        for layer, layer_input in zip(self.layers, self.layer_inputs(attention_mask, dropout_keys)):
            if recompute:
                hidden = checkpoint(layer, hidden, *layer_input, use_reentrant=False)
            else:
                hidden = layer(hidden, *layer_input)
        if self.final_norm is not None:
            hidden = self.final_norm(hidden)
        return hidden.view(shape_BSH)


def compile_layers(module: nn.Module, backend: str = "inductor") -> None:
    """Mark every transformer layer in a module for torch.compile, which compiles it when it is first called.

    `backend` is that of torch.compile.
    """
    for encoder in module.modules():
        if isinstance(encoder, Encoder):
            encoder.register_forward_pre_hook(_allow_any_number_of_sequences)
            for layer in encoder.layers:
                layer.compile(**compile_options(backend))


def _allow_any_number_of_sequences(encoder: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Mark the sizes that follow the number of examples as dynamic, so that one compiled graph serves every batch.

    This hook runs before each forward pass of an `Encoder`, whose second argument is the attention mask.
    """
    attention_mask: AttentionMask = inputs[1]
    for tensor, dimension in attention_mask.dynamic_sizes():
        torch._dynamo.maybe_mark_dynamic(tensor, dimension)
