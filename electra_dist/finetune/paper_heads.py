"""Define the heads of google-research/electra, which reproduce the paper's tables; transformers has no such classes.

- Texts: dropout and one linear layer on the state of [CLS] or, with `pooling: mean`, which the reference lacks, on the
  mean of all states.
- SQuAD: three outputs. Start logits: Dense(H -> 1) over all states. End logits: Dense(2H -> W), GELU, Dense(W -> 1)
  over [state of the start ; state of the token]. The start is the true one in training, and each of the K most
  probable ones (the beam) in prediction. Both are lowered by 1000 at positions outside the passage, so that these have
  probability 0, except at [CLS], the target of both start and end in a window without the answer. No-answer logit:
  Dense(2H -> W), GELU, Dense(W -> 1) over [state of CLS ; mean of the states weighted by softmax(start logits)]. It is
  positive for "no answer".

The loss of SQuAD is (start + end) / 2 + answerable_weight * answerability: cross-entropies of start and end, and the
binary cross-entropy of the no-answer logit. Losses and scores are fp32 whatever the precision of the states.

Source: google-research/electra, finetune/classification/classification_tasks.py and finetune/qa/qa_tasks.py.

Shapes: B rows, S tokens, H hidden width, N labels, K beam, W span_width (512 by default).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from typing_extensions import override

from electra_dist.finetune.finetune_config import FinetuneConfig
from electra_dist.finetune.models import OUTSIDE, AnswerModel, Network, SpanScores, init_head, mean_state
from electra_dist.model.encoder import DropoutKeys
from electra_dist.pretrained.encoder import Pretrained


class PaperNetwork(Network):
    """Encoder of this project with a head as in the ELECTRA paper."""

    encoder_prefix = "backbone."

    def __init__(self, encoder: Pretrained, head: nn.Module, settings: FinetuneConfig) -> None:
        """Copy the weights of `encoder`; use the module `head` itself."""
        super().__init__()
        self.backbone = encoder.backbone(settings.hidden_dropout, settings.attention_dropout)
        self.head = head


class PaperClassifier(PaperNetwork):
    """Encoder with one linear layer on the state of [CLS] or, with `pooling: mean`, on the mean of all states."""

    def __init__(self, encoder: Pretrained, num_outputs: int, settings: FinetuneConfig, seed: int) -> None:
        """Copy the weights of `encoder`; draw the weights of the head with `seed`."""
        head = nn.Sequential(nn.Dropout(settings.head_dropout), nn.Linear(encoder.tower.hidden_size, num_outputs))
        init_head(head.named_parameters(), seed)
        super().__init__(encoder, head, settings)
        self.takes_mean = settings.pooling == "mean"
        self.pad = encoder.special.pad

    def forward(self, ids_BS: torch.Tensor, dropout_keys: DropoutKeys | None = None) -> torch.Tensor:
        """Return the logits of each row, [B, N], or the numbers [B, 1] that a regression predicts."""
        state_BSH = self.backbone(ids_BS, dropout_keys)
        pooled_BH = mean_state(state_BSH, ids_BS != self.pad) if self.takes_mean else state_BSH[:, 0]
        logit_BN: torch.Tensor = self.head(pooled_BH)
        return logit_BN


class SpanHead(nn.Module):
    """SQuAD head: logits of the answer's start, of its end given the start, and of "no answer"."""

    def __init__(self, width: int, settings: FinetuneConfig, seed: int) -> None:
        """Build the head for states of size `width`, with initial weights from `seed`."""
        super().__init__()
        self.beam = settings.beam
        self.start = nn.Linear(width, 1)
        self.end_hidden = nn.Linear(2 * width, settings.span_width)
        self.end = nn.Linear(settings.span_width, 1)
        self.answer_hidden = nn.Linear(2 * width, settings.span_width)
        self.answer = nn.Linear(settings.span_width, 1)
        init_head(self.named_parameters(), seed)

    def start_logits(self, state_BSH: torch.Tensor, allowed_BS: torch.Tensor) -> torch.Tensor:
        """Return the logits of the answer's start at each token, fp32 [B, S], less 1000 at forbidden tokens."""
        logit_BS = self.start(state_BSH).squeeze(-1).float()
        return logit_BS + OUTSIDE * ~allowed_BS

    def end_logits(self, state_BSH: torch.Tensor, allowed_BS: torch.Tensor, start_BK: torch.Tensor) -> torch.Tensor:
        """Return the logits of the answer's end at each token, given each of K start positions, fp32 [B, K, S]."""
        hidden_size = state_BSH.shape[-1]
        start_index_BKH = start_BK[..., None].expand(-1, -1, hidden_size)
        start_state_BKH = state_BSH.gather(1, start_index_BKH)
        # The first Dense is split into a half for the start and a half for the token, so that the product with a
        # token's state is computed once instead of once per start.
        start_weight_WH, token_weight_WH = self.end_hidden.weight.split(hidden_size, dim=1)
        start_part_BKW = F.linear(start_state_BKH, start_weight_WH, self.end_hidden.bias)
        token_part_BSW = F.linear(state_BSH, token_weight_WH)
        # The starts are processed one by one: [B, K, S, W] at once would be the largest tensor of the whole model.
        logits_per_start = []
        for k in range(start_BK.shape[1]):
            hidden_BSW = F.gelu(start_part_BKW[:, k, None] + token_part_BSW)
            logits_per_start.append(self.end(hidden_BSW))  # [B, S, 1]
        logit_BKS = torch.stack(logits_per_start, dim=1).squeeze(-1).float()
        return logit_BKS + OUTSIDE * ~allowed_BS[:, None]

    def no_answer_logit(self, state_BSH: torch.Tensor, start_logit_BS: torch.Tensor) -> torch.Tensor:
        """Return the logit of "no answer" for each row, fp32 [B]; positive if the row seems to have no answer."""
        start_prob_BS = start_logit_BS.softmax(-1).to(state_BSH.dtype)
        expected_start_BH = torch.einsum("bs,bsh->bh", start_prob_BS, state_BSH)
        cls_state_BH = state_BSH[:, 0]
        features = torch.cat([cls_state_BH, expected_start_BH], -1)  # [B, 2H]
        hidden_BW = F.gelu(self.answer_hidden(features))  # W is `span_width`
        return self.answer(hidden_BW).squeeze(-1).float()

    def search(self, state_BSH: torch.Tensor, allowed_BS: torch.Tensor) -> SpanScores:
        """Return the K best starts of each row, and for each start the K best ends.

        K is the setting `beam`, but at most the row's length S. An end may lie before its start, or outside the
        passage; `best_spans` rejects such candidates.
        """
        num_tokens = state_BSH.shape[1]
        beam = min(self.beam, num_tokens)
        start_logit_BS = self.start_logits(state_BSH, allowed_BS)
        start_logp_BK, start_BK = start_logit_BS.log_softmax(-1).topk(beam)
        # The end is predicted given the start, so each of the K starts has K best ends of its own.
        end_logit_BKS = self.end_logits(state_BSH, allowed_BS, start_BK)
        end_logp_BKK, end_BKK = end_logit_BKS.log_softmax(-1).topk(beam)
        return SpanScores(
            start_logp_BK=start_logp_BK,
            start_BK=start_BK,
            end_logp_BKK=end_logp_BKK,
            end_BKK=end_BKK,
            no_answer_B=self.no_answer_logit(state_BSH, start_logit_BS),
        )


class PaperSpanModel(AnswerModel):
    """SQuAD model of google-research/electra: an encoder with a `SpanHead`."""

    network: PaperNetwork

    def __init__(self, encoder: Pretrained, settings: FinetuneConfig, seed: int) -> None:
        """Copy the weights of `encoder`; draw the weights of the head with `seed`."""
        head = SpanHead(encoder.tower.hidden_size, settings, seed)
        super().__init__(PaperNetwork(encoder, head, settings), encoder.special, settings.beam)
        self.answerable_weight = settings.answerable_weight

    @property
    def spans(self) -> SpanHead:
        """Return the head."""
        assert isinstance(self.network.head, SpanHead)
        return self.network.head

    @override
    def forward(self, ids_BS: torch.Tensor, target_B3: torch.Tensor, dropout_keys: DropoutKeys) -> torch.Tensor:
        start_B, end_B, impossible_B = target_B3.unbind(1)
        state_BSH = self.network.backbone(ids_BS, dropout_keys)
        allowed_BS = self.allowed(ids_BS)
        start_logit_BS = self.spans.start_logits(state_BSH, allowed_BS)
        # In training, the end is predicted given the true start: a beam of one.
        true_start_B1 = start_B[:, None]
        end_logit_BS = self.spans.end_logits(state_BSH, allowed_BS, true_start_B1)[:, 0]
        no_answer_logit_B = self.spans.no_answer_logit(state_BSH, start_logit_BS)
        start_loss = F.cross_entropy(start_logit_BS, start_B)
        end_loss = F.cross_entropy(end_logit_BS, end_B)
        span_loss = (start_loss + end_loss) / 2
        answerable_loss = F.binary_cross_entropy_with_logits(no_answer_logit_B, impossible_B.float())
        return span_loss + self.answerable_weight * answerable_loss

    @override
    def search(self, ids_BS: torch.Tensor) -> SpanScores:
        state_BSH = self.network.backbone(ids_BS)
        return self.spans.search(state_BSH, self.allowed(ids_BS))
