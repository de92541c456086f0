"""Connect to the tracking services that a user may switch on: Weights & Biases (`log.wandb`), MLflow (`log.mlflow`).

Guarantee: all starts of a run are one run at the service; its id is in tracking.json in the run folder. The service
shows the config as the settings of the run; the value of `cluster.notify`, which may hold a secret, is hidden.

Limits: steps that are repeated after a crash are sent again. Both services read their address and credentials from
their own environment variables and files.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from electra_dist.config import Config, LogConfig
from electra_dist.config.keys import flattened
from electra_dist.config.secrets import without_secrets
from electra_dist.run.folder import MLFLOW_FILE, TRACKING_FILE
from electra_dist.run.metrics import EvalRecord, StepRecord
from electra_dist.run.tensorboard import EVAL_TAGS, HELDOUT_DIR, SHARED_TAGS, TRAIN_TAGS, scalars
from electra_dist.store.atomic_files import replacing
from electra_dist.store.json_file import find_document
from electra_dist.tracking.background_tracker import BackgroundTracker

Settings = dict[str, str | float | bool]  # dotted keys of the config and their values
_DEFINING = ("seed", "model.", "objective.", "optimizer.", "data.", "train.")  # beginnings of keys
_MAX_PARAMS = 100  # that MLflow takes at once
_IDS_LOCK = threading.Lock()  # the threads of both services write tracking.json


def flat_settings(config: Config) -> Settings:
    """Return the config as dotted keys, such as "train.num_steps", with their values; lists and null become text."""
    settings: Settings = {}
    for key, value in flattened(without_secrets(config.model_dump(mode="json"))).items():
        if value is None:
            settings[key] = "null"
        else:
            settings[key] = value if isinstance(value, (str, int, float, bool)) else str(value)
    return settings


def hyperparameters(settings: Settings) -> Settings:
    """Return those settings that decide what a model learns, such as the keys of `model` and `train`."""
    return {key: value for key, value in settings.items() if key.startswith(_DEFINING)}


def open_trackers(log: LogConfig, run_dir: Path, settings: Settings) -> list[BackgroundTracker]:
    """Return a tracker for each service that the config names, or []; each connects in the background."""
    trackers = []
    wandb_project = log.wandb
    if wandb_project is not None:
        trackers.append(BackgroundTracker("log.wandb", lambda: WandbService(wandb_project, run_dir, settings)))
    mlflow_experiment = log.mlflow
    if mlflow_experiment is not None:
        trackers.append(BackgroundTracker("log.mlflow", lambda: MlflowService(mlflow_experiment, run_dir, settings)))
    return trackers


def log_record(tracker: BackgroundTracker, record: StepRecord | EvalRecord) -> None:
    """Send a record's finite values under their TensorBoard tags; shared tags get `heldout/` in evaluations."""
    fields = record.fields()
    if isinstance(record, StepRecord):
        values = scalars(fields, TRAIN_TAGS)
    else:
        shared = scalars(fields, SHARED_TAGS)
        values = scalars(fields, EVAL_TAGS) | {f"{HELDOUT_DIR}/{tag}": value for tag, value in shared.items()}
    tracker.log(record.step, values)


class WandbService:
    """Run at Weights & Biases; the environment variable WANDB_MODE decides whether it is online or offline."""

    def __init__(self, project: str, run_dir: Path, settings: Settings) -> None:
        """Begin or continue the run at the service; its files go into RUN/wandb/. May raise any error."""
        import wandb

        run_id = _service_ids(run_dir).get("wandb") or secrets.token_hex(8)
        _remember_id(run_dir, "wandb", run_id)
        self._run = wandb.init(
            project=project,
            id=run_id,
            resume="allow",
            name=run_dir.resolve().name,
            dir=str(run_dir),
            config=dict(settings),
            settings=wandb.Settings(console="off", silent=True, login_timeout=30),
        )
        # The step is a value like others: after a restart it begins again at the checkpoint, which wandb's own step,
        # which only grows, would not allow.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send the values of a step: tag (name of the curve) -> value."""
        self._run.log({"step": step, **values})

    def close(self, has_failed: bool) -> None:
        """Upload what is left, and mark the run as finished or failed."""
        self._run.finish(exit_code=1 if has_failed else 0)


class MlflowService:
    """The run as MLflow keeps it: on a server or, without MLFLOW_TRACKING_URI, in a database in the run folder."""

    def __init__(self, experiment: str, run_dir: Path, settings: Settings) -> None:
        """Begin or continue the run at the server; a missing experiment is created. May raise any error."""
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        database = f"sqlite:///{(run_dir / MLFLOW_FILE).absolute()}"
        self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or database)
        known_id = _service_ids(run_dir).get("mlflow")
        if known_id:
            self._run_id = known_id
            self._client.update_run(self._run_id, status="RUNNING")
            return
        known_experiment = self._client.get_experiment_by_name(experiment)
        if known_experiment is None:
            experiment_id = self._client.create_experiment(experiment)
        else:
            experiment_id = known_experiment.experiment_id
        self._run_id = self._client.create_run(experiment_id, run_name=run_dir.resolve().name).info.run_id
        params = [Param(key, str(value)) for key, value in settings.items()]
        for first in range(0, len(params), _MAX_PARAMS):
            self._client.log_batch(self._run_id, params=params[first : first + _MAX_PARAMS])
        _remember_id(run_dir, "mlflow", self._run_id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send the values of a step: tag (name of the curve) -> value."""
        from mlflow.entities import Metric

        now_ms = round(1000 * time.time())
        self._client.log_batch(self._run_id, [Metric(tag, value, now_ms, step) for tag, value in values.items()])

    def close(self, has_failed: bool) -> None:
        """Mark the run as finished or failed."""
        self._client.set_terminated(self._run_id, status="FAILED" if has_failed else "FINISHED")


def _service_ids(run_dir: Path) -> dict[str, Any]:
    """Return the content of tracking.json: name of a service -> id of the run there; {} without the file."""
    next_step = "delete it, and the next start begins a new record at the services"
    return find_document(run_dir / TRACKING_FILE, dict[str, Any], next_step) or {}


def _remember_id(run_dir: Path, service: str, run_id: str) -> None:
    """Write the id of the run at a service to tracking.json, which the next start of the run reads."""
    with _IDS_LOCK:
        ids = _service_ids(run_dir) | {service: run_id}
        with replacing(run_dir / TRACKING_FILE) as file:
            file.write(json.dumps(ids).encode() + b"\n")
