"""On a GPU the layers of ELECTRA-Large call FlashAttention, in bf16 with the paper's dropout."""

from __future__ import annotations

from pathlib import Path

from support.rehearsal import build, rehearse, step_input
from support.torch_versions import needs_products_on_meta

from electra_dist.config.load import load_config

LARGE = Path(__file__).parents[2] / "configs" / "large_25pct_mask.yaml"


@needs_products_on_meta
def test_every_layer_runs_flash_attention_and_none_the_slow_kernel_with_a_mask() -> None:
    config = load_config(LARGE, ["model.discriminator.num_layers=2", "model.generator.num_layers=3"])
    assert config.model.attention_dropout == 0.1
    module = build(config)

    counts = rehearse(module, lambda: step_input(config, module, 2)).operators

    forward_counts = {name: count for name, count in counts.items() if "attention_forward" in name or "_dot_" in name}
    assert forward_counts == {"aten._flash_attention_forward.default": 5}
