"""Make the stages of a preparation, each a pipeline of datatrove, from its config.

Guarantee: equal configs give equal stages. Tasks of a stage depend on nothing but the stages before it, so a task that
was killed is repeated alone and writes the same bytes.

How: the first stage reads the sources and filters. Each deduplication adds its own stages: signatures, search (for
MinHash also clusters), and one that drops what was found. The last of these stages formats the text and writes to the
output. A stage `report` of one task adds up the counts.

| deduplication | stages | steps of datatrove |
| --- | --- | --- |
| exact | signatures, search, filter | ExactDedupSignature, ExactFindDedups, ExactDedupFilter |
| minhash | signatures, buckets, clusters, filter | MinhashDedupSignature, -Buckets, -Cluster, -Filter |
| sentences | signatures, search, filter | SentenceDedupSignature, SentenceFindDedups, SentenceDedupFilter |
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from datatrove.data import Document
from datatrove.pipeline.dedup import (
    ExactDedupConfig,
    ExactDedupFilter,
    ExactDedupSignature,
    ExactFindDedups,
    MinhashConfig,
    MinhashDedupBuckets,
    MinhashDedupCluster,
    MinhashDedupFilter,
    MinhashDedupSignature,
    SentDedupConfig,
    SentenceDedupFilter,
    SentenceDedupSignature,
    SentenceFindDedups,
)
from datatrove.utils.hashing import HashConfig

from electra_dist.corpus.prepare.document_files import DropRecorder, ReadDocuments, WriteDocuments
from electra_dist.corpus.prepare.filter_steps import PlainWords, filter_steps, formatting_steps
from electra_dist.corpus.prepare.prepare_config import PrepareConfig
from electra_dist.corpus.prepare.prepare_report import WriteReport
from electra_dist.corpus.prepare.read_sources import ExtractText, ReadSources

# SHA-1 of the standard library; datatrove's default, xxhash, refuses text since its version 4.
_HASH = HashConfig(precision=64, hash_fc="sha1")


class Stage(NamedTuple):
    """One datatrove pipeline of a preparation; its tasks run in parallel, after all tasks of the stage before."""

    name: str  # such as "02-exact-signatures", also the folder of the stage in the work folder
    num_tasks: int
    steps: list[Any]  # the pipeline
    has_record: bool  # whether its tasks read and write documents and count them

    @property
    def step_names(self) -> str:
        """Return the class names of the steps in their order, joined by arrows, as `--dry-run` prints them."""
        return " -> ".join(type(step).__name__ for step in self.steps)


def make_stages(config: PrepareConfig) -> list[Stage]:
    """Return the stages (datatrove pipelines) of `corpus prepare` in the order in which they run."""
    return _StageList(config).stages


def whole_text(document: Document) -> str:
    """Return what the exact deduplication compares by its hash: the whole text of a document."""
    return str(document.text)


class _StageList:
    """Builder of the stages (datatrove pipelines) of one preparation, from its config."""

    def __init__(self, config: PrepareConfig) -> None:
        self.stages: list[Stage] = []
        self._config = config
        self._work = Path(config.work)
        # How datatrove's steps cut text into words: their argument `language`.
        self._tokenizer = config.spacy_language if config.words == "spacy" else PlainWords()
        deduplication = config.deduplication
        # Stages that write documents and are not added yet; the last of them writes to the output.
        self._documents_left = 1 + sum(part is not None for part in deduplication.__dict__.values())
        self._newest_documents = self._work  # folder of the last stage that wrote documents
        self._add_first()
        if deduplication.exact is not None:
            self._add_exact()
        if deduplication.minhash is not None:
            self._add_minhash()
        if deduplication.sentences is not None:
            self._add_sentences()
        counting = [stage.name for stage in self.stages if stage.has_record]
        self._add("report", 1, [WriteReport(config, counting)])

    def _add_first(self) -> None:
        """Add the first stage, which reads the sources, extracts text and filters."""
        config = self._config

        def steps(recorder: DropRecorder) -> list[Any]:
            extractor = ExtractText(config.extraction, recorder)
            filters = filter_steps(config.filters, self._tokenizer, recorder)
            return [ReadSources(config, recorder), *filters.before_extraction, extractor, *filters.after_extraction]

        self._add_documents("filter", steps)

    def _add_exact(self) -> None:
        """Add the stages that keep one of all documents with the same text."""
        settings = self._config.deduplication.exact
        assert settings is not None
        dedup = ExactDedupConfig(content_getter=whole_text, hash_config=_HASH)
        signatures = self._folder("exact-signatures")
        self._add_reading("exact-signatures", ExactDedupSignature(str(signatures), dedup, settings.finder_tasks))
        found = self._folder("exact-search")
        self._add("exact-search", settings.finder_tasks, [ExactFindDedups(str(signatures), str(found), dedup)])
        self._add_documents(
            "exact-filter",
            lambda recorder: [
                self._reader(recorder),
                ExactDedupFilter(str(found), dedup, recorder.writer("exact")),
            ],
        )

    def _add_minhash(self) -> None:
        """Add the stages that keep one document of each cluster of near-duplicates."""
        settings = self._config.deduplication.minhash
        assert settings is not None
        dedup = MinhashConfig(
            settings.n_grams, settings.num_buckets, settings.hashes_per_bucket, settings.seed, hash_config=_HASH
        )
        signatures = self._folder("minhash-signatures")
        self._add_reading("minhash-signatures", MinhashDedupSignature(str(signatures), dedup, self._tokenizer))
        pairs = self._folder("minhash-buckets")
        self._add(
            "minhash-buckets", settings.num_buckets, [MinhashDedupBuckets(str(signatures), str(pairs), config=dedup)]
        )
        clusters = self._folder("minhash-clusters")
        self._add("minhash-clusters", 1, [MinhashDedupCluster(str(pairs), str(clusters), dedup)])
        self._add_documents(
            "minhash-filter",
            lambda recorder: [
                self._reader(recorder),
                MinhashDedupFilter(str(clusters), recorder.writer("minhash")),
            ],
        )

    def _add_sentences(self) -> None:
        """Add the stages that remove spans of sentences that occurred in an earlier document."""
        settings = self._config.deduplication.sentences
        assert settings is not None
        dedup = SentDedupConfig(
            n_sentences=settings.num_sentences,
            min_doc_words=settings.min_doc_words,
            min_num_sentences=settings.min_num_sentences,
            hash_config=_HASH,
        )
        signatures = self._folder("sentence-signatures")
        self._add_reading(
            "sentence-signatures",
            SentenceDedupSignature(str(signatures), settings.finder_tasks, dedup, self._tokenizer),
        )
        found = self._folder("sentence-search")
        self._add(
            "sentence-search", settings.finder_tasks, [SentenceFindDedups(str(signatures), str(found), config=dedup)]
        )
        self._add_documents(
            "sentence-filter",
            lambda recorder: [
                self._reader(recorder),
                SentenceDedupFilter(str(found), dedup, recorder.writer("sentences"), self._tokenizer),
            ],
        )

    def _add_documents(self, name: str, steps: Callable[[DropRecorder], list[Any]]) -> None:
        """Add a stage that writes documents after some steps; the last such stage also formats them for the output.

        `steps` is called with the recorder that counts what is dropped, and returns the steps.
        """
        self._documents_left -= 1
        recorder = DropRecorder(self._config.samples_per_filter)
        folder = self._folder(name)
        pipeline = steps(recorder)
        if self._documents_left == 0:
            pipeline += formatting_steps(self._config.formatting)
            pipeline.append(WriteDocuments(folder, recorder, self._config.output, self._config.endpoint_url))
        else:
            pipeline.append(WriteDocuments(folder, recorder))
        self._add(name, self._config.executor.tasks, pipeline, has_record=True)
        self._newest_documents = folder

    def _add_reading(self, name: str, step: Any) -> None:
        """Add a stage that reads the documents of the newest stage that writes some, and gives them to `step`."""
        self._add(name, self._config.executor.tasks, [self._reader(DropRecorder(0)), step])

    def _reader(self, recorder: DropRecorder) -> ReadDocuments:
        return ReadDocuments(self._newest_documents, recorder)

    def _add(self, name: str, num_tasks: int, steps: list[Any], *, has_record: bool = False) -> None:
        """Append a stage to the list; its name begins with its position, from 01, as in "02-exact-signatures"."""
        self.stages.append(Stage(self._folder(name).name, num_tasks, steps, has_record))

    def _folder(self, name: str) -> Path:
        """Return the folder of the stage that is added next, such as WORK/02-exact-signatures."""
        return self._work / f"{len(self.stages) + 1:02d}-{name}"
