"""Print the tables of docs/corpus_prepare.md, which list all keys of `corpus prepare`, from the fields' descriptions.

After a change of the config, run `python -m electra_dist.corpus.prepare.prepare_reference` and put its output at the
end of the page. A test fails if the page is out of date.
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
    """Return Markdown tables of all keys in `corpus prepare`'s YAML file: a table for each section, in file order."""
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
