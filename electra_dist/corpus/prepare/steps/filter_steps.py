"""Make datatrove's filters and formatters from the config of a preparation, in the order of FineWeb."""

from __future__ import annotations

from typing import Any, NamedTuple

from datatrove.pipeline.filters import (
    C4QualityFilter,
    FineWebQualityFilter,
    GopherQualityFilter,
    GopherRepetitionFilter,
    RegexFilter,
)
from datatrove.pipeline.formatters import FTFYFormatter, PIIFormatter, SymbolLinesFormatter

from electra_dist.corpus.prepare.filter_sections import FiltersSection, GopherRepetitionSection
from electra_dist.corpus.prepare.prepare_config import FormattingSection
from electra_dist.corpus.prepare.steps.drop_recorder import DropRecorder
from electra_dist.corpus.prepare.steps.offline_filters import (
    OfflineBadWordsFilter,
    OfflineClassifierFilter,
    OfflineLanguageFilter,
    OfflineUrlFilter,
)
from electra_dist.corpus.prepare.steps.words import PlainWords


class FilterSteps(NamedTuple):
    """Filters that run before the text of HTML pages is extracted, and those that run after it."""

    before_extraction: list[Any]
    after_extraction: list[Any]


def filter_steps(filters: FiltersSection, tokenizer: str | PlainWords, recorder: DropRecorder) -> FilterSteps:
    """Return the filters that are switched on; `recorder` counts what each filter drops, under the filter's key."""
    before: list[Any] = []
    after: list[Any] = []
    if filters.url is not None:
        before.append(OfflineUrlFilter(filters.url, recorder.writer("url")))
    if filters.language is not None:
        after.append(OfflineLanguageFilter(filters.language, recorder.writer("language")))
    if filters.gopher_repetition is not None:
        after.append(_repetition_filter(filters.gopher_repetition, tokenizer, recorder))
    if filters.gopher_quality is not None:
        thresholds = filters.gopher_quality.model_dump()
        writer = recorder.writer("gopher_quality")
        after.append(GopherQualityFilter(**thresholds, exclusion_writer=writer, language=tokenizer))
    if filters.c4_quality is not None:
        thresholds = filters.c4_quality.model_dump()
        after.append(C4QualityFilter(recorder.writer("c4_quality"), **thresholds, language=tokenizer))
    if filters.c4_bad_words is not None:
        after.append(OfflineBadWordsFilter(filters.c4_bad_words, recorder.writer("c4_bad_words")))
    if filters.fineweb_quality is not None:
        thresholds = filters.fineweb_quality.model_dump()
        after.append(FineWebQualityFilter(recorder.writer("fineweb_quality"), **thresholds, language=tokenizer))
    if filters.classifier is not None:
        after.append(OfflineClassifierFilter(filters.classifier, recorder.writer("classifier", "no label to keep")))
    if filters.drop_pattern is not None:
        after.append(RegexFilter(filters.drop_pattern, recorder.writer("drop_pattern", "match")))
    return FilterSteps(before, after)


def _repetition_filter(
    settings: GopherRepetitionSection, tokenizer: str | PlainWords, recorder: DropRecorder
) -> GopherRepetitionFilter:
    """Return Gopher's filter of repeated text, with limits for n-grams as pairs (n, share) for datatrove."""
    shares = settings.model_dump(exclude={"top_n_grams", "dup_n_grams"})
    return GopherRepetitionFilter(
        **shares,
        top_n_grams=tuple(sorted(settings.top_n_grams.items())),
        dup_n_grams=tuple(sorted(settings.dup_n_grams.items())),
        exclusion_writer=recorder.writer("gopher_repetition"),
        language=tokenizer,
    )


def formatting_steps(settings: FormattingSection) -> list[Any]:
    """Return the switched-on steps that change texts: wrong encoding, lines of symbols, e-mail and IP addresses."""
    steps: list[Any] = []
    if settings.fix_encoding:
        steps.append(FTFYFormatter())
    if settings.drop_symbol_lines:
        steps.append(SymbolLinesFormatter())
    if settings.pii is not None:
        steps.append(PIIFormatter(**settings.pii.model_dump()))
    return steps
