"""Real Slurm arrays prepare text and build a corpus; a killed task does not change the corpus of one machine."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from machines import wait_for
from slurm import SlurmCluster

from electra_dist.data.manifest import read_manifest
from electra_dist.store.open_store import open_store

COMMAND = [sys.executable, "-c", "from electra_launcher.cli.main import main; main()", "corpus"]
WORDS = [f"word{number}" for number in range(300)]
# Words without digits, which MinHash does not distinguish, in two languages.
SYLLABLES = ["ba", "ce", "di", "fo", "gu", "la", "me", "ni", "ro", "su", "ta", "ve"]
NATIVE = [f"{first}{second}n" for first in SYLLABLES for second in SYLLABLES]
FOREIGN = [f"{first}{second}x" for first in SYLLABLES for second in SYLLABLES]
BOILERPLATE = "We use cookies. Accept all cookies."
NUM_PARTS = 4
NUM_PLANTED = 3  # of each kind, in each file


def write_texts(folder: Path) -> None:
    """Write six files of random sentences, 40,000 lines in all; the sentences are the same in every run."""
    draw = random.Random(1)
    folder.mkdir()
    for number in range(6):
        lines = (" ".join(draw.choices(WORDS, k=20)) + ("\n" if draw.random() < 0.2 else "") for _ in range(7000))
        (folder / f"{number}.txt").write_text("\n".join(lines))


def write_planted_texts(folder: Path) -> int:
    """Write six files of random documents, with near-duplicates, boilerplate and texts of another language.

    Returns:
        The number of documents that are none of these.
    """
    draw = random.Random(2)
    folder.mkdir()
    num_good = 0
    for number in range(6):
        good = [[draw.choices(NATIVE, k=20) for _ in range(10)] for _ in range(120)]
        num_good += len(good)
        planted = [[draw.choices(FOREIGN, k=20) for _ in range(10)] for _ in range(NUM_PLANTED)]
        for original in good[:NUM_PLANTED]:
            changed = [list(line) for line in original]
            changed[-1][-1] = "otherwise"
            planted.append(changed)
        documents = ["\n".join(" ".join(line) for line in document) for document in good + planted]
        documents += [f"{BOILERPLATE} {' '.join(draw.choices(NATIVE, k=80))}" for _ in range(NUM_PLANTED)]
        (folder / f"{number}.txt").write_text("\n\n".join(documents))
    return num_good


def prepare(folder: Path, texts: Path, executor: dict[str, object]) -> str:
    """Run `corpus prepare` with its output below `folder`; return the text that it printed."""
    folder.mkdir(exist_ok=True)
    tree = {
        "output": str(folder / "out"),
        "work": str(folder / "work"),
        "sources": [{"name": "web", "path": str(texts)}],
        "filters": {"gopher_quality": {"min_stop_words": 2, "stop_words": NATIVE}, "drop_pattern": "cookies"},
        "deduplication": {"minhash": {}},
        "executor": {"tasks": 4, **executor},
    }
    (folder / "pipeline.yaml").write_text(yaml.safe_dump(tree))
    done = subprocess.run([*COMMAND, "prepare", str(folder / "pipeline.yaml")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_planted_texts_are_gone_after_arrays_that_prepare_build_and_merge(
    cluster: Callable[..., SlurmCluster], shared_folder: Path, tiny_config: Callable[..., Path]
) -> None:
    pytest.importorskip("datatrove", reason="datatrove is not installed: pip install -e '.[corpus]'")
    slurm = cluster(2)
    num_good = write_planted_texts(shared_folder / "texts")
    prepare(shared_folder / "alone", shared_folder / "texts", {})
    executor = {"kind": "slurm", "slurm": {"partition": "batch", "mem_per_cpu_gb": 1, "time": "30"}}
    web = shared_folder / "web"
    assert "submitted" in prepare(web, shared_folder / "texts", executor)
    wait_for(lambda: (web / "out" / "prepare.json").exists(), 400, lambda: slurm.slurm("squeue"))
    report = json.loads((web / "out" / "prepare.json").read_text())
    dropped = {step: sum(by["web"] for by in reasons.values()) for step, reasons in report["dropped"].items()}
    planted = 6 * NUM_PLANTED
    assert dropped == {"gopher_quality": planted, "drop_pattern": planted, "minhash": planted}
    assert report["documents_out"] == num_good == report["documents_in"] - 3 * planted

    config = tiny_config("unused", **{"corpus.shard_size_mb": 0.1, "corpus.heldout_fraction": 0.05})
    options = ["--config", str(config), "--set", "model.vocab_size=200"]
    output = shared_folder / "corpus"
    inputs = ["--input", str(web / "out" / "documents")]
    jobs = [*COMMAND, "submit", *inputs, *options, "--output", str(output), "--parts", str(NUM_PARTS), "--cpus", "1"]
    subprocess.run(jobs, check=True, capture_output=True, text=True)
    wait_for(lambda: (output / "corpus.json").exists(), 240, lambda: slurm.slurm("squeue"))

    alone = shared_folder / "alone"
    inputs = ["--input", str(alone / "out" / "documents")]
    vocab = ["--vocab", str(output / "vocab.txt")]
    build = [*COMMAND, "build", *inputs, *options, *vocab, "--output", str(alone / "corpus"), "--workers", "1"]
    subprocess.run(build, check=True, capture_output=True)
    built = read_manifest(open_store(str(output)))
    assert built.fingerprint == read_manifest(open_store(str(alone / "corpus"))).fingerprint
    assert built.totals["documents_in"] == num_good


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
