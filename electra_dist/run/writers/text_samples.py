"""Write and read samples.jsonl: held-out text with replacements by the generator, and the discriminator's verdicts.

Every evaluation adds a record with the same few rows, so the records show what generator and discriminator learn:

    {"step": 1000, "texts": [{"original": [...], "shown": [...], "replaced_probability": [...]}]}

Limits: one writer (rank 0); no record for objectives without a discriminator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from electra_dist.errors import StoreAway
from electra_dist.escapes import markdown_text
from electra_dist.run.folder import SAMPLES_FILE
from electra_dist.run.jsonl import JsonlFile, Record, read_records
from electra_dist.run.record_checks import samples_fault
from electra_dist.run.record_stream import newest_record

CONTINUATION = "##"  # begins a WordPiece token that continues the word of the token before it


@dataclass(frozen=True, kw_only=True)
class TextSample:
    """Beginning of a held-out row as the discriminator read it; the lists have one entry for each token."""

    original: list[str]  # tokens of the corpus
    shown: list[str]  # tokens that the discriminator read, with the generator's replacements
    replaced_probability: list[float]  # by the discriminator, in [0, 1]


class SampleFile:
    """Writer of samples.jsonl in a run folder. Only rank 0 has one; call `close` at the end."""

    def __init__(self, run_dir: Path) -> None:
        self._file = JsonlFile(run_dir / SAMPLES_FILE)

    def truncate_after(self, step: int) -> None:
        """Drop the samples of evaluations after step `step`, because the run repeats them. Call it at every resume."""
        records = read_records(self._file.path, samples_fault)
        kept_records = [record for record in records if record["step"] <= step]
        if len(kept_records) < len(records):
            self._file.replace(kept_records)

    def write(self, step: int, samples: Sequence[TextSample]) -> None:
        """Append the samples of the evaluation after `step` steps."""
        self._file.append({"step": step, "texts": [asdict(sample) for sample in samples]})

    def close(self) -> None:
        """Sync the file to the disk and close it; samples that a full disk refuses are lost. May be called twice."""
        try:
            self._file.close()
        except StoreAway:
            self._file.discard()


def has_samples(run_dir: Path) -> bool:
    """Return whether an evaluation of the run has written samples.jsonl."""
    return (run_dir / SAMPLES_FILE).exists()


def read_newest_samples(run_dir: Path) -> Record | None:
    """Return the newest record of samples.jsonl, with its "step" and "texts"; None without a record."""
    return newest_record(run_dir / SAMPLES_FILE, samples_fault)


def replaced_words_table(samples: Sequence[TextSample]) -> str:
    """Return the samples as Markdown: each text with its replaced tokens in bold, and a table of these tokens."""
    parts = []
    for sample in samples:
        text = ""
        rows = ["| original | shown | probability of replaced |", "| --- | --- | --: |"]
        for original, shown, probability in zip(sample.original, sample.shown, sample.replaced_probability):
            piece = markdown_text(shown.removeprefix(CONTINUATION))
            if shown != original:
                piece = f"**{piece}**"
                rows.append(f"| {markdown_text(original)} | {markdown_text(shown)} | {probability:.2f} |")
            text += piece if shown.startswith(CONTINUATION) else f" {piece}"
        parts.append("\n".join([text.strip(), "", *rows]))
    return "\n\n".join(parts)
