"""Score tokens by a masked language model: each token is masked in turn, and predicted from all other tokens.

Cost: one forward pass of a sentence for each of its tokens.

Source: Salazar et al., "Masked language model scoring", ACL 2020.

Shapes: C copies of rows, B rows of a batch, S tokens, H hidden width, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from electra_dist.finetune.sentences.head_outputs import SENTENCES_PER_BATCH, token_log_prob_function
from electra_dist.finetune.training_loop import Ids, Progress, predict, quiet
from electra_dist.pretrained.encoder import Pretrained

# Function that scores every token of rows of ids. It takes the rows and a function to report progress to, which it
# calls after each batch. It returns one fp32 tensor on the host for each row, without [CLS] and the last [SEP].
TokenScorer = Callable[[Ids, Progress], list[torch.Tensor]]


def masked_scorer(encoder: Pretrained, device: torch.device) -> TokenScorer:
    """Return a function that scores the tokens of each row by log p(token | all other tokens), natural logarithm.

    The function scores all tokens but [CLS] and the last [SEP]. It raises UserError if the model has no head that
    predicts tokens.
    """

    def score(ids: Ids, progress: Progress = quiet) -> list[torch.Tensor]:
        # All places but [CLS] and the last [SEP].
        places = [(row, position) for row, row_ids in enumerate(ids) for position in range(1, len(row_ids) - 1)]
        logp_C = masked_log_probs(encoder, ids, places, device, progress)
        return list(logp_C.split([len(row_ids) - 2 for row_ids in ids]))

    return score


def masked_log_probs(
    encoder: Pretrained, ids: Ids, places: Sequence[tuple[int, int]], device: torch.device, progress: Progress
) -> torch.Tensor:
    """Return log p(token | all other tokens) for the tokens at C places in the rows `ids`, fp32 [C] on the host.

    Rows have [CLS] and [SEP], but no padding. A place is (index of the row, position in the row). For each place, the
    model reads a copy of the row in which that token is masked. `progress` is called with
    ("predict", copies done, copies in total).
    """
    token_log_probs = token_log_prob_function(encoder, device)
    backbone = encoder.backbone().to(device).eval()
    mask = encoder.special.mask

    def log_probs(ids_BS: torch.Tensor) -> torch.Tensor:
        state_BSH = backbone(ids_BS)
        is_masked_BS = ids_BS == mask
        assert bool((is_masked_BS.sum(1) == 1).all()), "a row holds another [MASK] than that of the scored token"
        masked_state_BH = state_BSH[is_masked_BS]
        return token_log_probs(masked_state_BH)

    copies = [_with_mask(ids[row], position, mask) for row, position in places]
    logp_C = torch.empty(len(copies))
    for copy_numbers, logp_BV in predict(
        log_probs, copies, encoder.special.pad, SENTENCES_PER_BATCH, device, progress
    ):
        masked_places = [places[number] for number in copy_numbers]
        original_B = torch.tensor([ids[row][position] for row, position in masked_places], device=logp_BV.device)
        logp_C[copy_numbers] = logp_BV.gather(1, original_B[:, None])[:, 0].cpu()
    return logp_C


def _with_mask(row: Sequence[int], position: int, mask: int) -> list[int]:
    return [*row[:position], mask, *row[position + 1 :]]
