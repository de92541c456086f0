"""Name the folders in which commands keep what they can make again, such as shards from S3 and compiled code."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from pathlib import Path

COMPILED_CODE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
TRITON_VARIABLE = "TRITON_CACHE_DIR"
_TORCHS_FOLDER = "torchinductor_"  # and the name of the user, in the shared folder for temporary files


@functools.cache
def user_cache_folder() -> Path:
    """Return ~/.cache/electra-dist, which need not exist yet; if the user has no home folder, a temporary folder."""
    try:
        return Path("~/.cache/electra-dist").expanduser()
    except RuntimeError:  # no HOME, and no entry of this user in the password database
        folder = tempfile.mkdtemp(prefix="electra-dist-cache-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return Path(folder)


def keep_compiled_code(folder: Path) -> None:
    """Let torch.compile and Triton cache compiled code in this user's own `folder`, unless the user chose another one.

    Triton's own default is in the home folder, which the ranks of a cluster may share, where each would compile every
    kernel. torch's own default is a folder in the shared directory for temporary files. Anybody can predict its name:
    another user who makes it first can have his code executed. Importing torch's inductor writes this default into the
    environment variable, so the default does not count as a choice of the user.
    """
    torchs_default = Path(tempfile.gettempdir()) / _TORCHS_FOLDER
    if os.environ.get(COMPILED_CODE_VARIABLE, str(torchs_default)).startswith(str(torchs_default)):
        os.environ[COMPILED_CODE_VARIABLE] = str(folder.absolute())
    os.environ.setdefault(TRITON_VARIABLE, str(folder.absolute() / "triton"))
