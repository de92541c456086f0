"""Probe the frozen states of words for their parts of speech and for their heads, at every layer.

Guarantee: the result depends on the encoder's weights and the treebank alone. On a CPU with the same number of threads
it is reproduced bit for bit. The layer is chosen on a fixed tenth of the training sentences, which is held out; the
test sentences decide nothing.

How: the words of a sentence are encoded as a text in which spaces separate them, and the state of a word is that of
its first piece. The state of [CLS], which represents the root of the sentence's tree, precedes those of the words, so
the state at place i is that of word i, counted from 1 as in CoNLL-U. No state has a gradient.

The tag of a word is predicted by a linear model of its state, softmax(W x_i / sqrt(H) + b).
The head of a word is predicted among [CLS], which stands for the root, and the other words of the sentence, by a
bilinear model of both states, softmax over j of (x_i^T B x_j / H + c^T x_j). States are standardized with the training
data. Both models begin at 0 and are trained by Adam, whose learning rate falls linearly to 0, on batches of 32
sentences in a fixed order, for 10 epochs and at least 400 steps. The held-out accuracy is computed after each tenth of
the steps, and the weights with the highest one are used. Both training problems are convex.

Cost: one forward pass of each sentence, then seconds of one core for each layer, with 2,000 training sentences and a
width of 256. All states are kept: L x H floats for each word, which is 1.3 GB for the 250,000 words of UD English-EWT
with four layers (L = 5) and H = 256.

Limits: punctuation counts as words, and the heads of a sentence need not form a tree.

Shapes: B sentences, S tokens, W places ([CLS] and words) of the longest one, H hidden width, C classes: tags, or
places; T places of all sentences, L layers + 1, for the embeddings.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from electra_dist.errors import UserError
from electra_dist.finetune.stored_scores import Measured, best_layer
from electra_dist.finetune.tagging_task import tagged_rows
from electra_dist.finetune.task_metrics import sentence_errors
from electra_dist.finetune.training_loop import Progress, predict, quiet, row_sequence
from electra_dist.finetune.word_files import Sentence, Treebank
from electra_dist.pretrained.encoder import Pretrained

Target = Literal["tags", "heads"]
Standardize = Callable[[torch.Tensor], torch.Tensor]  # brings states [W, H] to the scale of the training states
_BATCH = 32  # sentences per step, and per forward pass of the encoder
_EPOCHS = 10
_MIN_STEPS = 400  # a small treebank is read more often than _EPOCHS times
_NUM_CHECKS = 10  # how often the held-out accuracy is computed
_LR = 2e-2  # at the first step
_NO_WORD = -100  # class of [CLS] and of padding, which cross_entropy ignores


def probe_words(
    encoder: Pretrained,
    treebank: Treebank,
    target: Target,
    device: torch.device,
    progress: Progress = quiet,
) -> Measured:
    """Train a probe on the states of each layer; return the test accuracy at the layer that is best on held-out data.

    `target` is what is predicted for each word: "tags", its part of speech, or "heads", the word on which it depends.
    Sentences too long for the model are left out; UserError is raised if none is left. `progress` is called with
    ("predict", sentences done, in total), then with ("fit layers", layers done, in total).
    """
    train_states = compute_word_states(encoder, treebank.train, device, progress)
    test_states = compute_word_states(encoder, treebank.test, device, progress)
    classes: _Heads | _Tags = _Heads() if target == "heads" else _Tags(treebank.train)
    train = _Examples(train_states, classes, device)
    test = _Examples(test_states, classes, device)
    num_train = len(train_states.sentences)
    order = np.random.default_rng(0).permutation(num_train).tolist()
    held_out_numbers = order[: num_train // 10]
    fitted_numbers = order[num_train // 10 :]
    test_numbers = range(len(test_states.sentences))

    num_states = len(train_states.state_LTH)
    held_out_scores: list[float | None] = []
    counts_of_layers = []
    for layer in range(num_states):
        scale = _standardization(train_states.state_LTH[layer])
        probe = classes.new_probe(encoder.tower.hidden_size).to(device)
        batches = train.batches(layer, fitted_numbers, scale)
        held_out_batches = train.batches(layer, held_out_numbers, scale)
        held_out_scores.append(_fit(probe, batches, held_out_batches))
        counts_of_layers.append(_counts(probe, test.batches(layer, test_numbers, scale)))
        progress("fit layers", layer + 1, num_states)

    layer = best_layer(held_out_scores)
    standard_error, items = sentence_errors(counts_of_layers[layer])
    return Measured(
        task=target,
        mode=target,
        metric="accuracy",
        score=_accuracy(counts_of_layers[layer]),
        examples=num_train,
        standard_error=standard_error,
        items=items,
        layer=layer,
        layer_scores=[_accuracy(counts) for counts in counts_of_layers],
        held_out_scores=held_out_scores,
    )


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


class _Tags:
    """Classes of words by their parts of speech: a class is the number of a tag among those of the training data."""

    def __init__(self, train: Sequence[Sentence]) -> None:
        tags = sorted({tag for sentence in train for tag in sentence.tags})
        self._number_of = {tag: number for number, tag in enumerate(tags)}

    def of_words(self, sentence: Sentence) -> list[int]:
        # A tag that the training data lack gets a number that no model predicts.
        return [self._number_of.get(tag, len(self._number_of)) for tag in sentence.tags]

    def new_probe(self, hidden_size: int) -> nn.Module:
        return _TagProbe(hidden_size, len(self._number_of))


class _Heads:
    """Classes of words by their heads: a class is the number of the head in its sentence, from 1; 0 for the root."""

    def of_words(self, sentence: Sentence) -> Sequence[int]:
        return sentence.heads

    def new_probe(self, hidden_size: int) -> nn.Module:
        return _HeadProbe(hidden_size)


class _Batch(NamedTuple):
    """Padded states of some sentences at one layer, and the class (tag or head) of each word."""

    state_BWH: torch.Tensor  # standardized; 0 at padding
    is_place_BW: torch.Tensor  # bool: [CLS] and words
    class_BW: torch.Tensor  # int64: the class of each word; `_NO_WORD` at [CLS] and at padding


class _Examples:
    """Training or test sentences with the states and the classes of their words, at all layers."""

    def __init__(self, states: WordStates, classes: _Tags | _Heads, device: torch.device) -> None:
        self._states = states
        self._classes_of = [torch.tensor([_NO_WORD, *classes.of_words(sentence)]) for sentence in states.sentences]
        self._device = device

    def batches(self, layer: int, numbers: Sequence[int], scale: Standardize) -> list[_Batch]:
        """Return the states of the sentences `numbers` at one layer as padded batches, in order of sentence length."""
        by_length = sorted(numbers, key=lambda number: len(self._classes_of[number]))
        batches = []
        for start in range(0, len(by_length), _BATCH):
            batch_numbers = by_length[start : start + _BATCH]
            state_of = [scale(self._states.of_sentence(layer, number)) for number in batch_numbers]
            classes_of = [self._classes_of[number] for number in batch_numbers]
            state_BWH = nn.utils.rnn.pad_sequence(state_of, batch_first=True)
            class_BW = nn.utils.rnn.pad_sequence(classes_of, batch_first=True, padding_value=_NO_WORD)
            length_B1 = torch.tensor([[len(state)] for state in state_of])
            is_place_BW = torch.arange(state_BWH.shape[1]) < length_B1
            batches.append(_Batch(state_BWH.to(self._device), is_place_BW.to(self._device), class_BW.to(self._device)))
        return batches


def _standardization(state_TH: torch.Tensor) -> Standardize:
    """Return a function that subtracts each feature's mean over the training states, and divides by its deviation.

    The deviation counts as at least 1e-6, so a feature that is constant in training becomes 0 there.
    """
    mean_H = state_TH.mean(0)
    std_H = state_TH.std(0).clamp_min(1e-6)
    return lambda state_WH: (state_WH - mean_H) / std_H


class _TagProbe(nn.Module):
    """Linear model from the state of a word to its part of speech; all weights begin at 0."""

    def __init__(self, hidden_size: int, num_tags: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(hidden_size, num_tags))
        self.bias = nn.Parameter(torch.zeros(num_tags))

    def forward(self, batch: _Batch) -> torch.Tensor:
        """Return the logits of all C tags at each place ([CLS] or word), [B, W, C]."""
        scale = 1.0 / math.sqrt(len(self.weight))  # keeps the change of a logit per step small for wide states
        return batch.state_BWH @ self.weight * scale + self.bias


class _HeadProbe(nn.Module):
    """Bilinear model that scores every place of a sentence as the head of a word; all weights begin at 0."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.product = nn.Parameter(torch.zeros(hidden_size, hidden_size))
        self.candidate = nn.Parameter(torch.zeros(hidden_size))

    def forward(self, batch: _Batch) -> torch.Tensor:
        """Return for each place the logits of all places as its head, [B, W, W]; -inf for padding and for itself."""
        hidden_size = len(self.candidate)
        query_BWH = batch.state_BWH @ self.product / hidden_size
        logits_BWW = query_BWH @ batch.state_BWH.transpose(1, 2) + (batch.state_BWH @ self.candidate)[:, None, :]
        itself_WW = torch.eye(logits_BWW.shape[-1], dtype=torch.bool, device=logits_BWW.device)
        is_candidate_BWW = batch.is_place_BW[:, None, :] & ~itself_WW
        return logits_BWW.masked_fill(~is_candidate_BWW, -math.inf)


def _fit(probe: nn.Module, batches: Sequence[_Batch], held_out_batches: Sequence[_Batch]) -> float | None:
    """Train a probe in place; keep its best weights on held-out data, and return their accuracy.

    If there is no held-out data, the last weights are kept, and None is returned.
    """
    optimizer = torch.optim.Adam(probe.parameters(), lr=_LR)
    best_score: float | None = None
    best_weights = {}
    num_steps = max(_MIN_STEPS, _EPOCHS * len(batches))
    steps_of_check = num_steps // _NUM_CHECKS
    numbers = row_sequence(len(batches), seed=0)
    for step in range(1, num_steps + 1):
        optimizer.param_groups[0]["lr"] = _LR * (1.0 - (step - 1) / num_steps)
        batch = batches[next(numbers)]
        loss = F.cross_entropy(probe(batch).flatten(0, 1), batch.class_BW.flatten(), ignore_index=_NO_WORD)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if held_out_batches and step % steps_of_check == 0:
            score = _accuracy(_counts(probe, held_out_batches))
            if best_score is None or score > best_score:
                best_score = score
                best_weights = {name: weight.clone() for name, weight in probe.state_dict().items()}
    if best_score is not None:
        probe.load_state_dict(best_weights)
    return best_score


@torch.no_grad()
def _counts(probe: nn.Module, batches: Sequence[_Batch]) -> list[tuple[int, int]]:
    """Return for each sentence of the batches (number of words that the probe predicts right, number of words)."""
    counts = []
    for batch in batches:
        is_word_BW = batch.class_BW != _NO_WORD
        is_right_BW = (probe(batch).argmax(-1) == batch.class_BW) & is_word_BW
        counts += list(zip(is_right_BW.sum(1).tolist(), is_word_BW.sum(1).tolist(), strict=True))
    return counts


def _accuracy(counts: Sequence[tuple[int, int]]) -> float:
    return sum(right for right, _ in counts) / sum(words for _, words in counts)
