"""Where a run's checkpoints are: its own folder, or what `checkpoint.targets` names, each holding every checkpoint."""

from __future__ import annotations

from electra_dist.config import Config
from electra_dist.store.interface import Store
from electra_dist.store.open import open_store


def open_targets(config: Config) -> list[Store]:
    """The stores that every checkpoint is written to, the preferred one first."""
    return [open_store(url, config.checkpoint.endpoint_url) for url in config.checkpoint_urls]
