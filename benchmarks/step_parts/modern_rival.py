"""Joint ELECTRA step built from Hugging Face's ModernBERT modules, with which `step_modern.py` compares our step.

It is the step of `rival.py` with ModernBertForMaskedLM as generator and ModernBertForTokenClassification as
discriminator.

Limits: each row must hold one example, because these modules take no mask between the examples of a row.

Shapes: M masked slots, V entries of the vocabulary, H hidden width.
"""

from __future__ import annotations

import torch
from step_parts.rival import HuggingFace
from transformers import ModernBertConfig, ModernBertForMaskedLM, ModernBertForTokenClassification

from electra_dist.config import ObjectiveConfig
from electra_dist.model.row_layout import RowLayout, SpecialIds
from electra_dist.model.towers import ElectraTowers
from electra_dist.pretrained.hf_conversion import to_hf_discriminator, to_hf_generator
from electra_dist.pretrained.hf_modernbert import hf_config


class ModernHuggingFace(HuggingFace):
    """Hugging Face's ModernBERT as generator and discriminator, with shared embeddings.

    Calling it computes both ELECTRA losses, see `HuggingFace`.
    """

    def __init__(
        self, towers: ElectraTowers, objective: ObjectiveConfig, special: SpecialIds, *, gathered: bool
    ) -> None:
        """Build both modules, and copy the weights of `towers` into them.

        Args:
            towers: our model of the architecture `modern`, whose weights are copied.
            objective: share and kind of masking.
            special: ids of the special tokens.
            gathered: whether the generator's head is computed at the masked slots only.
        """
        torch.nn.Module.__init__(self)
        self.objective = objective
        self.special = special
        self.gathered = gathered
        self.packed = False
        model = towers.model
        generator_config = hf_config(model, "generator", special, "ModernBertForMaskedLM")
        discriminator_config = hf_config(model, "discriminator", special, "ModernBertForTokenClassification")
        self.generator = ModernBertForMaskedLM(ModernBertConfig(**generator_config))
        self.discriminator = ModernBertForTokenClassification(ModernBertConfig(**discriminator_config, num_labels=1))
        state = towers.state_dict()
        # Not strict: the output table is tied to the embeddings and therefore absent from the state.
        self.generator.load_state_dict(to_hf_generator(state, model), strict=False)
        self.discriminator.load_state_dict(to_hf_discriminator(state, model))
        self.discriminator.model.embeddings = self.generator.model.embeddings

    def inputs(self, layout: RowLayout) -> dict[str, torch.Tensor]:
        """Return the arguments of both modules in addition to the token ids: the mask of the real tokens.

        ModernBERT has no token types.
        """
        return {"attention_mask": layout.is_real_BS}

    def head(self, hidden_MH: torch.Tensor) -> torch.Tensor:
        """Return the generator's logits over the vocabulary, [M, V], for its last hidden states [M, H]."""
        return self.generator.decoder(self.generator.head(hidden_MH))
