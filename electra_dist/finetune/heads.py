"""The reference's heads on an encoder, with their losses.

Classification and regression: state of [CLS], dropout, Dense(H -> n); `dense` puts Dense(H -> H), GELU and dropout in
between, as Hugging Face does. Cross-entropy, or squared error with labels scaled to [0, 1].

SQuAD: start = Dense(H -> 1) over all states, the positions outside the passage lowered by 1000 ([CLS] stays: where
there is no answer in a window, both point at it); end = Dense(2H -> 512), GELU, Dense(512 -> 1) over [state of the
start ; state of the token], the start being the true one in training and each of the beam's in prediction;
answerability = Dense(2H -> 512), GELU, Dense(512 -> 1) over [state of CLS ; states weighted by softmax(start)],
positive for "no answer". Loss = (start + end) / 2 + answerable_weight * BCE.

Guarantee: a head's initial weights are a function of (seed, name, shape): Glorot-uniform, TF's default, biases 0.
Losses and scores are fp32 whatever the precision of the states.

Source: google-research/electra, finetune/classification/classification_tasks.py and finetune/qa/qa_tasks.py.

Cost of the beam: Dense(2H -> 512) is split into its two halves, so a token's half is computed once, not once a start.

Shapes: B rows, S tokens, H hidden width, K beam, W span_width, N labels.
"""

from __future__ import annotations

import math
import zlib
from typing import NamedTuple

import torch
import torch.nn.functional as F
from electra_kernels.keyed_random import Purpose, derive_seed
from torch import nn

from electra_dist.finetune.config import FinetuneConfig
from electra_dist.model.encoder import Noise
from electra_dist.model.rows import derive
from electra_dist.pretrained.encoder import Backbone

OUTSIDE = -1000.0  # added to the logits of positions that cannot be an answer


class TaskModel(nn.Module):
    """An encoder and a head; `forward` gives the mean loss of a batch."""

    def __init__(self, backbone: Backbone, head: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    def forward(self, ids_BS: torch.Tensor, target_BK: torch.Tensor, noise: Noise) -> torch.Tensor:
        """The batch's mean loss; `target_BK` is int64, or fp32 where numbers are predicted."""
        raise NotImplementedError


class Classifier(TaskModel):
    """Labels, or with one output a number."""

    def __init__(self, backbone: Backbone, width: int, num_outputs: int, settings: FinetuneConfig, seed: int) -> None:
        layers: list[nn.Module] = [nn.Dropout(settings.head_dropout)]
        if settings.head == "dense":
            layers += [nn.Linear(width, width), nn.GELU(), nn.Dropout(settings.head_dropout)]
        super().__init__(backbone, nn.Sequential(*layers, nn.Linear(width, num_outputs)))
        init_head(self.head, seed)

    def predict(self, ids_BS: torch.Tensor, noise: Noise | None = None) -> torch.Tensor:
        """[B, N] fp32 logits, or [B, 1] numbers."""
        return self.head(self.backbone(ids_BS, noise)[:, 0]).float()

    def forward(self, ids_BS: torch.Tensor, target_BK: torch.Tensor, noise: Noise) -> torch.Tensor:
        """Mean cross-entropy of [B, 1] label numbers, or mean squared error of [B, 1] numbers in [0, 1]."""
        output_BN = self.predict(ids_BS, noise)
        if output_BN.shape[1] == 1:
            return F.mse_loss(output_BN, target_BK.float())
        return F.cross_entropy(output_BN, target_BK[:, 0].long())


class SpanScores(NamedTuple):
    """The beam of each row, best first, as natural logarithms of probabilities."""

    start_logp_BK: torch.Tensor
    start_BK: torch.Tensor  # int64 positions
    end_logp_BKK: torch.Tensor  # given the start of the same row
    end_BKK: torch.Tensor
    no_answer_B: torch.Tensor  # logit


class SpanHead(nn.Module):
    """Joint start and end, and answerability."""

    def __init__(self, width: int, settings: FinetuneConfig, seed: int) -> None:
        super().__init__()
        self.beam = settings.beam
        self.start = nn.Linear(width, 1)
        self.end_hidden = nn.Linear(2 * width, settings.span_width)
        self.end = nn.Linear(settings.span_width, 1)
        self.answer_hidden = nn.Linear(2 * width, settings.span_width)
        self.answer = nn.Linear(settings.span_width, 1)
        init_head(self, seed)

    def start_logits(self, state_BSH: torch.Tensor, allowed_BS: torch.Tensor) -> torch.Tensor:
        """[B, S] fp32."""
        return self.start(state_BSH).squeeze(-1).float() + OUTSIDE * ~allowed_BS

    def end_logits(self, state_BSH: torch.Tensor, allowed_BS: torch.Tensor, start_BK: torch.Tensor) -> torch.Tensor:
        """[B, K, S] fp32: logits of the end for each of K starts."""
        H = state_BSH.shape[-1]
        chosen_BKH = state_BSH.gather(1, start_BK[..., None].expand(-1, -1, H))
        of_start, of_token = self.end_hidden.weight.split(H, dim=1)
        start_BKW = F.linear(chosen_BKH, of_start, self.end_hidden.bias)
        token_BSW = F.linear(state_BSH, of_token)
        # One start at a time: K * S * W numbers at once would be the largest tensor of the whole model.
        logits = [self.end(F.gelu(start_BKW[:, k, None] + token_BSW)) for k in range(start_BK.shape[1])]
        return torch.stack(logits, dim=1).squeeze(-1).float() + OUTSIDE * ~allowed_BS[:, None]

    def no_answer_logit(self, state_BSH: torch.Tensor, start_logit_BS: torch.Tensor) -> torch.Tensor:
        """[B] fp32, positive where the passage holds no answer."""
        weight_BS = start_logit_BS.softmax(-1).to(state_BSH.dtype)
        expected_BH = torch.einsum("bs,bsh->bh", weight_BS, state_BSH)
        hidden = F.gelu(self.answer_hidden(torch.cat([state_BSH[:, 0], expected_BH], -1)))
        return self.answer(hidden).squeeze(-1).float()

    def search(self, state_BSH: torch.Tensor, allowed_BS: torch.Tensor) -> SpanScores:
        """The best `beam` starts, and for each the best `beam` ends."""
        beam = min(self.beam, state_BSH.shape[1])
        start_logit_BS = self.start_logits(state_BSH, allowed_BS)
        start_logp, start = start_logit_BS.log_softmax(-1).topk(beam)
        end_logp, end = self.end_logits(state_BSH, allowed_BS, start).log_softmax(-1).topk(beam)
        return SpanScores(start_logp, start, end_logp, end, self.no_answer_logit(state_BSH, start_logit_BS))


class SpanModel(TaskModel):
    """Question answering. Targets are [B, 3]: start, end, 1 where the question has no answer."""

    head: SpanHead

    def __init__(self, backbone: Backbone, width: int, settings: FinetuneConfig, seed: int) -> None:
        super().__init__(backbone, SpanHead(width, settings, seed))
        self.answerable_weight = settings.answerable_weight

    def allowed(self, ids_BS: torch.Tensor) -> torch.Tensor:
        """[B, S]: the second segment (its [SEP] too, as in the reference) and [CLS]."""
        allowed_BS = derive(ids_BS, self.backbone.special).token_type_BS == 1
        allowed_BS[:, 0] = True
        return allowed_BS

    def forward(self, ids_BS: torch.Tensor, target_BK: torch.Tensor, noise: Noise) -> torch.Tensor:
        """Mean loss of start, end and answerability."""
        start_B, end_B, impossible_B = target_BK.unbind(1)
        state_BSH, allowed_BS = self.backbone(ids_BS, noise), self.allowed(ids_BS)
        start_logit_BS = self.head.start_logits(state_BSH, allowed_BS)
        end_logit_BS = self.head.end_logits(state_BSH, allowed_BS, start_B[:, None])[:, 0]
        no_answer_B = self.head.no_answer_logit(state_BSH, start_logit_BS)
        span = (F.cross_entropy(start_logit_BS, start_B) + F.cross_entropy(end_logit_BS, end_B)) / 2
        return span + self.answerable_weight * F.binary_cross_entropy_with_logits(no_answer_B, impossible_B.float())

    def search(self, ids_BS: torch.Tensor) -> SpanScores:
        """The beam of each row."""
        return self.head.search(self.backbone(ids_BS), self.allowed(ids_BS))


@torch.no_grad()
def init_head(head: nn.Module, seed: int) -> None:
    """Glorot-uniform kernels, zero biases, keyed by the seed and each parameter's name."""
    for name, parameter in head.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
            continue
        generator = torch.Generator().manual_seed(derive_seed(seed, Purpose.INIT, zlib.crc32(name.encode())))
        bound = math.sqrt(6.0 / sum(parameter.shape))
        parameter.copy_(torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator))
