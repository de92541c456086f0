"""The folder in which this user's commands keep what they can make again: measured rates, shards fetched from S3."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path


@functools.cache
def user_cache_folder() -> Path:
    """Return ~/.cache/electra-dist, which need not exist yet.

    A user without a home folder, as in some containers, gets a private temporary folder, which is deleted when this
    process ends.
    """
    try:
        return Path("~/.cache/electra-dist").expanduser()
    except RuntimeError:  # no HOME, and no entry of this user in the password database
        folder = tempfile.mkdtemp(prefix="electra-dist-cache-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return Path(folder)
