"""`electra-dist finetune --parallel`, killed in the middle: no process stays, and one line says what happened."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from electra_dist.errors import EXIT_USER_ERROR
from electra_dist.pretrained.encoder import Pretrained

COMMAND = [sys.executable, "-c", "from electra_launcher.cli.main import main; main()", "finetune", "--task", "custom"]
TIMEOUT_S = 240


def start_command(encoder: Pretrained, folder: Path) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """Start a command that would take hours, and wait until its two processes compute."""
    tower = "{hidden_size: 32, num_layers: 1, num_heads: 2, intermediate_size: 64}"
    (folder / "vocab.txt").write_text(encoder.vocabulary.text)
    (folder / "tiny.yaml").write_text(
        f"run_dir: r\nmodel: {{vocab_size: {encoder.vocabulary.size}, embedding_size: 32, max_positions: 64, "
        f"discriminator: {tower}, generator: {tower}}}\ndata: {{corpus: none, seq_len: 64}}\n"
        f"train: {{num_steps: 1, global_batch: 1, micro_batch: 1}}\n"
    )
    for stem in ("train", "dev"):
        (folder / f"{stem}.tsv").write_text("text\tlabel\n" + "the dog\tyes\nthe bird\tno\n" * 50)
    options = ["--text-a", "text", "--label", "label", "--model", f"random:{folder / 'tiny.yaml'}"]
    options += ["--vocab", str(folder / "vocab.txt"), "--data", str(folder), "--output", str(folder / "out")]
    options += ["--seeds", "4", "--parallel", "2", "--set", "epochs=1000000"]
    command = subprocess.Popen([*COMMAND, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        time.sleep(0.5)
        children = psutil.Process(command.pid).children()
        workers = [child for child in children if any("spawn_main" in word for word in child.cmdline())]
        if len(workers) == 2 and all(worker.cpu_times().user > 3 for worker in workers):
            return command, workers
    command.kill()
    pytest.fail("the processes of the command did not start")


@pytest.mark.drill
@pytest.mark.parametrize(
    ("kill", "exit_code", "message"),
    [
        (lambda command, workers: os.kill(command.pid, signal.SIGINT), 130, ""),
        (lambda command, workers: os.kill(command.pid, signal.SIGTERM), -signal.SIGTERM, ""),
        (lambda command, workers: workers[0].kill(), EXIT_USER_ERROR, "error: a process of --parallel was killed"),
    ],
    ids=["Ctrl-C", "SIGTERM", "killed process"],
)
def test_no_process_outlives_a_command_that_is_killed_or_whose_process_is(
    encoder: Pretrained,
    tmp_path: Path,
    kill: Callable[[subprocess.Popen[str], list[psutil.Process]], None],
    exit_code: int,
    message: str,
) -> None:
    command, workers = start_command(encoder, tmp_path)

    kill(command, workers)

    output, _ = command.communicate(timeout=TIMEOUT_S)
    assert command.returncode == exit_code
    assert message in output
    assert "Traceback" not in output
    _, alive = psutil.wait_procs(workers, timeout=30)
    for worker in alive:
        worker.kill()
    assert alive == []
