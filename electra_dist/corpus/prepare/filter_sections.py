"""Define the sections of a preparation's config that hold the filters and their thresholds.

Each filter is off unless its key is in the file; `gopher_quality: {}` switches one on with all defaults. The keys are
the parameters of datatrove's filter of the same name, and the defaults are those of FineWeb (arXiv:2406.17557), which
takes them from the paper that is named at each filter.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator

from electra_dist.config.sections.base import NonNegative, Positive, Section

Share = Annotated[float, Field(ge=0.0, le=1.0)]


class UrlFilterSection(Section):
    """Lists of web addresses; pages at these addresses are dropped, and documents without an address stay."""

    domains: Path | None = Field(
        default=None, description="file with a domain or subdomain a line whose pages are dropped"
    )
    urls: Path | None = Field(default=None, description="file with a whole URL a line to drop")
    words: Path | None = Field(
        default=None,
        description="file with a word a line; a page with one in its URL is dropped",
    )
    bundled_lists: bool = Field(
        default=False,
        description="use the lists in the datatrove package (the UT1 block lists of adult sites, and lists of "
        "words), as FineWeb did; they are unpacked into the cache folder of Hugging Face",
    )


class LanguageSection(Section):
    """Filter by language, which a fastText model identifies."""

    model: Path = Field(description="fastText model file, such as lid.176.bin")
    languages: tuple[str, ...] = Field(
        min_length=1, description="labels without `__label__` that are kept, such as [en]"
    )
    threshold: Share = Field(default=0.65, description="least score of one of these languages; FineWeb: 0.65")


class GopherRepetitionSection(Section):
    """Filter of documents with much repeated text, by the rules of Gopher (arXiv:2112.11446, table A1)."""

    dup_line_frac: Share = Field(default=0.3, description="largest share of lines that repeat an earlier one")
    dup_para_frac: Share = Field(default=0.3, description="the same of paragraphs")
    dup_line_char_frac: Share = Field(default=0.2, description="largest share of characters in repeated lines")
    dup_para_char_frac: Share = Field(default=0.2, description="the same in repeated paragraphs")
    top_n_grams: dict[Positive, Share] = Field(
        default={2: 0.2, 3: 0.18, 4: 0.16},
        description="n -> largest share of characters in the most frequent n-gram of words",
    )
    dup_n_grams: dict[Positive, Share] = Field(
        default={5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.1},
        description="n -> largest share of characters in n-grams of words that repeat an earlier one",
    )


class GopherQualitySection(Section):
    """Filter of documents of low quality, by the rules of Gopher (arXiv:2112.11446, section A.1.1)."""

    min_doc_words: NonNegative = Field(default=50, description="least number of words; 0: no limit")
    max_doc_words: NonNegative = Field(default=100_000, description="largest number of words; 0: no limit")
    min_avg_word_length: float = Field(default=3, ge=0, description="least mean length of a word, characters")
    max_avg_word_length: float = Field(default=10, ge=0, description="largest mean length of a word, characters")
    max_symbol_word_ratio: float = Field(
        default=0.1, ge=0, description="largest number of `#`, and of ellipses, for each word"
    )
    max_bullet_lines_ratio: Share = Field(default=0.9, description="largest share of lines that begin with a bullet")
    max_ellipsis_lines_ratio: Share = Field(
        default=0.3, description="largest share of lines that end with an ellipsis"
    )
    max_non_alpha_words_ratio: Share = Field(
        default=0.8, description="least share of words with a letter (the name is datatrove's)"
    )
    min_stop_words: NonNegative = Field(default=2, description="least number of different stop words")
    stop_words: tuple[str, ...] = Field(
        default=("the", "be", "to", "of", "and", "that", "have", "with"),
        description="set those of the language, or min_stop_words to 0",
    )


class C4QualitySection(Section):
    """Rules of C4 (arXiv:1910.10683, section 2.2); some drop single lines of a document, others the whole document.

    FineWeb switches filter_no_terminal_punct off, because this rule alone drops 30 % of the tokens.
    """

    filter_no_terminal_punct: bool = Field(
        default=False, description="drop lines that do not end with . ? ! or a quotation mark; C4 did, FineWeb did not"
    )
    min_num_sentences: NonNegative = Field(default=5, description="least number of sentences that are left")
    min_words_per_line: NonNegative = Field(default=3, description="drop lines with fewer words")
    max_word_length: Positive = Field(default=1000, description="drop lines with a longer word, characters")
    filter_lorem_ipsum: bool = Field(default=True, description="drop documents with `lorem ipsum`")
    filter_javascript: bool = Field(default=True, description="drop lines with `javascript`")
    filter_curly_bracket: bool = Field(default=True, description="drop documents with a `{`")
    filter_policy: bool = Field(default=True, description="drop lines about cookies and terms of use")
    remove_citations: bool = Field(default=True, description="remove marks such as [1] and [citation needed]")


class C4BadWordsSection(Section):
    """List of words; a document that contains one of them is dropped."""

    list: Path = Field(description="file with one word or phrase a line; it is never downloaded")


class FineWebQualitySection(Section):
    """Rules of FineWeb's own about the lines of a document (arXiv:2406.17557, section 3.6)."""

    line_punct_thr: Share = Field(default=0.12, description="least share of lines that end with punctuation")
    short_line_thr: Share = Field(default=0.67, description="largest share of short lines")
    short_line_length: Positive = Field(default=30, description="largest length of a short line, characters")
    char_duplicates_ratio: Share = Field(
        default=0.01,
        description="largest share of characters in repeated lines; datatrove, with its script for FineWeb, has 0.01, "
        "the paper (section 3.6) 0.1",
    )
    new_line_ratio: float = Field(default=0.3, ge=0, description="largest number of line ends for each word")


class ClassifierSection(Section):
    """Filter that keeps documents by the labels that the user's fastText classifier gives them."""

    model: Path = Field(description="fastText model file; it is never downloaded")
    keep: dict[str, Share] = Field(
        min_length=1, description="label without `__label__` -> least score; a document needs one of them"
    )


class FiltersSection(Section):
    """Filters in the order in which they are applied; each is off unless its key is set."""

    url: UrlFilterSection | None = Field(default=None, description="block lists of addresses")
    language: LanguageSection | None = Field(default=None, description="language identification")
    gopher_repetition: GopherRepetitionSection | None = Field(default=None, description="Gopher: repeated text")
    gopher_quality: GopherQualitySection | None = Field(default=None, description="Gopher: quality of a document")
    c4_quality: C4QualitySection | None = Field(default=None, description="C4: lines and documents")
    c4_bad_words: C4BadWordsSection | None = Field(default=None, description="C4: list of words")
    fineweb_quality: FineWebQualitySection | None = Field(default=None, description="FineWeb: structure of lines")
    classifier: ClassifierSection | None = Field(default=None, description="fastText classifier")
    drop_pattern: str | None = Field(
        default=None, description="regular expression; a document with a match is dropped; null: none"
    )

    @field_validator("drop_pattern")
    @classmethod
    def _is_pattern(cls, value: str | None) -> str | None:
        try:
            re.compile(value or "")
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"no regular expression of Python's ({error}); escape what stands for itself") from None
        return value
