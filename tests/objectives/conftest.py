"""A NumPy mirror of the masks, written from the reference's description; a small model; packed and padded rows."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from electra_kernels.operation_types import SpecialIds

from electra_dist.config import ModelConfig, ObjectiveConfig, TowerConfig
from electra_dist.model.towers import build_towers
from electra_dist.objectives.rtd import ReplacedTokenDetection

SPECIAL = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
MASK_POSITION, MASK_KEEP = 3, 4


def philox_words(block: int, row: int, step: int, purpose: int, seed: int) -> list[int]:
    """Philox4x32-10 in plain integers, from the paper's definition."""
    c, k = [block, row, step, purpose], [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(b >> 32) ^ c[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def bits_of(row: int, step: int, purpose: int, seed: int, count: int) -> np.ndarray:
    blocks = [philox_words(block, row, step, purpose, seed) for block in range(-(-count // 4))]
    return np.array(blocks, np.uint64).reshape(-1)[:count]


@pytest.fixture
def bits() -> Callable[..., np.ndarray]:
    return bits_of


@pytest.fixture
def mirror_masks() -> Callable[..., tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(positions, weights, generator input) of rows, one row and one slot at a time."""

    def mirror(
        ids: np.ndarray, objective: ObjectiveConfig, seed: int, step: int, rows: list[int]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        seq_len = ids.shape[1]
        slots = max(1, int((objective.mask_prob + 0.005) * seq_len))
        positions, weights, masked = np.zeros((len(rows), slots), int), np.zeros((len(rows), slots)), ids.copy()
        for b, row in enumerate(rows):
            candidates = [p for p in range(seq_len) if ids[b, p] not in (SPECIAL.pad, *SPECIAL[2:])]
            number = np.float32 if objective.masking == "reference" else np.float64  # Google's code has float32
            used = int(np.round(number((ids[b] != SPECIAL.pad).sum()) * number(objective.mask_prob)))
            used = min(max(1, used), slots, len(candidates))
            draws = bits_of(row, step, MASK_POSITION, seed, seq_len)
            keep = bits_of(row, step, MASK_KEEP, seed, slots)
            if objective.masking == "reference":
                chosen = [candidates[int(draws[j]) * len(candidates) // 2**32] for j in range(used)]
            else:
                chosen = sorted(candidates, key=lambda p: (int(draws[p]), p))[:used]
            for j, position in enumerate(chosen):
                positions[b, j], weights[b, j] = position, 1.0
                if int(keep[j]) / 2**32 < objective.mask_token_prob:
                    masked[b, position] = SPECIAL.mask
        return positions, weights, masked

    return mirror


@pytest.fixture
def special() -> SpecialIds:
    return SPECIAL


@pytest.fixture
def make_ids() -> Callable[..., torch.Tensor]:
    """Rows of given lengths: examples of up to 20 tokens one after another, then padding; some [UNK] and [MASK]."""

    def make(lengths: list[int], seq_len: int, vocab_size: int = 300, seed: int = 0) -> torch.Tensor:
        rng = np.random.default_rng(seed)
        ids = np.zeros((len(lengths), seq_len), np.int64)
        for row, length in zip(ids, lengths, strict=True):
            row[:length] = rng.integers(5, vocab_size, length)
            row[:length][rng.random(length) < 0.05] = SPECIAL.unk
            row[:length][rng.random(length) < 0.05] = SPECIAL.mask
            for start in range(0, length, 20):
                end = min(start + 20, length)
                row[start], row[(start + end) // 2], row[end - 1] = SPECIAL.cls, SPECIAL.sep, SPECIAL.sep
        return torch.from_numpy(ids)

    return make


@pytest.fixture
def make_model() -> Callable[..., tuple[ReplacedTokenDetection, ModelConfig]]:
    """A small initialised objective without dropout."""

    def make(dropout: float = 0.0, **objective: Any) -> tuple[ReplacedTokenDetection, ModelConfig]:
        model = ModelConfig(
            vocab_size=300,
            embedding_size=32,
            max_positions=64,
            discriminator=TowerConfig(hidden_size=32, num_layers=2, num_heads=2, intermediate_size=64),
            generator=TowerConfig(hidden_size=16, num_layers=2, num_heads=1, intermediate_size=32),
            hidden_dropout=dropout,
            attention_dropout=dropout,
        )
        return ReplacedTokenDetection(build_towers(model, seed=3), ObjectiveConfig(**objective), SPECIAL), model

    return make
