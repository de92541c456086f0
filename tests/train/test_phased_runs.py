"""Real runs with `data.phases`: a restart or rollback across the change of corpus equals an uninterrupted run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from electra_launcher.cli.main import app
from support.real_runs import go_back, quick_command, read_losses, step_records, write_corpus, write_tiny_config
from typer.testing import CliRunner

import electra_dist as ed
from electra_dist.config.load import load_config
from electra_dist.data.manifest import read_manifest
from electra_dist.data.receipt import Receipt
from electra_dist.errors import UserError
from electra_dist.pretrained.export import export_run
from electra_dist.report.model_card import write_model_cards
from electra_dist.report.report_page import describe_run
from electra_dist.report.run_record import read_run
from electra_dist.store.open_store import open_store
from electra_dist.train.check_inputs import check_inputs

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
    """Return the corpus of the second phase, which has fewer rows than two steps use."""
    folder = tmp_path_factory.mktemp("later") / "corpus"
    write_corpus(str(folder), [11, 19], seed=4)
    return folder


def write_config(run_dir: Path, corpus: Path, later: Path, **settings: Any) -> Path:
    """Write the config of a run whose corpus changes before step BORDER."""
    phases = {"data.phases": [{"corpus": str(later), "from_step": BORDER}]}
    return write_tiny_config(run_dir.with_suffix(".yaml"), run_dir, str(corpus), **SETTINGS, **phases, **settings)


@pytest.fixture(scope="module")
def uncut(tiny_corpus: Path, later_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an uninterrupted run on 2 ranks, with which the others are compared."""
    run_dir = tmp_path_factory.mktemp("uncut") / "run"
    config = write_config(run_dir, tiny_corpus, later_corpus)
    subprocess.run(quick_command(config, 2), check=True, capture_output=True, timeout=300)
    return run_dir


def receipts(run_dir: Path) -> list[tuple[int, str]]:
    """Return, for each step, the number and the digest of the rows used until then."""
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
        num_rows = first.corpora.num_rows
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


def test_a_text_of_the_later_corpus_is_found_in_the_steps_of_its_phase(uncut: Path, later_corpus: Path) -> None:
    with ed.open_corpus(later_corpus, seed=7, shuffle_window_shards=2) as later:
        wanted = int(later.row_ids(0, 16)[3])
        first_example = later.batch(0, 16)[3].tolist()
    words = first_example[1 : first_example.index(3)]  # between [CLS] and the first [SEP]
    text = " ".join(f"w{token - 5}" for token in words)
    with ed.open_corpus(uncut) as of_run:
        num_rows_of_first = of_run.corpora.num_rows - 30
        steps = [step for step in range(12) if num_rows_of_first + wanted in of_run.row_ids(step, 16).tolist()]

    found = json.loads(CliRunner().invoke(app, ["corpus", "find", text, "--run", str(uncut), "--json"]).stdout)
    place = {"shard": f"phase-1/shard-{wanted // 11:06d}.tar", "row": wanted if wanted < 11 else wanted - 11}
    [row] = [row for row in found["rows"] if place.items() <= row.items()]
    assert [use["step"] for use in row["uses"]] == steps
    assert min(steps) >= BORDER
    refused = CliRunner().invoke(app, ["corpus", "find", text, "--run", str(uncut), "--corpus", str(later_corpus)])
    assert "leave CORPUS out" in str(refused.exception)


def test_plan_status_report_and_model_card_name_the_corpora(
    uncut: Path, tiny_corpus: Path, later_corpus: Path, tmp_path: Path
) -> None:
    plan = CliRunner().invoke(app, ["plan", str(uncut / "config.yaml"), "--json"]).stdout
    assert [(phase["corpus"], phase["steps"]) for phase in json.loads(plan)["phases"]] == [
        (str(tiny_corpus), 6),
        (str(later_corpus), 6),
    ]
    assert "phase 2 of 2" in CliRunner().invoke(app, ["status", str(uncut)]).stdout

    manifests = [read_manifest(open_store(str(corpus))) for corpus in (tiny_corpus, later_corpus)]
    tokens = [6 * 16 * manifest.num_tokens / manifest.num_rows for manifest in manifests]
    assert step_records(uncut)[-1]["tokens_seen"] == round(sum(tokens))
    rows = dict(describe_run(read_run(uncut)))
    share = tokens[1] / sum(tokens)
    assert f"3.20 epochs seen, {share:.1%} of the tokens seen" in rows[f"corpus from step {BORDER} on"]
    [card, *_] = write_model_cards(uncut, export_run(uncut, tmp_path / "export"))
    for manifest, token_share in zip(manifests, (1 - share, share)):
        assert f"corpus with fingerprint `{manifest.fingerprint}`: {token_share:.1%} of the tokens" in card.read_text()


def test_verify_bytes_reads_the_corpora_of_all_phases(uncut: Path) -> None:
    result = CliRunner().invoke(app, ["verify", "--bytes", str(uncut), "--json"])
    counts = json.loads(result.stdout)["counts"]
    assert result.exit_code == 0
    assert (counts["corpus manifest"], counts["shard"]) == (3, 5 + 2 + 1)  # data.corpus, the later one, data.heldout


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
