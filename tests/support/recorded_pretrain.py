"""Runs launcher/pretrain.py and writes to the file RECORDS-RANK.json what this rank has unpickled and used in TMPDIR.

unpickled     classes and functions that were looked up for a pickle
object_calls  functions of torch.distributed that exchange Python objects, which were called
guessable     paths below the folder for temporary files that `tempfile` did not make, and that this rank has used
checked       number of files that this rank has opened
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch.distributed as dist
from electra_launcher.pretrain import main
from torch.distributed import distributed_c10d

SHARED = os.environ["TMPDIR"]
PATH_EVENTS = ("open", "os.mkdir", "os.rename", "os.link", "os.symlink", "os.listdir", "os.remove", "os.chmod")
OBJECT_CALLS = (
    *("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
)
unpickled: list[str] = []
object_calls: list[str] = []
guessable: list[str] = []
made: list[str] = []  # by `tempfile`, with names that nobody can predict
num_checked = 0


def record(event: str, arguments: tuple[Any, ...]) -> None:
    """Record an audit event of Python."""
    global num_checked
    if event == "pickle.find_class":
        unpickled.append(".".join(map(str, arguments)))
    if event in ("tempfile.mkdtemp", "tempfile.mkstemp"):
        made.append(os.path.abspath(arguments[0]))
    if event in PATH_EVENTS and isinstance(arguments[0], (str, bytes)):
        num_checked += 1
        path = os.path.abspath(os.fsdecode(arguments[0]))
        is_made = any(path == own or path.startswith(own + os.sep) for own in made)
        if path.startswith(SHARED + os.sep) and not is_made:
            guessable.append(path)


def recorded(name: str, function: Any) -> Any:
    """Return a function that records its call and calls `function`."""

    def call(*arguments: Any, **options: Any) -> Any:
        object_calls.append(name)
        return function(*arguments, **options)

    return call


def write_record() -> None:
    """Write the file of this rank."""
    content = {"unpickled": unpickled, "object_calls": object_calls, "guessable": guessable, "checked": num_checked}
    Path(f"{os.environ['RECORDS']}-{os.environ['RANK']}.json").write_text(json.dumps(content))


if __name__ == "__main__":
    tempfile.tempdir = None
    tempfile.gettempdir()  # reads TMPDIR, and writes a file of a random name there
    for name in OBJECT_CALLS:
        function = recorded(name, getattr(distributed_c10d, name))
        setattr(distributed_c10d, name, function)
        setattr(dist, name, function)
    atexit.register(write_record)
    sys.addaudithook(record)
    sys.exit(main())
