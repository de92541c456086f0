"""Filters of datatrove that take their lists and models from local files, so that nothing is downloaded at run time.

datatrove fetches the fastText model for languages, the list of bad words and the list of domain suffixes when they are
first used. The classes of this module replace just that part.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from datatrove.data import Document
from datatrove.pipeline.filters import C4BadWordsFilter, FastTextClassifierFilter, LanguageFilter, URLFilter
from datatrove.utils.lid import FT176LID
from tldextract import TLDExtract
from typing_extensions import override

from electra_dist.corpus.prepare.filter_sections import (
    C4BadWordsSection,
    ClassifierSection,
    LanguageSection,
    UrlFilterSection,
)
from electra_dist.errors import UserError
from electra_dist.store.regular_files import check_regular, read_regular


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
    from fasttext.FastText import _FastText

    try:
        check_regular(path)
        return _FastText(str(path))
    except (ValueError, MemoryError, OSError) as error:
        raise UserError(f"{path}: no fastText model ({error}); download the model again") from None


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
    """Filter that keeps documents in given languages; a dropped document's language is the recorded reason."""

    def __init__(self, settings: LanguageSection, exclusion_writer: Any) -> None:
        languages = list(settings.languages)
        super().__init__(languages, settings.threshold, exclusion_writer)
        self.model = _LocalLanguageModel(settings.model, languages)

    def filter(self, doc: Document) -> bool | tuple[bool, str]:
        """Return True to keep a document, else (False, its likeliest language), or (False, "unknown") without one."""
        labels, _ = self.model.model.predict(doc.text.replace("\n", " "))
        if not labels:
            return False, "unknown"  # nothing in the text is in the vocabulary of the model
        return True if super().filter(doc) else (False, doc.metadata["language"])


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
    def model(self) -> Any:
        """Return the model, loaded at the first use; UserError if it lacks a label of `filters.classifier.keep`."""
        if self._model is None:
            self._model = load_model(self._path)
            known = {label.removeprefix("__label__") for label in self._model.labels}
            unknown = [label for label, _ in self.keep_labels if label not in known]
            if unknown:
                raise UserError(
                    f"{self._path}: no label {unknown[0]}; set filters.classifier.keep to some of {sorted(known)[:20]}"
                )
        return self._model
