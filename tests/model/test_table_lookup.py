"""The gradient of small tables by a product with a one-hot matrix, against float64 and NumPy."""

import numpy as np
import pytest
import torch

from electra_dist.model.encoder import SharedEmbeddings, SmallEmbedding, lookup_with_product_gradient


def packed_positions(num_rows: int, seq_len: int) -> torch.Tensor:
    """Positions of rows of several examples, which restart at 0, so that low positions are frequent."""
    generator = torch.Generator().manual_seed(3)
    rows = []
    for _ in range(num_rows):
        lengths = torch.randint(1, 12, (seq_len,), generator=generator).tolist()
        rows.append(torch.cat([torch.arange(length) for length in lengths])[:seq_len])
    return torch.stack(rows)


def gradient_by_numpy(upstream: torch.Tensor, index: torch.Tensor, num_rows: int) -> np.ndarray:
    """Add up the gradients of each entry, one token after the other, in float64."""
    gradient = np.zeros((num_rows, upstream.shape[-1]))
    np.add.at(gradient, index.flatten().numpy(), upstream.flatten(0, -2).double().numpy())
    return gradient


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_values_and_gradient_are_those_of_an_embedding(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    table = torch.randn(16, 24).to(dtype).requires_grad_()
    index = packed_positions(5, 40)
    upstream = torch.randn(5, 40, 24).to(dtype)
    entries = lookup_with_product_gradient(table, index)
    assert torch.equal(entries, torch.nn.functional.embedding(index, table))
    (gradient,) = torch.autograd.grad(entries, table, upstream)
    assert gradient.dtype == dtype
    exact = gradient_by_numpy(upstream, index, 16)
    error = np.abs(gradient.double().numpy() - exact).max()
    assert error <= 4 * torch.finfo(dtype).eps * np.abs(exact).max()


def test_the_gradient_repeats_whatever_the_order_of_equal_tokens() -> None:
    """It is one product: the same input gives the same bits, and positions that no token has get exactly 0."""
    table = torch.randn(32, 8).requires_grad_()
    index = packed_positions(3, 20)  # below 12
    upstream = torch.randn(3, 20, 8)
    entries = lookup_with_product_gradient(table, index)
    first, second = (torch.autograd.grad(entries, table, upstream, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert not first[12:].any()


def test_positions_and_types_have_it_on_a_gpu_and_torchs_own_on_a_cpu(make_config) -> None:
    embeddings = SharedEmbeddings(make_config(32, 32, 32), 32)
    assert isinstance(embeddings.position, SmallEmbedding) and isinstance(embeddings.token_type, SmallEmbedding)
    index = torch.zeros(2, 3, dtype=torch.int64)
    assert embeddings.position(index).grad_fn.name() == "EmbeddingBackward0"
    on_meta = embeddings.to("meta").position(index.to("meta"))
    assert on_meta.grad_fn.name() == "_LookupBackward"
