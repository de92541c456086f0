"""The run folder: the names of its files, how it is begun, and how it is opened again.

Guarantee: a folder that holds a run is bound to that run's identity (everything that defines its trajectory, and the
corpus fingerprint); another config or corpus is refused before anything is written. A folder that was moved or copied
can be opened where it is now. `docs/run-folder.md` lists every file with its writer and its readers.

Cost: opening reads one YAML file. Imports no torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from electra_dist.config import Config, canonical_json
from electra_dist.config_file import dump_yaml, load_config
from electra_dist.errors import UserError
from electra_dist.store.files import replacing

# What every start writes before its first step; the same at each.
CONFIG_FILE = "config.yaml"
IDENTITY_FILE = "identity.json"
TOKENIZER_FILE = "tokenizer.json"
RUN_VOCAB_FILE = "vocab.txt"
# What every start appends to or replaces.
METRICS_FILE = "metrics.jsonl"
LEDGER_FILE = "ledger.jsonl"
LOG_FILE = "log.txt"
ENVIRONMENT_FILE = "environment.json"
TENSORBOARD_DIR = "tensorboard"
HEARTBEAT_DIR = "heartbeats"
STAGING_DIR = "staging"  # fragments on their way to a store that is not a local folder
# What is written when there is a reason to.
REPORT_FILE = "report.html"
EXPORT_DIR = "export"
MICRO_BATCH_FILE = "micro_batch.json"
SKIPPED_STEPS_FILE = "skipped_steps.json"
STRIKES_FILE = "strikes.jsonl"
SLURM_DIR = "slurm"
JOBS_FILE = f"{SLURM_DIR}/jobs.jsonl"
MEETING_DIR = "meeting"  # where the supervisors of several nodes agree on a start
# Files that a person creates.
STOP_FILE = "stop"
SAVE_FILE = "save"


def token_counts_file(run_dir: Path, corpus_fingerprint: str) -> Path:
    """Return where the counts of a corpus's tokens are kept, for the unigram generator."""
    return run_dir / f"token_counts-{corpus_fingerprint[:16]}.npy"


def supervise_log(run_dir: Path, node: int) -> Path:
    """Return the log of the supervisor of node number `node`."""
    return run_dir / f"supervise-{node}.log"


def is_run_folder(folder: Path) -> bool:
    """Return whether a run was begun in `folder`."""
    return (folder / CONFIG_FILE).exists()


def open_run(folder: Path) -> Config:
    """Return the resolved config of the run in `folder`, with `run_dir` where the folder is now.

    Raises:
        UserError: no run was begun there, or its config is damaged.
    """
    if not is_run_folder(folder):
        raise UserError(f"{folder}: not a run folder (no {CONFIG_FILE}); name the run_dir of a started run")
    return load_config(folder / CONFIG_FILE).model_copy(update={"run_dir": str(folder)})


def run_identity(config: Config, corpus_fingerprint: str) -> dict[str, Any]:
    """Return what a run folder is bound to: everything that defines the trajectory."""
    return {**config.identity(), "corpus_fingerprint": corpus_fingerprint}


def check_run_folder(run_dir: Path, identity: Mapping[str, Any]) -> None:
    """Refuse a run folder that cannot be written or that holds another run.

    Raises:
        UserError: names the folder and, for another run, the first key that differs.
    """
    existing = run_dir
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"run_dir {run_dir}: {existing} is not a writable folder; choose another run_dir")
    identity_file = run_dir / IDENTITY_FILE
    if identity_file.exists():
        difference = _first_difference(json.loads(identity_file.read_text()), dict(identity))
        if difference:
            raise UserError(
                f"run_dir {run_dir} holds a run of another config or corpus ({difference}); "
                f"choose another run_dir, or restore it to go on with that run"
            )


def begin_run_folder(config: Config, identity: Mapping[str, Any], tokenizer_json: str, vocabulary: bytes) -> None:
    """Write what the folder says of its run: resolved config, identity, tokenizer, vocabulary. Rank 0 only.

    Args:
        identity: what `run_identity` gives.
        tokenizer_json: the corpus's tokenizer entry.
        vocabulary: the corpus's vocab.txt.
    """
    contents = {
        CONFIG_FILE: dump_yaml(config).encode(),
        IDENTITY_FILE: canonical_json(identity).encode() + b"\n",
        TOKENIZER_FILE: tokenizer_json.encode() + b"\n",
        RUN_VOCAB_FILE: vocabulary,
    }
    for name, content in contents.items():
        with replacing(Path(config.run_dir) / name) as file:
            file.write(content)


def _first_difference(old: object, new: object, key: str = "") -> str:
    """Return a line that names the first key, in the old tree's order, whose value differs; empty if none does."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in [*old, *(n for n in new if n not in old)]:
            found = _first_difference(old.get(name), new.get(name), f"{key}.{name}" if key else str(name))
            if found:
                return found
        return ""
    return "" if old == new else f"{key} was {old}, is {new}"
