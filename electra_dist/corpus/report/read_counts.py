"""Define the form in which a build's records hold counts of files read and inputs left out, and add such counts up."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import Field

from electra_dist.config import Section
from electra_dist.corpus.inputs.skipped_inputs import MAX_NAMES, SkippedInputs
from electra_dist.corpus.text_readers import StreamCounts

_COUNTERS = ("files", "file_bytes", "source_files", "source_bytes", "members")  # of StreamCounts


class ReadCounts(Section):
    """Counts of input files that were read and of inputs that were left out, as the records of a build keep them."""

    files: dict[str, int] = Field(default={}, description="files read, by the ending of their names")
    file_bytes: dict[str, int] = Field(default={}, description="their bytes on disk, by ending")
    source_files: dict[str, int] = Field(default={}, description="files read, by source")
    source_bytes: dict[str, int] = Field(default={}, description="their bytes on disk, by source")
    members: dict[str, int] = Field(default={}, description="members of archives that were read, by ending")
    skipped: dict[str, dict[str, int]] = Field(default={}, description="inputs left out: reason -> ending -> number")
    skipped_names: dict[str, list[str]] = Field(default={}, description="names of the first of these, by reason")


def of_skipped(skipped: SkippedInputs) -> ReadCounts:
    """Convert counts of left-out inputs to the form of a build's records; the counts of files read stay empty."""
    return ReadCounts(skipped=skipped.by_reason(), skipped_names=dict(skipped.names))


def of_stream(counts: StreamCounts) -> ReadCounts:
    """Convert the counts of a `DocumentStream` that has ended to the form of a build's records."""
    counters = {name: dict(getattr(counts, name)) for name in _COUNTERS}
    return of_skipped(counts.skipped).model_copy(update=counters)


def add_counts(records: Iterable[ReadCounts]) -> StreamCounts:
    """Add up the counts of all records; of inputs left out, keep the first `MAX_NAMES` names for each reason."""
    total = StreamCounts()
    for record in records:
        for name in _COUNTERS:
            getattr(total, name).update(getattr(record, name))
        for reason, numbers in record.skipped.items():
            for ending, number in numbers.items():
                total.skipped.counts[reason, ending] += number
        for reason, names in record.skipped_names.items():
            kept = total.skipped.names[reason]
            kept.extend(names[: MAX_NAMES - len(kept)])
    return total
