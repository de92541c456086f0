"""The folder in which this user's commands keep what they can make again: measured rates, shards fetched from S3."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path


@functools.cache
def user_cache_folder() -> Path:
    """Return ~/.cache/electra-dist, which need not exist yet.

    A user without a home folder, as in some containers, gets a new private folder for temporary files; later processes
    then make again what was kept in it.
    """
    try:
        return Path("~/.cache/electra-dist").expanduser()
    except RuntimeError:  # no HOME, and no entry of this user in the password database
        return Path(tempfile.mkdtemp(prefix="electra-dist-cache-"))
