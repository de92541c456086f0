"""A run of older numerics (random draws and rounding) is refused, or continues with --accept-new-numerics."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from electra_launcher import pretrain
from electra_launcher.cli.main import app
from electra_launcher.supervise import __main__ as supervise
from support import checkpoints as small
from support.real_runs import REPOSITORY, step_records, write_tiny_config
from typer.testing import CliRunner

from electra_dist.checkpoint.commit import begin_attempt
from electra_dist.checkpoint.stored_copies import check_resumable
from electra_dist.config import NUMERICS
from electra_dist.config import config as config_module
from electra_dist.config.load import load_config
from electra_dist.errors import OtherNumerics, TornCheckpoint, UserError
from electra_dist.run.folder import check_run_folder, recorded_numerics, run_identity
from electra_dist.run.ledger import read_ledger
from electra_dist.store.open_store import open_store

MakeConfig = Callable[..., Path]
ACCEPT = "--accept-new-numerics"
# Runs pretrain.py as a later version, which draws or rounds differently.
NEWER_PRETRAIN = """
import sys
from electra_dist.config import config
config.NUMERICS += 1
from electra_launcher.pretrain import main
sys.exit(main())
"""
NEWER = ("-c", NEWER_PRETRAIN)


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> int:
    """Make this process a later version, which draws or rounds differently; return its numerics."""
    monkeypatch.setattr(config_module, "NUMERICS", NUMERICS + 1)
    return NUMERICS + 1


def start(config: Path, *options: str, program: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """Run one rank to its end, without the `deepspeed` launcher; `program` replaces pretrain.py."""
    script = program or (str(REPOSITORY / "launcher" / "pretrain.py"),)
    command = [sys.executable, *script, "--config", str(config), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def contents(folder: Path) -> dict[Path, bytes]:
    """Return the bytes of all files below a folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_older_run_is_refused_then_accepted_and_recorded_and_needs_no_flag_again(
    tiny_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str], newer: int
) -> None:
    run_dir = tmp_path / "run"
    config = tiny_config(**{"data.heldout": None, "train.num_steps": 4})
    # The file `stop` ends a start after its first step, with a checkpoint.
    run_dir.mkdir()
    (run_dir / "stop").touch()
    assert start(config).returncode == 75
    assert json.loads((run_dir / "identity.json").read_text())["numerics"] == NUMERICS
    before = contents(run_dir)

    capsys.readouterr()
    assert pretrain.main(["--config", str(config)]) == 78  # refused before anything is started
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ") and f"numerics {NUMERICS}" in error and ACCEPT in error
    assert contents(run_dir) == before

    # The accepted start is stopped, too; the one after it goes on to the end without the option.
    (run_dir / "stop").touch()
    assert start(config, ACCEPT, program=NEWER).returncode == 75
    assert recorded_numerics(run_dir) == newer
    done = start(config, program=NEWER)
    assert done.returncode == 0, done.stderr
    (event,) = [event for event in read_ledger(run_dir) if event.event == "new_numerics"]
    assert (event.step, event.was, event.now) == (1, NUMERICS, newer)
    assert [record["step"] for record in step_records(run_dir)] == [1, 2, 3, 4]


def config_of(tmp_path: Path) -> tuple[Path, dict]:
    """Return a run folder whose run has the first numerics, and the identity of that run in this version."""
    config = load_config(write_tiny_config(tmp_path / "run.yaml", tmp_path / "run", "corpus"))
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "identity.json").write_text(json.dumps({**config.identity(1), "corpus_fingerprint": "c"}))
    return run_dir, run_identity(config, "c")


@pytest.mark.usefixtures("newer")
def test_a_run_folder_of_other_numerics_needs_the_flag_and_one_of_another_config_is_refused_with_it(
    tmp_path: Path,
) -> None:
    run_dir, identity = config_of(tmp_path)
    assert recorded_numerics(run_dir) == 1
    with pytest.raises(OtherNumerics, match="numerics 1, and this version computes with numerics 2"):
        check_run_folder(run_dir, identity)
    check_run_folder(run_dir, identity, accept_new_numerics=True)
    with pytest.raises(UserError, match="seed was 7, is 8"):
        check_run_folder(run_dir, {**identity, "seed": 8}, accept_new_numerics=True)


def test_a_run_that_is_to_be_longer_is_refused_with_the_way_to_train_longer(tmp_path: Path) -> None:
    run_dir, _ = config_of(tmp_path)
    longer = load_config(tmp_path / "run.yaml", ["train.num_steps=1000"])
    with pytest.raises(UserError, match=r"num_steps was \d+, is 1000.*new run.*train\.init_from"):
        check_run_folder(run_dir, run_identity(longer, "c"), accept_new_numerics=True)


def test_a_version_knows_the_identity_that_each_earlier_one_gave_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(write_tiny_config(tmp_path / "run.yaml", tmp_path / "run", "corpus"))
    assert config.identity()["numerics"] == NUMERICS
    earlier = config.identity_sha256()
    monkeypatch.setattr(config_module, "NUMERICS", NUMERICS + 2)
    assert config.older_identities() == {number: config.identity_sha256(number) for number in range(1, NUMERICS + 2)}
    assert config.older_identities()[NUMERICS] == earlier != config.identity_sha256()


def test_an_acceptance_is_stored_with_the_checkpoints(tmp_path: Path) -> None:
    two_targets = [open_store(str(tmp_path / name)) for name in ("a", "b")]
    older, now = ({"identity_sha256": digit * 64, "corpus_fingerprint": "corpus"} for digit in "12")
    other = {"identity_sha256": "3" * 64, "corpus_fingerprint": "corpus"}
    begin_attempt(two_targets, older)
    with pytest.raises(OtherNumerics, match=ACCEPT):
        begin_attempt(two_targets, now, {1: older})
    with pytest.raises(UserError, match="checkpoints of another run"):
        begin_attempt(two_targets, other, {1: now}, accept_new_numerics=True)
    assert begin_attempt(two_targets, now, {1: older}, accept_new_numerics=True) == 2
    assert begin_attempt(two_targets, now, {1: older}) == 3


def test_a_checkpoint_of_older_numerics_belongs_to_the_run_only_with_its_digest() -> None:
    found = small.state_at(10, identity_sha256="1" * 64)
    expected = small.state_at(0, identity_sha256="2" * 64)
    with pytest.raises(TornCheckpoint, match="another config"):
        check_resumable(found, expected)
    check_resumable(found, expected, ["1" * 64])
    with pytest.raises(TornCheckpoint, match="another corpus"):
        check_resumable(found, expected.model_copy(update={"corpus_fingerprint": "other"}), ["1" * 64])


@pytest.mark.usefixtures("newer")
def test_submit_refuses_an_older_run_before_it_is_queued_and_passes_the_flag_on(tmp_path: Path) -> None:
    run_dir, _ = config_of(tmp_path)
    command = ["submit", "--config", str(tmp_path / "run.yaml"), "--nodes", "1", "--gpus-per-node", "1", "--dry-run"]
    refused = CliRunner().invoke(app, command)
    assert isinstance(refused.exception, OtherNumerics)
    assert str(run_dir) in str(refused.exception)
    script = CliRunner().invoke(app, [*command, ACCEPT]).output
    assert f"supervise_options=({ACCEPT})\n" in script


@pytest.mark.parametrize("options", [[], [ACCEPT]])
def test_the_supervisor_passes_the_flag_to_the_ranks_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    config = str(write_tiny_config(tmp_path / "run.yaml", tmp_path / "run", "corpus"))
    received = []

    class Recorder:
        def __init__(self, _config: object, _placement: object, *arguments: object) -> None:
            received.append(arguments)

        def run(self) -> int:
            return 0

        def close(self) -> None:
            pass

    monkeypatch.setattr(supervise, "Supervisor", Recorder)
    assert supervise.main(["--config", config, *options]) == 0
    assert received == [(["--config", config], "", options)]
