"""Dropout on embeddings, sub-layer outputs and, on a CPU, attention belongs to the row, not to the batch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from electra_kernels.operation_types import SpecialIds

from electra_dist.config import ModelConfig, ObjectiveConfig
from electra_dist.model.attention import RowLayout, SdpaMask
from electra_dist.model.encoder import DropoutKeys, Encoder, SharedEmbeddings
from electra_dist.objectives.base import StepInput
from electra_dist.objectives.build_objective import build_objective
from electra_dist.objectives.corruption import CorruptingObjective

SPECIAL = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
DROP = 0.3


@pytest.mark.parametrize("place", ["hidden_dropout", "attention_dropout"])
def test_a_row_drops_the_same_units_in_any_batch(make_config: Callable[..., Any], place: str) -> None:
    model = make_config(32, 32, 32, **{place: 0.3})
    encoder = Encoder(model, model.discriminator, model.embedding_size).train()
    embedded, bias, rows = torch.randn(6, 10, 32), torch.zeros(6, 1, 10, 10), torch.arange(40, 46)

    def run(chosen: slice, step: int = 5) -> torch.Tensor:
        return encoder(embedded[chosen], SdpaMask(bias[chosen]), DropoutKeys(7, step, rows[chosen], "reference"))

    whole = run(slice(0, 6))
    torch.testing.assert_close(torch.cat([run(slice(0, 2)), run(slice(2, 6))]), whole, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(run(slice(0, 6), step=6), whole, atol=1e-2)  # another step drops others


def embeddings_of_ones(make_config: Callable[..., Any]) -> SharedEmbeddings:
    """Embeddings whose LayerNorm gives 1 everywhere, so that the result shows the factors of dropout."""
    model = make_config(32, 32, 32, hidden_dropout=DROP)
    embeddings = SharedEmbeddings(model, model.embedding_size).train()
    with torch.no_grad():
        embeddings.layer_norm.weight.zero_()
        embeddings.layer_norm.bias.fill_(1.0)
    return embeddings


def factors(embeddings: SharedEmbeddings, rows: torch.Tensor, seed: int = 7, step: int = 5) -> torch.Tensor:
    """The factors of dropout on the embeddings of some rows of 64 tokens."""
    ids = torch.full((len(rows), 64), 9)
    keys = DropoutKeys(seed, step, rows, "reference")
    zeros = torch.zeros_like(ids)
    return embeddings(ids, RowLayout(zeros, zeros, zeros, is_real_BS=ids > 0), keys).detach()


def test_embeddings_drop_by_row_and_not_by_batch(make_config: Callable[..., Any]) -> None:
    """However the rows are split and ordered, each row drops the same elements; so do all ranks."""
    embeddings = embeddings_of_ones(make_config)
    rows = torch.arange(40, 52)
    whole = factors(embeddings, rows)
    for sizes in ([12], [1] * 12, [5, 7], [3, 3, 6]):
        torch.manual_seed(len(sizes))  # torch's generator has no influence
        assert torch.equal(torch.cat([factors(embeddings, part) for part in rows.split(sizes)]), whole)
    assert torch.equal(factors(embeddings, rows.flip(0)), whole.flip(0))
    assert len(torch.unique(whole.flatten(1), dim=0)) == len(rows)


def test_embeddings_keep_the_right_share_and_differ_between_towers_and_steps(make_config: Callable[..., Any]) -> None:
    embeddings = embeddings_of_ones(make_config)
    rows = torch.arange(64)
    first = factors(embeddings, rows)
    assert set(first.unique().tolist()) == {0.0, torch.tensor(1 / (1 - DROP)).item()}
    deviation = (DROP * (1 - DROP) / first.numel()) ** 0.5
    assert abs((first == 0).double().mean().item() - DROP) < 5 * deviation
    for other in (factors(embeddings, rows, seed=8), factors(embeddings, rows, step=6)):
        both_dropped = ((first == 0) & (other == 0)).double().mean().item()
        assert abs(both_dropped - DROP**2) < 5 * (DROP**2 / first.numel()) ** 0.5  # as if they were independent


def test_a_training_step_on_a_cpu_draws_nothing_from_torchs_generator_and_rows_do_not_depend_on_the_split(
    make_config: Callable[..., Any],
) -> None:
    model = make_config(32, 32, 16, hidden_dropout=DROP, attention_dropout=DROP)
    module = build_objective(model, ObjectiveConfig(), SPECIAL, 3).train()
    ids = torch.randint(5, model.vocab_size, (6, 32), generator=torch.Generator().manual_seed(1))
    ids[:, 0] = SPECIAL.cls
    rows = torch.arange(6) + 90
    before = torch.get_rng_state()

    def logits(chosen: slice) -> torch.Tensor:
        out = module(StepInput(ids[chosen], rows[chosen], 5, 7, 1.0, 1.0))
        out.loss.backward()
        return out.rtd_logit_BS

    whole = logits(slice(0, 6))
    split = torch.cat([logits(slice(0, 1)), logits(slice(1, 3)), logits(slice(3, 6))])
    torch.testing.assert_close(split, whole, rtol=1e-5, atol=1e-5)
    assert torch.equal(torch.get_rng_state(), before)


def tower_states(model: ModelConfig) -> dict[str, torch.Tensor]:
    """Return the states of both towers in training on the same rows, which no generator has changed."""
    module = build_objective(model, ObjectiveConfig(), SPECIAL, 3).train()
    ids = torch.randint(5, model.vocab_size, (4, 32), generator=torch.Generator().manual_seed(1))
    ids[:, 0] = SPECIAL.cls
    batch = module.batch(StepInput(ids, torch.arange(4), 5, 7, 1.0, 1.0))
    assert isinstance(module, CorruptingObjective)
    return {
        "generator": module.generator_states(batch, module.mask(batch)),
        "discriminator": module.read(batch, ids),
    }


@pytest.mark.parametrize("architecture", ["bert", "modern"])
@pytest.mark.parametrize("sharing", ["none", "gdes", "embeddings"])
def test_dropout_of_the_generator_alone_is_that_of_a_run_in_which_both_towers_have_it(
    make_config: Callable[..., Any], architecture: str, sharing: str
) -> None:
    shapes = make_config(32, 32, 16).model_copy(update={"architecture": architecture, "sharing": sharing})

    def states(dropout: float, of_generator: float | None = None) -> dict[str, torch.Tensor]:
        update = {"hidden_dropout": dropout, "attention_dropout": dropout, "generator_dropout": of_generator}
        return tower_states(shapes.model_copy(update=update))

    without, with_it = states(0.0), states(DROP)
    for dropout, of_generator, alike in ((0.0, DROP, with_it), (DROP, 0.0, without)):
        own = states(dropout, of_generator)
        other = with_it if alike is without else without
        assert torch.equal(own["discriminator"], other["discriminator"])
        # Tables that both towers read have the dropout of the discriminator.
        assert torch.equal(own["generator"], alike["generator"]) == (sharing != "embeddings")
        assert not torch.equal(own["generator"], other["generator"])
