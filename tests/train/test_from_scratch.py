"""A run whose checkpoints are damaged, or not in its targets, ends with 78; `--from-scratch` begins it again."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from electra_launcher import pretrain
from electra_launcher.cli.main import app
from support.real_runs import REPOSITORY, go_back, read_losses
from typer.testing import CliRunner

MakeConfig = Callable[..., Path]


def one_rank(config: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run one rank without the `deepspeed` launcher."""
    command = [sys.executable, str(REPOSITORY / "launcher" / "pretrain.py"), "--config", str(config), *options]
    return subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), timeout=120)


def files(folder: Path) -> dict[str, bytes]:
    """Return the content of every file below a folder, by its path relative to the folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def events(run_dir: Path) -> list[dict[str, object]]:
    """Return the events of a run's ledger."""
    return [json.loads(line) for line in (run_dir / "ledger.jsonl").read_text().splitlines()]


def test_a_run_without_a_good_checkpoint_is_refused_and_begins_again_only_from_scratch(
    tiny_config: MakeConfig, tmp_path: Path
) -> None:
    config = tiny_config(**{"data.heldout": None, "train.num_steps": 12})
    run_dir = tmp_path / "run"
    assert one_rank(config).returncode == 0
    uncut = read_losses(run_dir)
    audit = CliRunner().invoke(app, ["verify", str(run_dir), "--json"])
    good = json.loads(audit.stdout)
    assert (good["good"], good["step"], good["rows"], good["deviation"]) == (True, 12, 12 * 16, None)

    for tensors in run_dir.glob("checkpoints/step-*/*.safetensors"):
        tensors.write_bytes(tensors.read_bytes()[:-1])
    records = (run_dir / "metrics.jsonl").read_bytes()
    checkpoints = files(run_dir / "checkpoints")

    refused = one_rank(config)
    (error,) = [line for line in refused.stderr.splitlines() if line.startswith("error: ")]
    assert refused.returncode == 78 and "Traceback" not in refused.stderr
    assert error.count("step-000000") == 3 and "--from-scratch" in error  # the checkpoints of steps 5, 10 and 12
    assert (run_dir / "metrics.jsonl").read_bytes() == records
    after = files(run_dir / "checkpoints")
    assert {name: after[name] for name in checkpoints} == checkpoints

    again = one_rank(config, "--from-scratch")
    assert again.returncode == 0, again.stderr
    assert read_losses(run_dir) == uncut  # the same run, from its first step
    assert (run_dir / "earlier" / "0001" / "metrics.jsonl").read_bytes() == records
    kept = files(run_dir / "checkpoints")
    for name, content in checkpoints.items():
        set_aside = name.replace("manifest.json", "manifest.set-aside.json")
        assert kept[set_aside] == content, name
    assert again.stdout.count("begins again from scratch") == 3
    first_event = events(run_dir)[0]
    assert (first_event["event"], first_event["step"]) == ("start", 0)


def test_a_start_that_would_lose_the_checkpoints_of_the_run_is_refused_and_changes_no_file(
    tiny_config: MakeConfig, tmp_path: Path
) -> None:
    """Each refused start has a setting that may change at a restart; the same start without it goes on."""
    config = tiny_config(**{"data.heldout": None, "train.num_steps": 12})
    run_dir = tmp_path / "run"
    assert one_rank(config).returncode == 0
    uncut = read_losses(run_dir)
    go_back(run_dir, 5)
    recorded = files(run_dir)

    def refusal(*overrides: str) -> str:
        done = one_rank(config, *(part for override in overrides for part in ("--set", override)))
        (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert done.returncode == 78 and "Traceback" not in done.stderr
        kept = files(run_dir)
        assert {name: kept[name] for name in recorded if "lease" not in name} == {
            name: content for name, content in recorded.items() if "lease" not in name
        }
        return error

    assert "restore train.skip_steps" in refusal("train.skip_steps=[3]")
    error = refusal(f"checkpoint.targets=[{tmp_path}/new]")
    old = run_dir / "checkpoints"
    assert f"has saved step 12 in {old}, and there is no checkpoint in {tmp_path}/new" in error
    both = f'["{tmp_path}/new", "{old}"]'
    assert f"checkpoint.targets='{both}'" in error
    assert one_rank(config, "--set", f"checkpoint.targets={both}").returncode == 0
    assert read_losses(run_dir) == uncut
    (event,) = [event for event in events(run_dir) if event["event"] == "resume"]
    assert event["step"] == 5

    old.rename(tmp_path / "away")
    shutil.rmtree(tmp_path / "new")
    recorded = files(run_dir)
    assert "to go on from that step" not in refusal(f"checkpoint.targets={both}")
    assert one_rank(config, "--from-scratch").returncode == 0
    assert read_losses(run_dir) == uncut


def test_a_checkpoint_target_that_cannot_be_written_leaves_no_run_folder(
    tiny_config: MakeConfig, tmp_path: Path
) -> None:
    """The unigram generator would write the counts of tokens into the run folder at its first start."""
    (tmp_path / "file").write_text("in the way")
    settings = {"checkpoint.targets": [f"{tmp_path}/file/checkpoints"], "objective.generator": "unigram"}
    done = one_rank(tiny_config(**settings))
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 78 and "checkpoint.targets" in error and f"{tmp_path}/file" in error
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_warm_up_longer_than_the_run_is_refused_and_a_run_that_began_with_it_goes_on(
    tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("electra_dist.train.run.run", lambda *arguments: 0)
    monkeypatch.setattr(pretrain, "_write_report", lambda run_dir: None)
    command = ["--config", str(tiny_config(**{"optimizer.warmup_steps": 30}))]
    for options in ([], ["--dry-run"]):
        assert pretrain.main([*command, *options]) == 78
        output = capsys.readouterr()
        assert "optimizer.warmup_steps 30 is longer than the run, train.num_steps 20" in output.err
        assert output.out == "" and not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").touch()  # an older version has begun it
    assert pretrain.main(command) == 0
