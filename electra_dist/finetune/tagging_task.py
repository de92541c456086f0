"""Make tagging a fine-tuning task: one label for each word, such as a part of speech or a named entity.

Guarantee: every word of the development data gets exactly one prediction. A sentence that is longer than the model's
rows is cut between two words into several rows. The words are encoded as a text in which spaces separate them, as a
pipeline of Hugging Face reads them. The label of a word is predicted from the state of its first piece, and its other
pieces have no label, as in google-research/electra and in Hugging Face's `aggregation_strategy="first"`.

A predicted span, such as a named entity, counts as right if its first word, its last word and its type are those of a
true span, as in the evaluation of CoNLL-2000 and CoNLL-2003. Tags may be in the schemes IOB1, BIO (IOB2) and BIOES
(IOBES, BILOU). An invalid sequence, such as an I- at the beginning, is read as these evaluations do: a span begins
wherever the type changes.

How: the head is that of transformers' classes, one Dense(H -> N) over the states for ELECTRA, without dropout, as in
google-research/electra. The loss is the mean cross-entropy over the words of a batch.

Limits: a word with more pieces than a row has room for is cut.

Shapes: B rows, S tokens, N tags.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from typing_extensions import override

from electra_dist.errors import UserError
from electra_dist.finetune.finetune_config import FinetuneConfig
from electra_dist.finetune.models import NO_WORD, StockNetwork, Tagger, TaskModel, labels_config
from electra_dist.finetune.task import Task, TaskOutcome, TextFile
from electra_dist.finetune.training_loop import Examples, Progress, padded, predict
from electra_dist.finetune.word_files import TaggedSentence, find_tagged_file, read_tagged_file, tags_of
from electra_dist.pretrained.encoder import Pretrained
from electra_dist.store.atomic_files import MOST_DATA_BYTES, read_regular

Span = tuple[str, int, int]  # (type, index of the first word, index of the last word); the last word is included

_BEGIN = frozenset("BSU")  # prefixes of a word that always begins a span; U is the S of BILOU
_END = frozenset("ESLU")  # prefixes of a word that always ends a span; L is the E of BILOU
_PREFIXES = frozenset("BIESLU")


def are_bio_tags(tags: Sequence[str]) -> bool:
    """Return whether all tags are O or begin with a prefix such as B- or I-, and at least one has a prefix."""
    prefixed = [tag for tag in tags if tag != "O"]
    return bool(prefixed) and all(tag[:1] in _PREFIXES and tag[1:2] == "-" and len(tag) > 2 for tag in prefixed)


def spans_of(tags: Sequence[str]) -> list[Span]:
    """Return the spans that the tags of a sentence mark, in their order, as (type, first word, last word).

    Indices begin at 0: B-PER I-PER O B-LOC gives ("PER", 0, 1) and ("LOC", 3, 3). A tag I- or E- that continues no
    span begins a new one, so every sequence of tags is accepted.
    """
    spans: list[Span] = []
    open_type = ""  # type of the span that this word may continue; empty if there is none
    for place, tag in enumerate(tags):
        if tag == "O":
            open_type = ""
            continue
        prefix, span_type = tag[0], tag[2:]
        if prefix in _BEGIN or span_type != open_type:
            spans.append((span_type, place, place))
        else:
            _, first, _ = spans[-1]
            spans[-1] = (span_type, first, place)
        open_type = "" if prefix in _END else span_type
    return spans


def entity_metrics(true: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> dict[str, float]:
    """Return `f1`, `precision` and `recall` of the predicted spans over all sentences and types, as fractions.

    A fraction with the denominator 0 is returned as 0.
    """
    counts: Counter[str] = Counter()
    for true_tags, predicted_tags in zip(true, predicted, strict=True):
        true_spans = set(spans_of(true_tags))
        predicted_spans = set(spans_of(predicted_tags))
        counts["true"] += len(true_spans)
        counts["predicted"] += len(predicted_spans)
        counts["right"] += len(true_spans & predicted_spans)
    precision = counts["right"] / max(1, counts["predicted"])
    recall = counts["right"] / max(1, counts["true"])
    f1 = 2 * counts["right"] / max(1, counts["predicted"] + counts["true"])
    return {"f1": f1, "precision": precision, "recall": recall}


_NUM_SPECIAL = 2  # [CLS] and [SEP] of a row


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
        target_NK = torch.full((len(rows), longest), NO_WORD)
        for number, row in enumerate(rows):
            for place in row.places:
                target_NK[number, place] = number_of[tags_left[row.sentence].pop()]
        return Examples(ids=[row.ids for row in rows], target_NK=target_NK)

    @override
    def model(self, encoder: Pretrained, settings: FinetuneConfig, seed: int) -> Tagger:
        # The default of transformers is a dropout before the head, which the paper does not have.
        config = {"classifier_dropout": 0.0, **labels_config(self.tags)}
        return Tagger(StockNetwork(encoder, "TokenClassification", config, settings, seed), encoder.special)

    @override
    def evaluate(
        self, model: TaskModel, encoder: Pretrained, settings: FinetuneConfig, progress: Progress
    ) -> TaskOutcome:
        assert isinstance(model, Tagger)
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
