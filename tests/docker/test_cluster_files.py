"""The files for Kubernetes and SkyPilot: their commands start the supervisor as it is, and pass its ends on."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from electra_launcher.supervise.__main__ import _parse
from support.real_runs import REPOSITORY

from electra_dist.config.load import load_config
from electra_dist.errors import EXIT_CRASH, EXIT_DONE, EXIT_STOPPED, EXIT_UNHEALTHY, EXIT_USER_ERROR

DOCKER = REPOSITORY / "docker"
NODE_SCRIPT = DOCKER / "supervise_node.sh"
# Takes the place of `python`: writes its arguments and the names of its variables, and ends with $CODE. With CODE=wait
# it ends with 75 when it receives TERM, as the supervisor does.
FAKE_PYTHON = """#!/bin/bash
printf '%s\\0' "$@" > "$RECORD/arguments"
env -0 | cut -z -d= -f1 > "$RECORD/variables"
[ "$CODE" != wait ] && exit "$CODE"
trap 'sleep 0.2; exit 75' TERM
touch "$RECORD/waiting"
while :; do sleep 0.02; done
"""


@pytest.fixture
def fake_node(tmp_path: Path) -> dict[str, str]:
    """An environment whose `python` records how it was called, with the variables that schedulers set in a pod."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    return {
        "PATH": f"{python.parent}:{os.environ['PATH']}",
        "RECORD": str(tmp_path),
        "CODE": "0",
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "electra-large-master-0",
        "MASTER_PORT": "23456",
        "JOB_COMPLETION_INDEX": "1",
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "SKYPILOT_NUM_GPUS_PER_NODE": "8",
        "SKYPILOT_TASK_ID": "managed-1",
    }


def arguments_of(environment: dict[str, str]) -> list[str]:
    """Return the arguments that the fake Python received."""
    return (Path(environment["RECORD"]) / "arguments").read_text().rstrip("\0").split("\0")


def documents() -> dict[str, Any]:
    """Return the content of each YAML file in docker/."""
    return {path.name: yaml.safe_load(path.read_text()) for path in sorted(DOCKER.glob("*.yaml"))}


def pods_of(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the specs of all kinds of pods of a Kubernetes job."""
    if job["kind"] == "PyTorchJob":
        return [replica["template"]["spec"] for replica in job["spec"]["pytorchReplicaSpecs"].values()]
    return [group["template"]["spec"]["template"]["spec"] for group in job["spec"]["replicatedJobs"]]


def commands() -> list[tuple[str, list[str], str]]:
    """Return the command of each kind of node of each file: name of the file, command, address of node 0."""
    result = []
    for name, content in documents().items():
        if name == "skypilot.yaml":
            result.append((name, ["bash", "-c", content["run"]], "10.0.0.1"))
            continue
        is_jobset = content["kind"] == "JobSet"
        address = "electra-large-node-0-0.electra-large" if is_jobset else "electra-large-master-0"
        for pod in pods_of(content):
            (container,) = pod["containers"]
            result.append((name, [*container["command"], *container["args"]], address))
    return result


def test_the_files_are_those_that_the_documentation_names() -> None:
    text = (REPOSITORY / "docs" / "cluster.md").read_text()
    assert sorted(documents()) == ["jobset.yaml", "pytorchjob.yaml", "skypilot.yaml"]
    for name in (*documents(), NODE_SCRIPT.name):
        assert f"docker/{name}" in text


@pytest.mark.parametrize(("name", "command", "address"), commands(), ids=[entry[0] for entry in commands()])
def test_each_command_is_one_that_the_supervisor_accepts_and_numbers_the_nodes(
    name: str, command: list[str], address: str, fake_node: dict[str, str]
) -> None:
    """The command runs on node 1 of 2 with a Python that records its arguments, which the supervisor's parser reads.

    The config that it names and all overrides must be valid, too.
    """
    subprocess.run(command, cwd=REPOSITORY, env=fake_node, check=True, timeout=30)

    module_option, module, *arguments = arguments_of(fake_node)
    assert (module_option, module) == ("-m", "electra_launcher.supervise")
    options = _parse(arguments)
    assert (options.nodes, options.node_rank, options.master_addr) == (2, 1, address)
    assert options.gpus_per_node == 8
    assert options.preflight
    config = load_config(REPOSITORY / options.config, options.set)
    assert config.train.micro_batches(16) > 0


def test_torchruns_variables_do_not_reach_preflight_which_would_take_them_for_a_ranks(
    fake_node: dict[str, str],
) -> None:
    subprocess.run([str(NODE_SCRIPT), "c.yaml", "2", "1", "host"], env=fake_node, check=True, timeout=30)

    variables = (Path(fake_node["RECORD"]) / "variables").read_text().split("\0")
    assert "RECORD" in variables
    assert not {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} & set(variables)


@pytest.mark.parametrize(
    ("code", "expected"),
    [(EXIT_DONE, 0), (EXIT_USER_ERROR, 78), (EXIT_STOPPED, 203), (EXIT_UNHEALTHY, 197), (EXIT_CRASH, 129), (137, 137)],
)
def test_codes_that_need_another_start_are_128_and_above(code: int, expected: int, fake_node: dict[str, str]) -> None:
    """Kubeflow's restart policy ExitCode starts a pod again from 128 on, and takes a lower code for final."""
    done = subprocess.run(
        [str(NODE_SCRIPT), "c.yaml", "1", "0", "h"], env={**fake_node, "CODE": str(code)}, timeout=30
    )

    assert done.returncode == expected


def test_a_pod_that_is_deleted_passes_term_on_and_waits_for_the_save(fake_node: dict[str, str]) -> None:
    node = subprocess.Popen([str(NODE_SCRIPT), "c.yaml", "1", "0", "h"], env={**fake_node, "CODE": "wait"})
    deadline = time.monotonic() + 30
    while not (Path(fake_node["RECORD"]) / "waiting").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)

    node.send_signal(signal.SIGTERM)

    assert node.wait(30) == 128 + EXIT_STOPPED


def test_the_script_without_its_arguments_is_a_user_error_in_one_line(fake_node: dict[str, str]) -> None:
    done = subprocess.run([str(NODE_SCRIPT), "c.yaml"], env=fake_node, capture_output=True, text=True, timeout=30)

    assert done.returncode == EXIT_USER_ERROR
    assert len(done.stderr.splitlines()) == 1 and "MASTER_ADDR" in done.stderr


def test_pods_have_shared_memory_a_cache_on_the_node_and_time_to_save() -> None:
    for name, content in documents().items():
        if name == "skypilot.yaml":
            assert content["resources"]["job_recovery"]["recover_on_exit_codes"] == [EXIT_UNHEALTHY, EXIT_STOPPED]
            continue
        for pod in pods_of(content):
            (container,) = pod["containers"]
            volumes = {volume["name"]: volume for volume in pod["volumes"]}
            paths = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
            assert volumes["shm"]["emptyDir"]["medium"] == "Memory" and paths["shm"] == "/dev/shm"
            assert "emptyDir" in volumes["cache"] and f"data.cache_dir={paths['cache']}" in container["args"][-1]
            assert "persistentVolumeClaim" in volumes["runs"] and f"run_dir={paths['runs']}/" in container["args"][-1]
            assert pod["terminationGracePeriodSeconds"] >= 300


def test_configuration_errors_end_the_jobs_and_only_the_jobset_is_marked_as_not_validated() -> None:
    job = documents()["pytorchjob.yaml"]
    assert {replica["restartPolicy"] for replica in job["spec"]["pytorchReplicaSpecs"].values()} == {"ExitCode"}
    jobset = documents()["jobset.yaml"]["spec"]
    (rule,) = jobset["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob" and rule["onExitCodes"]["values"] == [EXIT_USER_ERROR]
    for name in documents():
        assert ("NOT VALIDATED" in (DOCKER / name).read_text()) == (name == "jobset.yaml")
