"""Make the steps of datatrove that filter and format text, and cut text into words, from the config of a preparation.

Guarantee: nothing is downloaded. datatrove fetches the fastText model for languages, the list of bad words and the
list of domain suffixes when they are first used, and spaCy's models for words; the classes of this module take local
files and regular expressions instead.

Limits: `PlainWords` is for languages that separate words by spaces. A word with an apostrophe or a hyphen is one word,
where spaCy, datatrove's default, makes two or three of it, so the n-grams of the two tokenizers differ slightly. An
abbreviation ends a sentence.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from datatrove.data import Document
from datatrove.pipeline.filters import (
    C4BadWordsFilter,
    C4QualityFilter,
    FastTextClassifierFilter,
    FineWebQualityFilter,
    GopherQualityFilter,
    GopherRepetitionFilter,
    LanguageFilter,
    RegexFilter,
    URLFilter,
)
from datatrove.pipeline.filters.base_filter import BaseFilter
from datatrove.pipeline.formatters import FTFYFormatter, PIIFormatter, SymbolLinesFormatter
from datatrove.utils.lid import FT176LID
from datatrove.utils.text import simplify_text
from datatrove.utils.word_tokenizers import WordTokenizer, load_word_tokenizer
from tldextract import TLDExtract
from typing_extensions import override

from electra_dist.corpus.evaluation_texts import read_evaluation_texts
from electra_dist.corpus.prepare.document_files import DropRecorder, ExclusionWriter
from electra_dist.corpus.prepare.prepare_config import (
    C4BadWordsSection,
    ClassifierSection,
    DecontaminationSection,
    FiltersSection,
    FormattingSection,
    GopherRepetitionSection,
    LanguageSection,
    UrlFilterSection,
)
from electra_dist.errors import UserError
from electra_dist.store.atomic_files import check_regular, read_regular
from electra_dist.word_pattern import WORD_PATTERN

_WORD = re.compile(rf"{WORD_PATTERN}(?:['\u2019-]{WORD_PATTERN})*|[^\w\s]")
# A sentence ends at a line's end, with a mark of Chinese or Japanese or, before white space, with . ! ? an ellipsis,
# or the mark of Hindi, Urdu or Arabic; closing quotes and brackets belong to it. Of several marks in a row before
# white space only the last one is matched as a mark: matching all of them would be quadratic in their number.
_SENTENCE = re.compile(
    r"[^\n]*?(?:[.!?\u2026\u0964\u06d4\u061f][\"'\u201d\u2019)\]]*(?=\s|$)"
    r"|[\u3002\uff01\uff1f]++[\"'\u201d\u2019)\]\uff09\u300d\u300f]*+)"
    r"|[^\n]+"
)


class PlainWords(WordTokenizer):
    """Tokenizer of datatrove that finds words and sentences by regular expressions.

    All instances compare equal, so that datatrove, which caches its tokenizers, keeps only one.
    """

    def __init__(self) -> None:
        super().__init__("plain")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PlainWords)

    def __hash__(self) -> int:
        return hash(PlainWords)

    def word_tokenize(self, text: str) -> list[str]:
        """Return the words of a text; each punctuation mark is a word."""
        return _WORD.findall(text)

    def sent_tokenize(self, text: str) -> list[str]:
        """Return the sentences of a text without the white space around them."""
        return [text[start:end] for start, end in self.span_tokenize(text)]

    def span_tokenize(self, text: str) -> list[tuple[int, int]]:
        """Return the positions (start, end) of each sentence in the text; the end is exclusive."""
        spans = []
        for match in _SENTENCE.finditer(text):
            sentence = match.group()
            if sentence.strip():
                start = match.start() + len(sentence) - len(sentence.lstrip())
                spans.append((start, match.start() + len(sentence.rstrip())))
        return spans


EVALUATION_KEY = "filters.decontamination.files"


class FilterSteps(NamedTuple):
    """Filters of web addresses, which run before the text of HTML pages is extracted, and filters of texts."""

    before_extraction: list[Any]
    after_extraction: list[Any]


def filter_steps(filters: FiltersSection, tokenizer: str | PlainWords, recorder: DropRecorder) -> FilterSteps:
    """Return the filters that the config switches on; `recorder` counts what each one drops, under its key."""
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
    if filters.decontamination is not None:
        writer = recorder.writer("decontamination")
        after.append(DecontaminationFilter(filters.decontamination, tokenizer, writer))
    return FilterSteps(before, after)


def _repetition_filter(
    settings: GopherRepetitionSection, tokenizer: str | PlainWords, recorder: DropRecorder
) -> GopherRepetitionFilter:
    """Return datatrove's filter of documents that repeat lines, paragraphs or n-grams, with Gopher's rules.

    Dropped documents go to `recorder`.
    """
    shares = settings.model_dump(exclude={"top_n_grams", "dup_n_grams"})
    return GopherRepetitionFilter(
        **shares,
        top_n_grams=tuple(sorted(settings.top_n_grams.items())),
        dup_n_grams=tuple(sorted(settings.dup_n_grams.items())),
        exclusion_writer=recorder.writer("gopher_repetition"),
        language=tokenizer,
    )


def formatting_steps(settings: FormattingSection) -> list[Any]:
    """Return the steps, as far as switched on, that repair encodings, drop lines of symbols and replace addresses."""
    steps: list[Any] = []
    if settings.fix_encoding:
        steps.append(FTFYFormatter())
    if settings.drop_symbol_lines:
        steps.append(SymbolLinesFormatter())
    if settings.pii is not None:
        steps.append(PIIFormatter(**settings.pii.model_dump()))
    return steps


def read_list(path: Path | None) -> list[str]:
    """Return the lines of a text file without empty lines and comments (`#`); [] if `path` is None."""
    if path is None:
        return []
    try:
        lines = read_regular(path).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); give a readable text file in UTF-8") from None
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def load_model(path: Path) -> Any:
    """Load a fastText model; raise UserError if the file is not one."""
    from fasttext.FastText import _FastText  # needed by two of the filters only

    try:
        check_regular(path)
        return _FastText(str(path))
    except (ValueError, MemoryError, OSError) as error:
        raise UserError(f"{path}: no fastText model ({error}); download the model again") from None


def check_labels(key: str, labels: Iterable[str], model: Path) -> None:
    """Raise UserError, which names the config's `key` and the nearest label, if a fastText model lacks a label."""
    known = [label.removeprefix("__label__") for label in load_model(model).labels]
    for label in labels:
        if label not in known:
            nearest = max(known, key=lambda other: _likeness(label.removeprefix("__label__").lower(), other.lower()))
            shown = ", ".join(sorted(known)[:20]) + (", ..." if len(known) > 20 else "")
            raise UserError(
                f"{key}: {model} has no label `{label}`; did you mean `{nearest}`? It has {len(known)}: {shown}"
            )


def _likeness(name: str, other: str) -> tuple[int, float]:
    """Return a sort key, higher for labels that are more alike: common beginning first, then all characters."""
    num_equal = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(name, other, strict=False)))
    return num_equal, difflib.SequenceMatcher(None, name, other).ratio()


class OfflineUrlFilter(URLFilter):
    """Filter that drops pages whose address is on a block list; documents without an address pass."""

    def __init__(self, settings: UrlFilterSection, exclusion_writer: Any) -> None:
        super().__init__(
            extra_domains=read_list(settings.domains),
            extra_urls=read_list(settings.urls),
            banned_words=read_list(settings.words),
            use_integrated_lists=settings.bundled_lists,
            exclusion_writer=exclusion_writer,
        )
        self.tldextractor = TLDExtract(suffix_list_urls=(), cache_dir=None)  # the list in the package, no download

    def filter(self, document: Document) -> bool | tuple[bool, str]:
        """Return True to keep a page, or (False, name of the list) if its address is on a block list."""
        return super().filter(document) if document.metadata.get("url") else True


class _LocalLanguageModel(FT176LID):
    """fastText's language model from a local file, which is loaded when the first document comes."""

    def __init__(self, path: Path, languages: list[str]) -> None:
        super().__init__(languages)
        self._path = path
        self._model: Any = None

    @property
    @override
    def model(self) -> Any:
        if self._model is None:
            self._model = load_model(self._path)
        return self._model


class OfflineLanguageFilter(LanguageFilter):
    """Filter that keeps documents in given languages; the recorded reason names a dropped document's language."""

    def __init__(self, settings: LanguageSection, exclusion_writer: Any) -> None:
        languages = list(settings.languages)
        super().__init__(languages, settings.threshold, exclusion_writer)
        self._wanted = languages
        self._reason_of_doubt = f"score below {settings.threshold:g}"
        self.model = _LocalLanguageModel(settings.model, languages)

    def filter(self, doc: Document) -> bool | tuple[bool, str]:
        """Return True to keep a document, or (False, reason).

        The reason is the likeliest language, "unknown" if none is found, or "en, score below 0.65" for a wanted one.
        """
        labels, _ = self.model.model.predict(doc.text.replace("\n", " "))
        if not labels:
            return False, "unknown"  # nothing in the text is in the vocabulary of the model
        if super().filter(doc):
            return True
        language = doc.metadata["language"]
        return False, f"{language}, {self._reason_of_doubt}" if language in self._wanted else language


class OfflineBadWordsFilter(C4BadWordsFilter):
    """Filter of C4 that drops documents with a word from a list; one list serves documents in all languages."""

    def __init__(self, settings: C4BadWordsSection, exclusion_writer: Any) -> None:
        super().__init__(exclusion_writer=exclusion_writer)
        words = read_list(settings.list)
        if not words:
            raise UserError(f"{settings.list}: the list of words is empty; give one word a line")
        alternatives = "|".join(re.escape(word.lower()) for word in words)
        self._words = re.compile(rf"(?:\W|^)({alternatives})(?:\W|$)")

    def _get_badwords(self, lang: str) -> re.Pattern[str]:
        """Return the pattern that finds a listed word as a whole word; it is the same for every `lang`."""
        return self._words


class OfflineClassifierFilter(FastTextClassifierFilter):
    """Filter by labels that a fastText classifier gives to documents; its file is loaded for the first document."""

    def __init__(self, settings: ClassifierSection, exclusion_writer: Any) -> None:
        super().__init__(
            str(settings.model),
            keep_labels=list(settings.keep.items()),
            save_labels_in_metadata=False,
            newline_replacement=" ",
            exclusion_writer=exclusion_writer,
        )
        self._path = settings.model
        self._model: Any = None

    @property
    @override
    def model(self) -> Any:
        if self._model is None:
            self._model = load_model(self._path)
        return self._model


class DecontaminationFilter(BaseFilter):
    """Filter that drops documents with words of evaluation texts; the name of the text's file is the recorded reason.

    Texts are compared in lower case, without punctuation, accents and the values of numbers, as by datatrove's
    NGramsDecontFilter. That filter is not used, because it never finds a text of fewer than `n_grams` words, such as
    most sentences of BLiMP.
    """

    name = "decontamination"

    def __init__(
        self, settings: DecontaminationSection, tokenizer: str | PlainWords, exclusion_writer: ExclusionWriter
    ) -> None:
        super().__init__(exclusion_writer)
        self._settings = settings
        self._tokenizer = tokenizer
        self._names: dict[str, str] = {}  # n-gram of a text, words with spaces -> FOLDER/FILE
        self._lengths: dict[str, list[int]] = {}  # first `min_words` words of n-grams -> words in these, ascending

    def filter(self, doc: Document) -> bool | tuple[bool, str]:
        """Return True to keep a document, or (False, FOLDER/FILE) if it has an n-gram of a text in this file."""
        if not self._names:
            self._read_texts()
        words = self._words(doc.text)
        min_words = self._settings.min_words
        for start in range(len(words) - min_words + 1):
            for length in self._lengths.get(" ".join(words[start : start + min_words]), ()):
                name = self._names.get(" ".join(words[start : start + length]))
                if name is not None:
                    return False, name
        return True

    def _words(self, text: str) -> list[str]:
        return load_word_tokenizer(self._tokenizer).word_tokenize(simplify_text(text))

    def _read_texts(self) -> None:
        """Read the n-grams of all evaluation texts; a worker does so when its first document comes."""
        settings = self._settings
        for text in read_evaluation_texts(settings.files, settings.min_words, EVALUATION_KEY).texts:
            words = self._words(text.text)
            length = min(len(words), settings.n_grams)
            if length < settings.min_words:
                continue  # punctuation between spaces was counted as words
            for start in range(len(words) - length + 1):
                n_gram = words[start : start + length]
                self._names.setdefault(" ".join(n_gram), f"{text.file.parent.name}/{text.file.name}")
                lengths = self._lengths.setdefault(" ".join(n_gram[: settings.min_words]), [])
                if length not in lengths:
                    lengths.append(length)
