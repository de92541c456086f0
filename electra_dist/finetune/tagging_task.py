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
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from typing_extensions import override

from electra_dist.corpus.counts import remarks_on_texts
from electra_dist.errors import UserError
from electra_dist.finetune.labelled_texts import count_names, held_out_rows, list_names
from electra_dist.finetune.task import Task, TaskOutcome, TextFile, label_weights
from electra_dist.finetune.word_files import find_tagged_file, read_tagged_file, tags_of
from electra_dist.store.atomic_files import MOST_DATA_BYTES, read_regular

if TYPE_CHECKING:
    import torch

    from electra_dist.finetune.finetune_config import FinetuneConfig
    from electra_dist.finetune.models import Tagger, TaskModel
    from electra_dist.finetune.training_loop import Examples, Progress
    from electra_dist.pretrained.encoder import Pretrained

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


def tag_metrics(
    true: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]], has_spans: bool
) -> dict[str, float]:
    """Return the accuracy of predicted tags (of at least one word), and with `has_spans` the `entity_metrics`."""
    num_words = 0
    num_right = 0
    for tags, guesses in zip(true, predicted, strict=True):
        num_words += len(tags)
        num_right += sum(tag == guess for tag, guess in zip(tags, guesses, strict=True))
    metrics = {"accuracy": num_right / num_words}
    if has_spans:
        metrics |= entity_metrics(true, predicted)
    return metrics


def _failures(predicted: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Return a line that says so if all predicted tags, at least two, are the same one; otherwise ()."""
    tags = [tag for sentence in predicted for tag in sentence]
    if len(tags) > 1 and len(set(tags)) == 1:
        return (f"degenerate: all {len(tags)} predictions are `{tags[0]}`",)
    return ()


def remarks_on_tags(file: Path, tags: Iterable[Sequence[str]], known: Sequence[str]) -> list[str]:
    """Return a line on the tags of a file's sentences that are not among the `known` ones of a model; else []."""
    known_tags = set(known)
    unknown = [tag for tags_of_sentence in tags for tag in tags_of_sentence if tag not in known_tags]
    if not unknown:
        return []
    return [
        f"{file}: tags that the training data lack count as wrong: {count_names(unknown)}; the known tags are "
        f"{list_names(known)}"
    ]


_NUM_SPECIAL = 2  # [CLS] and [SEP] of a row


class TaggedRow(NamedTuple):
    """Token ids of a sentence, or of a part of a long one, and which of them begin a word."""

    sentence: int  # number of the sentence in its file, from 0
    ids: list[int]
    places: list[int]  # for each word, the index in `ids` of its first piece


class TaggingTask(Task):
    """Tagging of words, scored by accuracy (`tagging`) or by the F1 of the spans that BIO tags mark (`ner`)."""

    optional_settings = ("class_weights",)

    def __init__(self, name: str, data: Path, dev_share: float = 0.1, split_seed: int = 0) -> None:
        """Read the train and dev files in `data`; `name` is "ner" (needs BIO tags, such as B-PER) or "tagging".

        Without a dev file, a share of the sentences is held out.
        """
        train_file = find_tagged_file(data, "train")
        if train_file is None:
            raise UserError(
                f"{data}: no train file; put train.conllu, or train.txt with a word and its tag on each line, there "
                f"(--data)"
            )
        dev_file = find_tagged_file(data, "dev")
        self.name = name
        self.metric = "f1" if name == "ner" else "accuracy"
        self.train = read_tagged_file(train_file)
        self.tags = tags_of(self.train)
        digested = name.encode() + read_regular(train_file, MOST_DATA_BYTES) + b"\0"
        self.notes = []
        self.data = {"split": None}
        if dev_file is not None:
            self.dev = read_tagged_file(dev_file)
            digested += read_regular(dev_file, MOST_DATA_BYTES)
        else:
            self._hold_out(train_file, dev_share, split_seed)
            digested += f"{dev_share} {split_seed}".encode()
        self.has_spans = are_bio_tags(self.tags) and are_bio_tags([*self.tags, *tags_of(self.dev)])
        if name == "ner" and not self.has_spans:
            raise UserError(
                f"{train_file}: the tags ({', '.join(self.tags[:4])}, ...) do not mark named entities as B-TYPE, "
                f"I-TYPE and O; use --task tagging, which is scored by accuracy"
            )
        self.digest = hashlib.sha256(digested).hexdigest()
        for file, sentences in ((train_file, self.train), (dev_file or train_file, self.dev)):
            num_words = sum(len(sentence.words) for sentence in sentences)
            self.notes.append(
                f"{file}: {len(sentences)} sentences, {num_words} words, {len(tags_of(sentences))} different tags"
            )
            self.notes += remarks_on_texts(str(file), (" ".join(sentence.words) for sentence in sentences))
        self.notes += remarks_on_tags(dev_file or train_file, (sentence.tags for sentence in self.dev), self.tags)

    def _hold_out(self, file: Path, share: float, seed: int) -> None:
        """Move a share of the sentences from `train` to `dev`: of those with one tag, and of those with several."""
        keys = [float(len(set(sentence.tags)) > 1) for sentence in self.train]
        if len(keys) == 1:
            raise UserError(
                f"{file}: all words are one sentence, so none can be held out; write an empty line after each "
                f"sentence, or put a dev file beside it"
            )
        rows = held_out_rows(file, keys, share, seed, instead="put a dev file beside it")
        self.data = {"split": {"dev_share": share, "split_seed": seed, "dev_sentences": rows}}
        self.notes.append(
            f"{file}: no development file, so {len(rows)} of {len(self.train)} sentences are held out (--dev-share "
            f"{share}, --split-seed {seed}); finetune.json has their numbers, from 0"
        )
        self.dev = [self.train[row] for row in rows]
        kept = sorted(set(range(len(keys))) - set(rows))
        self.train = [self.train[row] for row in kept]

    @override
    def examples(self, encoder: Pretrained, settings: FinetuneConfig) -> Examples:
        import torch

        from electra_dist.finetune.models import NO_WORD
        from electra_dist.finetune.training_loop import Examples, padded

        rows = tagged_rows([sentence.words for sentence in self.train], encoder, settings.max_length)
        number_of = {tag: number for number, tag in enumerate(self.tags)}
        # A long sentence has several rows: each row takes the next tags, from the end of a reversed list.
        tags_left = [list(reversed(sentence.tags)) for sentence in self.train]
        longest = padded([max((row.ids for row in rows), key=len)], encoder.special.pad).shape[1]
        target_NK = torch.full((len(rows), longest), NO_WORD)
        for number, row in enumerate(rows):
            for place in row.places:
                target_NK[number, place] = number_of[tags_left[row.sentence].pop()]
        return Examples(ids=[row.ids for row in rows], target_NK=target_NK)

    @override
    def check(self, settings: FinetuneConfig) -> None:
        super().check(settings)
        self._weights(settings)

    def _weights(self, settings: FinetuneConfig) -> list[float] | None:
        counts = Counter(tag for sentence in self.train for tag in sentence.tags)
        return label_weights(counts, self.tags, settings.class_weights)

    @override
    def model(self, encoder: Pretrained, settings: FinetuneConfig, seed: int) -> Tagger:
        from electra_dist.finetune.models import StockNetwork, Tagger, labels_config

        # The default of transformers is a dropout before the head, which the paper does not have.
        config = {"classifier_dropout": 0.0, **labels_config(self.tags)}
        network = StockNetwork(encoder, "TokenClassification", config, settings, seed)
        return Tagger(network, encoder.special, self._weights(settings))

    @override
    def evaluate(
        self, model: TaskModel, encoder: Pretrained, settings: FinetuneConfig, progress: Progress
    ) -> TaskOutcome:
        words = [sentence.words for sentence in self.dev]
        outputs = word_outputs(model, words, encoder, settings, progress)
        return self.score([[self.tags[number] for number in output_WN.argmax(-1).tolist()] for output_WN in outputs])

    def score(self, predicted: Sequence[Sequence[str]]) -> TaskOutcome:
        """Score the predicted tags of all development sentences; the same tag for all words counts as a failure."""
        from electra_dist.finetune.task_metrics import sentence_errors

        true = [sentence.tags for sentence in self.dev]
        metrics = tag_metrics(true, predicted, self.has_spans)
        outcome = TaskOutcome(metrics, _failures(predicted), (self._predictions_file(predicted),))
        if self.metric != "accuracy":
            return outcome
        pairs = zip(true, predicted, strict=True)
        counts = [(sum(map(str.__eq__, tags, guesses)), len(tags)) for tags, guesses in pairs]
        standard_error, items = sentence_errors(counts)
        return outcome._replace(standard_error=standard_error, items=items)

    def _predictions_file(self, predicted: Sequence[Sequence[str]]) -> TextFile:
        """Return a file with a word, its tag and its predicted tag per line, as the evaluation of CoNLL reads it."""
        lines = []
        for sentence, tags in zip(self.dev, predicted, strict=True):
            for word, true_tag, predicted_tag in zip(sentence.words, sentence.tags, tags, strict=True):
                lines.append(f"{word.replace(' ', '_')} {true_tag} {predicted_tag}")
            lines.append("")
        return TextFile(name="dev_predictions.txt", text="\n".join(lines) + "\n")


def word_outputs(
    model: TaskModel,
    sentences: Sequence[Sequence[str]],
    encoder: Pretrained,
    settings: FinetuneConfig,
    progress: Progress,
) -> list[torch.Tensor]:
    """Return a model's outputs at the first pieces of the W words of each sentence, fp32 [W, N] on the host."""
    import torch

    from electra_dist.finetune.training_loop import predict

    rows = tagged_rows(sentences, encoder, settings.max_length)
    device = next(model.parameters()).device
    output_of_row: dict[int, torch.Tensor] = {}
    ids = [row.ids for row in rows]
    for numbers, logit_BSN in predict(model.predict, ids, encoder.special.pad, settings.batch, device, progress):
        for number, logit_SN in zip(numbers, logit_BSN.cpu(), strict=True):
            output_of_row[number] = logit_SN[rows[number].places]
    outputs: list[list[torch.Tensor]] = [[] for _ in sentences]
    for number, row in enumerate(rows):  # the rows of a sentence are in its order
        outputs[row.sentence].append(output_of_row[number])
    return [torch.cat(parts) for parts in outputs]


def tagged_rows(sentences: Sequence[Sequence[str]], encoder: Pretrained, max_length: int) -> list[TaggedRow]:
    """Encode words as rows `[CLS] words [SEP]` of at most `max_length` tokens; a long sentence gives several rows.

    All words are kept, in their order. A word that the tokenizer drops, such as a control character, becomes [UNK].
    """
    special = encoder.special
    room = max_length - _NUM_SPECIAL
    rows = []
    for number, words in enumerate(sentences):
        ids = [special.cls]
        places: list[int] = []
        for encoded in encoder.tokenizer.encode_words(words):
            pieces = (encoded or [special.unk])[:room]
            if len(ids) - 1 + len(pieces) > room:
                rows.append(TaggedRow(number, [*ids, special.sep], places))
                ids = [special.cls]
                places = []
            places.append(len(ids))
            ids += pieces
        rows.append(TaggedRow(number, [*ids, special.sep], places))
    return rows
