"""Joint ELECTRA step built from Hugging Face's modules: the rival of our step on a CPU and on a GPU.

ElectraForMaskedLM and ElectraForPreTraining share their embeddings and start from our weights. The masks are computed
by our code, so both sides learn from the same slots. Samples are drawn by Gumbel-max over the generator's logits, as
Google's code does. The losses are cross-entropy over the slots and binary cross-entropy over all real tokens. The
generator is used in one of two ways:

    as published   its module computes logits at every position, and the slots are taken from these
    gathered       the slots are taken from its encoder's states, and only they go through its head, as a user would
                   write it who looks for speed

Shapes: B rows, S tokens, N slots (masked positions) per row, M = B * N, V entries of the vocabulary, H hidden width.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
import transformers
from electra_kernels.operation_types import SpecialIds

from electra_dist.config import ObjectiveConfig
from electra_dist.model.attention import RowLayout, attention_bias, derive
from electra_dist.model.towers import ElectraTowers
from electra_dist.objectives.masking import Masking, mask_rows
from electra_dist.pretrained.hf import to_hf
from electra_dist.pretrained.hf_settings import hf_config


class HuggingFace(torch.nn.Module):
    """Hugging Face's generator and discriminator with shared embeddings; calling it computes both ELECTRA losses."""

    def __init__(
        self,
        towers: ElectraTowers,
        objective: ObjectiveConfig,
        special: SpecialIds,
        *,
        gathered: bool,
        packed: bool = False,
    ) -> None:
        """Build both modules with the weights of `towers`; `packed` says whether rows hold several examples."""
        super().__init__()
        model = towers.model
        self.objective = objective
        self.special = special
        self.gathered = gathered
        self.packed = packed
        config = functools.partial(hf_config, model, special=special, architecture="Electra")
        self.generator = transformers.ElectraForMaskedLM(transformers.ElectraConfig(**config("generator")))
        self.discriminator = transformers.ElectraForPreTraining(transformers.ElectraConfig(**config("discriminator")))
        state = towers.state_dict()
        # Not strict: the output table is tied to the embeddings and therefore absent from the state.
        self.generator.load_state_dict(to_hf(state, model, "generator"), strict=False)
        self.discriminator.load_state_dict(to_hf(state, model, "discriminator"))
        self.discriminator.base_model.embeddings = self.generator.base_model.embeddings

    def forward(
        self, ids_BS: torch.Tensor, row_B: torch.Tensor, step: int, seed: int, sampled_M: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Return the loss to minimise, the mean MLM loss over the filled slots, and the mean RTD loss over tokens.

        `row_B`, `step` and `seed` key the masks, and `sampled_M` replaces the samples.
        """
        layout = derive(ids_BS, self.special)
        masking = mask_rows(ids_BS, self.special, self.objective, seed, step, row_B)
        inputs = self._inputs(layout)
        weight_M = masking.weight_BN.flatten()
        target_BN = ids_BS.gather(1, masking.position_BN)
        logits_MV = self._slot_logits(masking, inputs).float()
        loss_M = F.cross_entropy(logits_MV, target_BN.flatten(), reduction="none")
        mlm = (loss_M * weight_M).sum() / weight_M.sum()
        if sampled_M is None:
            noise_MV = -torch.log(-torch.log(torch.rand_like(logits_MV).clamp_(1e-9, 1 - 6e-8)))
            sampled_M = (logits_MV.detach() + noise_MV).argmax(-1)
        chosen_BN = torch.where(masking.weight_BN > 0, sampled_M.view_as(target_BN), target_BN)
        # Empty slots point at position 0, which holds [CLS] and is never masked. They write its own id back.
        corrupted_BS = ids_BS.scatter(1, masking.position_BN, chosen_BN)
        logit_BS = self.discriminator(input_ids=corrupted_BS, **inputs).logits.float()
        label_BS = (corrupted_BS != ids_BS).float()
        loss_BS = F.binary_cross_entropy_with_logits(logit_BS, label_BS, reduction="none")
        rtd = (loss_BS * layout.is_real_BS).sum() / layout.is_real_BS.sum()
        return self.objective.mlm_weight * mlm + self.objective.rtd_weight * rtd, mlm, rtd

    def _inputs(self, layout: RowLayout) -> dict[str, torch.Tensor]:
        """Return the arguments of both modules in addition to the token ids."""
        if not self.packed:
            return {"token_type_ids": layout.token_type_BS, "attention_mask": layout.is_real_BS}
        # Examples of one row must not attend to each other. Attention kernels of a GPU refuse a mask of another type
        # than the queries'.
        bias = attention_bias(layout, self.generator.dtype)
        return {"token_type_ids": layout.token_type_BS, "attention_mask": bias, "position_ids": layout.position_BS}

    def _slot_logits(self, masking: Masking, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the generator's logits at the masked slots, [M, V]."""
        position_BN = masking.position_BN[:, :, None]
        if not self.gathered:
            logits_BSV = self.generator(input_ids=masking.input_BS, **inputs).logits
            return logits_BSV.gather(1, position_BN.expand(-1, -1, logits_BSV.shape[-1])).flatten(0, 1)
        hidden_BSH = self.generator.base_model(input_ids=masking.input_BS, **inputs).last_hidden_state
        hidden_MH = hidden_BSH.gather(1, position_BN.expand(-1, -1, hidden_BSH.shape[-1])).flatten(0, 1)
        return self.generator.generator_lm_head(self.generator.generator_predictions(hidden_MH))
