"""A corpus built by a real Slurm array, one task of which is killed: the corpus of one process."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from machines import wait_for
from slurm import SlurmCluster

from electra_dist.data.corpus_manifest import read_manifest
from electra_dist.store.open_store import open_store

COMMAND = [sys.executable, "-c", "from launcher.cli.main import main; main()", "corpus"]
WORDS = [f"word{number}" for number in range(300)]
NUM_PARTS = 4


def write_texts(folder: Path) -> None:
    """Write six files of random sentences, 40,000 lines in all."""
    draw = random.Random(1)
    folder.mkdir()
    for number in range(6):
        lines = (" ".join(draw.choices(WORDS, k=20)) + ("\n" if draw.random() < 0.2 else "") for _ in range(7000))
        (folder / f"{number}.txt").write_text("\n".join(lines))


def test_an_array_of_parts_one_of_which_is_killed_gives_the_corpus_of_one_process(
    cluster: Callable[..., SlurmCluster], shared_folder: Path, tiny_config: Callable[..., Path]
) -> None:
    slurm = cluster(2)
    write_texts(shared_folder / "texts")
    config = tiny_config("unused", **{"corpus.shard_size_mb": 0.1, "corpus.heldout_fraction": 0.05})
    options = ["--input", str(shared_folder / "texts"), "--config", str(config), "--set", "model.vocab_size=200"]
    output = shared_folder / "corpus"

    jobs = [*COMMAND, "submit", *options, "--output", str(output), "--parts", str(NUM_PARTS), "--cpus", "1"]
    submitted = subprocess.run(jobs, capture_output=True, text=True)
    assert submitted.returncode == 0, submitted.stderr
    vocabulary_job, array, merge_job = submitted.stdout.partition("submitted jobs ")[2].partition(":")[0].split(", ")

    def log() -> str:
        """Return what all jobs printed, and the queue."""
        logs = [path.read_text(errors="replace") for path in sorted((output / "slurm").glob("*.log"))]
        return "\n".join([*logs, slurm.slurm("squeue")])

    def part_two() -> list[int]:
        """Return the processes of the second part, which are at work."""
        return [pid for node in ("n1", "n2") for pid in slurm.processes(node, f"2/{NUM_PARTS}")]

    wait_for(lambda: part_two() and list(output.glob("progress/groups/*.json")), 120, log)
    for pid in part_two():
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: slurm.job_state(f"{array}_2") == "FAILED", 60, log)
    again = subprocess.run(jobs, capture_output=True, text=True)  # the user submits the build again
    assert again.returncode == 0, again.stderr
    wait_for(lambda: (output / "corpus.json").exists(), 240, log)
    print(f"jobs {vocabulary_job}, {array}, {merge_job}; {again.stdout.splitlines()[0]}")

    alone = shared_folder / "alone"
    build = [
        *COMMAND,
        "build",
        *options,
        "--vocab",
        str(output / "vocab.txt"),
        "--output",
        str(alone),
        "--workers",
        "1",
    ]
    subprocess.run(build, check=True, capture_output=True)
    assert read_manifest(open_store(str(output))).fingerprint == read_manifest(open_store(str(alone))).fingerprint
    for entry in read_manifest(open_store(str(alone))).shards:
        assert (output / entry.name).read_bytes() == (alone / entry.name).read_bytes()
