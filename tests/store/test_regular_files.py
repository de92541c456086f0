"""Only regular files are read, whole ones up to a limit; every reader of files of others uses these functions."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support.import_graph import ROOT

from electra_dist.config.load import load_config
from electra_dist.errors import StoreError, UserError
from electra_dist.store import atomic_files
from electra_dist.store.atomic_files import check_regular, open_regular, read_regular, readable

OTHER_KINDS: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "link_to_pipe": lambda path: (os.mkfifo(path.with_name("pipe")), path.symlink_to("pipe"))[-1],
    "device": lambda path: path.symlink_to("/dev/zero"),
}
# Files that are no file of others: of the system, of this process, or written a moment ago by this program.
OWN = {
    "electra_dist/corpus/prepare/document_files.py",
    "electra_dist/data/node_cache.py",
    "electra_dist/data/peer_group.py",
    "electra_dist/data/shard_server.py",
    "electra_dist/gpu_affinity.py",
    "electra_dist/store/atomic_files.py",
    "electra_dist/store/cloud_store.py",
    "electra_dist/report/model_card.py",
    "electra_dist/run/environment_record.py",
    "electra_dist/run/lease.py",
    "electra_dist/run/this_node.py",
    "electra_dist/store/open_store.py",
    "electra_dist/store/s3/s3_store.py",
    "electra_dist/compare/comparison_runs.py",
    "launcher/electra_launcher/chaos/drill.py",
    "launcher/electra_launcher/chaos/faults.py",
    "launcher/electra_launcher/cli/main.py",
    "launcher/electra_launcher/slurm/batch_script.py",
    "launcher/electra_launcher/supervise/start_outcome.py",
    "launcher/electra_launcher/supervise/rank_processes.py",
}


@pytest.mark.parametrize("make", OTHER_KINDS.values(), ids=OTHER_KINDS)
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "config.json"
    make(path)
    for read in (open_regular, check_regular, read_regular):
        with pytest.raises(StoreError, match=r"config\.json: is a named pipe"):
            read(path)


def test_a_folder_a_missing_file_and_a_loop_of_links_are_errors_of_the_system(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for name, reason in (("", "is a folder"), ("missing", "no such file"), ("loop", "loop: ")):
        with pytest.raises(StoreError, match=reason), readable(tmp_path / name):
            read_regular(tmp_path / name)


def test_a_file_of_more_bytes_than_its_limit_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_regular(path, 5) == b"12345"
    with pytest.raises(StoreError, match="more than the 4 bytes"):
        read_regular(path, 4)
    with path.open("r+b") as file:
        file.truncate(1 << 40)  # takes no space on the disk
    with pytest.raises(StoreError, match=f"more than the {atomic_files.MOST_BYTES:,} bytes"):
        read_regular(path)


def test_a_file_without_a_size_is_read_up_to_the_limit() -> None:
    """Files of /proc are regular and have 0 bytes."""
    assert read_regular("/proc/self/status").startswith(b"Name:")
    with pytest.raises(StoreError, match="more than"):
        read_regular("/proc/self/status", 10)


@pytest.mark.parametrize("make", OTHER_KINDS.values(), ids=OTHER_KINDS)
def test_a_config_and_one_that_it_extends_must_be_regular_files(tmp_path: Path, make: Callable[[Path], None]) -> None:
    other = tmp_path / "other.yaml"
    make(other)
    (tmp_path / "run.yaml").write_text("extends: other.yaml\n")
    for path in (other, tmp_path / "run.yaml"):
        with pytest.raises(UserError, match=r"other\.yaml: is a named pipe"):
            load_config(path)


def test_every_reader_of_files_of_others_uses_these_functions() -> None:
    """`read_bytes`, `read_text` and `open` for reading are for files that this program has just written, and /proc."""
    found = set()
    for package in ("electra_dist", "launcher"):
        for path in sorted((ROOT / package).rglob("*.py")):
            calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
            if any(_reads_by_path(call) for call in calls):
                found.add(path.relative_to(ROOT).as_posix())
    assert found <= OWN


def _reads_by_path(call: ast.Call) -> bool:
    """Return whether a call opens a file for reading by its path."""
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name in ("read_bytes", "read_text"):
        return True
    if name != "open" or (isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name)):
        is_gzip = isinstance(function, ast.Attribute) and getattr(function.value, "id", "") == "gzip"
        if not is_gzip:
            return False
    modes = [argument.value for argument in call.args if isinstance(argument, ast.Constant)]
    return bool({"r", "rb", "rt", "r+b"} & set(modes)) or (name == "open" and not call.args)
