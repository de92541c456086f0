"""Open the stores ("targets") that a run writes its checkpoints to; each of them receives every checkpoint."""

from __future__ import annotations

import secrets

from electra_dist.config import Config
from electra_dist.errors import StoreError, StoreMissing, UserError
from electra_dist.store.interface import Store
from electra_dist.store.open_store import open_store

_WRITE_TEST = "write-test"  # one name, so that the next start deletes the object of a start that was killed


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


def check_targets(config: Config) -> None:
    """Write a small object into each store of `checkpoint.targets` and delete it again, before a run writes anything.

    A store that cannot be written is then found before the run folder exists, and not at the first checkpoint. Two
    stores in which the same object appears are one, whatever their names are: a bind mount, or another name of a
    bucket. What a start that was killed here has left is deleted. The default target is not checked, because it is
    inside the run folder. Costs three requests for each store, and one for each pair. Rank 0 only.

    Raises:
        StoreError: a store cannot be written; the message names the key, the store and the next step.
        UserError: two of the stores are one.
    """
    if not config.checkpoint.targets:
        return
    written: list[Store] = []
    for target in open_targets(config):
        try:
            target.discard_unfinished(_WRITE_TEST, lambda key: True)  # of a start that was killed here
            content = secrets.token_bytes(16)
            target.write(_WRITE_TEST, content)
            for earlier in written:
                if _holds(earlier, content):
                    target.delete(_WRITE_TEST)
                    raise UserError(
                        f"checkpoint.targets: {earlier.url} and {target.url} are the same place; name each place "
                        f"once, because every checkpoint is written to each of them"
                    )
            written.append(target)
        except StoreError as error:
            raise type(error)(f"checkpoint.targets: {error}") from None
    for target in written:
        target.delete(_WRITE_TEST)


def _holds(store: Store, content: bytes) -> bool:
    """Return whether the object of the test is in a store and has this content; another start may have deleted it."""
    try:
        return store.read(_WRITE_TEST) == content
    except StoreMissing:
        return False
