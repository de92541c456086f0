"""Rotary positions and GeGLU in Triton's interpreter, in both directions, against references and float64."""

import pytest
import torch
from electra_kernels.modern_layer import geglu, geglu_reference, rotate_in_place, rotate_query_and_key, rotation_of

from electra_dist.config import ModelConfig, TowerConfig
from electra_dist.model.attention import SdpaMask
from electra_dist.model.encoder import DropoutKeys
from electra_dist.model.modern_encoder import LayerScope, ModernAttention


def rotated_and_gradient(qkv, upstream, rotation, num_heads, by_kernel):
    """Query, key and value after the rotation, and their gradient, each [T, 3 H]."""
    if by_kernel:
        rotated, gradient = qkv.clone(), upstream.clone()
        rotate_in_place(rotated, num_heads, rotation)
        rotate_in_place(gradient, num_heads, rotation, is_gradient=True)
        return rotated, gradient
    num_rows, seq_len, _ = rotation.cos_BSF.shape
    leaf = qkv.view(num_rows, seq_len, 3, num_heads, -1).clone().requires_grad_()
    rotated = rotate_query_and_key(leaf, rotation)
    (gradient,) = torch.autograd.grad(rotated, leaf, upstream.view(leaf.shape))
    return rotated.detach().view(qkv.shape), gradient.view(qkv.shape)


@pytest.mark.parametrize(
    ("num_rows", "seq_len", "num_heads", "head_width"), [(1, 30, 1, 2), (2, 9, 3, 24), (1, 5, 2, 64)]
)
def test_rotations_are_no_further_from_float64_than_the_reference(
    assert_no_worse, assert_rounded, dtype, num_rows, seq_len, num_heads, head_width
):
    rotation = rotation_of(torch.randint(9000, (num_rows, seq_len)), head_width, 160000.0)
    triples_of_draws = []
    for draw in range(3):
        inputs = torch.randn(2, num_rows * seq_len, 3 * num_heads * head_width).to(dtype)
        in_fp32 = (*inputs.float(), rotation, num_heads)
        by_kernel = rotated_and_gradient(*in_fp32, by_kernel=True)
        by_reference = rotated_and_gradient(*in_fp32, by_kernel=False)
        exact = rotated_and_gradient(*inputs.double(), rotation, num_heads, by_kernel=False)
        triples_of_draws.append(list(zip(by_kernel, by_reference, exact)))
        if dtype != torch.float32 and draw == 0:
            stored = rotated_and_gradient(*inputs, rotation, num_heads, by_kernel=True)
            for stored_tensor, tensor in zip(stored, by_kernel):
                assert_rounded(stored_tensor, tensor)

    for triples in zip(*triples_of_draws):
        assert_no_worse(list(triples))
    values = slice(2 * num_heads * head_width, None)
    assert torch.equal(by_kernel[0][:, values], in_fp32[0][:, values])


def output_and_gradient(expanded, upstream, backend):
    leaf = expanded.clone().requires_grad_()
    out = geglu(leaf, backend)
    (gradient,) = torch.autograd.grad(out, leaf, upstream)
    return out.detach(), gradient


@pytest.mark.parametrize(("num_tokens", "width", "draws"), [(1, 8, 60), (7, 24, 8), (2, 1100, 3)])
def test_geglu_is_no_further_from_float64_than_the_reference(
    assert_no_worse, assert_rounded, dtype, num_tokens, width, draws
):
    triples_of_draws = []
    for draw in range(draws):
        expanded, upstream = torch.randn(num_tokens, 2 * width).to(dtype), torch.randn(num_tokens, width).to(dtype)
        by_kernel = output_and_gradient(expanded.float(), upstream.float(), "triton")
        by_reference = output_and_gradient(expanded.float(), upstream.float(), "reference")
        exact = output_and_gradient(expanded.double(), upstream.double(), "reference")
        triples_of_draws.append(list(zip(by_kernel, by_reference, exact)))
        if dtype != torch.float32 and draw == 0:
            for stored, tensor in zip(output_and_gradient(expanded, upstream, "triton"), by_kernel):
                assert_rounded(stored, tensor)

    for triples in zip(*triples_of_draws):
        assert_no_worse(list(triples))


def test_geglu_overwrites_its_input_by_the_gradient():
    expanded = torch.randn(3, 20)
    leaf = expanded.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(geglu_reference(leaf).sum(), leaf)

    kept = expanded.clone()
    out = geglu(kept.requires_grad_(), "triton")
    (found,) = torch.autograd.grad(out.sum(), kept)

    assert found.data_ptr() == kept.data_ptr()
    torch.testing.assert_close(found, gradient)


def test_attention_of_a_modern_layer_has_the_references_output_and_gradients():
    """The product, its rotation and both gradients as the layer calls them; a second example has its own positions."""
    tower = TowerConfig(hidden_size=24, num_layers=1, num_heads=3, intermediate_size=8)
    model = ModelConfig(architecture="modern", embedding_size=24, discriminator=tower, generator=tower)
    model = model.model_copy(update={"attention_dropout": 0.0})
    attention = ModernAttention(model, tower)
    ids = torch.zeros(2, 5, dtype=torch.int64)
    scope = LayerScope(SdpaMask(torch.zeros(2, 1, 5, 5)), rotation_of(torch.arange(10).view(2, 5) % 7, 8, 10000.0))
    hidden, upstream = torch.randn(10, 24), torch.randn(10, 24)

    def results(backend):
        states = hidden.clone().requires_grad_()
        out = attention(states, scope, DropoutKeys.off(ids)._replace(backend=backend).of_layers(1)[0])
        return [out.detach(), *torch.autograd.grad(out, [states, *attention.parameters()], upstream)]

    for found, expected in zip(results("triton"), results("reference"), strict=True):
        torch.testing.assert_close(found, expected)
