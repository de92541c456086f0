"""Weights & Biases, MLflow and Trackio, all without a connection: what a run sends is in their files afterwards.

Fixtures: `step_record(...)` and `eval_record(...)` return example records with some fields replaced.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.run_records import eval_record, step_record

from electra_dist.config import LogConfig
from electra_dist.report.tracking import log_record, open_trackers
from electra_dist.run.metrics import EvalRecord, StepRecord

__all__ = ["eval_record", "step_record"]

SETTINGS = {"train.num_steps": 400, "objective.name": "rtd", "cluster.notify": "(hidden)"}


def test_without_the_keys_there_is_no_tracker(tmp_path: Path):
    assert open_trackers(LogConfig(), tmp_path, lambda: SETTINGS) == []
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home folder, which the packages of the services need when they are imported."""
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.parametrize("store", ["a server's address", pytest.param("", marks=pytest.mark.drill)])
def test_mlflow_has_the_settings_and_the_values_of_all_starts_in_one_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    step_record: Callable[..., StepRecord],
    eval_record: Callable[..., EvalRecord],
    store: str,
):
    """The second start of the run continues the run of the first.

    A folder stands in for the server. Without an address, the values go into mlflow.db in the run folder, whose tables
    take seconds to create.
    """
    reason = "install the extra mlflow: pip install -e '.[mlflow]'"
    tracking = pytest.importorskip("mlflow.tracking", reason=reason)
    pytest.importorskip("alembic", reason=reason)
    address = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    if store:
        address = (tmp_path / "server").as_uri()
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    for step in (10, 20):
        (tracker,) = open_trackers(LogConfig(mlflow="electra"), tmp_path, lambda: SETTINGS)
        log_record(tracker, step_record(step=step, mlm_loss=100.0 / step, mfu=None, grad_norm=float("nan")))
        log_record(tracker, eval_record(step=step, mlm_loss=step / 4, auc=0.75))
        tracker.close(has_failed=step == 20)
        assert tracker.problems() == []

    client = tracking.MlflowClient(address)
    (run,) = client.search_runs([client.get_experiment_by_name("electra").experiment_id])
    assert run.info.status == "FAILED"
    assert run.data.params == {key: str(value) for key, value in SETTINGS.items()}
    history = client.get_metric_history(run.info.run_id, "loss/mlm")
    assert [(metric.step, metric.value) for metric in history] == [(10, 10.0), (20, 5.0)]
    history = client.get_metric_history(run.info.run_id, "heldout/loss/mlm")
    assert [(metric.step, metric.value) for metric in history] == [(10, 2.5), (20, 5.0)]
    assert run.data.metrics["eval/auc"] == 0.75
    assert {"speed/mfu", "optimizer/grad_norm"}.isdisjoint(run.data.metrics)


def test_wandb_without_a_connection_keeps_the_values_in_the_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_record: Callable[..., StepRecord]
):
    """The service's own process writes the file, a moment after the run of the service is finished."""
    pytest.importorskip("wandb", reason="install the extra wandb: pip install -e '.[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    (tracker,) = open_trackers(LogConfig(wandb="electra"), tmp_path, lambda: SETTINGS)

    log_record(tracker, step_record(step=10, mlm_loss=2.5))
    tracker.close(has_failed=False)

    assert tracker.problems() == []
    run_id = json.loads((tmp_path / "tracking.json").read_text())["wandb"]
    (record_file,) = (tmp_path / "wandb").glob(f"offline-run-*-{run_id}/run-{run_id}.wandb")
    deadline = time.monotonic() + 60
    while b"loss/mlm" not in record_file.read_bytes():
        assert time.monotonic() < deadline, "the values are not in the file"
        time.sleep(0.05)
    assert b"train.num_steps" in record_file.read_bytes()


def test_trackio_has_the_settings_and_the_values_of_all_starts_in_one_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    step_record: Callable[..., StepRecord],
    eval_record: Callable[..., EvalRecord],
):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when the package is imported
    trackio = pytest.importorskip("trackio", reason="install the extra trackio: pip install -e '.[trackio]'")
    for step in (10, 20):
        (tracker,) = open_trackers(LogConfig(trackio="electra"), tmp_path, lambda: SETTINGS)
        log_record(tracker, step_record(step=step, mlm_loss=100.0 / step, mfu=None))
        log_record(tracker, eval_record(step=step, mlm_loss=step / 4))
        tracker.close(has_failed=False)
        assert tracker.problems() == []

    (run,) = trackio.Api().runs("electra")
    assert run.name == json.loads((tmp_path / "tracking.json").read_text())["trackio"]
    assert {key: run.config[key] for key in SETTINGS} == SETTINGS
    storage = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage
    entries = storage.get_logs("electra", run.name, run_id=run.id)
    history = [(entry["step"], entry["loss/mlm"]) for entry in entries if "loss/mlm" in entry]
    assert history == [(10, 10.0), (20, 5.0)]


def test_a_service_without_its_package_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "trackio", None)  # an import raises ModuleNotFoundError
    (tracker,) = open_trackers(LogConfig(trackio="electra"), tmp_path, lambda: SETTINGS)
    tracker.close(has_failed=False)
    (problem,) = tracker.problems()
    assert problem.startswith("log.trackio: no longer sent to")
