"""Small models of the architecture `modern`, and Hugging Face's ModernBERT with the same weights."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from electra_kernels.operation_types import SpecialIds
from transformers import ModernBertConfig, ModernBertForMaskedLM, ModernBertForTokenClassification

from electra_dist.config import ModelConfig, TowerConfig
from electra_dist.model.attention import derive, new_attention_mask
from electra_dist.model.encoder import DropoutKeys
from electra_dist.model.towers import ElectraTowers
from electra_dist.pretrained.hf import to_hf

VOCAB_SIZE = 300
SPECIAL = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)


def modern_model(
    width: int = 32, heads: int = 2, layers: int = 4, generator_layers: int = 2, **fields: Any
) -> ModelConfig:
    """Return a model config of the architecture `modern` whose generator is as wide as the discriminator."""

    def tower(num_layers: int) -> TowerConfig:
        return TowerConfig(
            hidden_size=width, num_layers=num_layers, num_heads=heads, intermediate_size=width + width // 2
        )

    defaults: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "max_positions": 512, "local_window": 16}
    return ModelConfig(
        architecture="modern",
        embedding_size=width,
        **{"discriminator": tower(layers), "generator": tower(generator_layers), **defaults, **fields},
    )


def random_towers(model: ModelConfig) -> ElectraTowers:
    """Return towers in evaluation mode with random parameters, so that no bias is 0 and no LayerNorm weight is 1."""
    torch.manual_seed(0)
    towers = ElectraTowers(model).eval()
    with torch.no_grad():
        for name, parameter in towers.named_parameters():
            is_norm_weight = "norm" in name
            parameter.copy_(torch.randn(parameter.shape) * 0.1 + (1.0 if is_norm_weight else 0.0))
        for module in towers.modules():
            if isinstance(module, torch.nn.Embedding):
                module.weight[model.vocab_size :] = 0.0  # rows that pad the table
    return towers


class Logits(NamedTuple):
    """Logits that the two towers compute for the same rows.

    `tokens` is [B, S, V], from the generator; `replaced` is [B, S], from the discriminator.
    """

    tokens: torch.Tensor
    replaced: torch.Tensor


@torch.no_grad()
def our_logits(towers: ElectraTowers, ids_BS: torch.Tensor) -> Logits:
    """Return the logits that the two towers compute for the same rows, at every position."""
    model = towers.model
    layout = derive(ids_BS, SPECIAL)
    mask = new_attention_mask(model, layout, torch.float32)
    keys = DropoutKeys.off(ids_BS)
    embedded = towers.embeddings(ids_BS, layout)
    head = towers.generator_head
    features = head.transform(towers.generator(embedded, mask, keys))
    tokens = features @ towers.embeddings.word.weight[: model.vocab_size].T + head.bias
    states = towers.discriminator(
        getattr(towers, "discriminator_embeddings", towers.embeddings)(ids_BS, layout), mask, keys
    )
    return Logits(tokens=tokens, replaced=towers.discriminator_head.logits(states))


def hugging_face_config(model: ModelConfig, tower: TowerConfig, **fields: Any) -> ModernBertConfig:
    """Return Hugging Face's config of one tower, written out here and not by the exporter that is under test."""
    return ModernBertConfig(
        vocab_size=model.vocab_size,
        hidden_size=tower.hidden_size,
        intermediate_size=tower.intermediate_size,
        num_hidden_layers=tower.num_layers,
        num_attention_heads=tower.num_heads,
        max_position_embeddings=model.max_positions,
        layer_types=[
            "sliding_attention" if layer % model.global_every else "full_attention"
            for layer in range(tower.num_layers)
        ],
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": model.global_rope_theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": model.local_rope_theta},
        },
        local_attention=model.local_window,
        norm_eps=model.layer_norm_eps,
        pad_token_id=SPECIAL.pad,
        attn_implementation="eager",
        **fields,
    )


def hugging_face_twins(towers: ElectraTowers) -> tuple[ModernBertForMaskedLM, ModernBertForTokenClassification]:
    """Return Hugging Face's generator and discriminator with the weights of `towers`, in evaluation mode."""
    model = towers.model
    generator = ModernBertForMaskedLM(hugging_face_config(model, model.generator)).eval()
    missing = generator.load_state_dict(to_hf(towers.state_dict(), model, "generator"), strict=False)
    assert not missing.unexpected_keys and set(missing.missing_keys) <= {"decoder.weight"}  # tied
    discriminator = ModernBertForTokenClassification(
        hugging_face_config(model, model.discriminator, num_labels=1)
    ).eval()
    discriminator.load_state_dict(to_hf(towers.state_dict(), model, "discriminator"), strict=True)
    return generator, discriminator
