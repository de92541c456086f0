"""Name, list and set aside the checkpoints in several stores, and tell whether they are of a run that may resume.

A store that receives checkpoints holds each in a folder such as step-00000400-a0003 (`manifest.py`). A checkpoint
exists once its manifest does.

Guarantee: whoever reads the checkpoints of a run folder outside a start of the run (export, fine-tuning, another run
that begins with the weights, a verification, a repair) compares their identity and corpus with the folder first
(`Owner`). A checkpoint of another run is refused in one line, and nothing is changed. A start compares more
(`check_resumable`), and sets aside what is not its own.

Limits: a run folder without identity.json does not say which corpus it used, so nothing is compared.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from electra_dist.checkpoint.manifest import MANIFEST, FileEntry, Manifest, RunState, TensorEntry, tensors_of_header
from electra_dist.config import Config
from electra_dist.errors import StorageLost, StoreAway, StoreError, StoreMissing, TornCheckpoint, UserError
from electra_dist.store.interface import Store, in_parallel
from electra_dist.store.open_store import open_store
from electra_dist.store.patience import Patience

T = TypeVar("T")

FIRST_TRY_S = 20.0  # wait for one of several copies before the next copy is tried
SET_ASIDE = "manifest.set-aside.json"
SET_ASIDE_REASON = "set-aside.txt"
# How set-aside.txt begins for a checkpoint that the run itself has given up, so that no repair restores it.
WITHDRAWN = "withdrawn: "
_FOLDER = re.compile(r"step-([0-9]{8,})-a([0-9]{4,})")
_WRITE_TEST = "write-test"  # one name, so that the next start deletes the object of a start that was killed
# Fields of RunState in which a checkpoint must equal the run, too -> what differs otherwise, for the message.
_FURTHER_FIELDS_OF_A_RUN = {
    "shapes": "other parameter shapes",
    "shared": "other shared parameters",
}


@dataclass(frozen=True)
class Checkpoint:
    """Checkpoint in one store, saved after `step` steps by the start of the run with number `attempt`.
    It may be damaged; nothing has been read.
    """

    step: int
    attempt: int
    store: Store

    @property
    def folder(self) -> str:
        """Return the name of the checkpoint's folder in its store, such as step-00000400-a0003."""
        return f"step-{self.step:08d}-a{self.attempt:04d}"

    @property
    def url(self) -> str:
        """Return the URL of the checkpoint's folder, for messages."""
        return f"{self.store.url}/{self.folder}"

    def key(self, name: str) -> str:
        """Return the key, in the store, of the checkpoint's file with this name."""
        return f"{self.folder}/{name}"

    def manifest(self) -> Manifest:
        """Read and verify the manifest, but no tensor file; a reading that finds a fault is repeated.
        Raises TornCheckpoint if the manifest is damaged or belongs to another folder, StoreMissing if there is none.
        """
        key = self.key(MANIFEST)

        def read_once() -> tuple[Manifest | TornCheckpoint, str]:
            data = self.store.read(key)
            try:
                return Manifest.parse(data), ""
            except TornCheckpoint as error:
                return error, f"{error} (sha256 {hashlib.sha256(data).hexdigest()[:12]})"

        manifest, _ = self.store.reread(key, read_once)
        if isinstance(manifest, TornCheckpoint):
            raise manifest
        state = manifest.state
        if (state.step, state.attempt) != (self.step, self.attempt):
            raise TornCheckpoint(
                f"{key} is that of another checkpoint: step {state.step}, written by start {state.attempt} of the run"
            )
        return manifest

    def tensors(self, file: FileEntry) -> tuple[list[TensorEntry], str]:
        """Read and verify a file's header; return the tensors that it lists, and "" or what is wrong with the header.
        Raises TornCheckpoint if the header is undamaged but contradicts itself.
        """
        key = self.key(file.name)

        def read_once() -> tuple[bytes, str]:
            try:
                header = bytes(self.store.read_range(key, 0, file.header_bytes))
            except StoreMissing:
                return b"", missing(file.name)
            found_sha256 = hashlib.sha256(header).hexdigest()
            if found_sha256 == file.header_sha256:
                return header, ""
            return header, f"the header of {file.name} does not match its digest (found {found_sha256[:12]})"

        header, fault = self.store.reread(key, read_once)
        if fault:
            return [], fault
        return tensors_of_header(file, header), ""

    def set_aside(self, reason: str) -> None:
        """Withdraw the checkpoint: rename its manifest, so that no load takes it; no data is deleted.
        A repair may restore it. `reason` is stored in set-aside.txt. Raises StoreMissing if there is no manifest.
        """
        data = self.store.read(self.key(MANIFEST))
        # The copy is complete before the original is deleted, so that a kill in between loses nothing.
        self.store.write(self.key(SET_ASIDE_REASON), (reason + "\n").encode())
        self.store.write(self.key(SET_ASIDE), data)
        self.store.delete(self.key(MANIFEST))


def missing(file: str) -> str:
    """Return the description of a missing file, by which callers tell a missing file from a damaged one."""
    return f"{file} is missing"


def parse_folder(folder: str) -> tuple[int, int] | None:
    """Return (step, attempt) from the name of a checkpoint folder; None for any other name."""
    match = _FOLDER.fullmatch(folder)
    if match is None:
        return None
    return int(match[1]), int(match[2])


def checkpoints(stores: Sequence[Store]) -> list[Checkpoint]:
    """Return every checkpoint of several stores that has a manifest, newest first; copies in the order of the stores.
    Each store is listed once, and no manifest is read, so the checkpoints may be damaged. If stores do not respond,
    all are waited for at the same time, because each of them may have the newest checkpoint.
    """
    found = itertools.chain.from_iterable(in_parallel(_checkpoints_in, stores))
    return sorted(found, key=lambda checkpoint: (-checkpoint.step, -checkpoint.attempt))


def _checkpoints_in(store: Store, prefix: str = "step-") -> list[Checkpoint]:
    found = []
    for key in store.list(prefix):
        folder, _, name = key.partition("/")  # step-00000400-a0003/manifest.json
        step_and_attempt = parse_folder(folder)
        if name == MANIFEST and step_and_attempt is not None:
            found.append(Checkpoint(*step_and_attempt, store))
    return found


def copies_of_each(found: Sequence[Checkpoint]) -> list[list[Checkpoint]]:
    """Group the result of `checkpoints`: each list has the copies of one checkpoint in several stores."""
    groups = itertools.groupby(found, key=lambda checkpoint: (checkpoint.step, checkpoint.attempt))
    return [list(copies) for _, copies in groups]


class GoodCopy(NamedTuple, Generic[T]):
    """First good copy of a checkpoint, what `read` returned for it, and the copies that cannot be read now."""

    copy: Checkpoint
    content: T
    unreadable: dict[Checkpoint, StoreError]


def first_good(
    groups: Sequence[Sequence[Checkpoint]], read: Callable[[Checkpoint], T]
) -> tuple[GoodCopy[T] | None, dict[Checkpoint, Exception]]:
    """Return the first good checkpoint, or None if all are damaged; also return the damaged copies that were read.
    Each item of `groups` has the copies of one checkpoint in several stores. `read` reads a copy, and raises
    TornCheckpoint or StoreMissing if it is damaged. The next checkpoint is tried only if all copies of one are
    damaged. Any other StoreError, which leaves open whether the copy is good, is raised if no other copy is good.
    """
    damaged: dict[Checkpoint, Exception] = {}
    for copies in groups:
        good = _good_copy(copies, read, damaged)
        if good is not None:
            return good, damaged
    return None, damaged


def _good_copy(
    copies: Sequence[Checkpoint], read: Callable[[Checkpoint], T], damaged: dict[Checkpoint, Exception]
) -> GoodCopy[T] | None:
    """Return the first good copy of one checkpoint, or None if all are damaged; record damaged ones in `damaged`.
    All copies are tried with a short wait before a store that does not respond is waited for.
    """
    unreadable: dict[Checkpoint, StoreError] = {}
    limits_s = [FIRST_TRY_S, math.inf] if len(copies) > 1 else [math.inf]
    for limit_s, copy in itertools.product(limits_s, copies):
        if copy in damaged or (copy in unreadable and not isinstance(unreadable[copy], StoreAway)):
            continue  # another try would not help
        unreadable.pop(copy, None)
        try:
            with copy.store.patience.at_most(limit_s):
                return GoodCopy(copy, read(copy), unreadable)
        # Without its traceback, which would keep in memory what was read so far.
        except (TornCheckpoint, StoreMissing) as error:
            damaged[copy] = error.with_traceback(None)
        except StoreError as error:
            unreadable[copy] = error.with_traceback(None)
    if unreadable:
        # An older checkpoint would lose steps, or is not what was asked for. Storage that is away may come back.
        raise min(unreadable.values(), key=lambda reason: not isinstance(reason, StoreAway))
    return None


def checkpoints_of_step(stores: Sequence[Store], step: int) -> list[Checkpoint]:
    """Return the checkpoints of one step, those of the newest start first; copies in the order of the stores.
    A store that does not respond is left out; it is waited for only if no other store has such a checkpoint.
    """
    found: list[Checkpoint] = []
    away: list[Store] = []
    for store in stores:
        try:
            with store.patience.at_most(FIRST_TRY_S):
                found += _checkpoints_in(store, f"step-{step:08d}-")
        except StorageLost:
            away.append(store)
    if not found:
        found = [checkpoint for checkpoint in checkpoints(away) if checkpoint.step == step]
    return sorted(found, key=lambda checkpoint: -checkpoint.attempt)


def has_withdrawn(stores: Sequence[Store]) -> bool:
    """Return whether a store has a checkpoint that the run itself gave up, as a rollback does."""
    for store in stores:
        for key in store.list("step-"):
            _, _, name = key.partition("/")
            if name == SET_ASIDE_REASON and store.read(key).startswith(WITHDRAWN.encode()):
                return True
    return False


def set_all_aside(targets: Sequence[Store]) -> list[str]:
    """Rename the manifest of every checkpoint in all stores, so that a run begins again at step 0; return log lines.
    A checkpoint whose manifest was renamed before is marked, too, so that no repair restores it. Tensor files stay.
    Call it on rank 0 only, while no save is under way.
    """
    reason = f"{WITHDRAWN}the run was begun again from scratch"
    lines = []
    for target in targets:
        for key in target.list("step-"):
            folder, _, name = key.partition("/")
            if name == SET_ASIDE:  # as damaged, by an earlier load; it must not be restored either
                target.write(f"{folder}/{SET_ASIDE_REASON}", f"{reason}\n".encode())
        for checkpoint in reversed(checkpoints([target])):
            checkpoint.set_aside(reason)
            lines.append(f"checkpoint {checkpoint.url} is set aside, because the run begins again from scratch")
    return lines


def open_targets(config: Config, patience: Patience | None = None) -> list[Store]:
    """Open the stores that receive every checkpoint, in the order in which a load tries them. Nothing is read yet.
    Raises UserError if a URL is malformed.
    """
    return [open_store(url, config.checkpoint.endpoint_url, patience) for url in config.checkpoint_urls]


def check_targets(targets: Sequence[Store]) -> None:
    """Write an object to each store of `checkpoint.targets` and delete it, to find a bad store before a run begins.
    Raises UserError if two stores hold the same object: they are one place with two names, as with a bind mount. Call
    it on rank 0 only.
    """
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


def _cannot_resume(fault: str) -> TornCheckpoint:
    return TornCheckpoint(
        f"this run cannot resume from the checkpoint, because {fault}; set run_dir and checkpoint.targets to folders "
        f"that only this run uses"
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
