"""The joint step out of Hugging Face's modules: what `step.py` compares ours with.

ElectraForMaskedLM and ElectraForPreTraining share their embeddings and start from our weights. The masks are ours, so
both learn from the same slots; samples are Gumbel-max over the generator's logits, as Google's code draws them; the
losses are cross-entropy over the slots and 50 x binary cross-entropy over all real tokens; torch's AdamW (foreach)
updates. Two ways to use the generator:

    as published   ElectraForMaskedLM is called: logits at every position, of which the slots are taken
    gathered       its encoder is called, the slots are taken, then its head: what a careful user writes

Shapes: B rows, S tokens, N slots a row, M = B * N, V tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from transformers import ElectraConfig, ElectraForMaskedLM, ElectraForPreTraining

from electra_dist.config import ModelConfig, ObjectiveConfig
from electra_dist.model.rows import SpecialIds, attention_bias, derive
from electra_dist.model.towers import ElectraTowers
from electra_dist.objectives.masking import Masking, mask_rows
from electra_dist.pretrained.hf import to_hf_discriminator, to_hf_generator


class Losses(NamedTuple):
    """Of one forward: the mean over the slots, and over the real tokens."""

    mlm: torch.Tensor
    rtd: torch.Tensor


class HuggingFace(torch.nn.Module):
    """Both modules and the objective between them; its forward is one joint forward."""

    def __init__(
        self, towers: ElectraTowers, objective: ObjectiveConfig, special: SpecialIds, *, gathered: bool
    ) -> None:
        """Modules with the weights of `towers`."""
        super().__init__()
        model = towers.model
        self.objective, self.special, self.gathered = objective, special, gathered
        self.generator = ElectraForMaskedLM(_config(model, "generator", special))
        self.discriminator = ElectraForPreTraining(_config(model, "discriminator", special))
        state = towers.state_dict()
        self.generator.load_state_dict(to_hf_generator(state, model), strict=False)  # its output table is tied
        self.discriminator.load_state_dict(to_hf_discriminator(state, model))
        self.discriminator.electra.embeddings = self.generator.electra.embeddings

    def forward(
        self, ids_BS: torch.Tensor, row_B: torch.Tensor, step: int, seed: int, sampled_M: torch.Tensor | None = None
    ) -> Losses:
        """The losses; `sampled_M` replaces the samples where both sides shall read the same text."""
        layout = derive(ids_BS, self.special)
        masking = mask_rows(ids_BS, self.special, self.objective, seed, step, row_B)
        inputs = {"token_type_ids": layout.token_type_BS, "attention_mask": layout.is_real_BS}
        if layout.example_BS.max() > 0:  # packed rows: no attention across examples
            inputs |= {"attention_mask": attention_bias(layout, torch.float32), "position_ids": layout.position_BS}
        weight_M = masking.weight_BN.flatten()
        target_BN = ids_BS.gather(1, masking.position_BN)
        logits_MV = self._slot_logits(masking, inputs).float()
        loss_M = F.cross_entropy(logits_MV, target_BN.flatten(), reduction="none")
        mlm = (loss_M * weight_M).sum() / weight_M.sum()
        if sampled_M is None:
            noise_MV = -torch.log(-torch.log(torch.rand_like(logits_MV).clamp_(1e-9, 1 - 6e-8)))
            sampled_M = (logits_MV.detach() + noise_MV).argmax(-1)
        chosen_BN = torch.where(masking.weight_BN > 0, sampled_M.view_as(target_BN), target_BN)
        # Empty slots point at position 0, a [CLS], which is never masked.
        corrupted_BS = ids_BS.scatter(1, masking.position_BN, chosen_BN)
        logit_BS = self.discriminator(input_ids=corrupted_BS, **inputs).logits.float()
        label_BS = (corrupted_BS != ids_BS).float()
        loss_BS = F.binary_cross_entropy_with_logits(logit_BS, label_BS, reduction="none")
        rtd = (loss_BS * layout.is_real_BS).sum() / layout.is_real_BS.sum()
        return Losses(mlm, rtd)

    def _slot_logits(self, masking: Masking, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """[M, V]."""
        position_BN = masking.position_BN[:, :, None]
        if not self.gathered:
            logits_BSV = self.generator(input_ids=masking.input_BS, **inputs).logits
            return logits_BSV.gather(1, position_BN.expand(-1, -1, logits_BSV.shape[-1])).flatten(0, 1)
        hidden_BSH = self.generator.electra(input_ids=masking.input_BS, **inputs).last_hidden_state
        hidden_MH = hidden_BSH.gather(1, position_BN.expand(-1, -1, hidden_BSH.shape[-1])).flatten(0, 1)
        return self.generator.generator_lm_head(self.generator.generator_predictions(hidden_MH))


def _config(model: ModelConfig, tower: str, special: SpecialIds) -> ElectraConfig:
    shape = getattr(model, tower)
    return ElectraConfig(
        vocab_size=model.vocab_size,
        embedding_size=model.embedding_size,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        intermediate_size=shape.intermediate_size,
        max_position_embeddings=model.max_positions,
        hidden_dropout_prob=model.hidden_dropout,
        attention_probs_dropout_prob=model.attention_dropout,
        layer_norm_eps=model.layer_norm_eps,
        pad_token_id=special.pad,
    )
