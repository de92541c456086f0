"""Open the stores ("targets") that a run writes its checkpoints to; each of them receives every checkpoint."""

from __future__ import annotations

from electra_dist.config import Config
from electra_dist.store.interface import Store
from electra_dist.store.open_store import open_store


def open_targets(config: Config) -> list[Store]:
    """Open the stores that every checkpoint is written to, in the order in which a load tries them.

    Their URLs are in `checkpoint.targets`; if that is not set, the only store is the folder `checkpoints` in the run
    folder. Nothing is read or written until a store is first used.

    Args:
        config: the run's config; its section `checkpoint` names the stores and the S3 endpoint.

    Raises:
        UserError: a URL is malformed or has an unknown scheme, or S3 is named without boto3 being installed.
    """
    return [open_store(url, config.checkpoint.endpoint_url) for url in config.checkpoint_urls]
