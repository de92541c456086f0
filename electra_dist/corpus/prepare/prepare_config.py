"""Define the config of `electra-dist corpus prepare`, a YAML file: sources, steps, executor and output.

The steps have a fixed order, that of FineWeb (arXiv:2406.17557): extraction of text from HTML, filters, deduplication,
formatting. A step is off unless its key is in the file; `gopher_quality: {}` switches one on with all defaults. The
keys of a filter are the parameters of datatrove's filter of the same name, and the defaults are those of FineWeb,
which takes them from the paper that is named at each filter.

`electra-dist corpus prepare --describe` prints all keys.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import wrap
from typing import Annotated, Literal, get_args, get_origin

from pydantic import BaseModel, Field, field_validator, model_validator
from pydantic.fields import FieldInfo

from electra_dist.config.keys import flattened, section_class
from electra_dist.config.sections.base import LocalFolder, NonNegative, Positive, Section

_WIDTH = 112  # of the lines of `reference`
SourceName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
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
    """Filter that keeps documents in given languages, which a fastText model of the user identifies."""

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
    """Filter that drops documents with a word of a list, as C4 did."""

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


class DecontaminationSection(Section):
    """Texts of evaluations; a document with a run of their words is dropped, as for GPT-3 (arXiv:2005.14165, C)."""

    files: tuple[Path, ...] = Field(
        min_length=1,
        description=".txt, .tsv, .csv, .jsonl, .json or .parquet files or folders of them; every text in them",
    )
    n_grams: Positive = Field(
        default=13, description="words of a text that a document must have in a row; GPT-3: at most 13"
    )
    min_words: Positive = Field(
        default=8,
        description="a text of fewer words than n_grams must be in the document as a whole, and one of fewer than "
        "these is not looked for, because it occurs by chance; GPT-3: 8; BLiMP has sentences of 4",
    )

    @model_validator(mode="after")
    def _n_grams_are_long_enough(self) -> DecontaminationSection:
        if self.n_grams < self.min_words:
            raise ValueError(
                f"n_grams is {self.n_grams}, but min_words {self.min_words}; set min_words to at most n_grams"
            )
        return self


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
    decontamination: DecontaminationSection | None = Field(
        default=None, description="texts on which models are evaluated, such as BLiMP or the test sets of GLUE"
    )

    @field_validator("drop_pattern")
    @classmethod
    def _is_pattern(cls, value: str | None) -> str | None:
        try:
            re.compile(value or "")
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"no regular expression of Python's ({error}); escape what stands for itself") from None
        return value


class SourceSection(Section):
    """One source of documents: files of any known kind, with a name and a licence for the reports."""

    name: SourceName = Field(description="name of the source in reports and metadata")
    path: str = Field(
        min_length=1,
        description="file, folder, URL (s3://, hf://, https:// ...), brace pattern or glob pattern",
    )
    license: str = Field(default="unknown", description="licence of the texts; recorded, not interpreted")
    text_field: str = Field(default="text", description="JSON field or column that holds the text")
    url_field: str | None = Field(
        default="url", description="JSON field or column with the address, for filters.url; null: none"
    )


class ExtractionSection(Section):
    """Extraction of the text of HTML pages by trafilatura; other documents pass unchanged."""

    favor: Literal["precision", "recall", "balance"] = Field(
        default="precision", description="less text but the right one, or more of it; FineWeb: precision"
    )
    timeout_s: float = Field(
        default=30.0, gt=0, description="seconds; a page that takes longer is dropped (reason timeout)"
    )


class ExactSection(Section):
    """Exact deduplication: of all documents with the same text, one is kept."""

    finder_tasks: Positive = Field(default=1, description="tasks that search for equal hashes, each a range of hashes")


class MinhashSection(Section):
    """MinHash deduplication: of each cluster of near-duplicates, one document is kept.

    Two documents whose sets of word n-grams have Jaccard similarity s match with probability
    1 - (1 - s^hashes_per_bucket)^num_buckets.
    """

    n_grams: Positive = Field(default=5, description="words in an n-gram; FineWeb took 5")
    num_buckets: Positive = Field(
        default=14, description="buckets, which are also the tasks of the search; FineWeb: 14"
    )
    hashes_per_bucket: Positive = Field(default=8, description="hashes that must all agree; FineWeb: 8")
    seed: int = Field(default=1, ge=0, lt=2**32, description="seed of the hash functions, below 2^32")


class SentencesSection(Section):
    """Deduplication of spans of sentences as in C4: a span that occurred in an earlier document is removed."""

    num_sentences: Positive = Field(default=3, description="sentences in a span; C4 took 3")
    min_doc_words: NonNegative = Field(
        default=50, description="a document that lost a span and has fewer words left is dropped"
    )
    min_num_sentences: NonNegative = Field(
        default=3, description="a document that lost a span and has fewer sentences left is dropped"
    )
    finder_tasks: Positive = Field(default=1, description="tasks that search for equal hashes, each a range of hashes")


class DeduplicationSection(Section):
    """Kinds of deduplication in the order in which they run. Each compares the documents of all sources together."""

    exact: ExactSection | None = Field(default=None, description="documents with the same text")
    minhash: MinhashSection | None = Field(default=None, description="near-duplicates")
    sentences: SentencesSection | None = Field(default=None, description="repeated spans of sentences")


class PiiSection(Section):
    """Replacement of e-mail addresses and IP addresses in the text by others that belong to nobody."""

    remove_emails: bool = Field(default=True, description="replace e-mail addresses")
    remove_ips: bool = Field(default=True, description="replace IP addresses")
    only_remove_public_ips: bool = Field(default=True, description="leave private addresses such as 192.168.0.1")
    email_replacement: tuple[str, ...] = Field(
        default=("email@example.com", "firstname.lastname@example.org"), min_length=1, description="taken in turn"
    )
    ip_replacement: tuple[str, ...] = Field(
        default=("192.0.2.1", "198.51.100.1", "203.0.113.1"),
        min_length=1,
        description="taken in turn; addresses that RFC 5737 reserves for documentation",
    )


class FormattingSection(Section):
    """Changes to the text of the documents that were not dropped; each is off unless its key is set."""

    fix_encoding: bool = Field(default=False, description="repair text in a wrong encoding (mojibake) by ftfy")
    drop_symbol_lines: bool = Field(default=False, description="remove lines that consist of punctuation only")
    pii: PiiSection | None = Field(default=None, description="replace e-mail and IP addresses")


class SlurmSection(Section):
    """Resources and options of the Slurm jobs that run a preparation (`executor.kind: slurm`)."""

    partition: str = Field(min_length=1, description="partition of the jobs")
    time: str = Field(default="24:00:00", description="time limit of a task, as Slurm writes it")
    cpus_per_task: Positive = Field(default=1, description="cores of a task; datatrove uses one")
    mem_per_cpu_gb: Positive = Field(default=4, description="memory for each core, GB")
    qos: str | None = Field(default=None, description="quality of service; null: the cluster's default")
    max_array_size: Positive = Field(
        default=1001, description="largest array that the cluster allows; more tasks become several arrays"
    )
    setup: str = Field(
        default="", description="shell lines that a task runs first; the folder of this Python is in PATH before them"
    )
    options: dict[str, str] = Field(default={}, description="further options of sbatch, without the dashes")

    @field_validator("partition", "time", "qos", "options")
    @classmethod
    def _one_line(cls, value: object) -> object:
        """Raise ValueError for a line break: what follows it in a job script would be a shell command."""
        texts = [*value, *value.values()] if isinstance(value, dict) else [value]
        if any(isinstance(text, str) and not text.isprintable() for text in texts):
            raise ValueError("must not contain a line break or a control character")
        return value


class ExecutorSection(Section):
    """Where the tasks of a preparation run: in processes of this machine, or on Slurm."""

    kind: Literal["local", "slurm"] = Field(
        default="local", description="processes of this machine, or a Slurm array for each stage"
    )
    tasks: Positive = Field(
        default=1, description="parts into which the files are divided, fixed for a preparation; one output file each"
    )
    workers: Positive | None = Field(
        default=None, description="tasks at a time; null: the usable cores of this machine, or no limit on a cluster"
    )
    slurm: SlurmSection | None = Field(default=None, description="what the jobs ask for; required for slurm")

    @model_validator(mode="after")
    def _slurm_has_its_section(self) -> ExecutorSection:
        if self.kind == "slurm" and self.slurm is None:
            raise ValueError("kind slurm needs the section slurm; add slurm: {partition: NAME}")
        return self


class PrepareConfig(Section):
    """The whole config of `electra-dist corpus prepare`, a YAML file: sources, steps, executor and output."""

    output: str = Field(
        min_length=1, description="folder or s3://bucket/prefix for documents/*.jsonl.gz, samples/ and prepare.json"
    )
    work: LocalFolder = Field(
        description="folder for intermediate documents, signatures, logs and completed tasks; shared by all nodes; "
        "takes about as much space as the documents, once for each deduplication"
    )
    sources: tuple[SourceSection, ...] = Field(min_length=1, description="sources of documents")
    endpoint_url: str | None = Field(default=None, description="URL of the S3 endpoint; null: AWS")
    undecodable: Literal["skip", "replace"] = Field(
        default="skip", description="documents that are not UTF-8 are dropped, or the bytes become U+FFFD"
    )
    words: Literal["plain", "spacy"] = Field(
        default="plain",
        description="how text is cut into words and sentences: by a regular expression for languages with spaces, "
        "or by spaCy as datatrove does by default (the package spacy must be installed)",
    )
    spacy_language: str = Field(default="eng", description="ISO 639-3 code of the language for words: spacy")
    extraction: ExtractionSection = Field(default=ExtractionSection(), description="text of HTML pages")
    filters: FiltersSection = Field(default=FiltersSection(), description="which documents are dropped")
    deduplication: DeduplicationSection = Field(default=DeduplicationSection(), description="repeated documents")
    formatting: FormattingSection = Field(default=FormattingSection(), description="changes to the text")
    executor: ExecutorSection = Field(default=ExecutorSection(), description="where the tasks run")
    samples_per_filter: NonNegative = Field(
        default=5, description="dropped documents that each task keeps for each filter, chosen by a hash; 0: none"
    )

    @field_validator("sources")
    @classmethod
    def _names_differ(cls, value: tuple[SourceSection, ...]) -> tuple[SourceSection, ...]:
        names = [source.name for source in value]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"two sources have the name {repeated[0]}; give each a name of its own")
        return value


def local_files(config: PrepareConfig) -> dict[str, Path]:
    """Return the paths of the models and lists that the filters read, by config key, such as filters.url.domains."""
    filters = flattened(config.filters.model_dump())
    return {f"filters.{key}": value for key, value in filters.items() if isinstance(value, Path)}


def reference() -> str:
    """Return a YAML file to be completed, with all keys of `corpus prepare`, their defaults and descriptions."""
    return "\n".join(_outline(PrepareConfig, "")) + "\n"


def _outline(section: type[BaseModel], indent: str) -> Iterator[str]:
    """Yield the lines of YAML for the keys of a section and of the sections in it, with their descriptions.

    The first line begins with `indent`, which ends in "- " for an item of a list; the others are aligned with it.
    """
    for name, field in section.model_fields.items():
        inner = section_class(field.annotation)
        entry = f"{indent}{name}:"
        if inner is None and not field.is_required():
            entry += f" {_in_yaml(field.default)}"
        note = _note_on(field, is_section=inner is not None)
        indent = " " * len(indent)
        if len(entry) + len(note) > _WIDTH:
            yield from wrap(note, _WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
            yield entry
        else:
            yield f"{entry}  # {note}"
        if inner is not None:
            is_list = get_origin(field.annotation) is tuple
            yield from _outline(inner, f"{indent}  - " if is_list else f"{indent}  ")


def _note_on(field: FieldInfo, *, is_section: bool) -> str:
    """Return a field's description, preceded by its possible values, and by whether it is required or off."""
    note = field.description or ""
    if field.is_required():
        note = f"required: {note}"
    elif is_section and field.default is None:
        note = f"off; {note}"
    if get_origin(field.annotation) is Literal:
        note = f"{' or '.join(get_args(field.annotation))}; {note}"
    return note


def _in_yaml(value: object) -> str:
    """Return a default as YAML; a text such as 24:00:00 needs quotes, because YAML would take it for a number."""
    if isinstance(value, dict) or (isinstance(value, str) and value.isalpha()):
        return str(value)
    return json.dumps(value)
