"""Count the documents of one task by step, reason and source, and keep some of those that each step drops.

Guarantee: of each source, documents in = documents out + documents dropped by each step; `as_json` asserts it. The
samples of a step are the documents with the smallest hashes of id and text, so they do not depend on the order of the
documents, and a task that runs again keeps the same ones.

How: every filter and deduplication of datatrove writes what it drops to an exclusion writer. `DropRecorder.writer`
returns such a writer, which only counts and keeps samples.
"""

from __future__ import annotations

import bisect
import hashlib
from collections import Counter, defaultdict
from typing import Any

_SAMPLE_CHARS = 2000  # of the text of a dropped document


class DropRecorder:
    """Counts of the documents that one task of a stage reads, drops and writes; all steps of the stage share it."""

    def __init__(self, samples_per_filter: int) -> None:
        self._samples_per_filter = samples_per_filter
        self.begin()

    def begin(self) -> None:
        """Set all counts to zero; the first step of a stage calls this when a task begins."""
        self.documents_in: Counter[str] = Counter()
        self.characters_in: Counter[str] = Counter()
        self.documents_out: Counter[str] = Counter()
        self.characters_out: Counter[str] = Counter()
        self.dropped: Counter[tuple[str, str, str]] = Counter()  # (step, reason, source) -> documents
        self._samples: defaultdict[str, list[tuple[str, dict[str, Any]]]] = defaultdict(list)
        self._current: Any = None

    def add_read(self, document: Any) -> None:
        """Count a document that was read, and remember it for `is_current`."""
        self.documents_in[document.metadata["source"]] += 1
        self.characters_in[document.metadata["source"]] += len(document.text)
        self._current = document

    def add_unreadable(self, source: str, reason: str) -> None:
        """Count a document that the reader cannot turn into text."""
        self.documents_in[source] += 1
        self.dropped["read", reason, source] += 1

    def add_written(self, document: Any) -> None:
        """Count a document that passed all steps of the stage."""
        self.documents_out[document.metadata["source"]] += 1
        self.characters_out[document.metadata["source"]] += len(document.text)

    def drop(self, step: str, reason: str, document: Any) -> None:
        """Count a document that a step drops, and keep it as a sample if its hash is among the smallest."""
        source = document.metadata["source"]
        self.dropped[step, reason, source] += 1
        key = hashlib.blake2b(f"{document.id}\n{document.text}".encode(), digest_size=16).hexdigest()
        sample = {"id": document.id, "source": source, "reason": reason, "text": document.text[:_SAMPLE_CHARS]}
        samples = self._samples[step]
        bisect.insort(samples, (key, sample), key=lambda pair: pair[0])
        del samples[self._samples_per_filter :]

    def writer(self, step: str, reason: str = "duplicate") -> ExclusionWriter:
        """Return an object that counts what a step drops; `reason` is recorded where the step itself gives none."""
        return ExclusionWriter(self, step, reason)

    def is_current(self, document: Any) -> bool:
        """Return whether `document` is the very object that was read last; a shortened copy of it is not."""
        return document is self._current

    def as_json(self) -> dict[str, Any]:
        """Return all counts and samples; raise AssertionError if the counts of a source do not add up."""
        dropped_of_source: Counter[str] = Counter()
        for (_, _, source), number in self.dropped.items():
            dropped_of_source[source] += number
        for source, number in self.documents_in.items():
            assert number == self.documents_out[source] + dropped_of_source[source], source
        return {
            "documents_in": dict(self.documents_in),
            "characters_in": dict(self.characters_in),
            "documents_out": dict(self.documents_out),
            "characters_out": dict(self.characters_out),
            "dropped": [[*key, number] for key, number in sorted(self.dropped.items())],
            "samples": {step: [sample for _, sample in pairs] for step, pairs in sorted(self._samples.items())},
        }


class ExclusionWriter:
    """Counter of the documents that a step of datatrove drops; the step gets it as its `exclusion_writer`.

    The deduplication of sentences also writes copies of documents that it only shortens; these are not counted.
    """

    def __init__(self, recorder: DropRecorder, step: str, reason: str) -> None:
        """Count in `recorder` under the name `step`; `reason` is used where the step itself gives no reason."""
        self._recorder = recorder
        self._step = step
        self._reason = reason

    def __enter__(self) -> ExclusionWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def write(self, document: Any, rank: int = 0) -> None:
        """Count a document that the step drops; if the filter has put a reason into the metadata, that one is used."""
        if self._recorder.is_current(document):
            self._recorder.drop(self._step, document.metadata.get("filter_reason", self._reason), document)
