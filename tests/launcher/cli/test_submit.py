"""`electra-dist submit`: the files that it writes, its calls of sbatch, and mistakes that are refused before them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from electra_launcher.cli.main import app
from electra_launcher.slurm import submit
from typer.testing import CliRunner

from electra_dist.errors import UserError
from electra_dist.run.failures import Strike, add_strike
from electra_dist.run.ledger import Ledger, read_jobs

MakeConfig = Callable[..., Path]


@pytest.fixture
def fake_sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The log of a fake sbatch, which records its arguments and prints the number of its calls as the job id."""
    folder = tmp_path / "bin"
    folder.mkdir()
    log = tmp_path / "sbatch.log"
    (folder / "sbatch").write_text(f'#!/bin/sh\necho "$@" >>{log}\nwc -l <{log}\n')
    (folder / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return log


def test_submit_writes_script_and_config_into_the_run_folder_and_calls_sbatch_for_each_job_of_the_chain(
    tiny_config: MakeConfig, tmp_path: Path, fake_sbatch: Path
):
    config = tiny_config("run")
    options = ["--nodes", "2", "--gpus-per-node", "1", "--chain", "3", "--set", "train.micro_batch=4"]
    result = CliRunner().invoke(app, ["submit", "--config", str(config), *options])
    assert result.exit_code == 0, result.output
    folder = tmp_path / "run" / "slurm"
    assert fake_sbatch.read_text().splitlines() == [f"--parsable {folder}/submission-0001.sh"] * 3
    assert yaml.safe_load((folder / "submission-0001.yaml").read_text())["train"]["micro_batch"] == 4
    assert read_jobs(tmp_path / "run")[0].jobs == ["1", "2", "3"]
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


def test_nodes_with_a_recent_strike_are_excluded(tiny_config: MakeConfig, tmp_path: Path, fake_sbatch: Path):
    import time

    old, fresh = time.time() - 30 * 3600, time.time() - 60
    for node, when in (("n1", old), ("n4", fresh), ("n2", fresh)):
        add_strike(tmp_path / "run", Strike(time=when, node=node, device="", reason="ECC", by="preflight"))
    command = ["submit", "--config", str(tiny_config("run")), "--nodes", "1", "--gpus-per-node", "2", "--dry-run"]
    assert "#SBATCH --exclude=n2,n4\n" in CliRunner().invoke(app, command).output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nodes", "3"], "--nodes 3 x 1 ranks do not share train.global_batch 16 .* use 1, 2, 4, 8, 16 nodes"),
        (["--nodes", "1", "--set", "train.micro_batc=1"], "did you mean `train.micro_batch`"),
    ],
)
def test_a_config_that_every_rank_would_refuse_is_refused_before_it_is_queued(
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


def test_without_sbatch_the_error_names_the_login_node(
    tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PATH", str(tmp_path))
    command = ["submit", "--config", str(tiny_config("run")), "--nodes", "1", "--gpus-per-node", "1"]
    result = CliRunner().invoke(app, command)
    assert isinstance(result.exception, UserError)
    assert "login node" in str(result.exception)


def test_a_submission_without_a_chain_has_a_standby_job_and_says_what_the_jobs_begin(
    tiny_config: MakeConfig, tmp_path: Path, fake_sbatch: Path
):
    command = ["submit", "--config", str(tiny_config("run")), "--nodes", "1", "--gpus-per-node", "1"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert len(fake_sbatch.read_text().splitlines()) == 2
    said = " ".join(result.output.split())
    assert "job 2 takes over if job 1 cannot be requeued" in said
    assert "a new run" in said


def test_paths_of_a_submission_do_not_depend_on_the_folder_in_which_its_jobs_run(
    tiny_config: MakeConfig, tmp_path: Path, fake_sbatch: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    changes = ["run_dir=runs/a", "data.cache_dir=cache", "checkpoint.targets=[saved, 's3://bucket/run']"]
    options = [option for change in changes for option in ("--set", change)]
    command = ["submit", "--config", str(tiny_config("run")), "--nodes", "1", "--gpus-per-node", "1", *options]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    queued = yaml.safe_load((tmp_path / "runs" / "a" / "slurm" / "submission-0001.yaml").read_text())
    assert queued["run_dir"] == str(tmp_path / "runs" / "a")
    assert queued["data"]["cache_dir"] == str(tmp_path / "cache")
    assert queued["checkpoint"]["targets"] == [str(tmp_path / "saved"), "s3://bucket/run"]


@pytest.mark.parametrize(("time", "is_refused"), [("2", True), ("2:30", True), ("2:31", False), ("0-1", False)])
def test_a_time_limit_that_leaves_no_time_for_steps_is_refused(
    tiny_config: MakeConfig, fake_sbatch: Path, time: str, is_refused: bool
):
    command = ["submit", "--config", str(tiny_config("run")), "--nodes", "1", "--gpus-per-node", "1", "--time", time]
    result = CliRunner().invoke(app, [*command, "--dry-run"])
    assert isinstance(result.exception, UserError) == is_refused
    if is_refused:
        assert "set --time to more than 2 minutes" in str(result.exception)  # 120 s ahead, 30 s assumed


def test_the_start_and_the_save_that_a_run_has_measured_count_for_its_time_limit(
    tiny_config: MakeConfig, tmp_path: Path, fake_sbatch: Path
):
    ledger = Ledger(tmp_path / "run")
    ledger.append("start", 0, setup_s={"import": 100.0, "build": 200.0})
    ledger.append("checkpoint", 10, stall_s=1.0, write_s=59.0)
    ledger.close()
    command = ["submit", "--config", str(tiny_config("run")), "--nodes", "1", "--gpus-per-node", "1", "--dry-run"]
    assert CliRunner().invoke(app, [*command, "--time", "9"]).exit_code == 0
    result = CliRunner().invoke(app, [*command, "--time", "8"])
    assert "360 s that this run has needed" in str(result.exception)


def test_a_setup_file_that_is_missing_is_refused(tiny_config: MakeConfig, fake_sbatch: Path):
    command = ["submit", "--config", str(tiny_config("run")), "--nodes", "1", "--gpus-per-node", "1"]
    result = CliRunner().invoke(app, [*command, "--setup", "none.sh"])
    assert isinstance(result.exception, UserError)
    assert "--setup none.sh" in str(result.exception)
    assert not fake_sbatch.exists()


def test_the_runs_of_a_sweep_unpack_one_archive_of_the_packages(
    tiny_config: MakeConfig, tmp_path: Path, fake_sbatch: Path, monkeypatch: pytest.MonkeyPatch
):
    files = [submit.PackedFile(Path(__file__), "package/module.py")]
    monkeypatch.setattr(submit, "environment_files", lambda: files)
    options = ["--nodes", "1", "--gpus-per-node", "1", "--stage-environment", "--each", "seed=3,4"]
    result = CliRunner().invoke(app, ["submit", "--config", str(tiny_config("run")), *options])
    assert result.exit_code == 0, result.output
    (archive,) = tmp_path.glob("*/slurm/environment-*.tar")
    assert archive.parent.parent.name == "run-seed-3"
    for seed in (3, 4):
        script = (tmp_path / f"run-seed-{seed}" / "slurm" / "submission-0001.sh").read_text()
        assert f"\narchive={archive}\n" in script


def test_a_sweep_submits_a_run_for_each_value_and_none_if_one_is_refused(
    tiny_config: MakeConfig, tmp_path: Path, fake_sbatch: Path
):
    command = ["submit", "--config", str(tiny_config("run")), "--nodes", "1", "--gpus-per-node", "1", "--chain", "2"]
    result = CliRunner().invoke(app, [*command, "--each", "seed=3,x"])
    assert isinstance(result.exception, UserError)
    assert not fake_sbatch.exists()
    result = CliRunner().invoke(app, [*command, "--each", "seed=3,4"])
    assert result.exit_code == 0, result.output
    assert len(fake_sbatch.read_text().splitlines()) == 4
    for seed in (3, 4):
        queued = yaml.safe_load((tmp_path / f"run-seed-{seed}" / "slurm" / "submission-0001.yaml").read_text())
        assert (queued["seed"], queued["run_dir"]) == (seed, str(tmp_path / f"run-seed-{seed}"))
