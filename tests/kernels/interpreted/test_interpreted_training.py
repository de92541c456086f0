"""Twenty steps of a tiny model, once with the references and once with the interpreted kernels."""

import pytest
import torch
from electra_kernels.operation_types import SpecialIds

from electra_dist.config import ModelConfig, ObjectiveConfig, TowerConfig
from electra_dist.model.towers import ElectraTowers, init_towers
from electra_dist.objectives.base import StepInput
from electra_dist.objectives.rtd import ReplacedTokenDetection

STEPS, ROWS, SEQ_LEN, VOCAB = 20, 1, 12, 90
SPECIAL = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)


def rows_of_step(step: int) -> torch.Tensor:
    """Two examples a row and some padding."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(5, VOCAB, (ROWS, SEQ_LEN), generator=generator)
    ids[:, [0, 6]], ids[:, [3, 5, 10]] = SPECIAL.cls, SPECIAL.sep
    ids[:, 11:] = SPECIAL.pad
    return ids


def train(backend: str, objective: ObjectiveConfig) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Sums of every step and the discriminator's labels, which tell the samples."""
    tower = TowerConfig(hidden_size=8, num_layers=1, num_heads=1, intermediate_size=16)
    model = ModelConfig(
        vocab_size=VOCAB,
        embedding_size=12,
        max_positions=SEQ_LEN,
        discriminator=tower,
        generator=tower,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    towers = ElectraTowers(model)
    init_towers(towers, model, seed=3)
    module = ReplacedTokenDetection(towers, objective, SPECIAL, backend)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    sums, labels = [], []
    for step in range(STEPS):
        out = module(StepInput(rows_of_step(step % 2), torch.arange(ROWS), step, 17, 1 / 6, 1 / 22))
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        sums.append(out.sums)
        labels.append(out.label_BS)
    return sums, labels


@pytest.mark.drill  # 15 s; the tests of the operations are those of each step
def test_twenty_training_steps_with_the_kernels_have_the_labels_and_sums_of_the_references():
    objective = ObjectiveConfig(mask_prob=0.25)
    (sums, labels), (sums_triton, labels_triton) = (train(backend, objective) for backend in ("reference", "triton"))
    assert torch.stack(labels).any()
    assert torch.equal(torch.stack(labels), torch.stack(labels_triton))
    torch.testing.assert_close(torch.stack(sums_triton), torch.stack(sums), rtol=2e-5, atol=1e-5)
    assert sum(s[0] for s in sums[-4:]) < 0.9 * sum(s[0] for s in sums[:4])  # it does learn
