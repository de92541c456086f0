"""Show a run while it goes on: at Weights & Biases, MLflow and Trackio (`log.wandb` and so on), and as report.html.

Guarantee: no training step waits for a service or a report, and no failure of theirs reaches the run. A service that
fails, or that falls 1,000 records behind, is dropped for the rest of this start. All starts of a run are one run at
the service; its id is in tracking.json in the run folder. The service shows the config as the settings of the run; the
value of `cluster.notify`, which may hold a secret, is hidden. At most one process updates report.html, and none after
`ReportRefresh.close`; an update takes 2 to 7 s of one processor core at a low priority.

How: a thread for each service sends what `BackgroundTracker.log` hands over.

Limits: steps that are repeated after a crash are sent again. What a dropped service has missed is not sent;
metrics.jsonl has it. The services read their address and credentials from their own environment variables and files.
"""

from __future__ import annotations

import json
import os
import queue
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from typing_extensions import override

from electra_dist.config import Config, LogConfig
from electra_dist.config.keys import flattened
from electra_dist.config.secrets import without_secrets
from electra_dist.run.folder import MLFLOW_FILE, TRACKING_FILE
from electra_dist.run.metrics import EvalRecord, StepRecord
from electra_dist.run.tensorboard import EVAL_TAGS, HELDOUT_DIR, SHARED_TAGS, TRAIN_TAGS, scalars
from electra_dist.store.atomic_files import replacing
from electra_dist.store.json_file import find_document

Settings = dict[str, str | float | bool]  # dotted keys of the config and their values
_DEFINING = ("seed", "model.", "objective.", "optimizer.", "data.", "train.")  # beginnings of keys
_MAX_PARAMS = 100  # that MLflow takes at once
_MAX_WAITING = 1000  # records that wait for the service
_CLOSE_S = 30.0  # how long `close` waits for room in the queue, and then for the thread
_REPORT_MODULE = "electra_dist.report.report_page"  # writes the report of the folder that is its argument
_NICENESS = 10  # a tenth of a training process's share, where processor cores are short
_IDS_LOCK = threading.Lock()  # the threads of all services write tracking.json


def flat_settings(config: Config) -> Settings:
    """Return the config as dotted keys, such as "train.num_steps", with their values; lists and null become text."""
    settings: Settings = {}
    for key, value in flattened(without_secrets(config.model_dump(mode="json"))).items():
        if value is None:
            settings[key] = "null"
        else:
            settings[key] = value if isinstance(value, (str, int, float, bool)) else str(value)
    return settings


def hyperparameters(config: Config) -> Settings:
    """Return those of `flat_settings` that decide what a model learns, such as the keys of `model` and `train`."""
    return {key: value for key, value in flat_settings(config).items() if key.startswith(_DEFINING)}


def open_trackers(log: LogConfig, run_dir: Path, settings: Callable[[], Settings]) -> list[BackgroundTracker]:
    """Return a tracker for each service that the config names; each connects in the background.

    `settings` returns what the services show as the settings of the run.
    """
    trackers = []
    services: dict[str, NewService] = {"wandb": WandbService, "mlflow": MlflowService, "trackio": TrackioService}
    for key, service in services.items():
        project = getattr(log, key)
        if project is not None:
            connect = partial(_connect, service, project, run_dir, settings)
            trackers.append(BackgroundTracker(f"log.{key}", connect))
    return trackers


def _connect(service: NewService, project: str, run_dir: Path, settings: Callable[[], Settings]) -> Service:
    return service(project, run_dir, settings())


def log_record(tracker: BackgroundTracker, record: StepRecord | EvalRecord) -> None:
    """Send a record's finite values to a service under their TensorBoard tags, the names of the curves.

    A tag that training steps have, too, begins with `heldout/` in an evaluation.
    """
    fields = record.fields()
    if isinstance(record, StepRecord):
        values = scalars(fields, TRAIN_TAGS)
    else:
        shared = scalars(fields, SHARED_TAGS)
        values = scalars(fields, EVAL_TAGS) | {f"{HELDOUT_DIR}/{tag}": value for tag, value in shared.items()}
    tracker.log(record.step, values)


class Service(Protocol):
    """Connection to a tracking service; all methods are called in one thread, and each may raise anything."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send the values of a step: tag (name of the curve) -> value."""

    def close(self, has_failed: bool) -> None:
        """Send what is left, and mark the run as finished or failed."""


NewService = Callable[[str, Path, Settings], Service]  # class of a service: from (project, run folder, settings)


class BackgroundTracker:
    """Sender of metrics to one tracking service. Only rank 0 has one; call `close` at the end."""

    def __init__(self, name: str, connect: Callable[[], Service]) -> None:
        """Start the thread that connects, which may take long, and sends; `name` is a key such as "log.wandb"."""
        self._name = name
        self._connect = connect
        self._queue: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(_MAX_WAITING)
        self._problems: list[str] = []
        self._is_dropped = False
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Hand a step's values, all finite, to the thread; a service that was dropped after a failure gets none."""
        if self._is_dropped:
            return
        try:
            self._queue.put_nowait((step, dict(values)))
        except queue.Full:
            self._drop(f"it is {_MAX_WAITING:,} records behind")

    def problems(self) -> list[str]:
        """Return one line for each failure since the last call, for the log of the run; usually none."""
        new_problems = []
        while self._problems:
            new_problems.append(self._problems.pop(0))
        return new_problems

    def close(self, has_failed: bool) -> None:
        """Wait at most 60 s until the service has all values; `has_failed` marks the run as failed at the service."""
        self._has_failed = has_failed
        if not self._is_dropped:
            try:
                self._queue.put(None, timeout=_CLOSE_S)
            except queue.Full:
                self._drop(f"it is {_MAX_WAITING:,} records behind")
        self._thread.join(0.0 if self._is_dropped else _CLOSE_S)
        if self._thread.is_alive() and not self._is_dropped:
            self._drop(f"it did not take the last records within {_CLOSE_S:.0f} s")

    def _run(self) -> None:
        """Connect, and send queued records to the service until the queue yields None; runs in a thread."""
        try:
            service = self._connect()
            while True:
                record = self._queue.get()
                if record is None or self._is_dropped:
                    break
                service.log(*record)
            service.close(self._has_failed)
        except Exception as error:  # noqa: BLE001  (a service may raise anything, which must not reach the run)
            self._drop(_one_line(error))

    def _drop(self, reason: str) -> None:
        self._is_dropped = True
        self._problems.append(
            f"{self._name}: no longer sent to, because {reason}; training goes on, and metrics.jsonl has all values"
        )


def _one_line(error: Exception) -> str:
    """Describe an error by its class and the first line of its text; for a missing package, say how to install it."""
    if isinstance(error, ModuleNotFoundError):
        return f"the package {error.name} is not installed (pip install {error.name})"
    text = str(error).strip()
    first_line = text.splitlines()[0] if text else ""
    return f"of {type(error).__name__}: {first_line}"[:300]


class WandbService(Service):
    """Service that sends values to Weights & Biases, online or offline as the environment variable WANDB_MODE says."""

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

    @override
    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    @override
    def close(self, has_failed: bool) -> None:
        self._run.finish(exit_code=1 if has_failed else 0)


class MlflowService(Service):
    """Service that sends values to MLflow, at the server MLFLOW_TRACKING_URI.

    If this variable is not set, values go into a database in the run folder.
    """

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

    @override
    def log(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now_ms = round(1000 * time.time())
        self._client.log_batch(self._run_id, [Metric(tag, value, now_ms, step) for tag, value in values.items()])

    @override
    def close(self, has_failed: bool) -> None:
        self._client.set_terminated(self._run_id, status="FAILED" if has_failed else "FINISHED")


class TrackioService(Service):
    """Service that sends values to Trackio, by default a database on this machine's disk."""

    def __init__(self, project: str, run_dir: Path, settings: Settings) -> None:
        """Begin or continue the run at the service. May raise any error."""
        import trackio

        # Trackio knows a run by its name, which must not be that of another run's folder.
        name = _service_ids(run_dir).get("trackio") or f"{run_dir.resolve().name}-{secrets.token_hex(4)}"
        _remember_id(run_dir, "trackio", name)
        self._run = trackio.init(
            project=project,
            name=name,
            resume="allow",
            config=dict(settings),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    @override
    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    @override
    def close(self, has_failed: bool) -> None:
        self._run.finish()  # Trackio has no mark for a failed run.


def _service_ids(run_dir: Path) -> dict[str, Any]:
    """Return the content of tracking.json: name of a service -> id of the run there; {} if there is no file."""
    next_step = "delete it, and the next start begins a new record at the services"
    return find_document(run_dir / TRACKING_FILE, dict[str, Any], next_step) or {}


def _remember_id(run_dir: Path, service: str, run_id: str) -> None:
    """Write the id of the run at a service to tracking.json, which the next start of the run reads."""
    with _IDS_LOCK:
        ids = _service_ids(run_dir) | {service: run_id}
        with replacing(run_dir / TRACKING_FILE) as file:
            file.write(json.dumps(ids).encode() + b"\n")


class ReportRefresh:
    """Thread that starts a process to write report.html at intervals; call `close` before the last report."""

    def __init__(self, run_dir: Path, every_minutes: float) -> None:
        """Start the thread, unless the interval is 0. Only rank 0 does so."""
        self._run_dir = run_dir
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        if every_minutes > 0:
            threading.Thread(target=self._refresh_every, args=(60 * every_minutes,), daemon=True).start()

    def _refresh_every(self, every_s: float) -> None:
        """Let a process of low priority write the report every `every_s` seconds, until `close`; runs in a thread."""
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        while not self._is_closed.wait(every_s):
            try:
                with self._lock:
                    if self._is_closed.is_set():
                        return
                    self._process = subprocess.Popen(
                        ["nice", "-n", str(_NICENESS), sys.executable, "-m", _REPORT_MODULE, str(self._run_dir)],
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                    )
            except OSError:  # no memory for a process, or no `nice`: the report at the end is written anyway
                return
            self._process.wait()

    def close(self) -> None:
        """Kill the process if it is still writing, so that it cannot replace the final report by an older one."""
        with self._lock:
            self._is_closed.set()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
