"""A real run with everything that follows it switched on: the same losses as without, whatever the services do."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.multiproc

OFF = {"log.tensorboard": False, "log.text_samples": 0, "log.report_every_minutes": 0}
ON = {
    "log.tensorboard": True,
    "log.text_samples": 2,
    "log.report_every_minutes": 0.001,
    "log.wandb": "project",
    "log.mlflow": "experiment",
    "log.kwh_price": 0.3,
    "cluster.notify": "exit 1",
}


@pytest.mark.sample
def test_tracking_changes_no_loss_and_a_service_that_fails_is_one_line_in_the_log(
    tiny_config: Callable[..., Path],
    pretrain: Callable[..., subprocess.CompletedProcess[str]],
    losses: Callable[[Path], list[tuple]],
    tmp_path: Path,
):
    """The packages of both services are stand-ins: one cannot be imported, the other cannot connect."""
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "mlflow.py").write_text("raise ModuleNotFoundError('No module named mlflow', name='mlflow')\n")
    (packages / "wandb.py").write_text("def Settings(**_): ...\ndef init(**_): raise OSError('no route')\n")
    search_path = os.pathsep.join([str(packages), os.environ.get("PYTHONPATH", "")])
    steps = {"train.num_steps": 8, "log.eval_every_steps": 4, "checkpoint.every_steps": 100}

    pretrain(tiny_config("off", **steps, **OFF), 1)
    pretrain(tiny_config("on", **steps, **ON), 1, env={"PYTHONPATH": search_path})

    assert losses(tmp_path / "on") == losses(tmp_path / "off")
    identities = [(tmp_path / name / "identity.json").read_text() for name in ("on", "off")]
    assert identities[0] == identities[1]
    log = (tmp_path / "on" / "log.txt").read_text()
    assert log.count("log.wandb: no longer sent to, because of OSError: no route; training goes on") == 1
    assert log.count("log.mlflow: no longer sent to, because the package mlflow is not installed") == 1
    environment = json.loads((tmp_path / "on" / "environment.json").read_text())
    assert list(environment["hosts"].values()) == [1]
    assert environment["corpus"]["seq_len"] == 32
    assert not (tmp_path / "off" / "samples.jsonl").exists()
    check_samples(tmp_path / "on")


def check_samples(run_dir: Path) -> None:
    """Check the text samples against the corpus: the rows are held-out rows, and only their replaced tokens differ."""
    records = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [4, 8]
    first, second = (record["texts"] for record in records)
    assert len(first) == 2
    for text, later_text in zip(first, second):
        assert text["original"] == later_text["original"]  # the same rows at every evaluation
        assert text["original"][0] == "[CLS]"
        assert "[PAD]" not in text["original"]
        num_replaced = sum(original != shown for original, shown in zip(text["original"], text["shown"]))
        assert 0 < num_replaced <= 0.3 * len(text["original"])
        assert len(text["replaced_probability"]) == len(text["shown"]) == len(text["original"])
        assert all(0 < probability < 1 for probability in text["replaced_probability"])
    page = (run_dir / "report.html").read_text()
    assert "Evaluation at step 8" in page
