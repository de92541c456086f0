"""Tell whether a checkpoint is of a run, and whether a start of that run may resume from it.

Guarantee: whoever reads the checkpoints of a run folder outside a start of the run (export, fine-tuning, another run
that begins with the weights, a verification, a repair) compares their identity and corpus with the folder first
(`Owner`). A checkpoint of another run is refused in one line, and nothing is changed. A start compares more
(`check_resumable`), and sets aside what is not its own.

Limits: a run folder without identity.json does not say which corpus it used, so nothing is compared.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from electra_dist.checkpoint.manifest import RunState
from electra_dist.checkpoint.stored_copies import Checkpoint, checkpoints, copies_of_each, first_good
from electra_dist.config import Config
from electra_dist.errors import StoreMissing, TornCheckpoint, UserError
from electra_dist.store.interface import Store

# Fields of RunState in which a checkpoint must equal the run, too -> what differs otherwise, for the message.
_FURTHER_FIELDS_OF_A_RUN = {
    "shapes": "other parameter shapes",
    "shared": "other shared parameters",
}


class OtherRun(UserError):
    """Error for a checkpoint of another run, found in a folder or store that belongs to this run."""


class Discarded(TornCheckpoint):
    """Error for a checkpoint that a later rollback has discarded: it was trained on steps that the run now skips."""


@dataclass(frozen=True)
class Owner:
    """The run that must have written a checkpoint, known by digests that every manifest records."""

    identities: frozenset[str]  # digests of its identity, one for each version of its arithmetic (`numerics`)
    corpora: frozenset[str]  # fingerprint of its corpus

    def fault(self, state: RunState) -> str:
        """Return why a checkpoint with this state is not of this run, or "" if it is."""
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
    """Return the run of a run folder, by its config and the content of its identity.json; None if that is empty."""
    if not identity:
        return None
    numerics = {*range(1, config.numerics + 1), identity["numerics"]}
    identities = frozenset(config.identity_sha256(number) for number in numerics)
    return Owner(identities, frozenset([identity["corpus_fingerprint"]]))


def check_resumable(
    found: RunState, expected: RunState, older_identities: Collection[str] = (), stopped: Collection[int] = ()
) -> None:
    """Raise TornCheckpoint if this run cannot resume from a checkpoint: another run wrote it, or skipped steps differ.
    Skipped steps after the checkpoint do not matter, nor do its step and world size. The error is `Discarded` if the
    difference comes from a rollback of this run: the checkpoint was trained on steps that `stopped` contains.
    """
    identities = frozenset([expected.identity_sha256, *older_identities])
    owner = Owner(identities, frozenset([expected.corpus_fingerprint]))
    check_resumable_without_model(found, owner, expected.skipped, stopped)
    for field, description in _FURTHER_FIELDS_OF_A_RUN.items():
        if getattr(found, field) != getattr(expected, field):
            raise _cannot_resume(f"a run with {description} wrote it")


def check_resumable_without_model(
    found: RunState, owner: Owner, skipped: Collection[int], stopped: Collection[int]
) -> None:
    """Raise what `check_resumable` does, as far as that is known before the model is built. `skipped` are the steps
    that the run `owner` skips now, ascending.
    """
    fault = owner.fault(found)
    if fault:
        raise _cannot_resume(fault)
    _check_skipped_steps(found, skipped, stopped)


def _cannot_resume(fault: str) -> TornCheckpoint:
    return TornCheckpoint(
        f"this run cannot resume from the checkpoint, because {fault}; set run_dir and checkpoint.targets to folders "
        f"that only this run uses"
    )


def _check_skipped_steps(found: RunState, skipped: Collection[int], stopped: Collection[int]) -> None:
    # Steps that the run will skip after the checkpoint do not matter to it.
    expected_skips = tuple(step for step in skipped if step < found.step)
    if found.skipped == expected_skips:
        return
    trained_on = set(expected_skips) - set(found.skipped)
    if set(found.skipped) < set(expected_skips) and trained_on <= set(stopped):
        raise Discarded("a rollback has discarded it, because it was trained on steps that the run skips since")
    raise TornCheckpoint(
        "this run skips other steps now than the run that wrote the checkpoint did up to its step; restore "
        "train.skip_steps in the config and skipped_steps.json in the run folder"
    )


def check_one_is_resumable(
    found: Sequence[Checkpoint], owner: Owner, skipped: Collection[int], stopped: Collection[int]
) -> None:
    """Raise UserError if the manifests tell that the run can resume from none of its checkpoints, newest first.
    A run whose rollback has discarded all of them begins again, so nothing is raised then. No tensor is read.
    """

    def read(checkpoint: Checkpoint) -> None:
        check_resumable_without_model(checkpoint.manifest().state, owner, skipped, stopped)

    good, rejected = first_good(copies_of_each(found), read)
    if good is None and not all(isinstance(error, Discarded) for error in rejected.values()):
        raise none_is_good(rejected)


def none_is_good(rejected: Mapping[Checkpoint, Exception]) -> UserError:
    """Return the error that the checkpoints of a run were all `rejected`, with why each of them was."""
    faults = "; ".join(f"{checkpoint.url}: {fault}" for checkpoint, fault in rejected.items())
    return UserError(
        f"none of the {len(rejected)} checkpoints of the run can be used ({faults}); if there is a copy elsewhere, "
        f"run `electra-dist checkpoint repair RUN --from URL`, or begin again at step 0 with the option "
        f"--from-scratch of launcher/pretrain.py, which deletes nothing"
    )
