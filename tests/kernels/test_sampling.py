"""The sampler's distribution, its independence of layout, and its corners."""

import math

import numpy as np
import pytest
import torch
from electra_kernels import sampling
from electra_kernels.gumbel_noise import gumbel_from_bits
from electra_kernels.sampling import sample
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare


def realistic_logits(num_tokens: int) -> torch.Tensor:
    """Zipf's law: what a language model's marginal looks like."""
    return -1.1 * torch.arange(1, num_tokens + 1).float().log()


@pytest.mark.parametrize(
    ("logits", "draws", "temperature"),
    [
        (torch.zeros(64), 1_000_000, 1.0),
        (torch.tensor([9.0] + [0.0] * 63), 1_000_000, 1.0),
        (realistic_logits(1000), 100_000, 1.0),
        (realistic_logits(200), 300_000, 0.7),
    ],
    ids=["flat", "peaked", "realistic", "tempered"],
)
def test_frequencies_are_the_softmax(logits, draws, temperature):
    tokens = sample(logits.expand(draws, -1), seed=5, step=9, row_M=torch.arange(draws), temperature=temperature)
    expected = (logits.double() / temperature).softmax(0).numpy() * draws
    observed = np.bincount(tokens.numpy(), minlength=len(logits)).astype(float)
    # Tokens expected fewer than 10 times are judged together.
    rare = expected < 10
    if rare.any():
        expected = np.append(expected[~rare], expected[rare].sum())
        observed = np.append(observed[~rare], observed[rare].sum())
    assert chisquare(observed, expected).pvalue > 1e-3


def test_a_forbidden_token_is_never_drawn_in_ten_million():
    logits = torch.tensor([0.0, -math.inf, 1.0, -math.inf]).expand(500_000, 4)
    for step in range(20):
        tokens = sample(logits, seed=1, step=step, row_M=torch.arange(500_000))
        assert not (tokens % 2).any()


def test_noise_is_finite_and_exact_at_both_ends():
    bits = torch.tensor([0, 1, 2, (1 << 27) - 1, 1 << 27, (1 << 31) - 1, 2**32 - 129, 2**32 - 2, 2**32 - 1])
    noise = gumbel_from_bits(bits)
    uniform = [(int(b) + 0.5) * 2.0**-32 for b in bits]
    exact = torch.tensor([-math.log(-math.log1p(-u)) for u in uniform], dtype=torch.float64)
    assert noise.isfinite().all()
    # An error of the exponential of 4e-7, relative, is one of the noise, absolute; plus fp32's own rounding of 22.9.
    assert ((noise - exact).abs() < 4e-7 + 1e-6 * (exact.abs() > 4)).all()
    assert (noise.diff() <= 0).all()


@given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=50))
@settings(max_examples=100, deadline=None)
def test_noise_is_the_textbook_formula(bits):
    noise = gumbel_from_bits(torch.tensor(bits)).double().numpy()
    exact = -np.log(-np.log1p(-(np.array(bits, np.float64) + 0.5) * 2.0**-32))
    np.testing.assert_allclose(np.exp(-noise), np.exp(-exact), rtol=2e-6)


def test_ties_go_to_the_lower_token():
    # Beside 1e30 the noise is less than a rounding error, so equal logits are equal scores.
    logits = torch.full((3, 10), -1.0e30)
    logits[:, 7] = logits[:, 4] = logits[:, 9] = 1.0e30
    assert sample(logits, seed=3, step=1, row_M=torch.arange(3)).tolist() == [4, 4, 4]


def test_same_tokens_for_any_split_and_block(monkeypatch):
    logits, rows = torch.randn(37, 501), torch.arange(37) * 1000 + 2**31
    whole = sample(logits, seed=2**62 + 5, step=3, row_M=rows)
    halves = [sample(logits[s], seed=2**62 + 5, step=3, row_M=rows[s]) for s in (slice(0, 5), slice(5, 37))]
    assert torch.equal(torch.cat(halves), whole)
    monkeypatch.setattr(sampling, "block_rows", lambda logits: 3)
    assert torch.equal(sample(logits, seed=2**62 + 5, step=3, row_M=rows), whole)
    order = torch.randperm(37)
    assert torch.equal(sample(logits[order], seed=2**62 + 5, step=3, row_M=rows[order]), whole[order])


@pytest.mark.parametrize("temperature", [1.0, 0.3, 2.5])
def test_equals_a_float64_sampler_where_the_gap_decides(exact_sample, temperature):
    logits, rows = torch.randn(2000, 300) * 2, torch.arange(2000) + 2**32 - 2000
    tokens = sample(logits, seed=77, step=12, row_M=rows, temperature=temperature)
    expected, gap = exact_sample(logits.numpy(), 77, 12, rows.numpy(), temperature)
    clear = gap > 1e-4
    assert clear.mean() > 0.99
    assert (tokens.numpy() == expected)[clear].all()


def test_no_rows():
    assert sample(torch.zeros(0, 5), seed=0, step=0, row_M=torch.zeros(0, dtype=torch.int64)).tolist() == []
