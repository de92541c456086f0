"""How often a model prefers the grammatical sentence of a pair (`agreement.py`).

A discriminator is asked for its logit at the word that differs: the wrong form must look more replaced than the right
one. A masked language model is asked for the pseudo-log-likelihood of both sentences: the sum over the words of
log p(word | all others), each word masked in turn. A large tower that predicts tokens but never saw [MASK] (Replace
MLM, All-Tokens MLM) is asked for log p(the original is this word | the sentence as it stands) at the word that
differs, copying counted where it can copy. A tie is a miss. No training, so it reads a model as pretraining left it;
chance is 50 %.

Cost: 200 pairs of each of six phenomena are 2,400 short sentences for a discriminator, some 17,000 for an MLM.

Source of the pseudo-log-likelihood: Salazar et al., "Masked language model scoring", ACL 2020.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from electra_dist.errors import UserError
from electra_dist.finetune.agreement import Pair, make_pairs
from electra_dist.finetune.fit import Ids, Progress, predict, quiet
from electra_dist.pretrained.encoder import Pretrained

_BATCH = 128
ALL = "all"


class PairScore(NamedTuple):
    """One phenomenon, or all of them."""

    phenomenon: str
    pairs: int
    accuracy: float
    example: str


def score_minimal_pairs(
    encoder: Pretrained, num_pairs: int, device: torch.device, progress: Progress = quiet, seed: int = 0
) -> list[PairScore]:
    """Accuracy on each phenomenon of which the vocabulary gives pairs, then on all pairs.

    Raises:
        UserError: the model has no pretraining head, or its vocabulary no pairs.
    """
    ids_of = encoder.vocabulary.ids
    by_phenomenon = {name: pairs for name, pairs in make_pairs(ids_of, num_pairs, seed).items() if pairs}
    pairs = [pair for found in by_phenomenon.values() for pair in found]
    if not pairs:
        raise UserError(f"{encoder.name}: the vocabulary holds no words of the templates; nothing can be asked")
    special = encoder.special
    sentences = [words for pair in pairs for words in (pair.good, pair.bad)]
    ids = [[special.cls, *(ids_of[word] for word in words), special.sep] for words in sentences]
    positions = [1 + pair.position for pair in pairs for _ in range(2)]
    if "layer_norm.weight" not in encoder.head_state():
        natural = -replaced_logits(encoder, ids, positions, device, progress)
    elif encoder.reads_masks:
        natural = pseudo_log_likelihood(encoder, ids, device, progress)
    else:
        natural = kept_log_probs(encoder, ids, positions, device, progress)
    right = (natural[0::2] > natural[1::2]).tolist()
    scores = []
    for name, found in by_phenomenon.items():
        hits = [hit for pair, hit in zip(pairs, right) if pair.phenomenon == name]
        scores.append(PairScore(name, len(found), sum(hits) / len(hits), _example(found[0])))
    return [*scores, PairScore(ALL, len(pairs), sum(right) / len(right), "")]


def replaced_logits(
    encoder: Pretrained, ids: Ids, positions: Sequence[int], device: torch.device, progress: Progress = quiet
) -> torch.Tensor:
    """[N] fp32: the discriminator's logit of each row at its position, positive for "replaced"."""
    head = _head(encoder, device, "dense.weight", "out.weight")
    backbone = encoder.backbone().to(device).eval()

    def logits(ids_BS: torch.Tensor) -> torch.Tensor:
        hidden_BSH = F.gelu(F.linear(backbone(ids_BS), head["dense.weight"], head["dense.bias"]))
        return F.linear(hidden_BSH, head["out.weight"], head["out.bias"]).squeeze(-1).float()

    return _at_positions(logits, encoder, ids, positions, device, progress)


def kept_log_probs(
    encoder: Pretrained, ids: Ids, positions: Sequence[int], device: torch.device, progress: Progress = quiet
) -> torch.Tensor:
    """[N] fp32: log p(the original of each row's token at its position is that token), with the copy gate if any."""
    token_log_probs = _token_log_probs(encoder, device)
    head = {name: weight.to(device) for name, weight in encoder.head_state().items()}
    backbone = encoder.backbone().to(device).eval()

    def log_probs(ids_BS: torch.Tensor) -> torch.Tensor:
        state_BSH = backbone(ids_BS)
        logp_BS = token_log_probs(state_BSH).gather(2, ids_BS[..., None]).squeeze(-1)
        if "copy_gate.weight" not in head:
            return logp_BS
        gate_BS = F.linear(state_BSH, head["copy_gate.weight"], head["copy_gate.bias"]).squeeze(-1).float()
        return torch.logaddexp(F.logsigmoid(gate_BS), F.logsigmoid(-gate_BS) + logp_BS)

    return _at_positions(log_probs, encoder, ids, positions, device, progress)


def pseudo_log_likelihood(
    encoder: Pretrained, ids: Ids, device: torch.device, progress: Progress = quiet
) -> torch.Tensor:
    """[N] fp32: natural logarithm, summed over all tokens of a row but its first and its last."""
    token_log_probs = _token_log_probs(encoder, device)
    backbone, mask = encoder.backbone().to(device).eval(), encoder.special.mask
    masked = [(row, at) for row in range(len(ids)) for at in range(1, len(ids[row]) - 1)]

    def log_probs(ids_BS: torch.Tensor) -> torch.Tensor:
        return token_log_probs(backbone(ids_BS)[ids_BS == mask])  # one masked token a row, so one state a row

    copies = [[*ids[row][:at], mask, *ids[row][at + 1 :]] for row, at in masked]
    total = torch.zeros(len(ids))
    for rows, logp_BV in predict(log_probs, copies, encoder.special.pad, _BATCH, device, progress):
        original = torch.tensor([ids[masked[n][0]][masked[n][1]] for n in rows], device=logp_BV.device)
        found = logp_BV.gather(1, original[:, None])[:, 0].cpu()
        total.index_add_(0, torch.tensor([masked[n][0] for n in rows]), found)
    return total


def _token_log_probs(encoder: Pretrained, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """States [..., H] -> fp32 log-probabilities [..., V] by the pretraining head, tied to the token table."""
    head = _head(encoder, device, "dense.weight", "layer_norm.weight", "bias")
    table_VE = encoder.state["embeddings.word.weight"][: encoder.model.vocab_size].to(device)

    def function(state: torch.Tensor) -> torch.Tensor:
        dense = F.gelu(F.linear(state, head["dense.weight"], head["dense.bias"]))
        norm = head["layer_norm.weight"], head["layer_norm.bias"], encoder.model.layer_norm_eps
        return F.linear(F.layer_norm(dense, dense.shape[-1:], *norm), table_VE, head["bias"]).float().log_softmax(-1)

    return function


def _at_positions(
    function: Callable[[torch.Tensor], torch.Tensor],
    encoder: Pretrained,
    ids: Ids,
    positions: Sequence[int],
    device: torch.device,
    progress: Progress,
) -> torch.Tensor:
    """[N]: of each row, what `function` says ([B, S]) at its position."""
    found = torch.empty(len(ids))
    for rows, value_BS in predict(function, ids, encoder.special.pad, _BATCH, device, progress):
        at = torch.tensor([positions[row] for row in rows], device=value_BS.device)
        found[rows] = value_BS.gather(1, at[:, None])[:, 0].cpu()
    return found


def _head(encoder: Pretrained, device: torch.device, *needed: str) -> dict[str, torch.Tensor]:
    head = {name: weight.to(device) for name, weight in encoder.head_state().items()}
    if not all(name in head for name in needed):
        raise UserError(f"{encoder.name}: the model came without its pretraining head; export it with the head")
    return head


def _example(pair: Pair) -> str:
    words = list(pair.good)
    words[pair.position] = f"{pair.good[pair.position]}/*{pair.bad[pair.position]}"
    return " ".join(words)
