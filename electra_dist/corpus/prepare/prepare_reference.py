"""Write the tables of all keys of `corpus prepare`, which docs/corpus_prepare.md holds, from the fields' descriptions.

Run `python -m electra_dist.corpus.prepare.prepare_reference` and put its output at the end of the page after a change
of the config. A test fails if the page is out of date.
"""

from __future__ import annotations

from electra_dist.config_reference import plain_table, section_tables
from electra_dist.corpus.prepare.filter_sections import FiltersSection
from electra_dist.corpus.prepare.prepare_config import (
    DeduplicationSection,
    ExecutorSection,
    ExtractionSection,
    FormattingSection,
    PrepareConfig,
    SourceSection,
)


def reference() -> str:
    """Return the Markdown tables of all keys of `corpus prepare`'s YAML file, one for each section, in its order."""
    return "\n".join(
        [
            plain_table("The file", PrepareConfig),
            plain_table("One of `sources`", SourceSection),
            section_tables("extraction", ExtractionSection),
            section_tables("filters", FiltersSection),
            section_tables("deduplication", DeduplicationSection),
            section_tables("formatting", FormattingSection),
            section_tables("executor", ExecutorSection),
        ]
    )


if __name__ == "__main__":
    print(reference(), end="")
