"""Open the stores ("targets") that a run writes its checkpoints to, and tell whether a checkpoint is of that run.

Guarantee: whoever reads the checkpoints of a run folder outside a start of the run (export, fine-tuning, another run
that begins with the weights, a verification, a repair) compares their identity and corpus with the folder first. A
checkpoint of another run is refused in one line, and nothing is changed.

Limits: a start compares more, and sets aside what is not its own (`restore.check_belongs`). A run folder without
identity.json does not say which corpus it used, so nothing is compared.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from electra_dist.checkpoint.checkpoint import checkpoints
from electra_dist.checkpoint.manifest import RunState
from electra_dist.config import Config
from electra_dist.errors import StoreError, StoreMissing, TornCheckpoint, UserError
from electra_dist.store.interface import Store, in_parallel
from electra_dist.store.open_store import open_store
from electra_dist.store.patience import Patience

_WRITE_TEST = "write-test"  # one name, so that the next start deletes the object of a start that was killed


def open_targets(config: Config, patience: Patience | None = None) -> list[Store]:
    """Open the stores that receive every checkpoint, in the order in which a load tries them. Nothing is read yet.
    Raises UserError if a URL is malformed, or if S3 is named and boto3 is not installed.
    """
    return [open_store(url, config.checkpoint.endpoint_url, patience) for url in config.checkpoint_urls]


def check_targets(config: Config, patience: Patience | None = None) -> None:
    """Write an object to each store of `checkpoint.targets` and delete it: a bad store is found before a run begins.
    Raises UserError if two stores hold one object: they are one place with two names, as with a bind mount.
    The default target is not checked: it is inside the run folder. Call it on rank 0 only.
    """
    if not config.checkpoint.targets:
        return
    targets = open_targets(config, patience)
    try:
        # A start that was killed here has left an unfinished object.
        in_parallel(lambda target: target.discard_unfinished(_WRITE_TEST, lambda key: True), targets)
        for target in targets:  # one after another, because two of them may be one place
            target.write(_WRITE_TEST, secrets.token_bytes(16))
        contents = in_parallel(lambda target: target.read(_WRITE_TEST), targets)
        in_parallel(lambda target: target.delete(_WRITE_TEST), targets)
    except StoreError as error:
        raise type(error)(f"checkpoint.targets: {error}") from None
    for number, content in enumerate(contents):
        first = contents.index(content)
        if first != number:
            raise UserError(
                f"checkpoint.targets: {targets[first].url} and {targets[number].url} are the same place; name each "
                f"place once, because every checkpoint is written to each of them"
            )


class OtherRun(UserError):
    """Error for a checkpoint of another run, found in a folder or store that belongs to this run."""


@dataclass(frozen=True)
class Owner:
    """Run that must have written a checkpoint, described by two digests that every manifest records."""

    identities: frozenset[str]  # digests of its identity, one for each version of its arithmetic (`numerics`)
    corpora: frozenset[str]  # fingerprint of its corpus

    def fault(self, state: RunState) -> str:
        """Return why a checkpoint is not of this run; "" if it is."""
        if state.identity_sha256 not in self.identities:
            return "a run with another config (model, objective, optimizer, seed, steps, batch) wrote it"
        if state.corpus_fingerprint not in self.corpora:
            return "a run with another corpus wrote it"
        return ""

    def check(self, state: RunState, url: str) -> None:
        """Raise OtherRun if another run wrote the checkpoint that holds `state`; the message begins with `url`."""
        fault = self.fault(state)
        if fault:
            raise OtherRun(
                f"{url}: the checkpoint of step {state.step:,} is not of this run: {fault}; put back the checkpoints "
                f"of this run, or correct checkpoint.targets in its config.yaml"
            )

    def check_all(self, targets: Sequence[Store]) -> None:
        """Raise OtherRun if another run wrote a checkpoint in these stores; skip damaged manifests."""
        for checkpoint in checkpoints(targets):
            try:
                state = checkpoint.manifest().state
            except (TornCheckpoint, StoreMissing):
                continue
            self.check(state, checkpoint.store.url)


def owner_of(config: Config, identity: Mapping[str, Any]) -> Owner | None:
    """Return the owner for a run folder's config and `identity` (its identity.json); None if `identity` is empty."""
    if not identity:
        return None
    numerics = {*range(1, config.numerics + 1), identity["numerics"]}
    identities = frozenset(config.identity_sha256(number) for number in numerics)
    return Owner(identities, frozenset([identity["corpus_fingerprint"]]))
