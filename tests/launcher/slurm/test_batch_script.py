"""The sbatch script: golden text, quoting that bash undoes exactly, and what is refused before anything is queued."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from electra_dist.errors import UserError
from electra_dist.run.ledger import Ledger, read_jobs
from electra_dist.run.strikes import Strike, add_strike
from launcher.cli.main import app
from launcher.slurm.batch_script import Container, SubmitRequest, batch_script
from launcher.slurm.submission import job_name

GOLDEN = Path(__file__).parent / "golden"
REQUEUED = SubmitRequest(
    run_dir="/shared/runs/large",
    script_file="/shared/runs/large/slurm/submission-0001.sh",
    config_file="/shared/runs/large/slurm/submission-0001.yaml",
    work_dir="/home/ada/electra",
    command="electra-dist submit --config configs/large_25pct_mask.yaml --nodes 8",
    python="/home/ada/electra/.venv/bin/python",
    job_name="large-0123abcd",
    num_nodes=8,
    gpus_per_node=8,
)
CHAIN = dataclasses.replace(
    REQUEUED,
    run_dir="/shared/it's a run",
    partition="gpu",
    time_limit="24:00:00",
    chain=5,
    signal_ahead_s=300,
    python="python",
    container=Container(image="/images/electra dist.sqsh", runtime="pyxis", mounts=("/data:/data:ro",)),
    sbatch_options=("account=vision", "comment=it's ours", "hold"),
)
APPTAINER = dataclasses.replace(CHAIN, container=Container(image="electra.sif", runtime="apptainer"))


@pytest.mark.parametrize(
    ("name", "request_", "excluded"),
    [("requeued", REQUEUED, ()), ("chain_pyxis", CHAIN, ("n3", "n7")), ("chain_apptainer", APPTAINER, ())],
)
def test_the_script_is_the_golden_one(name: str, request_: SubmitRequest, excluded: tuple[str, ...]):
    text = batch_script(request_, excluded)
    file = GOLDEN / f"{name}.sh"
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_text(text)
    assert text == file.read_text()
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


SUPERVISOR = """#!/bin/bash
trap 'sleep 0.2; exit 75' {signal}
echo ready
for i in $(seq 100); do sleep 0.1; done
"""


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM])
def test_a_signal_to_the_nodes_shell_alone_reaches_the_supervisor(tmp_path: Path, number: signal.Signals):
    """As Slurm sends it where it tracks processes by cgroup."""
    python = tmp_path / "supervisor"
    python.write_text(SUPERVISOR.format(signal=number.name))
    python.chmod(0o755)
    request = dataclasses.replace(REQUEUED, run_dir=str(tmp_path), python=str(python))
    script = tmp_path / "script.sh"
    # A shell that is told to ignore a signal cannot trap it again; Python can, and stands here for it.
    script.write_text(batch_script(request).replace("trap '' USR1 USR2 TERM", ":"))
    state = tmp_path / "slurm" / "job-7-0"
    state.mkdir(parents=True)
    environment = {**os.environ, "SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1", "SLURM_NODEID": "0"}
    with subprocess.Popen(["bash", str(script), "node"], env=environment, stdout=subprocess.PIPE) as shell:
        assert shell.stdout and shell.stdout.readline() == b"ready\n"
        shell.send_signal(number)
        assert shell.wait(10) == 75
    assert (state / "exit-n1").read_text() == "75\n"


words = st.text(st.characters(codec="utf-8", exclude_characters="\0", exclude_categories=["Cs"]), min_size=1)


@given(run_dir=words, config=words, python=words)
def test_bash_reads_back_every_value_that_was_quoted_into_the_body(run_dir: str, config: str, python: str):
    request = dataclasses.replace(REQUEUED, run_dir="/r", config_file=config, python=python, script_file=run_dir)
    text = batch_script(request)
    settings = text[text.index("\nrun_dir=") : text.index("\nexport state=")]
    shown = subprocess.run(
        ["bash", "-c", settings + '\nprintf \'%s\\0\' "$script" "$config" "$python"'],
        capture_output=True,
        check=True,
        env={"LC_ALL": "C.UTF-8"},
    )
    assert shown.stdout.decode("utf-8").split("\0")[:3] == [run_dir, config, python]


@pytest.mark.parametrize("partition", ["a\\b", "two\nlines", "tab\there"])
def test_a_value_that_an_sbatch_line_cannot_carry_is_refused(partition: str):
    with pytest.raises(UserError, match="backslash"):
        batch_script(dataclasses.replace(REQUEUED, partition=partition))


@pytest.mark.parametrize("option", ["nodes=3", "--exclude=n1", "signal=USR2@5"])
def test_an_option_that_the_script_sets_itself_is_refused(option: str):
    with pytest.raises(UserError, match="sets `"):
        batch_script(dataclasses.replace(REQUEUED, sbatch_options=(option,)))


def test_two_run_folders_never_share_a_job_name():
    names = {job_name(Path(path)) for path in ("/a/run", "/b/run", "/a/r n", "/a/r:n", "/a/...")}
    assert len(names) == 5
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-.") for name in names)


MakeConfig = Callable[..., Path]


@pytest.fixture
def fake_sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An sbatch that counts, and says what it was given."""
    folder = tmp_path / "bin"
    folder.mkdir()
    log = tmp_path / "sbatch.log"
    (folder / "sbatch").write_text(f'#!/bin/sh\necho "$@" >>{log}\nwc -l <{log}\n')
    (folder / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return log


def test_submit_writes_script_and_config_into_the_run_folder_and_hands_each_link_to_sbatch(
    tiny_config: MakeConfig, tmp_path: Path, fake_sbatch: Path
):
    config = tiny_config("run")
    options = ["--nodes", "2", "--gpus-per-node", "1", "--chain", "3", "--set", "train.micro_batch=4"]
    result = CliRunner().invoke(app, ["submit", "--config", str(config), *options])
    assert result.exit_code == 0, result.output
    folder = tmp_path / "run" / "slurm"
    assert fake_sbatch.read_text().splitlines() == [f"--parsable {folder}/submission-0001.sh"] * 3
    assert yaml.safe_load((folder / "submission-0001.yaml").read_text())["train"]["micro_batch"] == 4
    assert read_jobs(tmp_path / "run")[0]["jobs"] == ["1", "2", "3"]
    assert "1, 2, 3" in result.output
    again = CliRunner().invoke(app, ["submit", "--config", str(config), *options])
    assert again.exit_code == 0
    assert (folder / "submission-0002.sh").exists()


def test_dry_run_prints_the_script_and_writes_nothing(tiny_config: MakeConfig, tmp_path: Path, fake_sbatch: Path):
    command = ["submit", "--config", str(tiny_config("run")), "--nodes", "1", "--gpus-per-node", "2", "--dry-run"]
    result = CliRunner().invoke(app, command)
    assert result.output.startswith("#!/bin/bash\n")
    assert not (tmp_path / "run").exists()
    assert not fake_sbatch.exists()


def test_a_node_with_a_fresh_strike_is_left_out(tiny_config: MakeConfig, tmp_path: Path, fake_sbatch: Path):
    import time

    old, fresh = time.time() - 30 * 3600, time.time() - 60
    for node, when in (("n1", old), ("n4", fresh), ("n2", fresh)):
        add_strike(tmp_path / "run", Strike(time=when, node=node, device="", reason="ECC", by="preflight"))
    command = ["submit", "--config", str(tiny_config("run")), "--nodes", "1", "--gpus-per-node", "2", "--dry-run"]
    assert "#SBATCH --exclude=n2,n4\n" in CliRunner().invoke(app, command).output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nodes", "3"], "--nodes 3 x 1 ranks do not share train.global_batch 16 .* use 1, 2 nodes"),
        (["--nodes", "1", "--set", "train.micro_batc=1"], "did you mean `train.micro_batch`"),
    ],
)
def test_what_every_rank_would_refuse_is_refused_before_it_is_queued(
    tiny_config: MakeConfig, fake_sbatch: Path, options: list[str], message: str
):
    command = ["submit", "--config", str(tiny_config("run")), "--gpus-per-node", "1", *options]
    result = CliRunner().invoke(app, command)
    assert isinstance(result.exception, UserError)
    with pytest.raises(UserError, match=message):
        raise result.exception
    assert not fake_sbatch.exists()


def test_a_finished_run_is_not_submitted_again(tiny_config: MakeConfig, tmp_path: Path, fake_sbatch: Path):
    ledger = Ledger(tmp_path / "run")
    ledger.append("done", 20)
    ledger.close()
    command = ["submit", "--config", str(tiny_config("run")), "--nodes", "1", "--gpus-per-node", "1"]
    result = CliRunner().invoke(app, command)
    assert isinstance(result.exception, UserError)
    assert "finished" in str(result.exception)


def test_without_sbatch_the_one_line_says_where_to_go(
    tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PATH", str(tmp_path))
    command = ["submit", "--config", str(tiny_config("run")), "--nodes", "1", "--gpus-per-node", "1"]
    result = CliRunner().invoke(app, command)
    assert isinstance(result.exception, UserError)
    assert "login node" in str(result.exception)
