"""`cluster.notify` may hold a secret: no record shows it, and only its owner can read what must hold it."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from electra_launcher import pretrain as pretrain_program
from electra_launcher.cli.main import app
from support.supervised_runs import REAL, supervised
from typer.testing import CliRunner

from electra_dist.config import secrets
from electra_dist.config.load import load_config
from electra_dist.config.secrets import without_secret_arguments, without_secrets
from electra_dist.errors import UserError, error_line
from electra_dist.run.environment_record import write_environment
from electra_dist.store.atomic_files import PRIVATE, create_file, replacing

MakeConfig = Callable[..., Path]
SECRET = "tr0ub4dor"
COMMAND = f'curl -H "Authorization: Bearer {SECRET}" https://example.org'


def mode(path: Path) -> int:
    """Return the permissions of a file."""
    return stat.S_IMODE(path.stat().st_mode)


def files_with(folder: Path, text: str) -> list[Path]:
    """Return the files below a folder that hold a text."""
    return sorted(file for file in folder.rglob("*") if file.is_file() and text.encode() in file.read_bytes())


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file into which a stand-in for the package wandb writes the command line that it sees."""
    packages, seen = tmp_path / "packages", tmp_path / "service"
    packages.mkdir()
    init = f"def init(**_):\n    open({str(seen)!r}, 'w').write(str(sys.argv))\n"
    (packages / "wandb.py").write_text(f"import sys\ndef Settings(**_): ...\n{init}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(packages), os.environ.get("PYTHONPATH", "")]))
    return seen


def check_records(run_dir: Path) -> None:
    """Check that config.yaml alone holds the secret, and that the records of the command line have its other parts."""
    assert files_with(run_dir, SECRET) == [run_dir / "config.yaml"]
    assert mode(run_dir / "config.yaml") == mode(run_dir / "environment.json") == 0o600
    recorded = json.loads((run_dir / "environment.json").read_text())["command"]
    assert "cluster.notify=(hidden)" in recorded and "log.every_steps=1" in recorded


@pytest.mark.multiproc
def test_only_config_yaml_of_a_run_holds_the_command_and_only_its_owner_reads_it(
    tiny_config: MakeConfig, pretrain: Callable[..., object], tmp_path: Path
) -> None:
    config = tiny_config(**{"train.num_steps": 1})
    pretrain(config, 1, f"cluster.notify={json.dumps(COMMAND)}", "log.every_steps=1")
    check_records(tmp_path / "run")


def test_whoever_records_the_command_line_of_a_rank_sees_it_without_the_command(
    tiny_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--config", str(tiny_config()), "--dry-run", "--set", f"cluster.notify={json.dumps(COMMAND)}"]
    monkeypatch.setattr(sys, "argv", ["pretrain.py", *arguments])
    assert pretrain_program.main(arguments) == 0
    assert sys.argv == ["pretrain.py", *arguments[:-1], "cluster.notify=(hidden)"]


@pytest.mark.sample
@pytest.mark.multiproc
def test_a_supervisor_runs_the_command_and_hides_it_from_the_command_lines_of_its_ranks(
    tiny_config: MakeConfig, tmp_path: Path, service: Path
) -> None:
    config = tiny_config(**{"train.num_steps": 2, "log.wandb": "project"})
    notice = tmp_path / "notice"
    command = json.dumps(f'echo "Authorization: {SECRET}" > {notice}')
    options = ["--set", f"cluster.notify={command}", "--set", "log.every_steps=1", "--gpus-per-node", "1"]
    with supervised(REAL, config, tmp_path / "run", *options) as run:
        (rank,) = run.wait(run.pids)
        command_line = Path(f"/proc/{rank}/cmdline").read_bytes().decode()
        assert run.end() == 0, run.story()
        story = run.story()

    assert notice.read_text() == f"Authorization: {SECRET}\n"
    assert SECRET not in story and SECRET not in command_line
    assert "cluster.notify=(hidden)" in command_line
    check_records(tmp_path / "run")
    assert SECRET not in service.read_text() and "(hidden)" in service.read_text()


def test_a_submission_hides_the_command_in_its_script_and_keeps_its_config_to_the_owner(
    tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "sbatch").write_text("#!/bin/sh\necho 7\n")
    (programs / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    arguments = ["submit", "--config", str(tiny_config()), "--nodes", "1", "--gpus-per-node", "0"]
    arguments += ["--set", f"cluster.notify={json.dumps(COMMAND)}"]
    monkeypatch.setattr(sys, "argv", ["electra-dist", *arguments])

    result = CliRunner().invoke(app, arguments)

    assert result.exit_code == 0, result.output
    folder = tmp_path / "run" / "slurm"
    assert files_with(tmp_path / "run", SECRET) == [folder / "submission-0001.yaml"]
    assert load_config(folder / "submission-0001.yaml").cluster.notify == COMMAND
    assert mode(folder / "submission-0001.yaml") == 0o600 and mode(folder / "submission-0001.sh") == 0o700
    assert "cluster.notify=(hidden)" in (folder / "submission-0001.sh").read_text().splitlines()[1]


@pytest.mark.parametrize(
    ("argument", "shown"),
    [
        (f"cluster.notify={COMMAND}", "cluster.notify=(hidden)"),
        (f"--set=cluster.notify={COMMAND}", "--set=cluster.notify=(hidden)"),
        (f"--each=cluster.notify={COMMAND}", "--each=cluster.notify=(hidden)"),
        (f"cluster={{notify: {SECRET},\n hang_eval_s: 5}}", "cluster=(hidden)"),
        (f" cluster . notify = {COMMAND}", " cluster . notify =(hidden)"),
        (f"s3://me:{SECRET}@bucket/run", "s3://(hidden)@bucket/run"),
        (f"--set=data.endpoint_url=https://me:{SECRET}@host", "--set=data.endpoint_url=https://(hidden)@host"),
        ("cluster.hang_eval_s=5", "cluster.hang_eval_s=5"),
        ("runs/cluster.notify", "runs/cluster.notify"),
    ],
)
def test_a_command_line_is_recorded_without_secrets(argument: str, shown: str) -> None:
    assert without_secret_arguments(["--config", argument]) == ["--config", shown]
    assert without_secret_arguments([shown]) == [shown]


@pytest.mark.parametrize(
    "tree",
    [
        {"cluster": {"notify": COMMAND}},
        {"cluster.notify": COMMAND},
        {"entries": [{"changes": {"cluster.notify": COMMAND, "seed": 1}}]},
        {"cluster": {"notify": {"damaged": COMMAND}}},
        {"entries": [{"changes": {"cluster": {"notify": [COMMAND]}}}]},
    ],
)
def test_a_config_is_recorded_without_secrets(tree: dict[str, object]) -> None:
    before = json.dumps(tree)
    assert SECRET not in json.dumps(without_secrets(tree)) and secrets.HIDDEN in json.dumps(without_secrets(tree))
    assert json.dumps(tree) == before
    assert without_secrets({"cluster": {"notify": None, "a": 1}, "seed": [1]}) == {
        "cluster": {"notify": None, "a": 1},
        "seed": [1],
    }


@pytest.mark.parametrize(
    "override",
    [
        f"cluster.notify={COMMAND}",  # a colon makes it no YAML text
        f"cluster.notify={{a: {SECRET}}}",
        f"cluster.notify=[{SECRET}]",
        f"cluster={SECRET}",
        f"cluster={{notify: {{a: {SECRET}}}}}",
    ],
)
def test_an_error_about_the_command_does_not_quote_it(tiny_config: MakeConfig, override: str) -> None:
    with pytest.raises(UserError) as refused:
        load_config(tiny_config(), [override])
    assert "cluster" in str(refused.value) and SECRET not in error_line(refused.value)


def test_a_recorded_command_line_that_is_run_again_asks_for_the_command(tiny_config: MakeConfig) -> None:
    with pytest.raises(UserError, match=r"--set: `cluster.notify`: a record has this text in place of the command"):
        load_config(tiny_config(), without_secret_arguments([f"cluster.notify={COMMAND}"]))


def test_hidden_overrides_reach_only_the_command_line_that_they_belong_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELECTRA_DIST_OVERRIDES", "[]")
    overrides = ["seed=1", "cluster.notify=x", "cluster.hang_eval_s=5"]
    shown = secrets.hide_overrides(overrides)
    assert shown == ["seed=1", "cluster.notify=(hidden)", "cluster.hang_eval_s=5"]
    assert secrets.whole_overrides(shown) == overrides
    assert secrets.whole_overrides(["seed=2"]) == ["seed=2"]


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o027, 0o000])
def test_the_umask_decides_the_permissions_of_every_file_that_holds_no_secret(tmp_path: Path, umask: int) -> None:
    (tmp_path / "old").write_text("")
    (tmp_path / "old").chmod(0o644)
    before = os.umask(umask)
    try:
        with replacing(tmp_path / "shared") as file, replacing(tmp_path / "new", only_new=True) as other:
            file.write(b"x")
            other.write(b"x")
        create_file(tmp_path / "created", "xb").close()
        with replacing(tmp_path / "old", permissions=PRIVATE) as file:
            file.write(b"x")
        write_environment(tmp_path, 1)
    finally:
        os.umask(before)
    assert {mode(tmp_path / name) for name in ("shared", "new", "created")} == {0o666 & ~umask}
    assert {mode(tmp_path / name) for name in ("old", "environment.json")} == {0o600}
