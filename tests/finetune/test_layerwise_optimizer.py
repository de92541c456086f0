"""The learning rate of every parameter, and the schedule."""

from __future__ import annotations

import pytest

from electra_dist.finetune.finetune_config import FinetuneConfig
from electra_dist.finetune.layerwise_optimizer import layerwise_adamw, schedule, set_step
from electra_dist.finetune.task_heads import Classifier
from electra_dist.pretrained.load_encoder import Pretrained


@pytest.mark.parametrize(
    ("quirk", "expected"),
    # Two layers; by exponent of 0.5: embeddings, layer 0, layer 1, head.
    [(True, {"embeddings": 4, "layer 0": 3, "layer 1": 2, "head": 0}),
     (False, {"embeddings": 3, "layer 0": 2, "layer 1": 1, "head": 0})],
)  # fmt: skip
def test_every_parameter_has_the_rate_of_its_depth(encoder: Pretrained, quirk: bool, expected: dict[str, int]) -> None:
    settings = FinetuneConfig(lr=0.01, layer_decay=0.5, lr_decay_quirk=quirk, weight_decay=0.1)
    model = Classifier(encoder.backbone(), 32, 2, settings, seed=0)
    optimizer = layerwise_adamw(model, 2, settings)
    group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    assert len(group_of) == len(list(model.parameters()))
    set_step(optimizer, 0.25)
    for name, parameter in model.named_parameters():
        place = "head"
        if name.startswith("backbone."):
            place = "embeddings"  # and their projection
            if ".layers." in name:
                place = f"layer {name.split('.layers.')[1][0]}"
        group = group_of[id(parameter)]
        assert group["peak_lr"] == pytest.approx(0.01 * 0.5 ** expected[place], rel=1e-12), name
        assert group["lr"] == pytest.approx(0.25 * group["peak_lr"], rel=1e-12)
        plain = name.endswith("bias") or "norm" in name
        assert group["weight_decay"] == (0.0 if plain else 0.1), name


def test_warm_up_and_decay_overlap_and_start_at_zero() -> None:
    settings = FinetuneConfig(warmup_fraction=0.1)
    factors = [schedule(step, 100, settings) for step in range(100)]
    assert factors[0] == 0.0
    assert factors[5] == pytest.approx(0.5 * 0.95)
    assert max(factors) == factors[10] == pytest.approx(0.9)
    assert factors[99] == pytest.approx(0.01)
    assert schedule(0, 100, FinetuneConfig(warmup_fraction=0.0)) == 1.0
