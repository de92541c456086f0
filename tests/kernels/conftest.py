"""A sampler and a head written independently of the kernels, in float64 NumPy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from electra_kernels.keyed_random import Purpose, philox4x32


def exact_noise(seed: int, step: int, rows: np.ndarray, num_tokens: int) -> np.ndarray:
    """Gumbel noise in float64 from the same bits, by the textbook formula."""
    num_blocks = (num_tokens + 3) // 4
    c0 = np.broadcast_to(np.arange(num_blocks, dtype=np.uint64), (len(rows), num_blocks))
    c1 = np.broadcast_to(rows.astype(np.uint64)[:, None], c0.shape)
    words = philox4x32((c0, c1, np.full_like(c0, step), np.full_like(c0, int(Purpose.SAMPLE))), seed)
    bits = np.stack(words, -1).reshape(len(rows), -1)[:, :num_tokens].astype(np.float64)
    return -np.log(-np.log1p(-(bits + 0.5) * 2.0**-32))


@pytest.fixture
def exact_sample() -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    """`exact_sample(logits, seed, step, rows, temperature)`: drawn tokens and the gap between the two best scores."""

    def draw(
        logits: np.ndarray, seed: int, step: int, rows: np.ndarray, temperature: float = 1.0
    ) -> tuple[np.ndarray, np.ndarray]:
        score = logits.astype(np.float64) / temperature + exact_noise(seed, step, rows, logits.shape[1])
        best = np.partition(score, -2, axis=1)
        return score.argmax(1), best[:, -1] - best[:, -2]

    return draw
