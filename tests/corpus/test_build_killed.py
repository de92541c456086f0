"""A corpus build that is killed with SIGKILL at random moments: the same command resumes it, to the same corpus."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from support.corpus_texts import BUILD_CONFIG
from support.folder_contents import file_contents, finished_files

COMMAND = [sys.executable, "-c", "from electra_launcher.cli.main import corpus_app; corpus_app()", "build"]
NUM_DOCUMENTS = 3000
NUM_KILLS = 2
WORKERS_END_S = 20  # time in which workers must notice that their parent is gone


def finished_shards(folder: Path) -> list[str]:
    """Return the numbers of the shards that a build has recorded as finished."""
    return sorted(path.stem for path in folder.glob("progress/buckets/*.json"))


def shard_times(folder: Path) -> dict[str, int]:
    """Return the modification time of each finished shard, in nanoseconds, by its number."""
    return {number: (folder / f"shard-{number}.tar").stat().st_mtime_ns for number in finished_shards(folder)}


def worker_pids_of_killed_build(command: list[str], folder: Path, num_shards: int, delay_s: float) -> list[int]:
    """Start a build, kill it `delay_s` after `num_shards` are finished, and return the pids of its workers.

    The result is empty if the build ended before it could be killed.
    """
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    while process.poll() is None and len(finished_shards(folder)) < num_shards:
        time.sleep(0.005)
    time.sleep(delay_s)

    children: list[psutil.Process] = []
    if process.poll() is None:
        children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    code = process.wait()
    assert code in (-9, 0), process.stderr.read().decode()
    process.stderr.close()
    if code == 0:
        return []
    return [child.pid for child in children]


def surviving_workers(pids: list[int]) -> list[int]:
    """Return the workers that still run after the time in which they must end; return early once all have ended."""
    deadline = time.monotonic() + WORKERS_END_S
    while time.monotonic() < deadline:
        if not any(psutil.pid_exists(pid) for pid in pids):
            break
        time.sleep(0.05)
    return [pid for pid in pids if psutil.pid_exists(pid)]


def test_a_killed_build_resumes_at_its_finished_shards_and_ends_with_the_bytes_of_an_unkilled_one(
    prose: Callable[[int, int], list[str]], jsonl_file: Callable[..., Path], vocab_file: Path, tmp_path: Path
) -> None:
    """A build with two workers is killed twice at random moments, which differ in each run of this test."""
    config = tmp_path / "config.yaml"
    vocab_size = len(vocab_file.read_text().splitlines())
    config.write_text(BUILD_CONFIG.format(vocab_size=vocab_size))
    input_file = jsonl_file(prose(NUM_DOCUMENTS, 7))
    options = ["--input", str(input_file), "--vocab", str(vocab_file), "--config", str(config)]

    unkilled_folder = tmp_path / "whole"
    unkilled_command = [*COMMAND, *options, "--output", str(unkilled_folder), "--workers", "1"]
    subprocess.run(unkilled_command, check=True, capture_output=True)
    unkilled_contents = file_contents(unkilled_folder)
    assert len(unkilled_contents) > 15

    folder = tmp_path / "killed"
    command = [*COMMAND, *options, "--output", str(folder), "--workers", "2"]
    random_source = random.Random(os.getpid())
    was_killed = False
    for num_shards in sorted(random_source.sample(range(1, 12), NUM_KILLS)):
        times_before = shard_times(folder)
        delay_s = random_source.random() * 0.3
        workers = worker_pids_of_killed_build(command, folder, num_shards, delay_s)
        if workers:
            was_killed = True
            assert times_before.items() <= shard_times(folder).items(), "a finished shard was built again"
        assert surviving_workers(workers) == [], "workers outlive their parent"
    assert was_killed, "the build was too quick to be killed"

    times_before = shard_times(folder)
    last_build = subprocess.run(command, check=True, capture_output=True, text=True)

    if times_before:
        assert f"{len(times_before)} shards were finished before" in last_build.stdout
    for number, modification_time in times_before.items():
        assert (folder / f"shard-{number}.tar").stat().st_mtime_ns == modification_time
    # A killed build may leave unfinished files (.tmp), which are not part of the corpus.
    contents = finished_files(folder)
    assert contents == unkilled_contents
    manifest = json.loads(contents["corpus.json"])
    assert manifest["totals"]["documents_in"] == NUM_DOCUMENTS
