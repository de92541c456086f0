"""Real runs whose corpus changes: a restart or a rollback over the change gives the run that nothing interrupted."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.real_runs import go_back, quick_command, read_losses, step_records, write_corpus, write_tiny_config
from typer.testing import CliRunner

import electra_dist as ed
from electra_dist.config_file import load_config
from electra_dist.data.row_receipt import Receipt
from electra_dist.errors import UserError
from electra_dist.train.input_checks import check_inputs
from launcher.cli.main import app

Pretrain = Callable[..., subprocess.CompletedProcess[str]]

BORDER = 6
SETTINGS: dict[str, Any] = {
    "train.num_steps": 12,
    "model.hidden_dropout": 0.1,
    "checkpoint.every_steps": 3,
    "checkpoint.keep_last": 9,
    "log.eval_every_steps": 1000,
}


@pytest.fixture(scope="module")
def later_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus that the second phase reads, which is smaller than two steps."""
    folder = tmp_path_factory.mktemp("later") / "corpus"
    write_corpus(str(folder), [11, 19], seed=4)
    return folder


def write_config(run_dir: Path, corpus: Path, later: Path, **settings: Any) -> Path:
    """Write the config of a run whose corpus changes before step BORDER."""
    phases = {"data.phases": [{"corpus": str(later), "from_step": BORDER}]}
    return write_tiny_config(run_dir.with_suffix(".yaml"), run_dir, str(corpus), **SETTINGS, **phases, **settings)


@pytest.fixture(scope="module")
def uncut(tiny_corpus: Path, later_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run of 2 ranks that nothing interrupted."""
    run_dir = tmp_path_factory.mktemp("uncut") / "run"
    config = write_config(run_dir, tiny_corpus, later_corpus)
    subprocess.run(quick_command(config, 2), check=True, capture_output=True, timeout=300)
    return run_dir


def receipts(run_dir: Path) -> list[tuple[int, str]]:
    """Return the number and the digest of the rows used until each step."""
    return [(record["rows_seen"], record["receipt"]) for record in step_records(run_dir)]


def verify_json(run_dir: Path) -> tuple[int, dict[str, Any]]:
    """Return exit code and result of `electra-dist verify RUN --json`."""
    result = CliRunner().invoke(app, ["verify", str(run_dir), "--json"])
    return result.exit_code, json.loads(result.stdout)


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("restored", "ranks"),
    [
        pytest.param(BORDER - 3, 2, id="before the change", marks=pytest.mark.drill),
        pytest.param(BORDER, 2, id="at the change"),
        pytest.param(BORDER + 3, 2, id="after the change", marks=pytest.mark.drill),
        pytest.param(BORDER - 3, 1, id="with another number of ranks", marks=pytest.mark.drill),
    ],
)
def test_a_restart_gives_the_losses_and_receipts_of_the_uninterrupted_run(
    uncut: Path, tiny_corpus: Path, later_corpus: Path, tmp_path: Path, pretrain: Pretrain, restored: int, ranks: int
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(uncut, run_dir)
    go_back(run_dir, restored)
    output = pretrain(write_config(run_dir, tiny_corpus, later_corpus), ranks).stdout
    assert f"restored step {restored}" in output
    assert receipts(run_dir) == receipts(uncut)
    if ranks == 2:
        assert read_losses(run_dir) == read_losses(uncut)
    code, result = verify_json(run_dir)
    assert (code, result["good"]) == (0, True)
    assert [phase["rows_used"] for phase in result["phases"]] == [6 * 16, 6 * 16]


def test_the_rows_of_each_step_are_those_of_its_corpus_and_verify_finds_a_changed_receipt(
    uncut: Path, tiny_corpus: Path, later_corpus: Path, tmp_path: Path
) -> None:
    with ed.open_corpus(tiny_corpus, seed=7, shuffle_window_shards=2) as first:
        expected = [first.row_ids(step, 16) for step in range(BORDER)]
        num_rows = first.manifest.num_rows
    with ed.open_corpus(later_corpus, seed=7, shuffle_window_shards=2) as later:
        expected += [num_rows + later.row_ids(step, 16) for step in range(12 - BORDER)]
        text_of_later = later.batch(0, 16)
    total = Receipt()
    for step, row_ids in enumerate(expected):
        total += Receipt.of(row_ids.numpy())
        assert receipts(uncut)[step] == (total.rows, total.hex)
    with ed.open_corpus(uncut) as of_run:
        assert (of_run.batch(BORDER, 16) == text_of_later).all()

    copy = tmp_path / "run"
    shutil.copytree(uncut, copy)
    metrics = copy / "metrics.jsonl"
    right = receipts(uncut)[BORDER][1]
    metrics.write_text(metrics.read_text().replace(right, f"{int(right, 16) ^ 1:016x}"))
    code, result = verify_json(copy)
    assert code == 1
    assert result["deviation"]["first_step"] == BORDER

    log = (uncut / "log.txt").read_text()
    assert f"phase of the data: from step {BORDER} on, rows come from {later_corpus}" in log
    status = CliRunner().invoke(app, ["status", str(uncut)]).stdout
    assert "phase 2 of 2" in status


def test_a_changed_phase_and_a_missing_corpus_are_refused_before_anything_is_written(
    uncut: Path, tiny_corpus: Path, later_corpus: Path
) -> None:
    config = uncut / "config.yaml"
    check_inputs(load_config(config), 2)
    moved = load_config(config, [f"data.phases=[{{corpus: {later_corpus}, from_step: 7}}]"])
    with pytest.raises(UserError, match=r"data\.phase_steps.*restore the old value to continue"):
        check_inputs(moved, 2)
    with pytest.raises(UserError, match=r"data\.phase_steps"):
        check_inputs(load_config(config, ["data.phases=[]"]), 2)
    with pytest.raises(UserError, match="holds a run of another config or corpus"):
        check_inputs(load_config(config, [f"data.phases=[{{corpus: {tiny_corpus}/heldout, from_step: 6}}]"]), 2)
    missing = load_config(config, [f"data.phases=[{{corpus: {later_corpus}/nothing, from_step: 6}}]"])
    with pytest.raises(UserError, match=r"nothing/corpus\.json: no finished corpus"):
        check_inputs(missing, 2)


SPIKES = [9, 10]  # after the change, when the guard's new window is full; the steps from 5 on are skipped with them


@pytest.mark.drill
def test_a_rollback_over_the_change_equals_a_run_that_was_told_to_skip_these_steps(
    tiny_corpus: Path, later_corpus: Path, tmp_path: Path, pretrain: Pretrain
) -> None:
    guard = {"guard.window": 3, "guard.spike_sigma": 50.0, "guard.max_in_a_row": 2, "guard.skip_before": 4}
    rolled = write_config(tmp_path / "rolled", tiny_corpus, later_corpus, **guard)
    command = quick_command(rolled, 1)
    command[1] = str(Path(__file__).parent / "faulty_pretrain.py")
    environment = {**os.environ, "FAULTS": json.dumps({"spike": SPIKES})}
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=300)
    skipped = json.loads((tmp_path / "rolled" / "skipped_steps.json").read_text())
    assert skipped["rollbacks"] == 1
    assert skipped["steps"] == [5, 6, 7, 8, 9, 10]

    settings = {**guard, "train.skip_steps": skipped["steps"]}
    pretrain(write_config(tmp_path / "skipping", tiny_corpus, later_corpus, **settings), 1)
    assert read_losses(tmp_path / "rolled") == read_losses(tmp_path / "skipping")
    assert receipts(tmp_path / "rolled") == receipts(tmp_path / "skipping")
    assert verify_json(tmp_path / "rolled")[0] == 0
