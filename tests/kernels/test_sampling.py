"""The sampler draws from the softmax, row by row the same in any batch, and handles extreme noise and logits."""

import math

import numpy as np
import pytest
import torch
from electra_kernels.mlm_head import gumbel_from_bits, sample_reference
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
def test_frequencies_of_tokens_are_the_softmax_by_a_chi_square_test(logits, draws, temperature):
    tokens = sample_reference(logits.expand(draws, -1), 5, 9, torch.arange(draws), temperature)
    expected = (logits.double() / temperature).softmax(0).numpy() * draws
    observed = np.bincount(tokens.numpy(), minlength=len(logits)).astype(float)
    # Tokens expected fewer than 10 times are pooled, because the test is not valid for such counts.
    is_rare = expected < 10
    if is_rare.any():
        expected = np.append(expected[~is_rare], expected[is_rare].sum())
        observed = np.append(observed[~is_rare], observed[is_rare].sum())
    assert chisquare(observed, expected).pvalue > 1e-3


def test_a_token_of_logit_minus_infinity_is_never_drawn_in_ten_million_draws():
    """The forbidden tokens are the odd ones, 1 and 3."""
    logits = torch.tensor([0.0, -math.inf, 1.0, -math.inf]).expand(500_000, 4)
    for step in range(20):
        tokens = sample_reference(logits, 1, step, torch.arange(500_000))
        assert not (tokens % 2).any()


def test_noise_of_the_lowest_and_highest_random_words_is_finite_decreasing_and_exact():
    bits = torch.tensor([0, 1, 2, (1 << 27) - 1, 1 << 27, (1 << 31) - 1, 2**32 - 129, 2**32 - 2, 2**32 - 1])
    noise = gumbel_from_bits(bits)
    uniform = [(int(b) + 0.5) * 2.0**-32 for b in bits]
    exact = torch.tensor([-math.log(-math.log1p(-u)) for u in uniform], dtype=torch.float64)
    assert noise.isfinite().all()
    # An error of the exponential of 4e-7, relative, is one of the noise, absolute; plus fp32's own rounding of 22.9.
    allowed = 4e-7 + 1e-6 * (exact.abs() > 4)
    assert ((noise - exact).abs() < allowed).all()
    assert (noise.diff() <= 0).all()


@given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=50))
@settings(max_examples=100, deadline=None)
def test_noise_is_that_of_the_textbook_formula_in_float64(bits):
    """Gumbel noise is -log(-log u); it is compared as exp(-noise), which is exponentially distributed."""
    noise = gumbel_from_bits(torch.tensor(bits)).double().numpy()
    exact = -np.log(-np.log1p(-(np.array(bits, np.float64) + 0.5) * 2.0**-32))
    np.testing.assert_allclose(np.exp(-noise), np.exp(-exact), rtol=2e-6)


def test_the_lowest_of_equally_good_tokens_is_drawn():
    """Beside 1e30 the noise is less than a rounding error, so equal logits are equal scores."""
    logits = torch.full((3, 10), -1.0e30)
    logits[:, 7] = logits[:, 4] = logits[:, 9] = 1.0e30
    assert sample_reference(logits, 3, 1, torch.arange(3)).tolist() == [4, 4, 4]


def test_a_rows_token_does_not_depend_on_split_or_order_of_the_rows():
    logits = torch.randn(37, 501)
    rows = torch.arange(37) * 1000 + 2**31

    def sample_rows(chosen: slice | torch.Tensor) -> torch.Tensor:
        return sample_reference(logits[chosen], 2**62 + 5, 3, rows[chosen])

    all_rows = slice(0, 37)
    whole = sample_rows(all_rows)
    in_two_parts = torch.cat([sample_rows(slice(0, 5)), sample_rows(slice(5, 37))])
    order = torch.randperm(37)
    shuffled = sample_rows(order)

    assert torch.equal(in_two_parts, whole)
    assert torch.equal(shuffled, whole[order])


@pytest.mark.parametrize("temperature", [1.0, 0.3, 2.5])
def test_samples_are_those_of_a_float64_sampler_where_the_best_score_is_clear(exact_sample, temperature):
    """Scores closer than 1e-4, less than 1 % of the rows, may be ordered differently in fp32."""
    logits = torch.randn(2000, 300) * 2
    rows = torch.arange(2000) + 2**32 - 2000

    tokens = sample_reference(logits, 77, 12, rows, temperature)
    expected, gap = exact_sample(logits.numpy(), 77, 12, rows.numpy(), temperature)

    is_clear = gap > 1e-4
    assert is_clear.mean() > 0.99
    assert (tokens.numpy() == expected)[is_clear].all()


def test_sampling_zero_rows_gives_zero_tokens():
    tokens = sample_reference(torch.zeros(0, 5), 0, 0, torch.zeros(0, dtype=torch.int64))

    assert tokens.tolist() == []
