"""Checks docker/pytorchjob.yaml and docker/skypilot.yaml by the models and the schema of the programs that read them.

    python -m venv /tmp/schemas && /tmp/schemas/bin/pip install kubeflow-training
    /tmp/schemas/bin/python tests/drills/cluster_schemas.py pytorchjob
    python -m venv /tmp/sky && /tmp/sky/bin/pip install skypilot
    /tmp/sky/bin/python tests/drills/cluster_schemas.py skypilot

The two packages have many dependencies of their own, so each gets an environment without this project. The script
imports nothing of the project. It exits with 1 if the file has a field that the program does not know, or a value of
the wrong type.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

DOCKER = Path(__file__).resolve().parents[2] / "docker"


def lost_fields(written: Any, read_back: Any, place: str) -> list[str]:
    """Return the places of all fields and items of `written` that `read_back` lacks or that have another value there.

    Numbers that became text are equal, because Kubernetes writes quantities as text.
    """
    if isinstance(written, dict) and isinstance(read_back, dict):
        return [line for key in written for line in lost_fields(written[key], read_back.get(key), f"{place}.{key}")]
    if isinstance(written, list) and isinstance(read_back, list) and len(written) == len(read_back):
        pairs = enumerate(zip(written, read_back))
        return [line for number, (one, other) in pairs for line in lost_fields(one, other, f"{place}[{number}]")]
    return [] if str(written) == str(read_back) else [place]


def check_pytorchjob() -> list[str]:
    """Return the faults of docker/pytorchjob.yaml: what is lost when Kubeflow's client reads and writes it."""
    from kubeflow.training.api_client import ApiClient

    job = yaml.safe_load((DOCKER / "pytorchjob.yaml").read_text())
    client = ApiClient()
    # The generated client reads the answer of a server, of which it uses `data` only.
    model = client.deserialize(SimpleNamespace(data=json.dumps(job)), "KubeflowOrgV1PyTorchJob")
    read_back = client.sanitize_for_serialization(model)
    return [f"not known or of another type: {place}" for place in lost_fields(job, read_back, "")]


def check_skypilot() -> list[str]:
    """Return the faults of docker/skypilot.yaml: those that SkyPilot's schemas of tasks and resources find."""
    import jsonschema
    from sky.utils import schemas, validator

    schemas._allow_additional_properties = lambda: False  # as on the server; the client lets some unknown keys pass
    task = yaml.safe_load((DOCKER / "skypilot.yaml").read_text())
    faults = []
    for schema, tree in (
        (schemas.get_task_schema(), task),
        (schemas.get_resources_schema(), task["resources"]),
    ):
        try:
            validator.get_schema_validator()(schema).validate(tree)
        except jsonschema.ValidationError as error:
            faults.append(error.message)
    return faults


def main() -> int:
    """Check the file that the command line names, print its faults, and return the exit code."""
    checks = {"pytorchjob": check_pytorchjob, "skypilot": check_skypilot}
    if len(sys.argv) != 2 or sys.argv[1] not in checks:
        print(f"error: name one of {', '.join(checks)}", file=sys.stderr)
        return 2
    faults = checks[sys.argv[1]]()
    print("\n".join(faults) or f"docker/{sys.argv[1]}.yaml: every field is known and has the right type")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
