"""Find the spans that BIO tags mark, such as named entities, and compute their precision, recall and F1.

Guarantee: a predicted span counts as right if its first word, its last word and its type are those of a true span, as
in the evaluation of CoNLL-2000 and CoNLL-2003. Tags may be in the schemes IOB1, BIO (IOB2) and BIOES (IOBES, BILOU).
An invalid sequence, such as an I- at the beginning, is read as these evaluations do: a span begins wherever the type
changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

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
