"""Check the report of a hang: all nodes write why, the stacks of their ranks, and NCCL's records into one folder."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from electra_launcher.supervise.hangs import HangReport, nccl_environment, request_nccl_traces
from support.supervised_runs import FAKE, supervised

QUICK = {"train.num_steps": 100_000, "cluster.hang_step_floor_s": 2.0}


def test_the_stacks_of_the_ranks_of_all_nodes_are_collected_before_any_rank_is_killed(
    tiny_config: Callable[..., Path], tmp_path: Path
) -> None:
    config, run_dir = tiny_config(**QUICK), tmp_path / "run"
    options = ["--nodes", "2", "--gpus-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", "23100"]
    with (
        supervised(FAKE, config, run_dir, *options, "--node-rank", "1", node=1) as one,
        supervised(FAKE, config, run_dir, *options, "--node-rank", "0", node=0) as zero,
    ):
        zero.wait_for_step(12)
        os.kill(zero.rank_pid(1), signal.SIGSTOP)  # rank 0 goes on, so only node 1 finds a hung rank
        zero.wait(lambda: len(zero.events("resume")) == 1)
        (folder,) = (run_dir / "hangs").iterdir()
        texts = {file.name: file.read_text() for file in folder.iterdir()}
        (run_dir / "stop").touch()
        assert zero.end() == 75, zero.story()
        assert one.end() == 75, one.story()
    assert sorted(texts) == ["node-0.txt", "node-1.txt"]
    assert texts["node-1.txt"].startswith("hung: rank 1 in phase step")
    assert texts["node-0.txt"].startswith("a rank of another node is hung")
    for number in (0, 1):
        assert f"rank {number}, pid " in texts[f"node-{number}.txt"]
        assert "launcher/electra_launcher/supervise/rank_main.py" in texts[f"node-{number}.txt"]


def test_nccl_s_records_are_requested_through_the_pipes_and_copied(tmp_path: Path) -> None:
    state, folder = tmp_path / "state", tmp_path / "hangs" / "start-000001"
    state.mkdir()
    environment = nccl_environment(state, {})
    pipe = Path(environment["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + "3.pipe")
    os.mkfifo(pipe)
    os.mkfifo(state / "nccl-pipe-4.pipe")  # The pipe of a rank that has ended: nothing reads it.

    def rank() -> None:
        """Write the record of rank 3 when something is written into its pipe, as torch does."""
        with pipe.open("rb") as requests:
            assert requests.read(1)
        Path(environment["TORCH_FR_DUMP_TEMP_FILE"] + "3").write_bytes(b"record")

    reader = threading.Thread(target=rank)
    reader.start()
    deadline = time.monotonic() + 30
    while reader.is_alive() and time.monotonic() < deadline:
        request_nccl_traces(state)
        reader.join(0.05)
    report = HangReport(folder, node=0, num_nodes=1, log=print)
    report.begin()
    report.write("hung", ["rank 3"], state)
    assert (folder / "nccl-3").read_bytes() == b"record"
    assert (folder / "node-0.txt").read_text() == "hung\nrank 3\n"


def test_variables_of_the_user_are_not_changed(tmp_path: Path) -> None:
    ours = nccl_environment(tmp_path, {"TORCH_FR_BUFFER_SIZE": "0", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"})
    assert "TORCH_FR_BUFFER_SIZE" not in ours
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in ours
    assert ours["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"


def test_a_report_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "hangs").write_text("a file, not a folder")
    log: list[str] = []
    report = HangReport(tmp_path / "hangs" / "start-000001", node=0, num_nodes=1, log=log.append)
    report.begin()
    assert len(log) == 1
    assert "not complete" in log[0]
    assert not report.was_begun
