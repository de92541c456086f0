"""Judge the share of [UNK] in tokenized texts: a vocabulary that does not fit its texts turns them into [UNK]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from electra_dist.corpus.build_report import BuildReport
from electra_dist.errors import UserError

NAMED_RATE = 0.05  # share of [UNK] from which on a source is named to the user


class UnknownTokens(NamedTuple):
    """Counts for one text: its tokens without [CLS], [SEP] and [PAD], and how many of them are [UNK]."""

    tokens: int
    unk_tokens: int

    @property
    def rate(self) -> float:
        """Return the share of [UNK] among the tokens; 0 if there are none."""
        return self.unk_tokens / self.tokens if self.tokens else 0.0


def unknown_tokens_of_rows(ids: NDArray[np.integer], special: Mapping[str, int]) -> UnknownTokens:
    """Count the tokens and the [UNK] in rows of token ids; `special` maps BERT's special tokens to their ids."""
    num_unknown = int(np.count_nonzero(ids == special["[UNK]"]))
    ends = [special[token] for token in ("[PAD]", "[CLS]", "[SEP]")]
    return UnknownTokens(int(np.count_nonzero(~np.isin(ids, ends))), num_unknown)


def unknown_tokens_of_report(report: BuildReport) -> dict[str, UnknownTokens]:
    """Return how many tokens and [UNK] each source has, from the report of a build: source -> counts."""
    return {name: UnknownTokens(source.tokens, source.unk_tokens) for name, source in report.sources.items()}


def remarks_on_unknown_tokens(counts: Mapping[str, UnknownTokens], max_rate: float, key: str, place: str) -> list[str]:
    """Return a line for each source with 5 % of [UNK] or more; raise UserError if one has more than `max_rate`.

    Both name `place`, such as the corpus's URL. The error also names `key`, the config key that sets `max_rate`.
    """
    lines = []
    for source, count in counts.items():
        of_source = f"{place}: {100 * count.rate:.1f} % of the tokens of {source} are [UNK]"
        if count.rate > max_rate:
            raise UserError(
                f"{of_source}, more than {key} {max_rate:g} allows, because the vocabulary lacks their words; give "
                f"the vocabulary that belongs to the text, leave the source out, or set {key}=1 to accept it"
            )
        if count.rate >= NAMED_RATE:
            lines.append(f"{of_source}, because the vocabulary lacks their words")
    return lines
