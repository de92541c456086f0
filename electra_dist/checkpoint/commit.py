"""Commit checkpoints to a store so that a kill at any moment leaves only whole ones, and delete old ones safely.

Guarantee: every start of a run takes a number, its "attempt". Only the newest attempt deletes files. An older attempt
whose processes still run raises `Fenced` at its next check for a newer number. Each rank stores a tensor file, which
appears when it is whole. When a listing shows the files of all ranks, rank 0 commits the checkpoint by creating its
manifest; the store creates it only if it is absent. Deletion removes the manifest before the tensor files. A kill in
between leaves unused files ("leftovers"), and never a manifest whose files are missing. Files in the folder of a
checkpoint that no save has written stay.

How: no lock is needed. A new attempt first takes its number, then deletes what older attempts left uncommitted. An
older attempt may still run, for example behind a cut network link. It checks for newer numbers before its commit, and
again before it deletes anything. If the new attempt begins just after the first of these checks, it may delete files
of the checkpoint that the older attempt then commits. The next load finds that checkpoint damaged and takes an earlier
one, which still exists because the second check prevented its deletion.

Limits: only rank 0, or a command outside the run, calls these functions. At ZeRO stages 1 and 2, a commit reads the
header of every file, 16 at a time (docs/results.md). A start needs every target: if it took no number in one that is
away, an older start could go on to commit there. All targets are waited for at once.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from electra_dist.checkpoint.manifest import MANIFEST, FileEntry, Manifest, Range, RunState, ranges_of_tensors
from electra_dist.checkpoint.stored_copies import SET_ASIDE, SET_ASIDE_REASON, Checkpoint, checkpoints, parse_folder
from electra_dist.config import CheckpointConfig
from electra_dist.errors import OtherNumerics, StoreAway, StoreError, TornCheckpoint, UserError
from electra_dist.store.interface import Store, in_parallel
from electra_dist.store.json_file import DamagedJson, canonical_json, parse_json

FILES_TIMEOUT_S = 1800.0  # how long rank 0 waits for the files of the other ranks, besides their waits for storage
_POLL_S = 0.02  # first pause between two listings; it doubles with each
_LONGEST_POLL_S = 1.0
_ATTEMPTS = "attempts/"
_ATTEMPT_KEY = re.compile(r"attempts/(?P<number>\d+)\.json")  # attempts/0003.json
_MOST_TRIES = 50  # to take a number; each one that fails means that another start has taken it
_NO_OLDER_RUNS: Mapping[int, dict[str, str]] = MappingProxyType({})


class Fenced(UserError):
    """Error in a process of an older start after the run was started again: the process must not write any more.
    It is a UserError, so that the process ends with one line and is not started again.
    """


def begin_attempt(
    targets: Sequence[Store],
    run: dict[str, str],
    older_runs: Mapping[int, dict[str, str]] = _NO_OLDER_RUNS,
    accept_new_numerics: bool = False,
) -> int:
    """Take the next number for this start of the run, and delete uncommitted files of earlier starts.
    Call it once, on rank 0. It creates `attempts/NNNN.json` in each store of `targets`, with the digests `run` that
    identify the run. A store creates a file only if it is absent, so no two starts get the same number. `older_runs`
    maps older numerics (versions of random draws and rounding) to the digests that identified this run then.
    Raises UserError if a store holds another run's checkpoints or cannot create a file only if it is absent. Raises
    OtherNumerics if the newest start had older numerics and `accept_new_numerics` is not set.
    """
    document = _attempt_document(run)
    attempt = _take_number(targets, document, older_runs, accept_new_numerics)
    in_parallel(lambda target: check_exclusive(target, _attempt_key(attempt), document), targets)

    def clean(target: Store) -> None:
        sweep(target, attempt)
        # A start that was killed when it was about to take this number has left its temporary file.
        target.discard_unfinished(_attempt_key(attempt), lambda key: True)

    in_parallel(clean, targets)
    return attempt


def _take_number(
    targets: Sequence[Store], document: bytes, older_runs: Mapping[int, dict[str, str]], accept_new_numerics: bool
) -> int:
    """Reserve the next number that no start of the run has taken in any of the stores, and return it.

    A file with this number and the content `document` is created in each store; another start at the same time gets
    another number. If the newest file in a store has another content, `_check_older_run` may refuse it.
    """
    for _ in range(_MOST_TRIES):
        newest_starts = in_parallel(_newest_start, targets)
        for target, (_, found_document) in zip(targets, newest_starts):
            if found_document not in (b"", document):
                _check_older_run(target, found_document, older_runs, accept_new_numerics)
        attempt = 1 + max(number for number, _ in newest_starts)
        # Another start may take the same number at the same time; on each target only one of them creates the file.
        # It may be of another run, so the one that comes too late looks again; files that it has created stay.
        if all(target.write_new(_attempt_key(attempt), document) for target in targets):
            return attempt
    urls = " and ".join(target.url for target in targets)
    raise UserError(
        f"{urls}: no number for this start after {_MOST_TRIES} tries, because a file {_attempt_key(attempt)} was "
        f"there each time although no listing had shown it; name each place once in checkpoint.targets, and move "
        f"away what is no file of a start in {_ATTEMPTS}"
    )


def _newest_start(target: Store) -> tuple[int, bytes]:
    """Return the number of the run's newest start and the content of its file, read from a store of checkpoints.
    The result is (0, b"") if the run was never started.
    """
    number = newest_attempt(target)
    return number, target.read(_attempt_key(number)) if number else b""


def _check_older_run(
    target: Store, found_document: bytes, older_runs: Mapping[int, dict[str, str]], accept_new_numerics: bool
) -> None:
    """Raise an error unless this run, with older numerics, wrote `found_document`: the newest start's file in a store.
    It is UserError for another run, and OtherNumerics for this run unless the user accepts that numerics change.
    `older_runs` maps numerics (versions of random draws and rounding) to the digests that named this run then.
    """
    numerics_of_document = {_attempt_document(older_run): numerics for numerics, older_run in older_runs.items()}
    numerics = numerics_of_document.get(found_document)
    if numerics is None:
        raise UserError(
            f"{target.url} holds checkpoints of another run (another config or corpus); "
            f"set checkpoint.targets to a folder that only this run uses"
        )
    if not accept_new_numerics:
        current = max(older_runs) + 1  # `older_runs` has all numerics below this run's
        raise OtherNumerics(target.url, numerics, current)


def _attempt_document(run: dict[str, str]) -> bytes:
    return canonical_json(run).encode() + b"\n"


def check_exclusive(target: Store, key: str, document: bytes) -> None:
    """Raise UserError if the store's `write_new` replaces an existing file, instead of refusing it.
    This process has just created `key` with the content `document`. Some S3 services ignore the header If-None-Match
    of a PUT. There, two processes that train the same run would not notice each other, and the older one could
    overwrite a checkpoint of the newer one.
    """
    if target.write_new(key, document):
        raise UserError(
            f"{target.url}: the service has replaced {key}, although the request said to create it only if there is "
            f"none (If-None-Match: *), so two starts of a run could not be kept apart; use a service with conditional "
            f"writes, such as AWS S3, Ceph or MinIO"
        )


def newest_attempt(target: Store) -> int:
    """Return the number of the run's newest start, by one listing of a store of its checkpoints; 0 if none."""
    numbers = [0]
    for key in target.list(_ATTEMPTS):
        name = _ATTEMPT_KEY.fullmatch(key)
        if name is not None and key == _attempt_key(int(name["number"])):
            numbers.append(int(name["number"]))
    return max(numbers)


def run_of_attempt(target: Store, attempt: int) -> dict[str, str] | None:
    """Return the digests that start `attempt` recorded to identify its run; None if the file is missing or damaged."""
    data = target.read_or_none(_attempt_key(attempt))
    try:
        document = None if data is None else parse_json(data)
    except DamagedJson:
        return None
    names = ("identity_sha256", "corpus_fingerprint")
    is_known = isinstance(document, dict) and all(isinstance(document.get(name), str) for name in names)
    return document if is_known else None


def leftovers(target: Store, attempt: int) -> list[str]:
    """Return the keys of those files in a store that no checkpoint needs, sorted; nothing is deleted.
    They are the files of unfinished checkpoints from starts before `attempt`; the newest start, `attempt`, may still
    be writing. A checkpoint is finished if it has a manifest, also one that was renamed by `Checkpoint.set_aside`.
    """
    keys = target.list("step-")
    finished_folders = {key.partition("/")[0] for key in keys if key.endswith((f"/{MANIFEST}", f"/{SET_ASIDE}"))}
    return [
        key
        for key in keys
        if key.partition("/")[0] not in finished_folders and is_older(key, attempt) and is_of_checkpoint(key)
    ]


def sweep(target: Store, attempt: int) -> list[str]:
    """Delete what killed starts of the run have left in a checkpoint store: files and unfinished uploads.

    `attempt` is the number of this start; only what has a lower one is deleted. Returns the keys of the files.
    """
    leftover_keys = leftovers(target, attempt)
    target.delete_all(leftover_keys)
    target.discard_unfinished("", lambda key: is_older(key, attempt) or _attempt_of(key) < attempt)
    return leftover_keys


def _attempt_of(key: str) -> float:
    name = _ATTEMPT_KEY.fullmatch(key)
    return int(name["number"]) if name is not None else math.inf


def is_of_checkpoint(key: str) -> bool:
    """Return whether a key in a checkpoint's folder is a file of the checkpoint, and not one that a user put there."""
    _, _, name = key.partition("/")
    return name in (MANIFEST, SET_ASIDE, SET_ASIDE_REASON) or FileEntry.parse(name) is not None


def is_older(key: str, attempt: int) -> bool:
    """Return whether a store's key is in the folder of a checkpoint from an earlier start than number `attempt`."""
    folder = key.partition("/")[0]
    step_and_attempt = parse_folder(folder)
    if step_and_attempt is None:
        return False
    _, folder_attempt = step_and_attempt
    return folder_attempt < attempt


def commit(target: Store, state: RunState, saved_at: str, on_progress: Callable[[], None] = lambda: None) -> None:
    """Commit a checkpoint in one store: wait for the files of all ranks, then create the manifest.
    For rank 0 only, which may call it again after a failure. `saved_at` is UTC in ISO 8601, the same in all stores.
    `on_progress` is called after each look at the store. Raises Fenced if a newer start exists or another process has
    written to the folder, and TornCheckpoint if the files do not hold every parameter once. Raises TimeoutError if a
    rank's file takes longer than `FILES_TIMEOUT_S` and the store's patience together, or if the run ends meanwhile.
    """
    checkpoint = Checkpoint(state.step, state.attempt, target)
    files = _wait_for_files(checkpoint, state.world_size, on_progress)
    ranges = None if state.is_divided_evenly else _read_ranges(checkpoint, files, state)
    manifest = Manifest(saved_at=saved_at, state=state, files=files, ranges=ranges)
    manifest.check_coverage()
    check_fence(target, state.attempt)
    data = manifest.dump()
    is_created = target.write_new(checkpoint.key(MANIFEST), data)
    # An earlier call of this process may have created it, although it failed afterwards.
    if not is_created and target.read(checkpoint.key(MANIFEST)) != data:
        raise _two_writers(checkpoint, "committed this checkpoint")


def _two_writers(checkpoint: Checkpoint, action: str) -> Fenced:
    return Fenced(
        f"{checkpoint.url}: another process has {action}; stop all processes of this run, then start it once"
    )


def _wait_for_files(checkpoint: Checkpoint, world_size: int, on_progress: Callable[[], None]) -> tuple[FileEntry, ...]:
    """Wait until a listing shows the file of every rank in its full size; return the files in the order of the ranks.
    A shared file system may show an earlier, smaller size for a while.
    """
    limit_s = FILES_TIMEOUT_S + checkpoint.store.patience.limit_s  # the other ranks may wait for their storage first
    deadline = time.monotonic() + limit_s
    poll_s = _POLL_S
    while True:
        files = _complete_files(checkpoint, world_size)
        on_progress()
        missing_ranks = set(range(world_size)) - set(files)
        if not missing_ranks:
            return tuple(files[rank] for rank in range(world_size))
        if time.monotonic() > deadline or checkpoint.store.patience.is_abandoned:
            raise TimeoutError(
                f"checkpoint {checkpoint.url} was not committed: the file of rank {min(missing_ranks)} was not "
                f"written within {limit_s:.0f} s, or before the run ended; look for the error of that rank in "
                f"the output"
            )
        time.sleep(poll_s)
        poll_s = min(2 * poll_s, _LONGEST_POLL_S)


def _complete_files(checkpoint: Checkpoint, world_size: int) -> dict[int, FileEntry]:
    """List the tensor files of a checkpoint that have their full size: rank -> file.
    Raises Fenced for a second file of a rank or a file of rank `world_size` or above, which another process wrote.
    """
    files: dict[int, FileEntry] = {}
    for key, size_bytes in checkpoint.store.sizes(checkpoint.key("rank-")).items():
        file = FileEntry.parse(key.removeprefix(checkpoint.key("")))
        if file is None or file.size_bytes != size_bytes:
            continue
        if file.rank in files or file.rank >= world_size:
            raise _two_writers(checkpoint, "written its files into this start's folder")
        files[file.rank] = file
    return files


def _read_ranges(
    checkpoint: Checkpoint, files: Sequence[FileEntry], state: RunState
) -> dict[str, tuple[tuple[int, int, int], ...]]:
    """Read from the headers of all files which ranges of parameters each holds, up to 16 files at a time.
    Returns parameter name -> (rank, first element, element after the last) of each range, in the order of elements.
    """

    def read(file: FileEntry) -> dict[str, Range]:
        tensors, fault = checkpoint.tensors(file)
        if fault:
            raise StoreError(
                f"{checkpoint.url}: {fault}, at every reading; check the disk or the storage service, then start "
                f"the run again"
            )
        return ranges_of_tensors(file, tensors)

    ranges: dict[str, list[tuple[int, int, int]]] = {name: [] for name in state.shapes}
    for file, ranges_of_file in zip(files, in_parallel(read, files)):
        for name, (start, end) in ranges_of_file.items():
            ranges.setdefault(name, []).append((file.rank, start, end))
    return {name: tuple(sorted(parts, key=lambda part: part[1])) for name, parts in ranges.items()}


def check_fence(target: Store, attempt: int) -> None:
    """Raise Fenced if a newer start of the run than `attempt` exists. Call it before each commit and deletion."""
    newest = newest_attempt(target)
    if newest > attempt:
        raise Fenced(
            f"{target.url}: start {attempt} of this run must not write any more, because start {newest} has replaced "
            f"it; this process ends, and no action is needed: let start {newest} go on"
        )


def _attempt_key(attempt: int) -> str:
    return f"{_ATTEMPTS}{attempt:04d}.json"


@dataclass(frozen=True)
class HeldOutScore:
    """Scores of a checkpoint on held-out rows, from which the best checkpoint is chosen; None for a missing score."""

    context_auc: float | None = None  # None without a discriminator
    loss: float | None = None  # of the discriminator or, without one, of the network that predicts tokens


NOT_EVALUATED = HeldOutScore()


def superfluous(
    candidates: Sequence[Checkpoint],
    policy: CheckpointConfig,
    rollback_steps: int,
    scores: Mapping[Checkpoint, HeldOutScore],
) -> list[Checkpoint]:
    """Return the checkpoints of one store that the retention policy does not keep, oldest first; nothing is deleted.
    A checkpoint is kept if it is one of the newest `keep_last`, if `keep_every_steps` divides its step, if
    `keep_steps` names its step, or if it is one of the first `keep_best` in `best_first`. Two are always kept: the
    newest, and the newest that is at least `rollback_steps` (`guard.most_skipped`) older. A rollback skips at most
    that many steps before the newest checkpoint, so it finds a checkpoint that was not trained on a skipped step.
    """
    ordered = sorted(candidates, key=lambda checkpoint: (checkpoint.step, checkpoint.attempt))
    num_newest = max(1, policy.keep_last)
    keep = set(ordered[-num_newest:])
    older = [checkpoint for checkpoint in ordered if checkpoint.step <= ordered[-1].step - rollback_steps]
    keep |= set(older[-1:])
    keep |= {checkpoint for checkpoint in ordered if checkpoint.step in policy.keep_steps}
    if policy.keep_every_steps:
        keep |= {checkpoint for checkpoint in ordered if checkpoint.step % policy.keep_every_steps == 0}
    keep |= set(best_first(ordered, scores)[: policy.keep_best])
    return [checkpoint for checkpoint in ordered if checkpoint not in keep]


def best_first(candidates: Sequence[Checkpoint], scores: Mapping[Checkpoint, HeldOutScore]) -> list[Checkpoint]:
    """Return the checkpoints that have a score on held-out rows, best first; of equally good ones the newest first.
    Checkpoints with a context AUC come first, the highest first; the others follow by their loss, the lowest first.
    """
    ranked = []
    for checkpoint in candidates:
        score = scores.get(checkpoint, NOT_EVALUATED)
        newest_first = (-checkpoint.step, -checkpoint.attempt)
        if score.context_auc is not None:
            ranked.append(((0, -score.context_auc, *newest_first), checkpoint))
        elif score.loss is not None:
            ranked.append(((1, score.loss, *newest_first), checkpoint))
    return [checkpoint for _, checkpoint in sorted(ranked, key=lambda entry: entry[0])]


def held_out_score(checkpoint: Checkpoint) -> HeldOutScore:
    """Read a checkpoint's scores on held-out rows from its manifest; `NOT_EVALUATED` if it has none or is unreadable.
    Raises StoreAway if the store does not respond, so that a good checkpoint does not count as one without scores.
    """
    try:
        state = checkpoint.manifest().state
    except StoreAway:
        raise
    except (TornCheckpoint, StoreError):
        return NOT_EVALUATED
    return HeldOutScore(context_auc=state.eval_context_auc, loss=state.eval_loss)


def retain(
    target: Store,
    policy: CheckpointConfig,
    rollback_steps: int,
    attempt: int,
    scores: dict[Checkpoint, HeldOutScore],
) -> None:
    """Delete the checkpoints in a store that the retention policy does not keep (`superfluous`). Rank 0 only.
    Checkpoints that were set aside (withdrawn) stay. If the policy has `keep_best`, missing entries of `scores` are
    read and added. Raises Fenced, before anything is deleted, if a newer start of the run exists.
    """
    candidates = checkpoints([target])
    if policy.keep_best:
        for checkpoint in candidates:
            if checkpoint not in scores:
                scores[checkpoint] = held_out_score(checkpoint)
    check_fence(target, attempt)
    for checkpoint in superfluous(candidates, policy, rollback_steps, scores):
        target.delete(checkpoint.key(MANIFEST))
        target.delete_all([key for key in target.list(f"{checkpoint.folder}/") if is_of_checkpoint(key)])
