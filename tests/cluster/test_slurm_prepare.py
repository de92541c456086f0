"""Text is prepared by real Slurm arrays: a dead node costs a repetition, and the bytes are those of one machine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from machines import wait_for
from slurm import SlurmCluster
from support.corpus_texts import make_prose
from support.real_runs import REPOSITORY

_COMMAND = "from electra_launcher.cli.main import main; main()"


def prepare(folder: Path, executor: dict[str, Any], texts: Path) -> str:
    """Run `corpus prepare` with MinHash, which writes below `folder`; return what it printed."""
    folder.mkdir(exist_ok=True)
    tree = {
        "output": str(folder / "out"),
        "work": str(folder / "work"),
        "sources": [{"name": "web", "path": str(texts)}],
        "filters": {"gopher_quality": {"min_stop_words": 0}},
        "deduplication": {"exact": {}, "minhash": {"num_buckets": 3}},
        "executor": {"tasks": 4, **executor},
    }
    (folder / "pipeline.yaml").write_text(yaml.safe_dump(tree))
    command = [sys.executable, "-c", _COMMAND, "corpus", "prepare", str(folder / "pipeline.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    return done.stdout


def bytes_of(folder: Path) -> dict[str, bytes]:
    """Return all files of an output by their names."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_arrays_of_a_cluster_write_the_bytes_of_one_machine(
    cluster: Callable[..., SlurmCluster], shared_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("datatrove", reason="datatrove is not installed: pip install -e '.[corpus]'")
    texts = shared_folder / "texts"
    texts.mkdir()
    documents = make_prose(300, 1)
    for number in range(6):
        part = documents[50 * number : 50 * number + 60]  # ten of each file are in the next one, too
        (texts / f"{number}.txt").write_text("\n\n".join(part))
    prepare(shared_folder / "alone", {}, texts)

    slurm = cluster(2)
    # As in the shell of an array job, at a site that exports nothing.
    for name, value in (("SBATCH_EXPORT", "NONE"), ("SLURM_EXPORT_ENV", "NONE"), ("SLURM_ARRAY_TASK_ID", "1")):
        monkeypatch.setenv(name, value)
    settings = {"partition": "batch", "mem_per_cpu_gb": 1, "time": "30"}
    executor = {"kind": "slurm", "slurm": settings}
    printed = prepare(shared_folder / "array", executor, texts)
    assert printed.count("submitted") == 9
    slurm.crash("n2")
    slurm.boot("n2")
    wait_for(lambda: not slurm.slurm("squeue", "--noheader"), 300, lambda: slurm.slurm("squeue"))
    if not (shared_folder / "array" / "out" / "prepare.json").exists():  # a task ended with its node
        prepare(shared_folder / "array", executor, texts)
        wait_for(lambda: not slurm.slurm("squeue", "--noheader"), 300, lambda: slurm.slurm("squeue"))
    assert "prepared" in prepare(shared_folder / "array", executor, texts)
    alone = bytes_of(shared_folder / "alone" / "out")
    assert alone["prepare.json"]
    assert bytes_of(shared_folder / "array" / "out") == alone
