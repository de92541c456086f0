"""Decide how often the documents of each source are used, from `corpus.source_epochs` or `corpus.source_shares`."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from electra_dist.errors import UserError


def source_epochs(
    source_bytes: Mapping[str, int], given_epochs: Mapping[str, float], given_shares: Mapping[str, float]
) -> dict[str, float]:
    """Return how often the documents of each source are used, on average: source -> epochs.

    A source that is not in `given_epochs` is used once. `given_shares` is empty, or has for each source a share of the
    corpus's bytes; only the ratios of the shares matter. The source with the largest share for its size in undecoded
    bytes is then used once and no source more often, so that no document repeats.
    """
    refuse_unknown_sources("corpus.source_epochs", given_epochs, source_bytes)
    refuse_unknown_sources("corpus.source_shares", given_shares, source_bytes)
    if not given_shares:
        return {source: float(given_epochs.get(source, 1.0)) for source in source_bytes}
    missing = sorted(set(source_bytes) - set(given_shares))
    if missing:
        raise UserError(
            f"corpus.source_shares: no share for the source {missing[0]}; add one (0 leaves the source out)"
        )
    ratios = {source: given_shares[source] / max(num_bytes, 1) for source, num_bytes in source_bytes.items()}
    largest = max(ratios.values())
    if largest == 0:
        raise UserError("corpus.source_shares: all shares are 0; give at least one source a share")
    return {source: ratio / largest for source, ratio in ratios.items()}


def refuse_unknown_sources(key: str, given: Collection[str], sources: Collection[str]) -> None:
    """Raise UserError if the config's `key` (such as corpus.licences) names a source that the inputs do not have."""
    unknown = sorted(set(given) - set(sources))
    if unknown:
        all_sources = ", ".join(sorted(sources))
        raise UserError(f"{key}: {unknown[0]} is not a source of these inputs; use one of {all_sources}")
