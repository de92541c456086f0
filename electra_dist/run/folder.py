"""Define the files of a run folder, write those that begin a run, and open the folder again for commands.

Guarantee: a folder that holds a run is bound to that run's identity (the corpus fingerprint and all config keys that
define the course of the training). Another config or corpus is refused before anything is written. A folder that was
moved or copied can be opened at its new place. `docs/run-folder.md` lists every file.
Imports no torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from electra_dist.config import Config
from electra_dist.config.load import dump_yaml, load_config
from electra_dist.errors import ManifestMismatch, OtherNumerics, StoreAway, UserError
from electra_dist.store.atomic_files import (
    PRIVATE,
    SHARED,
    NamedDigest,
    disk_problem,
    is_temporary,
    nearest_folder,
    read_regular,
    readable,
    replacing,
    writable,
)
from electra_dist.store.json_file import canonical_json, find_document, first_difference
from electra_dist.store.patience import Patience, patient

# Written by every start before its first step.
CONFIG_FILE = "config.yaml"
IDENTITY_FILE = "identity.json"
TOKENIZER_FILE = "tokenizer.json"
RUN_VOCAB_FILE = "vocab.txt"
INPUTS_FILE = "inputs.json"
DIGESTS_FILE = "SHA256SUMS"  # of the two files above, in the format of the program sha256sum
# Appended to or replaced by every start.
METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
LEDGER_FILE = "ledger.jsonl"
LOG_FILE = "log.txt"
ENVIRONMENT_FILE = "environment.json"
TENSORBOARD_DIR = "tensorboard"
HEARTBEAT_DIR = "heartbeats"
# Written only in some runs.
REPORT_FILE = "report.html"
EXPORT_DIR = "export"
MICRO_BATCH_FILE = "micro_batch.json"
SKIPPED_STEPS_FILE = "skipped_steps.json"
STRIKES_FILE = "strikes.jsonl"
SLURM_DIR = "slurm"
JOBS_FILE = f"{SLURM_DIR}/jobs.jsonl"
TRACKING_FILE = "tracking.json"
MLFLOW_FILE = "mlflow.db"
WANDB_DIR = "wandb"
LEASE_DIR = "lease"  # in it, one file that describes the process that trains
MEETING_DIR = "meeting"  # files by which the supervisors of several nodes agree on a start
HANGS_DIR = "hangs"  # in it, a folder for each start of the run that hung, with the stacks of the ranks of all nodes
FAILURES_DIR = "failures"  # in it, why starts have failed, and the last output of their ranks
EARLIER_DIR = "earlier"  # in it, 0001, 0002, ...: records of a run that was begun again from scratch
_TUNED = ("finetune.json", "best/finetune.json", "seed-*/finetune.json")  # in the output folder of a fine-tuning
_OF_PREFLIGHT = re.compile(r"preflight-(?:[0-9a-f]{8}){1,2}")
_OLD_S = 3600.0  # age at which a temporary file counts as abandoned by its writer
# Created by a person.
STOP_FILE = "stop"
SAVE_FILE = "save"


class _Identity(BaseModel, strict=True, extra="allow"):
    """Content of identity.json, as far as this version relies on it."""

    numerics: int
    corpus_fingerprint: str


def token_counts_file(run_dir: Path, corpus_fingerprint: str) -> Path:
    """Return the path of the file that holds how often each token occurs in a corpus.

    The unigram generator needs these counts: it replaces masked tokens by random tokens, drawn by frequency.
    """
    return run_dir / f"token_counts-{corpus_fingerprint[:16]}.npy"


def token_counts_files(run_dir: Path) -> list[Path]:
    """Return the files in a run folder in which a start has stored how often each token occurs in a corpus."""
    return sorted(run_dir.glob(token_counts_file(Path(), "*").name))


def supervise_log(run_dir: Path, node: int) -> Path:
    """Return the path of the log that the supervisor of a node (numbered from 0) writes to the run folder."""
    return run_dir / f"supervise-{node}.log"


@patient
def is_run_folder(folder: Path, *, patience: Patience | None = None) -> bool:
    """Return whether a run was begun in `folder`, which is the case if it holds a config.yaml."""
    return (folder / CONFIG_FILE).exists()


def has_records_of_run(folder: Path) -> bool:
    """Return whether a start has recorded an identity or events in `folder`, even if its config.yaml is lost."""
    return any((folder / name).exists() for name in (IDENTITY_FILE, LEDGER_FILE))


def no_run(folder: Path) -> UserError:
    """Return the error that a folder is not that of a run or has lost its config.yaml, and what it is instead."""
    if not folder.is_dir():
        return UserError(f"{folder}: no such folder; give the run_dir of a run")
    if any(found for name in _TUNED for found in folder.glob(name)):
        place = shlex.quote(str(folder))
        return UserError(
            f"{folder}: a tuned model, not a run; use it: electra-dist predict {place} NEW.csv, or by transformers "
            f"(docs/finetune.md), and give here the run_dir of a run"
        )
    if has_records_of_run(folder):
        return UserError(
            f"{folder}: a run whose {CONFIG_FILE} is missing; restore it from a copy, or start the run once more from "
            f"its own config, which writes it again: electra-dist train CONFIG"
        )
    message = f"{folder}: not a run folder, because it has no {CONFIG_FILE}; give the run_dir of a run"
    return UserError(message + run_within(folder))


def run_within(folder: Path) -> str:
    """Return "; did you mean FOLDER/run?", to be put at the end of an error message, or "" if that is no run."""
    inner = folder / "run"  # as `electra-dist init` sets it
    return f"; did you mean {inner}?" if is_run_folder(inner) else ""


def open_run(folder: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Return the resolved config of the run in `folder`; its `run_dir` is `folder`, even if the run was moved.

    `overrides` have the form KEY=VALUE, such as "train.micro_batch=32".
    """
    folder = Path(folder)
    if not is_run_folder(folder):
        raise no_run(folder)
    return load_config(folder / CONFIG_FILE, overrides).model_copy(update={"run_dir": str(folder)})


def run_identity(config: Config, corpus_fingerprint: str, phase_fingerprints: Sequence[str] = ()) -> dict[str, Any]:
    """Return the identity of a run: corpus, version of random draws, and all config keys that shape the training.

    A run folder is bound to the identity of its first start; a start with another identity is refused. Keys that may
    change at a restart (number of ranks, micro-batch, ZeRO stage, logging) are not part of it. For a run on several
    corpora in turn (`data.phases`), `corpus_fingerprint` is the fingerprint of their joined manifest, and
    `phase_fingerprints` has one fingerprint for each corpus; for other runs, `phase_fingerprints` is empty.
    """
    identity = {**config.identity(), "corpus_fingerprint": corpus_fingerprint}
    if phase_fingerprints:
        identity["phase_fingerprints"] = list(phase_fingerprints)
    return identity


def read_identity(run_dir: Path) -> dict[str, Any]:
    """Return the content of identity.json in a run's folder (`run_identity`), or {} if no run was begun there."""
    next_step = "move it away if this is the run that you mean to continue, and the next start writes it again"
    identity = find_document(run_dir / IDENTITY_FILE, _Identity, next_step)
    return {} if identity is None else identity.model_dump()


def recorded_fingerprints(run_dir: Path, num_phases: int) -> list[str] | None:
    """Return the fingerprints of a run's `num_phases` corpora from identity.json, or None if no run was begun.

    The fingerprint of `data.corpus` comes first, then those of `data.phases` in the order in which the run reads them.
    """
    identity = read_identity(run_dir)
    if not identity:
        return None
    fingerprints = identity.get("phase_fingerprints", [identity["corpus_fingerprint"]])
    is_list_of_texts = isinstance(fingerprints, list) and all(isinstance(text, str) for text in fingerprints)
    if not is_list_of_texts or len(fingerprints) != num_phases:
        raise UserError(
            f"{run_dir / IDENTITY_FILE}: damaged, because it does not have the fingerprints of the {num_phases} "
            f"corpora that {CONFIG_FILE} names; restore both files, or move {IDENTITY_FILE} away, and the next start "
            f"writes it again"
        )
    return fingerprints


def recorded_numerics(run_dir: Path) -> int | None:
    """Return the version of random draws and rounding of the run's last start, or None if no run was begun."""
    numerics: int | None = read_identity(run_dir).get("numerics")
    return numerics


def check_numerics(run_dir: Path, current: int, accept_new_numerics: bool) -> None:
    """Raise OtherNumerics if the run's version of random draws and rounding is not `current`.

    Nothing is raised if `accept_new_numerics` is True.
    """
    numerics = recorded_numerics(run_dir)
    if numerics is not None and numerics != current and not accept_new_numerics:
        raise OtherNumerics(f"run_dir {run_dir}", numerics, current)


def override_of_moved_run(folder: Path, run_dir: str) -> str | None:
    """Return the override "run_dir=..." by which a run goes on in `folder`; None if its config names `folder` already.

    They differ after a run folder was moved or copied, or for a relative `run_dir` seen from another working folder.
    """
    if Path(run_dir).resolve() == folder.resolve():
        return None
    return f"run_dir={json.dumps(str(folder))}"


def check_run_folder(run_dir: Path, identity: Mapping[str, Any], accept_new_numerics: bool = False) -> None:
    """Raise an error if a run folder cannot be written or holds another run. Nothing is created or changed.

    The error names the first key that differs. If only the version of random draws and rounding differs, OtherNumerics
    is raised, or nothing if `accept_new_numerics` is True.
    """
    nearest = nearest_folder(run_dir)  # a missing folder is judged by its nearest parent
    problem = disk_problem(nearest)
    if problem:
        raise StoreAway(f"run_dir {run_dir}: {problem}; check the disk of {nearest}, or set another run_dir")
    can_create_files = os.access(nearest, os.W_OK | os.X_OK)
    if not nearest.is_dir() or not can_create_files:
        raise UserError(f"run_dir {run_dir}: {nearest} is not a writable folder; set another run_dir")
    recorded = read_identity(run_dir)
    if not recorded:
        return
    # Keys of the config are compared before the digests that depend on them, so that the message names such a key if
    # one differs. `check_numerics` judges the numerics.
    digests = ("phase_fingerprints", "corpus_fingerprint")
    keys = [key for key in recorded if key not in digests]
    for key in (*keys, *digests, *identity):
        difference = first_difference(recorded.get(key), identity.get(key), key)
        if difference is None or key == "numerics":
            continue
        advice = "set another run_dir, or restore the old value to continue that run"
        if difference.key == "train.num_steps":
            advice += "; a longer training is a new run, which may begin with these weights (train.init_from)"
        raise UserError(
            f"run_dir {run_dir} holds a run of another config or corpus ({difference.key} was {difference.old}, is "
            f"{difference.new}); {advice}"
        )
    check_numerics(run_dir, identity["numerics"], accept_new_numerics)


def read_recorded_inputs(run_dir: Path) -> dict[str, str]:
    """Return the digests of inputs that a run folder's inputs.json records, or {} if there is no such file.

    Such inputs lie outside the run folder, may be read again at a later start, and are not part of the run's identity.
    An input's name is its config key and its place, such as "data.heldout s3://bucket/heldout".
    """
    next_step = "move it away if these are the inputs that the run has used, and the next start writes it again"
    return find_document(run_dir / INPUTS_FILE, dict[str, str], next_step) or {}


def check_recorded_inputs(run_dir: Path, digests: Mapping[str, str]) -> None:
    """Raise ManifestMismatch if an input's digest is not the one recorded when the run first read the input."""
    recorded = read_recorded_inputs(run_dir)
    for name, digest in digests.items():
        if recorded.get(name, digest) != digest:
            raise ManifestMismatch(
                f"{name} has changed since the run began: its digest is {digest}, but {run_dir / INPUTS_FILE} has "
                f"{recorded[name]}; restore what was there, or begin again with "
                f"launcher/pretrain.py --from-scratch, which deletes nothing"
            )


@patient
def begin_run_folder(
    config: Config,
    identity: Mapping[str, Any],
    tokenizer_json: str,
    vocabulary: bytes,
    input_digests: Mapping[str, str],
    *,
    patience: Patience | None = None,
) -> None:
    """Write the files that describe the run, at every start, each atomically. Rank 0 only.

    SHA256SUMS, written last, has the digests of tokenizer.json and vocab.txt, which are the same at every start. Only
    the owner may read config.yaml, because its key `cluster.notify` may hold a secret. Call `check_run_folder` first,
    because this function does not check whether the folder holds another run. `tokenizer_json` is the tokenizer's
    entry in the corpus manifest. `input_digests` has the inputs that this start has read; earlier entries are kept.
    """
    recorded_inputs = {**read_recorded_inputs(Path(config.run_dir)), **input_digests}
    contents = {
        CONFIG_FILE: dump_yaml(config).encode(),
        IDENTITY_FILE: canonical_json(identity).encode() + b"\n",
        TOKENIZER_FILE: tokenizer_json.encode() + b"\n",
        RUN_VOCAB_FILE: vocabulary,
    }
    if recorded_inputs:
        contents[INPUTS_FILE] = canonical_json(recorded_inputs).encode() + b"\n"
    digests = [f"{hashlib.sha256(contents[name]).hexdigest()}  {name}\n" for name in (TOKENIZER_FILE, RUN_VOCAB_FILE)]
    contents[DIGESTS_FILE] = "".join(digests).encode()
    for name, content in contents.items():
        permissions = PRIVATE if name == CONFIG_FILE else SHARED
        with replacing(Path(config.run_dir) / name, permissions=permissions) as file:
            file.write(content)


def delete_unfinished_files(run_dir: Path) -> None:
    """Delete unfinished files that killed processes left in a run folder: `.NAME.<hex>.tmp` and `preflight-<hex>`.

    Only rank 0 calls this, while it holds the folder's lease. A file that another process may be writing now, such as
    one in `meeting/`, is deleted only when it is an hour old. Other modules clean up checkpoints, caches and leases.
    """
    for folder in (run_dir, run_dir / MEETING_DIR, run_dir / SLURM_DIR):
        for path in folder.glob("*"):
            if not is_temporary(path.name) and not _OF_PREFLIGHT.fullmatch(path.name):
                continue
            # Rank 0 alone writes temporary files directly in the run folder, except those of a report.
            is_of_rank_0 = folder == run_dir and not path.name.startswith((f".{REPORT_FILE}.", "preflight-"))
            with contextlib.suppress(OSError):  # another process has deleted the file
                if is_of_rank_0 or time.time() - path.stat().st_mtime > _OLD_S:
                    path.unlink()


def named_digest(run_dir: Path, name: str) -> NamedDigest | None:
    """Return the digest that SHA256SUMS lists for tokenizer.json or vocab.txt (`name`).

    None if the run folder has no SHA256SUMS because an old version wrote it.
    """
    digests_file = run_dir / DIGESTS_FILE
    if not digests_file.exists():
        return None
    with readable(digests_file):
        lines = read_regular(digests_file).decode(errors="replace").splitlines()
    sha256_of_file = {}
    for line in lines:  # SHA-256, two spaces and the name, as the command sha256sum writes them
        sha256, _, file = line.partition("  ")
        sha256_of_file[file] = sha256
    return NamedDigest(
        sha256=sha256_of_file.get(name, "nothing"),  # no file has the digest "nothing", so the check will fail
        named_by=str(digests_file),
        next_step=f"restore both from a backup, or start the run once more, which writes {name} again from the corpus",
    )


def move_records_aside(run_dir: Path) -> list[str]:
    """Move a run's records to earlier/NNNN in its folder, so that the run can begin again at step 0. Rank 0 only.

    Config, identity, tokenizer, cache, checkpoints and the folders of Slurm and of supervisors stay. Nothing is
    deleted. Returns a line for each file or folder that was moved.
    """
    names = [INPUTS_FILE, METRICS_FILE, LEDGER_FILE, LOG_FILE, ENVIRONMENT_FILE, TENSORBOARD_DIR]
    names += [REPORT_FILE, EXPORT_DIR, MICRO_BATCH_FILE, SKIPPED_STEPS_FILE]
    names += [SAMPLES_FILE, TRACKING_FILE, MLFLOW_FILE, WANDB_DIR]
    existing = [name for name in names if (run_dir / name).exists()]
    if not existing:
        return []
    number = 1
    while (run_dir / EARLIER_DIR / f"{number:04d}").exists():
        number += 1
    folder = run_dir / EARLIER_DIR / f"{number:04d}"
    with writable(folder):
        folder.mkdir(parents=True)
        for name in existing:
            (run_dir / name).rename(folder / name)
    return [f"{run_dir / name} is now {folder / name}" for name in existing]
