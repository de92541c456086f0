"""Compares what a killed run has left with what the uninterrupted one has left.

Files and objects are read here without the product. Compared are, bit for bit, every train and evaluation record
without its times, the text samples, the list of skipped steps, the run's identity, and the digests of the tensor files
of the last checkpoint in both targets. The ledger must have each stopped step and the rollback once, nothing that was
set aside, and `done` at its end. The names of all files and objects must be those of the uninterrupted run, so that
anything left over is found; only the numbers of attempts, and the step of the one older checkpoint that retention
keeps, depend on the moment of the kill.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drills.kill_matrix.short_run import NUM_STEPS, SPIKES, Trial
from support.checkpoints import committed, verify

# Of a machine or a moment, or of the requests to a store that were repeated after a kill.
NOT_COMPARED = {
    "tokens_per_s", "mfu", "data_wait", "memory_gb", "eta_s", "step_s", "store_retries", "store_wait_s", "refetches",
    "gpu_temperature_c", "gpu_power_w", "gpu_sm_clock_mhz", "gpu_throttle", "slow_ranks",
}  # fmt: skip
_NUMBER = re.compile(r"\d{4,}")
_TENSORS = re.compile(r"(rank-\d+)\.\d+\.\d+\.[0-9a-f]{64}")
_CHECKPOINT = re.compile(r"step-(\d{8})-a\d{4}")


@dataclass(frozen=True)
class Remains:
    """What a finished run has left."""

    contents: dict[str, Any]  # what must be equal, by name
    files: Counter[str]  # how many files, empty folders, objects and uploads there are of each name
    faults: tuple[str, ...]  # what is wrong whatever the uninterrupted run has left

    def differences(self, expected: Remains) -> list[str]:
        """Describe the differences from the uninterrupted run; an empty list if there are none."""
        found = list(self.faults)
        for name, content in expected.contents.items():
            if self.contents[name] != content:
                found.append(f"{name}: {first_difference(self.contents[name], content)}")
        found += [f"left over: {name}" for name in (self.files - expected.files).elements()]
        found += [f"missing: {name}" for name in (expected.files - self.files).elements()]
        return found


def read_remains(trial: Trial) -> Remains:
    """Read what a finished run has left, of which no process is running."""
    run_dir = trial.run_dir
    records = read_lines(run_dir / "metrics.jsonl")
    contents = {
        "metrics.jsonl": [_without_times(record) for record in records],
        "samples.jsonl": read_lines(run_dir / "samples.jsonl"),
        "skipped_steps.json": json.loads((run_dir / "skipped_steps.json").read_text()),
        "identity.json": json.loads((run_dir / "identity.json").read_text()),
        "weights and moments": _digests_of_last_checkpoint(trial),
    }
    return Remains(contents, Counter(_names(trial)), tuple(_ledger_faults(run_dir)))


def checkpoint_faults(trial: Trial) -> list[str]:
    """Describe what is wrong with the committed checkpoints of both targets right after a kill."""
    faults = []
    for target in trial.targets():
        for _, _, folder in committed(target):
            faults += [f"{target.url}/{folder}: {fault}" for fault in verify(target, folder)[1]]
    return faults


def newest_checkpoint(trial: Trial) -> int:
    """Return the newest committed step of both targets, 0 if there is none."""
    return max((step for target in trial.targets() for step, _, _ in committed(target)), default=0)


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a file of JSON lines; an empty list if there is no file."""
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def _without_times(record: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a record that an equal run repeats."""
    return {name: value for name, value in record.items() if name not in NOT_COMPARED}


def _digests_of_last_checkpoint(trial: Trial) -> dict[str, set[tuple[str, str]]]:
    """Return the names and SHA-256 of the tensor files of the last step, by target."""
    last = f"checkpoints/step-{NUM_STEPS:08d}-"
    digests: dict[str, set[tuple[str, str]]] = {"folder": set(), "objects": set()}
    for file in trial.watched.glob(f"{last}*/*.safetensors"):
        digests["folder"].add((file.name, hashlib.sha256(file.read_bytes()).hexdigest()))
    for key in trial.object_keys():
        if key.startswith(f"{trial.name}/{last}") and key.endswith(".safetensors"):
            digests["objects"].add((Path(key).name, hashlib.sha256(trial.objects.read(key)).hexdigest()))
    return digests


def _names(trial: Trial) -> list[str]:
    """Return the names of everything that the run has left; checkpoints are named "last" and "older".

    Other numbers in names become N, because starts are counted. The files attempts/NNNN.json, one for each start, are
    left out.
    """
    names = []
    for path in trial.watched.rglob("*"):
        is_empty_folder = path.is_dir() and not any(path.iterdir())
        if path.is_file() or is_empty_folder:
            names.append(str(path.relative_to(trial.watched)) + ("/" if is_empty_folder else ""))
    names += [f"{trial.objects.scheme}:{key.removeprefix(trial.name + '/')}" for key in trial.object_keys()]
    names += [f"unfinished upload of {key}" for key in trial.objects.unfinished(f"{trial.name}/")]
    names = [_CHECKPOINT.sub(_age, name) for name in names if "checkpoints/attempts/" not in name]
    names = [_TENSORS.sub(r"\1", name) for name in names]
    return [_NUMBER.sub("N", name) for name in names]


def _age(name: re.Match[str]) -> str:
    """Return the name that stands for a checkpoint's folder."""
    return "last" if int(name[1]) == NUM_STEPS else "older"


def _ledger_faults(run_dir: Path) -> list[str]:
    """Describe gaps and duplicates in the ledger of a finished run."""
    faults = []
    events = read_lines(run_dir / "ledger.jsonl")
    counts = Counter((event["event"], event["step"]) for event in events)
    for step in SPIKES:
        if counts["stopped_step", step] != 1:
            faults.append(f"ledger.jsonl: {counts['stopped_step', step]} events stopped_step of step {step}")
    if counts["rollback", SPIKES[-1]] != 1:
        faults.append(f"ledger.jsonl: {counts['rollback', SPIKES[-1]]} events rollback")
    if (events[-1]["event"], events[-1]["step"]) != ("done", NUM_STEPS):
        faults.append(f"ledger.jsonl: ends with {events[-1]['event']} at step {events[-1]['step']}")
    faults += [f"ledger.jsonl: set_aside: {event['reason']}" for event in events if event["event"] == "set_aside"]
    return faults


def first_difference(found: Any, expected: Any) -> str:
    """Describe the first difference of two lists of records, field by field, or of two other values."""
    if not isinstance(found, list) or not isinstance(expected, list):
        return f"{str(found)[:300]} instead of {str(expected)[:300]}"
    for number, (one, other) in enumerate(zip(found, expected), start=1):
        names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
        if names:
            values = ", ".join(f"{name} {one.get(name)} instead of {other.get(name)}" for name in names)
            return f"record {number} (step {other.get('step')}): {values[:400]}"
    return f"{len(found)} records instead of {len(expected)}"
