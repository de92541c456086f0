"""`electra-dist train`: how many ranks it starts and where, and that its runs are bit for bit those of `deepspeed`."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from electra_launcher.cli.command_output import open_console
from electra_launcher.cli.main import app
from electra_launcher.cli.train import Host, _codes_of, _cpu_ranks, _print_next, _read_hosts, _slots
from support.real_runs import step_records, wait_until
from typer.testing import CliRunner

from electra_dist.config.load import load_config
from electra_dist.errors import UserError
from electra_dist.train.stop_request import STOP_SIGNALS, StopRequest

MakeConfig = Callable[..., Path]
TRAIN = [str(Path(sys.executable).with_name("electra-dist")), "train"]
# Runs the command on this machine, whatever the host is.
SSH = """#!/bin/sh
while [ $# -gt 2 ]; do shift; done
[ "$1" = away ] && exit 255
exec sh -c "$2"
"""


@pytest.mark.parametrize(
    ("global_batch", "micro_batch", "cores", "expected"),
    [(16, 8, 2, 2), (16, 8, 64, 2), (16, 16, 64, 1), (12, 1, 5, 4), (12, "auto", 8, 6), (7, 1, 6, 1)],
)
def test_a_cpu_gets_the_most_ranks_for_which_there_are_cores_and_rows(
    tiny_config: MakeConfig, global_batch: int, micro_batch: object, cores: int, expected: int
) -> None:
    settings = {"train.global_batch": global_batch, "train.micro_batch": micro_batch}
    assert _cpu_ranks(load_config(tiny_config(**settings)), cores) == expected


def test_the_hosts_of_a_file_and_their_number_of_ranks(tmp_path: Path) -> None:
    file = tmp_path / "hostfile"
    file.write_text("# two nodes\nn1 slots=8\n\nuser@n2.cluster slots=8  # the new one\n")
    assert _read_hosts(file, None) == [Host("n1", 8), Host("user@n2.cluster", 8)]
    assert _read_hosts(file, 1) == [Host("n1", 8)]
    assert _slots(_read_hosts(file, None)) == 8


@pytest.mark.parametrize(
    ("text", "nodes", "message"),
    [
        (
            "n1 slots=8\nn2 slots=0\n",
            None,
            r"hostfile:2: 'n2 slots=0' names no host; write a line",
        ),
        ("n1 n2\n", None, "names no host"),
        ("-oProxyCommand=x\n", None, "names no host"),
        ("# nobody\n", None, "names 0 hosts, fewer than 1"),
        ("n1\n", 2, "names 1 hosts, fewer than 2"),
        ("n1 slots=8\nn2 slots=4\n", None, "need the same number of ranks"),
        ("n1\nn2\n", None, "need the same number of ranks"),
    ],
)
def test_a_hostfile_that_cannot_be_used_is_refused(tmp_path: Path, text: str, nodes: int | None, message: str) -> None:
    file = tmp_path / "hostfile"
    file.write_text(text)
    with pytest.raises(UserError, match=message):
        _slots(_read_hosts(file, nodes))


def test_a_hostfile_that_is_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    file = tmp_path / "hostfile"
    os.mkfifo(file)
    with pytest.raises(UserError, match="hostfile: is a named pipe"):
        _read_hosts(file, None)


def test_the_command_of_deepspeed_is_shown(
    tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = str(tiny_config())
    (tmp_path / "hostfile").write_text("n1 slots=8\nn2 slots=8\n")
    monkeypatch.chdir(tmp_path)

    def shown(*arguments: str) -> str:
        done = CliRunner().invoke(app, ["train", *arguments, "--show-command"])
        assert done.exit_code == 0, done.exception
        warnings.append(done.stderr)
        return done.stdout.strip()

    warnings: list[str] = []
    module = f"--module electra_launcher.pretrain --config {config}"
    assert shown(config, "--gpus", "3") == f"deepspeed --num_gpus 3 {module}"
    assert (
        shown("--config", config, "--gpus", "1", "--set", "seed=3") == f"deepspeed --num_gpus 1 {module} --set seed=3"
    )
    assert shown(config, "--hostfile", "hostfile") == f"deepspeed --hostfile hostfile {module}"
    assert shown(config, "--hostfile", "hostfile", "--nodes", "1").startswith(
        "deepspeed --hostfile hostfile --num_nodes 1 "
    )
    run = tmp_path / "a run"
    run.mkdir()
    shutil.copy(config, run / "config.yaml")  # as in a copy of the run folder that the config names
    assert shown(str(run), "--gpus", "1").endswith(f" --config '{run}/config.yaml' --set 'run_dir=\"{run}\"'")
    assert "was moved or copied: its config names run_dir" in warnings[-1] and not any(warnings[:-1])
    assert load_config(run / "config.yaml", [f'run_dir="{run}"']).run_dir == str(run)
    assert shown(str(run), "--gpus", "1", "--set", "run_dir=other").endswith("--set run_dir=other")
    assert not load_config(config).run_dir.startswith("runs") and not Path(load_config(config).run_dir).exists()


@pytest.mark.parametrize("arguments", [[], ["a.yaml", "--config", "b.yaml"], ["a.yaml", "--nodes", "2"]])
def test_contradictory_options_are_refused(arguments: list[str]) -> None:
    assert isinstance(CliRunner().invoke(app, ["train", *arguments]).exception, UserError)


def test_a_folder_without_a_run_is_refused_as_such(tmp_path: Path) -> None:
    refused = CliRunner().invoke(app, ["train", str(tmp_path)]).exception
    assert isinstance(refused, UserError) and "not a run folder, because it has no config.yaml" in str(refused)


@pytest.mark.parametrize(
    ("lost", "settings", "message"),
    [
        ("corpus.json", {}, "corpus/corpus.json: no finished corpus; build it"),
        ("heldout/corpus.json", {}, "has no held-out rows; build the corpus again"),
        ("vocab.txt", {}, "corpus/vocab.txt: no such file"),
        ("shard-000000.tar", {}, "shards that the run reads are missing, such as shard-000000.tar"),
        ("", {"data.phases": [{"corpus": "./nothing", "from_step": 5}]}, "nothing/corpus.json: no finished corpus"),
        ("", {"train.init_from": "./nothing"}, "train.init_from nothing: neither a run"),
        ("", {"data.seq_len": 16}, "data.seq_len is 16"),
        ("", {"train.global_batch": 15}, "train.global_batch"),
    ],
)
def test_what_the_ranks_would_refuse_is_refused_before_one_starts_and_leaves_nothing(
    lost: str,
    settings: dict[str, object],
    message: str,
    tiny_config: MakeConfig,
    tiny_corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("electra_launcher.supervise.__main__.main", lambda argv: pytest.fail("a rank would start"))
    monkeypatch.chdir(tmp_path)
    corpus = shutil.copytree(tiny_corpus, tmp_path / "corpus")
    if lost:
        (corpus / lost).unlink()
    where = {"data.corpus": str(corpus), "data.heldout": str(corpus / "heldout")}
    config = tiny_config(**(where | settings))
    before = sorted(tmp_path.rglob("*"))

    refused = CliRunner().invoke(app, ["train", str(config), "--ranks", "2"]).exception

    assert isinstance(refused, UserError) and message in str(refused), refused
    assert sorted(tmp_path.rglob("*")) == before


def test_the_ranks_check_what_is_in_the_cloud(tiny_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("electra_launcher.supervise.__main__.main", lambda argv: 69)
    config = tiny_config(**{"data.corpus": "s3://nowhere/corpus", "data.heldout": None})
    assert CliRunner().invoke(app, ["train", str(config), "--ranks", "2"]).exit_code == 69


def test_a_run_that_ctrl_c_stops_goes_on_with_its_number_of_ranks_and_equals_one_of_deepspeed(
    tiny_config: MakeConfig, pretrain: Callable[..., object], losses: Callable[[Path], list[tuple]], tmp_path: Path
) -> None:
    settings = {"train.num_steps": 60, "checkpoint.every_steps": 30}
    config = tiny_config("cut", **settings)
    run = config.with_suffix("")
    with open(tmp_path / "out", "wb") as out:
        command = [*TRAIN, str(config), "--ranks", "2"]
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    wait_until(lambda: len(step_records(run)) >= 5, process)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal sends it
    assert process.wait(timeout=120) == 75, (tmp_path / "out").read_text()
    shown = (tmp_path / "out").read_text()
    assert shown.endswith(f"to go on: electra-dist train {run}\n")
    assert not re.search(r"Traceback|\[(INFO|WARNING)\]|ds_accelerator", shown), shown
    status = CliRunner().invoke(app, ["status", str(run)]).output
    assert "stopped (stop: interrupted (Ctrl-C)" in status, status
    why = CliRunner().invoke(app, ["why", str(run)]).output
    assert "interrupted (Ctrl-C)" in why and "SIGTERM" not in why, why
    assert why.endswith(f"next:\n    electra-dist train {run}\n"), why

    done = subprocess.run([*TRAIN, str(run)], capture_output=True, text=True, timeout=300)

    assert done.returncode == 0, done.stderr
    assert "ranks 0 to 1 of 2" in done.stdout and done.stdout.endswith(f"finished; next: electra-dist export {run}\n")
    pretrain(whole := tiny_config("whole", **settings), 2)
    assert losses(run) == losses(whole.with_suffix(""))


def test_ctrl_c_stops_the_hosts_of_a_file_and_their_ranks_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Supervisor:
        """Supervisor of a host, which ends once its ranks can have seen the request to stop."""

        def poll(self) -> int | None:
            return 75 if (tmp_path / "stop").exists() else None

        wait = poll

    def sleep(duration_s: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("electra_launcher.cli.train.time.sleep", sleep)
    assert _codes_of([Supervisor()], tmp_path) == [75]  # type: ignore[list-item]
    assert _reason_of_file(tmp_path) == "interrupted (Ctrl-C)"
    (tmp_path / "stop").write_text("")  # as `touch` makes it
    assert _reason_of_file(tmp_path) == f"file {tmp_path / 'stop'}"


def _reason_of_file(run: Path) -> str:
    """Return why rank 0 stops because of the file `stop`; the handlers of signals are as before."""
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    request = StopRequest(run, is_first_rank=True)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    assert request.wants_stop()
    return request.reason


@pytest.mark.parametrize("second", ["127.0.0.2", "away"])
def test_a_run_on_the_hosts_of_a_file_equals_one_on_this_machine(
    tiny_config: MakeConfig,
    pretrain: Callable[..., object],
    losses: Callable[[Path], list[tuple]],
    tmp_path: Path,
    second: str,
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(SSH)
    (tmp_path / "bin" / "ssh").chmod(0o755)
    (tmp_path / "hostfile").write_text(f"127.0.0.1 slots=1\n{second} slots=1\n")
    config = tiny_config("hosts", **{"train.num_steps": 20})
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    command = [*TRAIN, str(config), "--hostfile", str(tmp_path / "hostfile")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if second == "away":
        assert done.returncode == 78
        assert "ssh to away failed; check that `ssh away true` works" in done.stderr
        return
    assert done.returncode == 0, done.stderr + done.stdout
    pretrain(whole := tiny_config("whole", **{"train.num_steps": 20}), 2)
    assert losses(config.with_suffix("")) == losses(whole.with_suffix(""))


def test_the_next_command_names_the_same_hosts_and_ranks_and_the_report(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    place = ["--hostfile", "my hosts", "--nodes", "2", "--gpus", "4"]
    _print_next(open_console(soft_wrap=True), "runs/a b", place, 75)
    assert (
        capsys.readouterr().out == "to go on: electra-dist train 'runs/a b' --hostfile 'my hosts' --nodes 2 --gpus 4\n"
    )
    _print_next(open_console(soft_wrap=True), "runs/a", [], 1)
    assert capsys.readouterr().out == ""
    (tmp_path / "a run").mkdir()
    (tmp_path / "a run" / "report.html").touch()
    _print_next(open_console(soft_wrap=True), f"{tmp_path}/a run", [], 0)
    expected = f"finished, {tmp_path}/a run/report.html has its curves; next: electra-dist export '{tmp_path}/a run'\n"
    assert capsys.readouterr().out == expected
