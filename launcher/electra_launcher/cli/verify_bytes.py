"""`electra-dist verify --bytes RUN_OR_CORPUS`: read every byte again and compare it with the digests of the manifests.

Guarantee: a file counts as good only if every byte of it was read now, and its digest is the one that corpus.json, the
manifest of its checkpoint or the run folder names. Nothing is changed. A file that cannot be read counts as bad, and
the next one is read.

Cost: one reading of all bytes; the shards of a corpus on S3 are fetched one after another into a temporary folder.

Limits: a corpus does not store the digest of its corpus.json. A changed corpus.json is detected only for the training
corpora of a run, which has recorded their fingerprints. The records of a run (metrics, ledger) are not covered.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from electra_dist.checkpoint.reader import verify as verify_checkpoint
from electra_dist.checkpoint.stored_copies import Checkpoint, Owner, checkpoints, open_targets, owner_of
from electra_dist.console import Console
from electra_dist.corpus.origins import ORIGINS_KEY, open_origins
from electra_dist.data.corpora import open_corpora
from electra_dist.data.manifest import MANIFEST_KEY, ShardEntry, heldout_of, read_corpus_vocabulary
from electra_dist.data.manifest import read_manifest as read_corpus
from electra_dist.errors import TornCheckpoint, UserError
from electra_dist.pretrained.weights import read_run_vocabulary
from electra_dist.run.folder import (
    RUN_VOCAB_FILE,
    is_run_folder,
    open_run,
    read_identity,
    recorded_fingerprints,
    token_counts_files,
)
from electra_dist.store.atomic_files import open_regular, readable
from electra_dist.store.interface import Store
from electra_dist.store.open_store import open_store
from electra_launcher.cli.command_output import byte_progress, open_console, print_json

Advance = Callable[[int], None]  # called with the number of bytes read since its last call
_BYTES_AT_A_TIME = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Part:
    """Part of a run or corpus to be checked by reading all of it: one file, or one whole checkpoint."""

    url: str
    kind: str  # name of the kind in the summary, such as "shard" or "checkpoint"
    size_bytes: int = 0  # size that the manifest lists; 0 if it is not known
    faults: Callable[[Advance], list[str]]  # reads all bytes and returns one line for each fault


def verify_bytes(path: str, endpoint_url: str | None, as_json: bool) -> None:
    """Read all bytes of a run or a corpus, print every bad file, and raise a UserError if a file is bad.

    `path` is a run folder, or has a corpus.json. The files of a run are the corpora that its config names, the
    vocabulary and the token counts in the run folder, and the checkpoints.
    """
    with tempfile.TemporaryDirectory(prefix="electra-dist-verify-") as temporary:
        parts = list(_parts(path, endpoint_url, Path(temporary)))
        bad = _read_all(parts)
    counts = Counter(part.kind for part in parts)
    size_bytes = sum(part.size_bytes for part in parts)
    if as_json:
        bad_parts = [{"url": url, "faults": faults} for url, faults in bad]
        print_json({"path": path, "good": not bad, "counts": counts, "bytes": size_bytes, "bad": bad_parts})
    else:
        out = open_console()
        for url, faults in bad:
            for fault in faults:
                out.print(f"BAD: {url}: {fault}")
        numbers = ", ".join(f"{count:,} {kind}{'' if count == 1 else 's'}" for kind, count in counts.items())
        verdict = f"{len(bad):,} of them bad" if bad else "all good"
        out.print(f"{path}: read {numbers}; {size_bytes / 1e6:,.1f} MB in shards and checkpoints; {verdict}")
    if bad:
        raise UserError(
            f"{path}: {len(bad):,} of {len(parts):,} files or checkpoints are bad; restore those that the output "
            "names from a copy, or make them again, then repeat this command"
        )


def _read_all(parts: list[Part]) -> list[tuple[str, list[str]]]:
    """Read all files and checkpoints, with a progress bar on stderr; return the URL and the faults of each bad one."""
    bad = []
    with byte_progress(Console(stderr=True), sum(part.size_bytes for part in parts)) as advance:
        for part in parts:
            try:
                faults = part.faults(advance)
            except UserError as error:
                faults = [str(error).removeprefix(f"{part.url}: ")]  # The URL is printed before each fault.
            if faults:
                bad.append((part.url, faults))
    return bad


def _parts(path: str, endpoint_url: str | None, temporary: Path) -> Iterator[Part]:
    """Yield what there is to read of the run or corpus `path`; shards on S3 are fetched into `temporary`."""
    if "://" not in path and is_run_folder(Path(path)):
        yield from _run_parts(Path(path), temporary)
        return
    store = open_store(path, endpoint_url)
    yield from _corpus_parts(store, None, temporary)
    heldout = open_store(heldout_of(path), endpoint_url)
    is_built = heldout.exists(MANIFEST_KEY)
    with contextlib.suppress(UserError):  # a damaged corpus.json is a part of its own
        is_built = is_built or bool(read_corpus(store).totals.get("documents_heldout"))
    if is_built:  # if it is missing since, its corpus.json counts as bad
        yield from _corpus_parts(heldout, None, temporary)


def _run_parts(run_dir: Path, temporary: Path) -> Iterator[Part]:
    """Yield what a run consists of: vocabulary, token counts, corpora with the held-out one, complete checkpoints."""
    from electra_dist.train.token_counts import read_counts

    config = open_run(run_dir)
    vocabulary = _reading(lambda: read_run_vocabulary(run_dir))
    yield Part(url=str(run_dir / RUN_VOCAB_FILE), kind="vocabulary file", faults=vocabulary)
    for file in token_counts_files(run_dir):
        counts = _reading(functools.partial(read_counts, file, config.model.vocab_size))
        yield Part(url=str(file), kind="token counts file", faults=counts)
    corpora = config.data.training_corpora()
    fingerprints = recorded_fingerprints(run_dir, len(corpora))
    for number, corpus in enumerate(corpora):
        fingerprint = fingerprints[number] if fingerprints else None
        yield from _corpus_parts(open_store(corpus.url, config.data.endpoint_url), fingerprint, temporary)
    if config.data.heldout:
        yield from _corpus_parts(open_store(config.data.heldout, config.data.endpoint_url), None, temporary)
    owner = owner_of(config, read_identity(run_dir))
    if owner is not None:
        with contextlib.suppress(UserError):  # a damaged corpus is a part of its own, and so is one that has changed
            found_corpus = open_corpora(config.data).fingerprint
            owner = Owner(owner.identities, owner.corpora | {found_corpus})
    for checkpoint in checkpoints(open_targets(config)):
        yield _checkpoint_part(checkpoint, owner)


def _corpus_parts(store: Store, fingerprint: str | None, temporary: Path) -> Iterator[Part]:
    """Yield the files of a corpus to read; if corpus.json is damaged, only that file.

    corpus.json also counts as bad if the corpus does not have the given `fingerprint`; None accepts any.
    """
    url = f"{store.url}/{MANIFEST_KEY}"
    try:
        manifest = read_corpus(store)
    except UserError as error:
        yield Part(url=url, kind="corpus manifest", faults=_found_already(str(error)))
        return
    wrong: list[str] = []
    if fingerprint not in (None, manifest.fingerprint):
        wrong.append(f"its fingerprint is {manifest.fingerprint}, but the run has trained on {fingerprint!r}")
    yield Part(url=url, kind="corpus manifest", faults=_found_already(*wrong))
    tokenizer = manifest.tokenizer
    vocabulary = _reading(lambda: read_corpus_vocabulary(store, tokenizer))
    yield Part(url=f"{store.url}/{tokenizer.vocab_file}", kind="vocabulary file", faults=vocabulary)
    for entry in manifest.shards:
        shard = functools.partial(_shard_faults, store, entry, temporary)
        yield Part(url=f"{store.url}/{entry.name}", kind="shard", size_bytes=entry.bytes, faults=shard)
    try:
        origins = open_origins(store, manifest)
    except UserError as error:  # only their list, origins.json, can be named
        yield Part(url=f"{store.url}/{ORIGINS_KEY}", kind="origin file", faults=_found_already(str(error)))
        return
    if origins is None:
        return
    for file in origins.files:
        table = _reading(functools.partial(origins.table, file.shard))
        yield Part(url=f"{store.url}/{file.name}", kind="origin file", size_bytes=file.bytes, faults=table)


def _reading(read: Callable[[], object]) -> Callable[[Advance], list[str]]:
    """Return a function for `Part.faults` that calls `read`, which raises UserError if the file is bad."""

    def faults(advance: Advance) -> list[str]:
        read()
        return []

    return faults


def _found_already(*faults: str) -> Callable[[Advance], list[str]]:
    """Return a check, as `Part.faults` holds one, of a part whose faults are known before it is read."""
    return lambda advance: list(faults)


def _shard_faults(store: Store, entry: ShardEntry, temporary: Path, advance: Advance) -> list[str]:
    """Return what is wrong with a shard; [] if its size and SHA-256 are those that corpus.json lists."""
    local_path = store.local_path(entry.name)
    path = local_path or temporary / "shard.tar"
    if local_path is None:
        store.fetch(entry.name, path)
    size_bytes, sha256 = _size_and_sha256(path, advance)
    # It is fetched once more, because bits may have flipped on the way.
    if local_path is None and sha256 != entry.sha256:
        store.fetch(entry.name, path)
        size_bytes, sha256 = _size_and_sha256(path, lambda num_bytes: None)
    if size_bytes == entry.bytes and sha256 == entry.sha256:
        return []
    return [
        f"has {size_bytes} bytes and sha256 {sha256}, but corpus.json lists {entry.bytes} bytes and sha256 "
        f"{entry.sha256}; restore the file or build the corpus again"
    ]


def _size_and_sha256(path: Path, advance: Advance) -> tuple[int, str]:
    digest = hashlib.sha256()
    size_bytes = 0
    with readable(path), open_regular(path) as stream:
        while content := stream.read(_BYTES_AT_A_TIME):
            digest.update(content)
            size_bytes += len(content)
            advance(len(content))
    return size_bytes, digest.hexdigest()


def _checkpoint_part(checkpoint: Checkpoint, owner: Owner | None) -> Part:
    """Return a checkpoint as a part to read; it counts as bad if another run than `owner` has written it."""
    size_bytes = 0
    other_run = ""
    with contextlib.suppress(TornCheckpoint):  # reported when the checkpoint is read
        manifest = checkpoint.manifest()
        size_bytes = manifest.size_bytes
        other_run = owner.fault(manifest.state) if owner is not None else ""
    if other_run:
        return Part(url=checkpoint.url, kind="checkpoint", faults=_found_already(other_run))
    return Part(
        url=checkpoint.url,
        kind="checkpoint",
        size_bytes=size_bytes,
        faults=lambda advance: verify_checkpoint(checkpoint, advance)[1],
    )
