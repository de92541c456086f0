"""One page of several runs: their curves in one diagram, their figures, and what differs in their configs.

Fixtures: `step_record(...)` and `eval_record(...)` return example records with some fields replaced; `runs` are the
folders of two runs.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from electra_launcher.cli.main import app
from typer.testing import CliRunner

from electra_dist.config.load import dump_yaml, load_config
from electra_dist.errors import UserError
from electra_dist.report import pages
from electra_dist.report.panels import PANELS
from electra_dist.report.report_page import unique_names, write_overlay, write_report
from electra_dist.run.metrics import EvalRecord, MetricsWriter, StepRecord

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory,
    step_record: Callable[..., StepRecord],
    eval_record: Callable[..., EvalRecord],
) -> list[Path]:
    """Two runs of 100 steps that differ in lr and losses; the second has half as many records."""
    folders = []
    for name, lr, every in (("one", 0.001, 5), ("two <b>", 0.002, 10)):
        folder = tmp_path_factory.mktemp("runs") / name
        writer = MetricsWriter(folder)
        for step in range(every, 101, every):
            writer.write(step_record(step=step, mlm_loss=lr * step, lr=lr))
        writer.write(eval_record(step=100, context_auc=0.5 + lr, context_auc_se=0.01))
        writer.close()
        config = load_config(CONFIGS / "demo_cpu_bert.yaml", [f"optimizer.lr={lr}", "train.num_steps=100"])
        (folder / "config.yaml").write_text(dump_yaml(config))
        folders.append(folder)
    return folders


@pytest.fixture(scope="module")
def page(runs: list[Path]) -> str:
    """The page of the two runs."""
    return write_overlay(runs, runs[0].parent / "page.html").read_text()


def test_every_diagram_has_the_values_of_both_runs_in_colors_of_their_own(page: str):
    diagrams = [json.loads(text) for text in re.findall(r'<script type="application/json">(.*?)</script>', page)]
    lines = {line["label"]: line for diagram in diagrams for line in diagram["lines"]}
    assert page.count("<svg") == len(diagrams)
    assert lines["one: lr"]["color"] == "--series-1"
    assert lines["one: lr"]["steps"] == list(range(5, 101, 5))
    assert lines["two <b>: lr"]["color"] == "--series-2"
    assert lines["two <b>: lr"]["steps"] == list(range(10, 101, 10))
    assert set(lines["one: lr"]["values"]) == {0.001}
    assert set(lines["two <b>: lr"]["values"]) == {0.002}
    assert lines["one: context AUC"]["values"] == [0.501]
    assert lines["two <b>: context AUC"]["values"] == [0.502]


def test_the_page_has_the_figures_of_the_runs_and_the_keys_that_differ(page: str):
    rows = [re.findall(r"<t[hd]>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", page)]
    assert ["", "one", "two &lt;b&gt;"] in rows
    assert ["Context AUC, held out", "0.5010", "0.5020"] in rows
    differing = rows[rows.index(["key", "one", "two &lt;b&gt;"]) + 1 :]
    assert differing == [["optimizer.lr", "0.001", "0.002"]]


def test_the_page_says_at_its_top_which_runs_learn_and_stacks_the_columns_of_many(
    runs: list[Path], step_record: Callable[..., StepRecord], eval_record: Callable[..., EvalRecord], tmp_path: Path
):
    folders = []
    for name, context_auc in (("learns", 0.7), ("stuck", 0.501)):
        folder = tmp_path / name
        shutil.copytree(runs[0], folder)
        (folder / "metrics.jsonl").unlink()
        writer = MetricsWriter(folder)
        writer.write(step_record(step=100))
        writer.write(eval_record(step=100, context_auc=context_auc, context_auc_se=0.001))
        writer.close()
        folders.append(folder)

    page = write_overlay([*folders, runs[1]], tmp_path / "page.html").read_text()

    top = page[: page.index("<h2>Figures</h2>")]
    assert '<p class="verdict good"><b>learns</b>: The discriminator learns from context: context AUC 0.700' in top
    assert '<p class="verdict bad"><b>stuck</b>: Warning: step 100: context AUC 0.501' in top
    assert re.search(r"data-name=\"stuck\">0.5010</td>", page)
    (auc,) = [
        diagram
        for diagram in map(json.loads, re.findall(r'<script type="application/json">(.*?)</script>', page))
        if diagram["lines"][0]["label"] == "learns: context AUC"
    ]
    assert auc["y"][2] <= 0.45 and auc["y"][3] >= 0.7


def test_runs_of_equal_name_are_told_apart_by_their_folders(tmp_path: Path):
    assert unique_names([tmp_path / "a", tmp_path / "b"]) == ["a", "b"]
    assert unique_names([tmp_path / "x" / "run", tmp_path / "y" / "run"]) == ["x/run", "y/run"]


def test_more_runs_than_colors_are_a_user_error(runs: list[Path], tmp_path: Path):
    with pytest.raises(UserError, match="at most 8"):
        write_overlay(runs * 5, tmp_path / "page.html")


def test_the_command_writes_one_page_for_one_run_and_one_for_several(
    runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """With one diagram in place of all, which takes less time."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pages, "PANELS", PANELS[:1])

    one = CliRunner().invoke(app, ["report", str(runs[0])])
    both = CliRunner().invoke(app, ["report", *map(str, runs)])
    elsewhere = CliRunner().invoke(app, ["report", str(runs[0]), "--output", "here.html"])

    assert one.output.split() == [str(runs[0] / "report.html")]
    assert both.output.split() == ["runs_report.html"]
    assert "2 runs" in (tmp_path / "runs_report.html").read_text()
    assert elsewhere.output.split() == ["here.html"]
    assert (tmp_path / "here.html").exists()


def test_folders_whose_names_are_no_utf8_or_hold_controls_are_shown_escaped(runs: list[Path], tmp_path: Path) -> None:
    folders = [tmp_path / os.fsdecode(b"run-\xff"), tmp_path / "run-\x1b]0;x\x07\u202e$_{"]
    for folder in folders:
        shutil.copytree(runs[0], folder)

    texts = [write_overlay(folders, tmp_path / "page.html").read_bytes().decode()]
    texts += [write_report(folder).read_bytes().decode() for folder in folders]
    result = CliRunner().invoke(app, ["report", str(folders[0])])
    texts.append(result.output)

    assert all(text.replace("\n", "").isprintable() for text in texts)
    assert texts[0].count("run-\\udcff") >= 2 and "run-\\x1b]0;x\\x07\\u202e$_{" in texts[0]
    assert "run-\\udcff" in texts[1] and "run-\\x1b]0;x" in texts[2]
    assert result.exit_code == 0 and "run-\\udcff/report.html" in texts[3]
