"""Make tagging a fine-tuning task: one label for each word, such as a part of speech or a named entity.

Guarantee: every word of the development data gets exactly one prediction. A sentence that is longer than the model's
rows is cut between two words into several rows. The words are encoded as a text in which spaces separate them, as a
pipeline of Hugging Face reads them. The label of a word is predicted from the state of its first piece, and its other
pieces have no label, as in google-research/electra and in Hugging Face's `aggregation_strategy="first"`.

How: the head is one Dense(H -> N) over the states, without dropout, as in google-research/electra. The loss is the
mean cross-entropy over the words of a batch.

Limits: a word with more pieces than a row has room for is cut.

Shapes: B rows, S tokens, N tags.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from typing_extensions import override

from electra_dist.errors import UserError
from electra_dist.finetune.finetune_config import FinetuneConfig
from electra_dist.finetune.output.hf_heads import tag_head
from electra_dist.finetune.output.text_files import TextFile
from electra_dist.finetune.tagging.entity_metrics import are_bio_tags, entity_metrics
from electra_dist.finetune.tagging.tagged_files import TaggedSentence, find_tagged_file, read_tagged_file, tags_of
from electra_dist.finetune.task import Task, TaskOutcome
from electra_dist.finetune.task_heads import TaskModel, init_head, new_features, on_features
from electra_dist.finetune.training_loop import Examples, Progress, padded, predict
from electra_dist.model.dropout_keys import DropoutKeys
from electra_dist.model.heads import ModernFeatures
from electra_dist.pretrained.encoder import Backbone, Pretrained
from electra_dist.pretrained.export import TaskHead
from electra_dist.store.regular_files import MOST_DATA_BYTES, read_regular

_NO_WORD = -100  # target of a token that is not the first piece of a word
_NUM_SPECIAL = 2  # [CLS] and [SEP] of a row


class TaggingModel(TaskModel):
    """Encoder with a head that computes the logits of the tags from the state of each token."""

    def __init__(
        self, backbone: Backbone, width: int, num_tags: int, seed: int, features: ModernFeatures | None = None
    ) -> None:
        """Put a new head on `backbone`; `features` (see `new_features`), if given, are the head's first layers."""
        output_layer = nn.Linear(width, num_tags)
        init_head(output_layer, seed)
        super().__init__(backbone, on_features(features, output_layer))

    def predict(self, ids_BS: torch.Tensor, dropout_keys: DropoutKeys | None = None) -> torch.Tensor:
        """Return the logits of the tags at every token, fp32 [B, S, N]; `dropout_keys` are needed in training only."""
        return self.head(self.backbone(ids_BS, dropout_keys)).float()

    def forward(self, ids_BS: torch.Tensor, target_BK: torch.Tensor, dropout_keys: DropoutKeys) -> torch.Tensor:
        """Return the mean cross-entropy over the words of a batch.

        `target_BK` has the number of the tag at the first piece of each word, and -100 elsewhere. K is the length of
        the longest row of all batches, so only the first S columns are used.
        """
        logit_BSN = self.predict(ids_BS, dropout_keys)
        target_BS = target_BK[:, : ids_BS.shape[1]]
        return F.cross_entropy(logit_BSN.flatten(0, 1), target_BS.flatten(), ignore_index=_NO_WORD)


class TaggedRow(NamedTuple):
    """Row of token ids for some consecutive words of a sentence, and the places of the words' first pieces."""

    sentence: int  # number of the sentence in its file, from 0
    ids: list[int]
    places: list[int]  # for each word, the index in `ids` of its first piece


class TaggingTask(Task):
    """Tagging of words, scored by accuracy (`tagging`) or by the F1 of the spans that BIO tags mark (`ner`)."""

    def __init__(self, name: str, data: Path) -> None:
        """Read the train and dev files in `data`; `name` is "ner" (needs BIO tags, such as B-PER) or "tagging"."""
        train_file = find_tagged_file(data, "train")
        dev_file = find_tagged_file(data, "dev")
        self.name = name
        self.metric = "f1" if name == "ner" else "accuracy"
        self.train = read_tagged_file(train_file)
        self.dev = read_tagged_file(dev_file)
        self.tags = tags_of(self.train)
        self.has_spans = are_bio_tags(self.tags) and are_bio_tags(tags_of(self.dev))
        if name == "ner" and not self.has_spans:
            raise UserError(
                f"{train_file}: the tags ({', '.join(self.tags[:4])}, ...) do not mark named entities as B-TYPE, "
                f"I-TYPE and O; use --task tagging, which is scored by accuracy"
            )
        train_bytes, dev_bytes = (read_regular(file, MOST_DATA_BYTES) for file in (train_file, dev_file))
        digested = name.encode() + train_bytes + b"\0" + dev_bytes
        self.digest = hashlib.sha256(digested).hexdigest()
        self.notes = [
            f"{file}: {len(sentences)} sentences, {sum(len(sentence.words) for sentence in sentences)} words, "
            f"{len(tags_of(sentences))} different tags"
            for file, sentences in ((train_file, self.train), (dev_file, self.dev))
        ]
        unknown_tags = sorted(set(tags_of(self.dev)) - set(self.tags))
        if unknown_tags:
            self.notes.append(
                f"{dev_file}: tags that the training data lack count as wrong: {', '.join(unknown_tags)}"
            )

    @override
    def examples(self, encoder: Pretrained, settings: FinetuneConfig) -> Examples:
        rows = tagged_rows(self.train, encoder, settings.max_length)
        number_of = {tag: number for number, tag in enumerate(self.tags)}
        tags_left = [list(reversed(sentence.tags)) for sentence in self.train]
        longest = padded([max((row.ids for row in rows), key=len)], encoder.special.pad).shape[1]
        target_NK = torch.full((len(rows), longest), _NO_WORD)
        for number, row in enumerate(rows):
            for place in row.places:
                target_NK[number, place] = number_of[tags_left[row.sentence].pop()]
        return Examples(ids=[row.ids for row in rows], target_NK=target_NK)

    @override
    def model(self, encoder: Pretrained, settings: FinetuneConfig, seed: int) -> TaggingModel:
        backbone = encoder.backbone(settings.hidden_dropout, settings.attention_dropout)
        return TaggingModel(backbone, encoder.tower.hidden_size, len(self.tags), seed, new_features(encoder, seed))

    @override
    def evaluate(
        self, model: TaskModel, encoder: Pretrained, settings: FinetuneConfig, progress: Progress
    ) -> TaskOutcome:
        assert isinstance(model, TaggingModel)
        rows = tagged_rows(self.dev, encoder, settings.max_length)
        device = next(model.parameters()).device
        predicted_of_row: list[list[str]] = [[] for _ in rows]
        ids = [row.ids for row in rows]
        for numbers, logit_BSN in predict(model.predict, ids, encoder.special.pad, settings.batch, device, progress):
            best_tags = logit_BSN.argmax(-1).tolist()
            for number, tags_of_tokens in zip(numbers, best_tags, strict=True):
                predicted_of_row[number] = [self.tags[tags_of_tokens[place]] for place in rows[number].places]
        predicted: list[list[str]] = [[] for _ in self.dev]
        for row, tags in zip(rows, predicted_of_row, strict=True):  # the rows of a sentence are in its order
            predicted[row.sentence] += tags
        return self.score(predicted)

    def score(self, predicted: Sequence[Sequence[str]]) -> TaskOutcome:
        """Score the predicted tags of all development sentences; the same tag for all words counts as a failure."""
        true = [sentence.tags for sentence in self.dev]
        num_right = 0
        for true_tags, predicted_tags in zip(true, predicted, strict=True):
            num_right += sum(map(str.__eq__, true_tags, predicted_tags))
        num_words = sum(map(len, true))
        metrics = {"accuracy": num_right / num_words}
        if self.has_spans:
            metrics |= entity_metrics(true, predicted)
        different_tags = {tag for tags in predicted for tag in tags}
        failures: tuple[str, ...] = ()
        if len(different_tags) == 1 and num_words > 1:
            failures = (f"degenerate: all {num_words} predictions are `{different_tags.pop()}`",)
        return TaskOutcome(metrics, failures, (self._predictions_file(predicted),))

    @override
    def hf_head(self, model: TaskModel, settings: FinetuneConfig) -> TaskHead:
        return tag_head(model.head, self.tags)

    def _predictions_file(self, predicted: Sequence[Sequence[str]]) -> TextFile:
        """Return a file with a word, its tag and its predicted tag per line, as the evaluation of CoNLL reads it."""
        lines = []
        for sentence, tags in zip(self.dev, predicted, strict=True):
            for word, true_tag, predicted_tag in zip(sentence.words, sentence.tags, tags, strict=True):
                lines.append(f"{word.replace(' ', '_')} {true_tag} {predicted_tag}")
            lines.append("")
        return TextFile(name="dev_predictions.txt", text="\n".join(lines) + "\n")


def tagged_rows(sentences: Sequence[TaggedSentence], encoder: Pretrained, max_length: int) -> list[TaggedRow]:
    """Encode sentences as rows `[CLS] words [SEP]` of at most `max_length` tokens; a long sentence gives several rows.

    All words are kept, in their order. A word that the tokenizer drops, such as a control character, becomes [UNK].
    """
    special = encoder.special
    room = max_length - _NUM_SPECIAL
    rows = []
    for number, sentence in enumerate(sentences):
        ids = [special.cls]
        places: list[int] = []
        for encoded in encoder.tokenizer.encode_words(sentence.words):
            pieces = (encoded or [special.unk])[:room]
            if len(ids) - 1 + len(pieces) > room:
                rows.append(TaggedRow(number, [*ids, special.sep], places))
                ids = [special.cls]
                places = []
            places.append(len(ids))
            ids += pieces
        rows.append(TaggedRow(number, [*ids, special.sep], places))
    return rows
