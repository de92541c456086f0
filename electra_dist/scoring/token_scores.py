"""Compute how plausible a model finds the tokens of a sentence, with the head with which it was pretrained.

How: the score of a token depends on the kind of model. Scores of different kinds are not comparable.

- A discriminator gives a logit for "replaced". The score is log P(original) = log sigmoid(-logit).
- The discriminator of Electric gives an energy E. The score is -E, the token's log-probability given all other
  tokens, up to a constant.
- A masked language model predicts a token that shows [MASK] from all other tokens. The score is
  log p(token | all other tokens), and its sum over a sentence is the pseudo-log-likelihood (`masked_scorer`). This sum
  favours words of several tokens, of which all but one give each token away. If the rest of the word after the token
  is masked, too, the word is read from left to right (`pseudo_log_likelihoods` returns both).
- A model that restores the original tokens of a text with replaced tokens and never saw [MASK] (the objectives Replace
  MLM and All-Tokens MLM) reads the unmasked sentence. The score is log P(the token is the original one).

Cost: one forward pass of a sentence; for a masked language model one pass for each of its tokens.

Sources: Salazar et al., "Masked language model scoring", ACL 2020; Kauf and Ivanova, "A better way to do masked
language model scoring", ACL 2023.

Shapes: N rows, B rows of a batch, S tokens, C copies of rows, H hidden width, E embedding width, V tokens of the
vocabulary. Rows are token ids with [CLS] and [SEP], without padding. All functions call `progress` after each batch
with ("predict", rows done, rows in total). Logarithms are natural.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from electra_dist.errors import UserError
from electra_dist.finetune.training_loop import Ids, Progress, predict, quiet
from electra_dist.pretrained.encoder import Pretrained

SENTENCES_PER_BATCH = 128  # rows of a forward pass, wherever this package scores rows


def predicts_tokens(encoder: Pretrained) -> bool:
    """Return whether the pretraining head predicts tokens; False if it detects replaced tokens or does not exist."""
    # Only a head that predicts tokens has a `bias`, with one value per entry of the vocabulary.
    return "bias" in encoder.head_state()


def discriminator_output_function(encoder: Pretrained, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function from padded token ids [B, S] to the discriminator's output for each token, fp32 [B, S].

    The output is the logit of "replaced" or, for Electric, an energy. Raises UserError if the model has no
    discriminator head.
    """
    head = _head(encoder, device, "dense.weight", "out.weight")
    backbone = encoder.backbone().to(device).eval()

    def outputs(ids_BS: torch.Tensor) -> torch.Tensor:
        state_BSH = backbone(ids_BS)
        hidden_BSH = F.gelu(F.linear(state_BSH, head["dense.weight"], head.get("dense.bias")))
        if "layer_norm.weight" in head:  # architecture `modern`
            hidden_BSH = F.layer_norm(
                hidden_BSH, hidden_BSH.shape[-1:], head["layer_norm.weight"], eps=encoder.model.layer_norm_eps
            )
        output_BS1 = F.linear(hidden_BSH, head["out.weight"], head["out.bias"])
        return output_BS1.squeeze(-1).float()

    return outputs


def kept_log_prob_function(encoder: Pretrained, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function from padded token ids [B, S] to log P(the token is the original one), fp32 [B, S].

    Let p be the distribution that the head predicts at the token's position. Without a copy gate, the result is the
    log of p(token). A copy gate predicts the probability c that the token was not replaced; with this gate the result
    is log(c + (1 - c) * p(token)). Logarithms are natural. Raises UserError if the model has no head that predicts
    tokens.
    """
    token_log_probs = token_log_prob_function(encoder, device)
    gate = {name: weight.to(device) for name, weight in encoder.head_state().items() if name.startswith("copy_gate.")}
    backbone = encoder.backbone().to(device).eval()

    def log_probs(ids_BS: torch.Tensor) -> torch.Tensor:
        state_BSH = backbone(ids_BS)
        logp_BSV = token_log_probs(state_BSH)
        logp_BS = logp_BSV.gather(2, ids_BS[..., None]).squeeze(-1)
        if not gate:
            return logp_BS
        gate_BS = F.linear(state_BSH, gate["copy_gate.weight"], gate["copy_gate.bias"]).squeeze(-1).float()
        copy_logp_BS = F.logsigmoid(gate_BS)  # log c, with c = sigmoid(gate)
        no_copy_logp_BS = F.logsigmoid(-gate_BS)  # log(1 - c)
        return torch.logaddexp(copy_logp_BS, no_copy_logp_BS + logp_BS)

    return log_probs


def token_log_prob_function(encoder: Pretrained, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function from states of the encoder [..., H] to log-probabilities of all V tokens, fp32 [..., V].

    The function computes Dense(H -> E), GELU, LayerNorm and an output layer, whose weight is the token embedding table
    [V, E]. Raises UserError if the model has no head that predicts tokens.
    """
    head = _head(encoder, device, "dense.weight", "layer_norm.weight", "bias")
    table_VE = encoder.state["embeddings.word.weight"][: encoder.model.vocab_size].to(device)

    def log_probs(state: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(F.linear(state, head["dense.weight"], head.get("dense.bias")))
        normed = F.layer_norm(
            hidden,
            normalized_shape=hidden.shape[-1:],
            weight=head["layer_norm.weight"],
            bias=head.get("layer_norm.bias"),
            eps=encoder.model.layer_norm_eps,
        )
        logits = F.linear(normed, table_VE, head["bias"])
        return logits.float().log_softmax(-1)

    return log_probs


def _head(encoder: Pretrained, device: torch.device, *needed: str) -> dict[str, torch.Tensor]:
    """Return the weights of the pretraining head on `device`; raise UserError if a name in `needed` has no weight."""
    head = {name: weight.to(device) for name, weight in encoder.head_state().items()}
    missing = [name for name in needed if name not in head]
    if missing:
        raise UserError(
            f"{encoder.name}: the model has no pretraining head of the kind needed ({missing[0]} is missing); "
            f"use the folder of a run whose objective trains this head, or export the model with its head"
        )
    return head


# Function that scores every token of rows of ids. It takes the rows and a function to report progress to, which it
# calls after each batch. It returns one fp32 tensor on the host for each row, without [CLS] and the last [SEP].
TokenScorer = Callable[[Ids, Progress], list[torch.Tensor]]


def masked_scorer(encoder: Pretrained, device: torch.device) -> TokenScorer:
    """Return a function that scores the tokens of each row by log p(token | all other tokens)."""

    def score(ids: Ids, progress: Progress = quiet) -> list[torch.Tensor]:
        # All places but [CLS] and the last [SEP].
        places = [(row, position) for row, row_ids in enumerate(ids) for position in range(1, len(row_ids) - 1)]
        logp_C = masked_log_probs(encoder, ids, places, device, progress)
        return list(logp_C.split([len(row_ids) - 2 for row_ids in ids]))

    return score


def masked_log_probs(
    encoder: Pretrained,
    ids: Ids,
    places: Sequence[tuple[int, int]],
    device: torch.device,
    progress: Progress,
    ends: Sequence[int] | None = None,
) -> torch.Tensor:
    """Return log p(token | all tokens that are not masked) for the tokens at C places in `ids`, fp32 [C] on the host.

    A place is (index of the row, position in the row). For each place, the model reads a copy of the row in which that
    token is masked; equal copies are read once. If `ends` is given, the tokens after it are masked, too, up to the
    position ends[c] - 1.
    """
    token_log_probs = token_log_prob_function(encoder, device)
    backbone = encoder.backbone().to(device).eval()
    mask = encoder.special.mask

    def log_probs(ids_BS: torch.Tensor) -> torch.Tensor:
        state_BSH = backbone(ids_BS)
        first_masked_B = (ids_BS == mask).int().argmax(1)
        masked_state_BH = state_BSH[torch.arange(len(ids_BS), device=ids_BS.device), first_masked_B]
        return token_log_probs(masked_state_BH)

    if ends is None:
        ends = [position + 1 for _, position in places]
    # Sentences of minimal pairs that differ in one word have equal copies in which it is masked.
    numbers_of: dict[tuple[int, ...], list[int]] = {}  # copy -> indices in `places`
    for number, ((row, position), end) in enumerate(zip(places, ends, strict=True)):
        row_ids = ids[row]
        if mask in row_ids:
            raise UserError(
                f"{encoder.name}: a text has the token [MASK] in it, which hides the scored token; remove it"
            )
        masks = [mask] * (end - position)
        copy = (*row_ids[:position], *masks, *row_ids[end:])
        numbers_of.setdefault(copy, []).append(number)
    copies, numbers_of_copies = list(numbers_of), list(numbers_of.values())
    logp_C = torch.empty(len(places))
    for copy_numbers, logp_BV in predict(
        log_probs, copies, encoder.special.pad, SENTENCES_PER_BATCH, device, progress
    ):
        batch_rows = [row for row, copy in enumerate(copy_numbers) for _ in numbers_of_copies[copy]]
        numbers = [number for copy in copy_numbers for number in numbers_of_copies[copy]]
        originals = [ids[row][position] for row, position in (places[number] for number in numbers)]
        logp_C[numbers] = logp_BV[batch_rows, originals].cpu()
    return logp_C


def build_token_scorer(encoder: Pretrained, device: torch.device) -> TokenScorer:
    """Return the function by which this kind of model scores every token of a row but [CLS] and the last [SEP]."""
    if predicts_tokens(encoder):
        if encoder.reads_masks:
            return masked_scorer(encoder, device)
        # Replace MLM and All-Tokens MLM: log P(original), from a distribution over the vocabulary.
        token_scores = kept_log_prob_function(encoder, device)
    else:
        discriminator_outputs = discriminator_output_function(encoder, device)

        def token_scores(ids_BS: torch.Tensor) -> torch.Tensor:
            output_BS = discriminator_outputs(ids_BS)
            if encoder.gives_energies:
                return -output_BS  # Electric: the output is an energy, and a low energy means a probable token
            return F.logsigmoid(-output_BS)  # RTD: the output is the logit of "replaced"

    def score(ids: Ids, progress: Progress = quiet) -> list[torch.Tensor]:
        values = [torch.empty(0)] * len(ids)
        for rows, score_BS in predict(token_scores, ids, encoder.special.pad, SENTENCES_PER_BATCH, device, progress):
            for row, score_S in zip(rows, score_BS.cpu(), strict=True):
                values[row] = score_S[1 : len(ids[row]) - 1].clone()  # a view would keep the whole batch in memory
        return values

    return score


def score_places(
    encoder: Pretrained,
    ids: Ids,
    places: Sequence[tuple[int, int]],
    device: torch.device,
    progress: Progress = quiet,
) -> torch.Tensor:
    """Return the scores of the tokens at n places in the rows `ids`, fp32 [n].

    A place is (index of the row, position in the row), but never the first or last position of a row. A masked
    language model reads a copy of the row for each place; every other model reads each row once.
    """
    if predicts_tokens(encoder) and encoder.reads_masks:
        return masked_log_probs(encoder, ids, places, device, progress)
    scores = build_token_scorer(encoder, device)(ids, progress)
    return torch.stack([scores[row][position - 1] for row, position in places])


def sentence_log_probs(
    encoder: Pretrained, ids: Ids, device: torch.device, progress: Progress = quiet
) -> torch.Tensor:
    """Return for each row the sum of its tokens' scores, without [CLS] and the last [SEP], fp32 [N].

    For a masked language model it is the pseudo-log-likelihood, the sum of log p(token | all other tokens). Then rows
    must be single sentences: a pair has a [SEP] inside the row, and masking it would change the token types.
    """
    return row_sums(build_token_scorer(encoder, device)(ids, progress))


def replaced_logits(
    encoder: Pretrained, ids: Ids, positions: Sequence[int], device: torch.device, progress: Progress = quiet
) -> torch.Tensor:
    """Return the discriminator's logit of "replaced" at one position of each row, fp32 [N] on the host."""
    outputs = discriminator_output_function(encoder, device)
    logit_N = torch.empty(len(ids))
    for rows, logit_BS in predict(outputs, ids, encoder.special.pad, SENTENCES_PER_BATCH, device, progress):
        position_B = torch.tensor([positions[row] for row in rows], device=logit_BS.device)
        logit_N[rows] = logit_BS.gather(1, position_B[:, None])[:, 0].cpu()
    return logit_N


def pseudo_log_likelihoods(
    encoder: Pretrained,
    ids: Ids,
    continues_word: Sequence[Sequence[bool]],
    device: torch.device,
    progress: Progress = quiet,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two sums over each row's tokens without [CLS] and [SEP], each fp32 [N].

    The first is `sentence_log_probs`. In the second, the tokens after the scored one in the same word are masked
    together with it: `continues_word` says for each of these tokens whether it belongs to the word of the one before.
    The sums are equal for rows whose words are single tokens. Rows must be single sentences.
    """
    token_values = masked_scorer(encoder, device)(ids, progress)
    word_values = [value_S.clone() for value_S in token_values]
    places = []
    ends = []
    for row, is_continued in enumerate(continues_word):
        # From the last token before [SEP] to the first after [CLS]; `end` is the position after the token's word.
        end = len(is_continued) + 1
        for position in range(len(is_continued), 0, -1):
            is_last_of_word = end == position + 1
            if not is_last_of_word:
                places.append((row, position))
                ends.append(end)
            if not is_continued[position - 1]:
                end = position  # of the word before
    logp_C = masked_log_probs(encoder, ids, places, device, progress, ends)
    for (row, position), logp in zip(places, logp_C, strict=True):
        word_values[row][position - 1] = logp
    return row_sums(token_values), row_sums(word_values)


def row_sums(values: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum of the values of each row, fp32 [N]."""
    return torch.tensor([value.double().sum().item() for value in values], dtype=torch.float32)
