"""kill -9 at random moments of a build with workers: the same command goes on and ends with the same corpus."""

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

COMMAND = [sys.executable, "-c", "from launcher.cli.corpus import app; app()", "build"]
CONFIG = """
run_dir: unused
model:
  vocab_size: {vocab_size}
  max_positions: 64
  discriminator: {{hidden_size: 8, num_layers: 1, num_heads: 1, intermediate_size: 8}}
  generator: {{hidden_size: 8, num_layers: 1, num_heads: 1, intermediate_size: 8}}
data: {{corpus: unused, seq_len: 64}}
train: {{num_steps: 1, global_batch: 1, micro_batch: 1}}
corpus: {{shard_size_mb: 0.06, heldout_fraction: 0.05}}
"""


def finished_shards(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("progress/0*.json"))


def kill_after(command: list[str], folder: Path, num_shards: int, delay_s: float) -> list[int]:
    """Runs the build, kills it `delay_s` after `num_shards` are finished; its processes. [] if it ended before."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    while process.poll() is None and len(finished_shards(folder)) < num_shards:
        time.sleep(0.005)
    time.sleep(delay_s)
    children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.kill()
    code = process.wait()
    assert code in (-9, 0), process.stderr.read().decode()
    process.stderr.close()
    return [child.pid for child in children] if code else []


def stamps(folder: Path) -> dict[str, int]:
    return {number: (folder / f"shard-{number}.tar").stat().st_mtime_ns for number in finished_shards(folder)}


def test_a_killed_build_goes_on(
    prose: Callable[[int, int], list[str]], jsonl: Callable[..., Path], vocab_file: Path, tmp_path: Path
) -> None:
    path = jsonl(prose(3000, 7))
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG.format(vocab_size=len(vocab_file.read_text().splitlines())))
    common = [*COMMAND, "--input", str(path), "--vocab", str(vocab_file), "--config", str(config)]
    subprocess.run([*common, "--output", str(tmp_path / "whole"), "--workers", "1"], check=True, capture_output=True)
    whole = {p.relative_to(tmp_path / "whole"): p.read_bytes() for p in (tmp_path / "whole").rglob("*") if p.is_file()}
    assert len(whole) > 15

    folder = tmp_path / "killed"
    command = [*common, "--output", str(folder), "--workers", "2"]
    draw = random.Random(os.getpid())  # other moments each time; any must do
    num_kills = 0
    for num_shards in sorted(draw.sample(range(1, 12), 2)):
        before = stamps(folder)
        workers = kill_after(command, folder, num_shards, draw.random() * 0.3)
        num_kills += bool(workers)
        assert before.items() <= stamps(folder).items() or not workers, "a finished shard was made again"
        deadline = time.monotonic() + 20
        while any(psutil.pid_exists(pid) for pid in workers) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(psutil.pid_exists(pid) for pid in workers), "workers outlive their parent"
    assert num_kills, "the build was too quick to be killed"
    before = stamps(folder)
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    if before:
        assert f"{len(before)} shards were finished before" in done.stdout
    for number, stamp in before.items():
        assert (folder / f"shard-{number}.tar").stat().st_mtime_ns == stamp
    killed = {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.suffix != ".tmp" and p.is_file()}
    assert killed == whole
    assert json.loads(killed[Path("corpus.json")])["totals"]["documents_in"] == 3000
