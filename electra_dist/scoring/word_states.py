"""Compute the frozen states of the words of sentences, at every layer of an encoder.

How: the words of a sentence are encoded as a text in which spaces separate them, and the state of a word is that of
its first piece. The state of [CLS], which represents the root of the sentence's tree, precedes those of the words, so
the state at place i is that of word i, counted from 1 as in CoNLL-U.

Cost: one forward pass of each sentence. All states are kept: L x H floats for each word, which is 1.3 GB for the
250,000 words of UD English-EWT with four layers (L = 5) and H = 256.

Shapes: B sentences, S tokens, W places ([CLS] and words) of a sentence, T of all sentences, H hidden width, L layers
+ 1, for the embeddings.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from electra_dist.errors import UserError
from electra_dist.finetune.tagging_task import tagged_rows
from electra_dist.finetune.training_loop import Progress, predict
from electra_dist.finetune.word_files import Sentence
from electra_dist.pretrained.encoder import Pretrained

_BATCH = 32  # sentences per forward pass


class WordStates(NamedTuple):
    """States of [CLS] and of the words of each sentence, at every layer, one sentence after the other."""

    sentences: list[Sentence]  # those that fit into the model's positions
    first_T: list[int]  # place of each sentence's [CLS] in `state_LTH`
    state_LTH: torch.Tensor  # fp32 on the host

    def of_sentence(self, layer: int, number: int) -> torch.Tensor:
        """Return the states of one sentence at one layer, [1 + words, H]; the first one is that of [CLS]."""
        first = self.first_T[number]
        return self.state_LTH[layer, first : first + 1 + len(self.sentences[number].words)]


def compute_word_states(
    encoder: Pretrained, sentences: Sequence[Sentence], device: torch.device, progress: Progress
) -> WordStates:
    """Return the states of [CLS] and of the first piece of each word, at every layer, without gradient.

    Sentences with more pieces than the model has positions are left out; which ones depends on the vocabulary and the
    number of positions only. Raises UserError if no sentence is left. `progress` is called after each batch with
    ("predict", sentences done, sentences in total).
    """
    kept_sentences = []
    rows = []
    places_of_row = []  # for each row, the indices of [CLS] and of the first piece of each word
    for row in tagged_rows([sentence.words for sentence in sentences], encoder, max_length=sys.maxsize):
        if len(row.ids) <= encoder.model.max_positions:
            kept_sentences.append(sentences[row.sentence])
            rows.append(row.ids)
            places_of_row.append([0, *row.places])
    if not rows:
        raise UserError(
            f"{encoder.name}: no sentence of the treebank fits into {encoder.model.max_positions} positions; use a "
            f"treebank with shorter sentences"
        )

    lengths = [len(places) for places in places_of_row]
    ends = np.cumsum(lengths)
    first_T = (ends - lengths).tolist()
    backbone = encoder.backbone().to(device).eval()
    state_LTH = torch.empty(encoder.tower.num_layers + 1, int(ends[-1]), encoder.tower.hidden_size)

    def all_layers(ids_BS: torch.Tensor) -> torch.Tensor:
        return torch.stack(backbone.layer_states(ids_BS))

    for row_numbers, state_LBSH in predict(all_layers, rows, encoder.special.pad, _BATCH, device, progress):
        for index, number in enumerate(row_numbers):
            first = first_T[number]
            word_state_LWH = state_LBSH[:, index, places_of_row[number]]
            state_LTH[:, first : first + lengths[number]] = word_state_LWH.float().cpu()
    return WordStates(sentences=kept_sentences, first_T=first_T, state_LTH=state_LTH)
