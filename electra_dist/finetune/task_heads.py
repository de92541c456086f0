"""Defines task heads on an encoder, with their losses, as in the reference implementation.

Classification and regression: the state of [CLS], dropout, Dense(H -> N). With `head: dense`, Dense(H -> H), GELU and
dropout come in between, as in Hugging Face. The loss is cross-entropy, or the squared error of labels scaled to
[0, 1].

SQuAD has three outputs:
- start = Dense(H -> 1) over all states. Positions outside the passage are lowered by 1000, except [CLS]: in a window
  without the answer, both start and end point at [CLS].
- end = Dense(2H -> W), GELU, Dense(W -> 1) over [state of the start ; state of the token]. The start is the true one
  in training and each one of the beam in prediction.
- answerability = Dense(2H -> W), GELU, Dense(W -> 1) over [state of CLS ; mean of the states weighted by
  softmax(start)], positive for "no answer".
The loss is (start + end) / 2 + answerable_weight * BCE.

Guarantee: the initial weights of a head are a function of (seed, parameter name, shape): Glorot-uniform, as is TF's
default, with biases of 0. Losses and scores are fp32 whatever the precision of the states.

Cost: for the beam, the first Dense(2H -> W) of the end is split into its two halves, so that the half of each token is
computed once instead of once per start.

Source: google-research/electra, finetune/classification/classification_tasks.py and finetune/qa/qa_tasks.py.

Shapes: B rows, S tokens, H hidden width, K beam, W span_width (512 by default), N labels.
"""

from __future__ import annotations

import math
import zlib
from typing import NamedTuple

import torch
import torch.nn.functional as F
from electra_kernels.keyed_random import Purpose, derive_seed
from torch import nn

from electra_dist.finetune.finetune_config import FinetuneConfig
from electra_dist.model.encoder import DropoutKeys
from electra_dist.model.row_layout import derive
from electra_dist.pretrained.load_encoder import Backbone

OUTSIDE = -1000.0  # added to the start and end logits of positions that cannot be part of an answer


class TaskModel(nn.Module):
    """An encoder with a task head: the base class of the models that `fit` trains.

    Subclasses implement `forward`, which returns the loss; prediction has its own methods.
    """

    def __init__(self, backbone: Backbone, head: nn.Module) -> None:
        """Combine an encoder and a head; the model holds these modules themselves, not copies."""
        super().__init__()
        self.backbone = backbone
        self.head = head

    def forward(self, ids_BS: torch.Tensor, target_BK: torch.Tensor, dropout_keys: DropoutKeys) -> torch.Tensor:
        """Return the mean loss of a batch, as an fp32 scalar.

        Args:
            ids_BS: token ids with padding, int64 [B, S].
            target_BK: targets, [B, K]: int64 labels or positions, or fp32 for a regression.
            dropout_keys: keys of the encoder's dropout for this step.
        """
        raise NotImplementedError


class Classifier(TaskModel):
    """Classification or regression model on the state of [CLS]; with one output, it is a regression."""

    def __init__(self, backbone: Backbone, width: int, num_outputs: int, settings: FinetuneConfig, seed: int) -> None:
        """Add a new head to an encoder.

        Args:
            backbone: the encoder; it is used, not copied.
            width: hidden size of the encoder.
            num_outputs: number of labels, or 1 for a regression.
            settings: `head` selects the layers, `head_dropout` the dropout before each of them.
            seed: seed of the head's initial weights.
        """
        layers: list[nn.Module] = [nn.Dropout(settings.head_dropout)]
        if settings.head == "dense":
            layers += [nn.Linear(width, width), nn.GELU(), nn.Dropout(settings.head_dropout)]
        super().__init__(backbone, nn.Sequential(*layers, nn.Linear(width, num_outputs)))
        init_head(self.head, seed)

    def predict(self, ids_BS: torch.Tensor, dropout_keys: DropoutKeys | None = None) -> torch.Tensor:
        """Return the logits of each row, fp32 [B, N], or the predicted numbers, fp32 [B, 1], for a regression.

        Args:
            ids_BS: token ids with padding, int64.
            dropout_keys: keys of the encoder's dropout; None for evaluation.
        """
        return self.head(self.backbone(ids_BS, dropout_keys)[:, 0]).float()

    def forward(self, ids_BS: torch.Tensor, target_BK: torch.Tensor, dropout_keys: DropoutKeys) -> torch.Tensor:
        """Return the mean cross-entropy, or the mean squared error of a model with one output.

        Args:
            ids_BS: token ids with padding, int64.
            target_BK: label numbers, int64 [B, 1], or numbers in [0, 1], fp32 [B, 1].
            dropout_keys: keys of the encoder's dropout for this step.
        """
        output_BN = self.predict(ids_BS, dropout_keys)
        if output_BN.shape[1] == 1:
            return F.mse_loss(output_BN, target_BK.float())
        return F.cross_entropy(output_BN, target_BK[:, 0].long())


class SpanScores(NamedTuple):
    """Candidate answer spans of each row: the K best starts, and the K best ends for each start, best first.

    Log-probabilities are natural logarithms; positions are indices into the row of ids.
    """

    start_logp_BK: torch.Tensor
    start_BK: torch.Tensor  # positions of the starts, int64
    end_logp_BKK: torch.Tensor  # of each end, given the start: [row, start, end]
    end_BKK: torch.Tensor  # positions of the ends, int64
    no_answer_B: torch.Tensor  # logit, positive for "no answer"


class SpanHead(nn.Module):
    """SQuAD head: logits of the answer's start, of its end given the start, and of "no answer"."""

    def __init__(self, width: int, settings: FinetuneConfig, seed: int) -> None:
        """Build the head with initial weights from `seed`.

        Args:
            width: hidden size of the encoder.
            settings: `beam` and `span_width` are used.
            seed: seed of the initial weights.
        """
        super().__init__()
        self.beam = settings.beam
        self.start = nn.Linear(width, 1)
        self.end_hidden = nn.Linear(2 * width, settings.span_width)
        self.end = nn.Linear(settings.span_width, 1)
        self.answer_hidden = nn.Linear(2 * width, settings.span_width)
        self.answer = nn.Linear(settings.span_width, 1)
        init_head(self, seed)

    def start_logits(self, state_BSH: torch.Tensor, allowed_BS: torch.Tensor) -> torch.Tensor:
        """Return the logits of the answer's start at each token, fp32 [B, S].

        Args:
            state_BSH: states of the encoder.
            allowed_BS: bool, true at the positions that may be a start; the others are lowered by 1000.
        """
        return self.start(state_BSH).squeeze(-1).float() + OUTSIDE * ~allowed_BS

    def end_logits(self, state_BSH: torch.Tensor, allowed_BS: torch.Tensor, start_BK: torch.Tensor) -> torch.Tensor:
        """Return the logits of the answer's end at each token for each of K given starts, fp32 [B, K, S].

        Args:
            state_BSH: states of the encoder.
            allowed_BS: bool, true at the positions that may be an end; the others are lowered by 1000.
            start_BK: positions of the starts, int64.
        """
        H = state_BSH.shape[-1]
        chosen_BKH = state_BSH.gather(1, start_BK[..., None].expand(-1, -1, H))
        start_weight, token_weight = self.end_hidden.weight.split(H, dim=1)
        start_BKW = F.linear(chosen_BKH, start_weight, self.end_hidden.bias)
        token_BSW = F.linear(state_BSH, token_weight)
        # The starts are processed one by one: [B, K, S, W] at once would be the largest tensor of the whole model.
        logits = [self.end(F.gelu(start_BKW[:, k, None] + token_BSW)) for k in range(start_BK.shape[1])]
        return torch.stack(logits, dim=1).squeeze(-1).float() + OUTSIDE * ~allowed_BS[:, None]

    def no_answer_logit(self, state_BSH: torch.Tensor, start_logit_BS: torch.Tensor) -> torch.Tensor:
        """Return the logit of "no answer" for each row, fp32 [B]; positive if the window seems to hold none.

        Args:
            state_BSH: states of the encoder.
            start_logit_BS: result of `start_logits`; its softmax weights the states.
        """
        weight_BS = start_logit_BS.softmax(-1).to(state_BSH.dtype)
        expected_BH = torch.einsum("bs,bsh->bh", weight_BS, state_BSH)
        hidden_BW = F.gelu(self.answer_hidden(torch.cat([state_BSH[:, 0], expected_BH], -1)))
        return self.answer(hidden_BW).squeeze(-1).float()

    def search(self, state_BSH: torch.Tensor, allowed_BS: torch.Tensor) -> SpanScores:
        """Return the candidate answer spans of each row: its K best starts, and for each start the K best ends.

        K is the setting `beam`, but at most S. An end may lie before its start: the caller rejects such spans.
        """
        beam = min(self.beam, state_BSH.shape[1])
        start_logit_BS = self.start_logits(state_BSH, allowed_BS)
        start_logp_BK, start_BK = start_logit_BS.log_softmax(-1).topk(beam)
        end_logit_BKS = self.end_logits(state_BSH, allowed_BS, start_BK)
        end_logp_BKK, end_BKK = end_logit_BKS.log_softmax(-1).topk(beam)
        no_answer_B = self.no_answer_logit(state_BSH, start_logit_BS)
        return SpanScores(start_logp_BK, start_BK, end_logp_BKK, end_BKK, no_answer_B)


class SpanModel(TaskModel):
    """SQuAD model: an encoder with a `SpanHead`.

    Training targets are int64 [B, 3]: start and end position, and 1 if the question has no answer.
    """

    head: SpanHead

    def __init__(self, backbone: Backbone, width: int, settings: FinetuneConfig, seed: int) -> None:
        """Add a new SQuAD head to an encoder of hidden size `width`; `seed` determines the head's initial weights."""
        super().__init__(backbone, SpanHead(width, settings, seed))
        self.answerable_weight = settings.answerable_weight

    def allowed(self, ids_BS: torch.Tensor) -> torch.Tensor:
        """Return which positions may be the start or the end of an answer, bool [B, S].

        These are the passage, which is the second segment (with its [SEP], as in the reference), and [CLS], which
        stands for "no answer".
        """
        allowed_BS = derive(ids_BS, self.backbone.special).token_type_BS == 1
        allowed_BS[:, 0] = True
        return allowed_BS

    def forward(self, ids_BS: torch.Tensor, target_BK: torch.Tensor, dropout_keys: DropoutKeys) -> torch.Tensor:
        """Return the mean loss of start, end and answerability, as an fp32 scalar.

        Args:
            ids_BS: windows `[CLS] question [SEP] passage [SEP]`, int64.
            target_BK: int64 [B, 3]: start and end position (0, the [CLS], if the window has no answer), and 1 if the
                question has no answer.
            dropout_keys: keys of the encoder's dropout for this step.
        """
        start_B, end_B, impossible_B = target_BK.unbind(1)
        state_BSH = self.backbone(ids_BS, dropout_keys)
        allowed_BS = self.allowed(ids_BS)
        start_logit_BS = self.head.start_logits(state_BSH, allowed_BS)
        end_logit_BS = self.head.end_logits(state_BSH, allowed_BS, start_B[:, None])[:, 0]
        no_answer_B = self.head.no_answer_logit(state_BSH, start_logit_BS)
        span_loss = (F.cross_entropy(start_logit_BS, start_B) + F.cross_entropy(end_logit_BS, end_B)) / 2
        answerable_loss = F.binary_cross_entropy_with_logits(no_answer_B, impossible_B.float())
        return span_loss + self.answerable_weight * answerable_loss

    def search(self, ids_BS: torch.Tensor) -> SpanScores:
        """Return the candidate answer spans of each row, and its logit of "no answer".

        A row of `ids_BS`, int64 [B, S], is one window `[CLS] question [SEP] part of the passage [SEP]`.
        """
        return self.head.search(self.backbone(ids_BS), self.allowed(ids_BS))


@torch.no_grad()
def init_head(head: nn.Module, seed: int) -> None:
    """Initialize a head in place: weights Glorot-uniform, biases 0.

    Each weight has a generator of its own, keyed by the seed and the parameter's name, so the order of the parameters
    and torch's global generator do not matter. Values are drawn on the host in fp32.
    """
    for name, parameter in head.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
            continue
        generator = torch.Generator().manual_seed(derive_seed(seed, Purpose.INIT, zlib.crc32(name.encode())))
        bound = math.sqrt(6.0 / sum(parameter.shape))
        parameter.copy_(torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator))
