"""Count the inputs that a corpus build leaves out, by reason and by ending, and keep their names."""

from __future__ import annotations

from collections import Counter, defaultdict

from electra_dist.corpus.inputs.file_kinds import ending_of

# Reason for which a file, a folder or a member of an archive is not read -> explanation for the user.
SKIP_REASONS = {
    "unknown_kind": "no known ending",
    "hidden": "hidden: the name begins with a dot",
    "no_data": "named as Spark names what is no data: _temporary, _delta_log, or a table with _ before its name",
    "broken_link": "a link to nothing",
    "read_before": "a link or second path to what is read under another name",
    "not_a_file": "no regular file, such as a pipe, or a link within an archive",
    "empty_file": "no bytes at all, as after a failed download",
    "no_text_column": "a table without the column of --text-field",
    "metadata": "JSON or another text beside the text of a WebDataset sample",
}
MAX_NAMES = 1000  # names that are kept for each reason; the counts are exact all the same


def encodable(name: str) -> str:
    r"""Return a file's name with escapes such as `\udcff` for bytes that are not UTF-8, so that JSON can hold it."""
    return name.encode("utf-8", "backslashreplace").decode()


class SkippedInputs:
    """Counter of inputs that are left out: files, links, folders, and members of archives.

    A folder that is hidden, or that was read before under another path, counts as one input, whatever it contains.
    """

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()  # (reason, ending) -> number
        self.names: dict[str, list[str]] = defaultdict(list)  # reason -> the first MAX_NAMES names

    def add(self, reason: str, name: str) -> None:
        """Count a left-out input. `name` is its path below the input folder; in an archive, "wiki/a.tar: 1.jpg"."""
        assert reason in SKIP_REASONS
        self.counts[reason, ending_of(name)] += 1
        if len(self.names[reason]) < MAX_NAMES:
            self.names[reason].append(encodable(name))

    def by_reason(self) -> dict[str, dict[str, int]]:
        """Return reason -> ending -> number of inputs left out, without reasons that did not occur."""
        return {
            reason: {ending: number for (key, ending), number in sorted(self.counts.items()) if key == reason}
            for reason in SKIP_REASONS
            if self.names.get(reason)
        }

    def summary(self) -> str:
        """Return all numbers on one line, such as ".html 3, .pdf 1 (no known ending)"; "" if nothing is left out."""
        parts = []
        for reason, numbers in self.by_reason().items():
            counts = ", ".join(f"{ending} {number:,}" for ending, number in numbers.items())
            parts.append(f"{counts} ({SKIP_REASONS[reason]})")
        return "; ".join(parts)

    def joined(self, other: SkippedInputs) -> SkippedInputs:
        """Return a new counter with the sums of this counter and `other`; the names in this counter come first."""
        both = SkippedInputs()
        both.counts = self.counts + other.counts
        for reason in SKIP_REASONS:
            names = self.names.get(reason, []) + other.names.get(reason, [])
            if names:
                both.names[reason] = names[:MAX_NAMES]
        return both
