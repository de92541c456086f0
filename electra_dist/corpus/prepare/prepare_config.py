"""Define the config of `electra-dist corpus prepare`, a YAML file: sources, steps, executor and output.

The steps have a fixed order, that of FineWeb (arXiv:2406.17557): extraction of text from HTML, filters, deduplication,
formatting. A step is off unless its key is in the file. docs/corpus_prepare.md has all keys: after a change,
run `python -m electra_dist.corpus.prepare.prepare_config` and put its output at the end of that page.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from textwrap import wrap
from typing import Annotated, Literal, get_args, get_origin

from pydantic import BaseModel, Field, field_validator, model_validator

from electra_dist.config.keys import section_class
from electra_dist.config.sections.base import LocalFolder, NonNegative, Positive, Section
from electra_dist.corpus.prepare.filter_sections import FiltersSection

_WIDTH = 112  # of the lines of `reference`
SourceName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]


class SourceSection(Section):
    """One source of documents: files of any known kind, with a name and a licence for the reports."""

    name: SourceName = Field(description="name of the source in reports and metadata")
    path: str = Field(
        min_length=1,
        description="file, folder, s3:// URL, brace pattern or glob pattern",
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
    """Replacement of e-mail addresses and IP addresses."""

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
        """Refuse a line break: what follows it in a job script would be a shell command."""
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
    """The whole config of `electra-dist corpus prepare`, a YAML file."""

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
    """Return the model and list files that the filters need: key in the config, as filters.url.domains -> path."""
    filters = config.filters
    files: dict[str, Path | None] = {}
    if filters.url is not None:
        files["filters.url.domains"] = filters.url.domains
        files["filters.url.urls"] = filters.url.urls
        files["filters.url.words"] = filters.url.words
    if filters.language is not None:
        files["filters.language.model"] = filters.language.model
    if filters.c4_bad_words is not None:
        files["filters.c4_bad_words.list"] = filters.c4_bad_words.list
    if filters.classifier is not None:
        files["filters.classifier.model"] = filters.classifier.model
    return {key: path for key, path in files.items() if path is not None}


def reference() -> str:
    """Return a block of Markdown with all keys of the YAML file, their defaults and their descriptions."""
    return "\n".join(["```yaml", *_outline(PrepareConfig, ""), "```"]) + "\n"


def _outline(section: type[BaseModel], indent: str) -> Iterator[str]:
    """Yield the lines of YAML for the keys of a section; the first begins with `indent`, the others are aligned."""
    for name, field in section.model_fields.items():
        inner = section_class(field.annotation)
        entry = f"{indent}{name}:"
        note = field.description or ""
        if field.is_required():
            note = f"required: {note}"
        elif inner is None:
            entry += f" {_in_yaml(field.default)}"
        elif field.default is None:
            note = f"off; {note}"
        if get_origin(field.annotation) is Literal:
            note = f"{' or '.join(get_args(field.annotation))}; {note}"
        indent = " " * len(indent)
        if len(entry) + len(note) > _WIDTH:
            yield from wrap(note, _WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
            yield entry
        else:
            yield f"{entry}  # {note}"
        if inner is not None:
            is_list = get_origin(field.annotation) is tuple
            yield from _outline(inner, f"{indent}  - " if is_list else f"{indent}  ")


def _in_yaml(value: object) -> str:
    """Return a default as YAML; a text such as 24:00:00 needs quotes, because YAML would take it for a number."""
    if isinstance(value, dict) or (isinstance(value, str) and value.isalpha()):
        return str(value)
    return json.dumps(value)


if __name__ == "__main__":
    print(reference(), end="")
