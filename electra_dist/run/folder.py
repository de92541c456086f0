"""The run folder: its files, and whether it is this run's."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from electra_dist.config import Config
from electra_dist.errors import UserError

CONFIG_FILE = "config.yaml"
IDENTITY_FILE = "identity.json"
TOKENIZER_FILE = "tokenizer.json"
VOCAB_FILE = "vocab.txt"


def check_run_folder(config: Config, identity: dict[str, Any]) -> None:
    """Refuse a run folder that cannot be written or that belongs to another run."""
    run_dir = Path(config.run_dir)
    existing = run_dir
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"run_dir {config.run_dir}: {existing} is not a writable folder; choose another run_dir")
    identity_file = run_dir / IDENTITY_FILE
    if identity_file.exists():
        difference = _first_difference(json.loads(identity_file.read_text()), identity)
        if difference:
            raise UserError(
                f"run_dir {config.run_dir} holds a run of another config or corpus ({difference}); "
                f"choose another run_dir, or restore it to go on with that run"
            )


def _first_difference(old: object, new: object, key: str = "") -> str:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in [*old, *(n for n in new if n not in old)]:
            found = _first_difference(old.get(name), new.get(name), f"{key}.{name}" if key else str(name))
            if found:
                return found
        return ""
    return "" if old == new else f"{key} was {old}, is {new}"
