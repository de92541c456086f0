"""Define a SQuAD model whose start and end do not depend on each other, as Hugging Face's models for SQuAD.

How: one Dense(H -> 2) over the states gives the logits of start and end. In a window without the answer, both targets
are [CLS], so the probability of [CLS] is that of "no answer". The loss is the mean of the two cross-entropies over all
tokens of a row without its padding. In prediction, only tokens of the passage and [CLS] take part.

The no-answer logit of a row compares [CLS] with the best span among the candidates: log p(start = CLS) + log p(end =
CLS) - log p(start) - log p(end).

Source: Devlin et al., "BERT", NAACL 2019, section 4.2 and 4.3; transformers' ElectraForQuestionAnswering.

Shapes: B rows, S tokens, H hidden width, K beam.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from electra_dist.finetune.finetune_config import FinetuneConfig
from electra_dist.finetune.squad.span_head import OUTSIDE, AnswerModel, SpanScores
from electra_dist.finetune.task_heads import init_head, on_features
from electra_dist.model.dropout_keys import DropoutKeys
from electra_dist.model.heads import ModernFeatures
from electra_dist.pretrained.encoder import Backbone


class LinearSpanModel(AnswerModel):
    """SQuAD model that `transformers` can load: an encoder with one linear layer for the answer's start and end."""

    def __init__(
        self,
        backbone: Backbone,
        width: int,
        settings: FinetuneConfig,
        seed: int,
        features: ModernFeatures | None = None,
    ) -> None:
        """Put a new head on `backbone`; `features` (see `new_features`), if given, are the head's first layers."""
        output_layer = nn.Linear(width, 2)
        init_head(output_layer, seed)
        super().__init__(backbone, on_features(features, output_layer))
        self.beam = settings.beam

    def logits(
        self, ids_BS: torch.Tensor, dropout_keys: DropoutKeys | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits of the answer's start and of its end at every token, two fp32 tensors [B, S]."""
        logit_BS2 = self.head(self.backbone(ids_BS, dropout_keys)).float()
        start_logit_BS, end_logit_BS = logit_BS2.unbind(-1)
        return start_logit_BS, end_logit_BS

    def forward(self, ids_BS: torch.Tensor, target_B3: torch.Tensor, dropout_keys: DropoutKeys) -> torch.Tensor:
        """Return the mean cross-entropy of start and end, without padding; the third target of a row is not used."""
        start_logit_BS, end_logit_BS = self.logits(ids_BS, dropout_keys)
        is_pad_BS = ids_BS == self.backbone.special.pad
        start_loss = F.cross_entropy(start_logit_BS + OUTSIDE * is_pad_BS, target_B3[:, 0])
        end_loss = F.cross_entropy(end_logit_BS + OUTSIDE * is_pad_BS, target_B3[:, 1])
        return (start_loss + end_loss) / 2

    def search(self, ids_BS: torch.Tensor) -> SpanScores:
        """Return each row's K best starts, its K best ends (the same ones for all starts), and its no-answer logit."""
        is_outside_BS = ~self.allowed(ids_BS)
        start_logit_BS, end_logit_BS = self.logits(ids_BS)
        start_logp_BS = (start_logit_BS + OUTSIDE * is_outside_BS).log_softmax(-1)
        end_logp_BS = (end_logit_BS + OUTSIDE * is_outside_BS).log_softmax(-1)
        beam = min(self.beam, ids_BS.shape[1])
        start_logp_BK, start_BK = start_logp_BS.topk(beam)
        end_logp_BK, end_BK = end_logp_BS.topk(beam)
        shape_BKK = (-1, beam, -1)
        scores = SpanScores(
            start_logp_BK=start_logp_BK,
            start_BK=start_BK,
            end_logp_BKK=end_logp_BK[:, None].expand(shape_BKK),
            end_BKK=end_BK[:, None].expand(shape_BKK),
            no_answer_B=start_logp_BS[:, 0] + end_logp_BS[:, 0],
        )
        return scores._replace(no_answer_B=scores.no_answer_B - _best_span_logp(scores))


def _best_span_logp(scores: SpanScores) -> torch.Tensor:
    """Return log p(start) + log p(end) of each row's most probable span among the candidates, fp32 [B]."""
    # A pair is no span if it starts at [CLS], which stands for "no answer", or if it ends before it starts. A row
    # without any span gets the lowest finite number, which makes its logit of "no answer" larger than any other.
    logp_BKK = scores.start_logp_BK[..., None] + scores.end_logp_BKK
    start_BK1 = scores.start_BK[..., None]
    is_span_BKK = (start_BK1 > 0) & (scores.end_BKK >= start_BK1)
    lowest = torch.finfo(logp_BKK.dtype).min
    return logp_BKK.masked_fill(~is_span_BKK, lowest).flatten(1).amax(1)
