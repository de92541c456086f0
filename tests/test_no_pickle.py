"""No process executes what another one has sent or written: the sources and a run of two ranks use no pickles.

The sources may also open no server whose key can be guessed, and a run uses no name in the shared folder for temporary
files that another user could have made before it.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.import_graph import ROOT
from support.real_runs import go_back, quick_command

RECORDED_PRETRAIN = Path(__file__).parent / "support" / "recorded_pretrain.py"

# Calls by which Python objects, and with them code, come from other ranks, processes or files.
OBJECT_CALLS = {
    *("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"),
    *("send_object_list", "recv_object_list", "Listener", "Client", "Manager", "SyncManager", "BaseManager"),
}
PICKLE_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
WORDS = re.compile("|".join([*OBJECT_CALLS, *PICKLE_MODULES, "load", "allow_pickle"]))  # only such files are parsed
# datatrove's steps hold functions, which this program hands to its own worker processes through their pipes.
OWN_WORKERS = "electra_dist/corpus/prepare/preparation.py"


def unpicklings(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, what) for every place of a source that could build Python objects from foreign bytes."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            names = {module.partition(".")[0]} | {name.name.partition(".")[0] for name in node.names}
            names |= {name.name for name in node.names}
            yield from ((node.lineno, f"import {name}") for name in sorted(names & (PICKLE_MODULES | OBJECT_CALLS)))
        if not isinstance(node, ast.Call):
            if isinstance(node, ast.Attribute) and node.attr in OBJECT_CALLS - {"Client"}:
                yield node.lineno, node.attr
            continue
        called = ast.unparse(node.func)
        options = {option.arg: ast.unparse(option.value) for option in node.keywords}
        if called.rpartition(".")[2] in OBJECT_CALLS:
            yield node.lineno, called
        if called == "torch.load" and options.get("weights_only") != "True":
            yield node.lineno, "torch.load without weights_only"
        if options.get("allow_pickle", "False") != "False":
            yield node.lineno, f"{called} with allow_pickle"


def test_the_search_finds_each_kind_of_place() -> None:
    for source in (
        "import pickle",
        "from dill import loads",
        "from multiprocessing.connection import Listener",
        "dist.broadcast_object_list([1])",
        "gather = torch.distributed.all_gather_object",
        "torch.load(file)",
        "torch.load(file, weights_only=False)",
        "np.load(file, allow_pickle=True)",
        "np.lib.format.read_array(file, allow_pickle=flag)",
        "multiprocessing.Manager()",
    ):
        assert list(unpicklings(source)), source
    assert not list(unpicklings("torch.load(file, weights_only=True); np.load(file); np.load(f, allow_pickle=False)"))


def test_no_source_builds_python_objects_from_what_others_have_sent_or_written() -> None:
    found = []
    for folder in ("electra_dist", "kernels", "launcher", "benchmarks"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            name = file.relative_to(ROOT).as_posix()
            source = file.read_text(encoding="utf-8")
            for line, what in unpicklings(source) if WORDS.search(source) else ():
                if (name, what) != (OWN_WORKERS, "import dill"):
                    found.append(f"{name}:{line}: {what}")
    assert found == []


@pytest.mark.multiproc
@pytest.mark.parametrize("starts", [1, pytest.param(2, marks=pytest.mark.sample)])
def test_two_ranks_unpickle_nothing_and_use_no_name_in_the_shared_temporary_folder(
    tiny_config: Callable[..., Path], tmp_path: Path, starts: int
) -> None:
    """A run that saves and, in a second start, goes back to its first checkpoint; every rank records what it does."""
    shared = tmp_path / "shared"
    shared.mkdir()
    config = tiny_config(**{"train.num_steps": 4, "checkpoint.every_steps": 2, "log.eval_every_steps": 2})
    command = quick_command(config, 2)
    command[command.index(str(ROOT / "launcher" / "pretrain.py"))] = str(RECORDED_PRETRAIN)
    for start in range(starts):
        go_back(tmp_path / "run", 2)
        records = tmp_path / f"start-{start}"
        env = {**os.environ, "TMPDIR": str(shared), "RECORDS": str(records)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
        assert done.returncode == 0, done.stderr[-3000:]
        for rank in range(2):
            record = json.loads(Path(f"{records}-{rank}.json").read_text())
            assert record["checked"] > 50  # the hook was called
            assert record["unpickled"] == []
            assert record["object_calls"] == []
            assert record["guessable"] == []
