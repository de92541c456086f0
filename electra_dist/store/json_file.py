"""Read a file with one JSON object, and refuse a damaged one in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from electra_dist.errors import UserError
from electra_dist.store.atomic_files import readable


def read_json_object(path: Path, next_step: str) -> dict[str, Any]:
    """Return the JSON object in a local file.

    Args:
        path: the file, in UTF-8.
        next_step: what the user can do about a damaged file, as an imperative; it ends the error's message.

    Raises:
        StoreMissing: there is no such file.
        StoreError: the file cannot be read.
        UserError: the file holds no JSON object.
    """
    with readable(path):
        data = path.read_bytes()
    try:
        tree = json.loads(data)
    except ValueError as error:  # also for bytes that are not UTF-8
        raise UserError(f"{path}: damaged, because it is not JSON ({error}); {next_step}") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path}: damaged, because it holds no JSON object; {next_step}")
    return tree
