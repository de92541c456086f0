"""Fine-tuning's optimizer: the learning rate of every parameter, and the schedule."""

from __future__ import annotations

import re

import pytest

from electra_dist.finetune.finetune_config import FinetuneConfig
from electra_dist.finetune.models import Classifier, Network, StockNetwork
from electra_dist.finetune.paper_heads import PaperClassifier
from electra_dist.finetune.training_loop import layerwise_adamw, schedule, set_step
from electra_dist.pretrained.encoder import Pretrained


def part_of(parameter_name: str) -> str:
    """Return the part of the model to which a parameter belongs: `embeddings`, `layer 0`, ... or `head`."""
    if not parameter_name.startswith(("network.backbone.", "network.model.electra.")):
        return "head"
    layer = re.search(r"\.layers?\.(\d)\.", parameter_name)
    if layer:
        return f"layer {layer[1]}"
    return "embeddings"  # and their projection


@pytest.mark.parametrize("head", ["transformers", "paper"])
@pytest.mark.parametrize(
    ("quirk", "depths"),
    # Depth: how often the learning rate of a part of a model with two layers is multiplied by layer_decay. With
    # the reference's quirk all parts below the head are one deeper.
    [(True, {"embeddings": 4, "layer 0": 3, "layer 1": 2, "head": 0}),
     (False, {"embeddings": 3, "layer 0": 2, "layer 1": 1, "head": 0})],
)  # fmt: skip
def test_every_parameter_has_the_learning_rate_of_its_depth_and_biases_and_norms_no_weight_decay(
    encoder: Pretrained, quirk: bool, depths: dict[str, int], head: str
) -> None:
    settings = FinetuneConfig(lr=0.01, layer_decay=0.5, lr_decay_quirk=quirk, weight_decay=0.1)
    network: Network = PaperClassifier(encoder, 2, settings, seed=0)
    if head == "transformers":
        network = StockNetwork(encoder, "SequenceClassification", {}, settings, seed=0)
    model = Classifier(network, encoder.special)

    optimizer = layerwise_adamw(model, 2, settings)
    set_step(optimizer, 0.25)

    group_of = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    assert len(group_of) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        group = group_of[id(parameter)]
        assert group["peak_lr"] == pytest.approx(0.01 * 0.5 ** depths[part_of(name)], rel=1e-12), name
        assert group["lr"] == pytest.approx(0.25 * group["peak_lr"], rel=1e-12)
        is_bias_or_norm = name.endswith("bias") or "norm" in name.lower()
        expected_weight_decay = 0.0 if is_bias_or_norm else 0.1
        assert group["weight_decay"] == expected_weight_decay, name


def test_the_schedule_is_the_product_of_warm_up_and_linear_decay_and_starts_at_zero() -> None:
    """The decay runs from the first step on, also during warm-up, so the peak of 100 steps is 0.9 at step 10."""
    settings = FinetuneConfig(warmup_fraction=0.1)

    factors = [schedule(step, 100, settings) for step in range(100)]

    assert factors[0] == 0.0
    assert factors[5] == pytest.approx(0.5 * 0.95)
    assert max(factors) == factors[10]
    assert factors[10] == pytest.approx(0.9)
    assert factors[99] == pytest.approx(0.01)
    assert schedule(0, 100, FinetuneConfig(warmup_fraction=0.0)) == 1.0
