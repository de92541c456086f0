"""Where a preparation runs and writes: S3 at both ends, and the jobs that it submits to Slurm."""

from __future__ import annotations

import gzip
import json
import multiprocessing.connection
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from made_sources import english, lines
from prepare_processes import finish, start_prepare
from support.s3_server import S3Server

from electra_dist.corpus.prepare.prepare_config import PrepareConfig
from electra_dist.errors import UserError
from electra_dist.store.open_store import open_store

FAKE_SBATCH = """#!/bin/sh
echo "$@" >> "$SBATCH_LOG"
for file; do :; done
cp "$file" "$SBATCH_LOG.$(wc -l < "$SBATCH_LOG")"
echo "Submitted batch job $((100 + $(wc -l < "$SBATCH_LOG")))"
"""


def ignore(*progress: Any) -> None:
    """Receive the progress of a preparation."""


def test_sources_and_output_on_s3(bucket: str, s3: S3Server, tmp_path: Path):
    from electra_dist.corpus.prepare.preparation import check, finished_report, run

    store = open_store(bucket, s3.endpoint_url)
    store.write("in/a.jsonl.gz", gzip.compress(lines([english(1), "short"])))
    store.write("in/deep/b.jsonl", lines([english(2)]))
    config = PrepareConfig.model_validate(
        {
            "output": f"{bucket}/out",
            "work": str(tmp_path / "work"),
            "sources": [{"name": "web", "path": f"{bucket}/in"}],
            "endpoint_url": s3.endpoint_url,
            "filters": {"gopher_quality": {}},
            "executor": {"tasks": 2},
        }
    )
    preparation = check(config)
    assert finished_report(preparation) is None
    run(preparation, ignore)
    report = finished_report(preparation)
    assert report is not None
    assert report["dropped"] == {"gopher_quality": {"gopher_short_doc": {"web": 1}}}
    texts = set()
    for file in report["outputs"]:
        documents = gzip.decompress(store.read(f"out/{file['name']}")).splitlines()
        texts |= {json.loads(document)["text"] for document in documents}
    assert texts == {english(1), english(2)}
    assert store.exists("out/samples/gopher_quality.jsonl")


@pytest.fixture
def slurm_config(tmp_path: Path) -> PrepareConfig:
    """A preparation with MinHash for a Slurm cluster."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_bytes(lines([english(1)]))
    return PrepareConfig.model_validate(
        {
            "output": str(tmp_path / "out"),
            "work": str(tmp_path / "tasks"),
            "sources": [{"name": "web", "path": str(tmp_path / "in")}],
            "deduplication": {"minhash": {"num_buckets": 3}},
            "executor": {
                "kind": "slurm",
                "tasks": 2,
                "workers": 8,
                "slurm": {
                    "partition": "cpu",
                    "time": "1:00:00",
                    "setup": "echo ready",
                    "options": {"account": "a"},
                },
            },
        }
    )


def test_each_stage_is_an_array_job_that_waits_for_the_stage_before(
    slurm_config: PrepareConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from electra_dist.corpus.prepare.preparation import check, submit_to_slurm

    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sbatch").write_text(FAKE_SBATCH)
    (tmp_path / "bin" / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("SBATCH_LOG", str(tmp_path / "sbatch.log"))

    jobs = submit_to_slurm(check(slurm_config))
    assert list(jobs) == [
        "01-filter",
        "02-minhash-signatures",
        "03-minhash-buckets",
        "04-minhash-clusters",
        "05-minhash-filter",
        "06-report",
    ]
    script_of_job = {}
    dependency_of_job = {}
    for number, line in enumerate((tmp_path / "sbatch.log").read_text().splitlines(), start=1):
        script_of_job[str(100 + number)] = (tmp_path / f"sbatch.log.{number}").read_text()
        match = re.search(r"--dependency=afterok:(\d+)", line)
        dependency_of_job[str(100 + number)] = match.group(1) if match else None
    ids = list(jobs.values())
    assert [dependency_of_job[job] for job in ids] == [None, *ids[:-1]]
    script = script_of_job[jobs["03-minhash-buckets"]]
    for line in (
        "#SBATCH --array=0-2%8",
        "#SBATCH --partition=cpu",
        "#SBATCH --time=1:00:00",
        "#SBATCH --account=a",
        "#SBATCH --kill-on-invalid-dep=yes",
        "#SBATCH --job-name=prepare-03-minhash-buckets",
        "echo ready",
    ):
        assert line in script.splitlines(), script
    assert f"launch_pickled_pipeline {tmp_path}/tasks/03-minhash-buckets/run/executor.pik" in script


def test_arrays_submitted_within_an_array_job_from_a_folder_with_blanks_and_quotes(
    slurm_config: PrepareConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Bash and a fake srun are the independent truth: they say which words a job script passes on."""
    from electra_dist.corpus.prepare.preparation import check, submit_to_slurm

    work = tmp_path / "it's 50% $HOME"
    programs = {
        "sbatch": FAKE_SBATCH.replace("#!/bin/sh", '#!/bin/sh\nenv >> "$SBATCH_LOG.given"'),
        "srun": '#!/bin/sh\nprintf "%s\\n" "$@" >"$SRUN_LOG"\n',
    }
    (tmp_path / "bin").mkdir()
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("SBATCH_LOG", str(tmp_path / "sbatch.log"))
    monkeypatch.setenv("SRUN_LOG", str(tmp_path / "srun.log"))
    monkeypatch.setattr(sys, "executable", str(work / "bin/python"))
    of_a_job = {"SLURM_ARRAY_TASK_ID": "7", "SLURM_EXPORT_ENV": "NONE", "SBATCH_TIMELIMIT": "1"}
    for name, value in of_a_job.items():
        monkeypatch.setenv(name, value)

    submit_to_slurm(check(slurm_config.model_copy(update={"work": str(work)})))

    assert {name: os.environ[name] for name in of_a_job} == of_a_job  # as before
    given = (tmp_path / "sbatch.log.given").read_text()
    assert "SBATCH_LOG=" in given
    assert [name for name in of_a_job if f"{name}=" in given] == []
    script = (tmp_path / "sbatch.log.1").read_text()
    log = f"{work}/01-filter/run/slurm_logs/".replace("50%", "50%%") + "%A_%a.out"
    [output] = [line for line in script.splitlines() if line.startswith("#SBATCH --output=")]
    assert shlex.split(output.removeprefix("#SBATCH ")) == [f"--output={log}"]
    shown = subprocess.run(["bash", "-c", f"{script}\necho $PATH"], capture_output=True, text=True, check=True)
    assert shown.stdout.splitlines()[-1].startswith(f"{work}/bin:")
    words = (tmp_path / "srun.log").read_text().splitlines()
    assert words[0] == "--export=ALL"
    assert words[-2:] == ["launch_pickled_pipeline", f"{work}/01-filter/run/executor.pik"]


def test_without_slurm_the_command_says_where_to_run_it(slurm_config: PrepareConfig, monkeypatch: pytest.MonkeyPatch):
    from electra_dist.corpus.prepare.preparation import check, submit_to_slurm

    monkeypatch.setenv("PATH", "/nothing")
    with pytest.raises(UserError, match=r"no sbatch on this machine; run the command on a login node"):
        submit_to_slurm(check(slurm_config))


def test_the_tasks_that_slurm_loads_write_what_local_ones_write(
    slurm_config: PrepareConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The pickled executor of a stage is what `launch_pickled_pipeline` runs in each task of the array."""
    import dill

    from electra_dist.corpus.prepare.document_files import DOCUMENTS_DIR
    from electra_dist.corpus.prepare.preparation import _slurm_executor, check
    from electra_dist.corpus.prepare.source_plan import write_plan

    preparation = check(slurm_config)
    work = Path(slurm_config.work)
    work.mkdir()
    write_plan(preparation.plan, work)
    monkeypatch.setattr("datatrove.executor.slurm.expand_slurm_nodelist", lambda nodes: [nodes])
    monkeypatch.setenv("SLURM_NODELIST", "n1")
    stage = preparation.stages[0]
    executor = dill.loads(dill.dumps(_slurm_executor(slurm_config, stage, None)))
    for rank in range(stage.num_tasks):
        executor._run_for_rank(rank)
    files = sorted((work / stage.name / DOCUMENTS_DIR).iterdir())
    documents = [json.loads(line) for file in files for line in gzip.decompress(file.read_bytes()).splitlines()]
    assert [document["text"] for document in documents] == [english(1)]


def test_a_long_tmpdir_leaves_room_for_the_sockets_of_worker_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from electra_dist.corpus.workers import _shorten_socket_paths

    folder = tmp_path / ("long" * 20)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setitem(multiprocessing.current_process()._config, "tempdir", None)
    _shorten_socket_paths()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(multiprocessing.connection.arbitrary_address("AF_UNIX"))
    assert tempfile.gettempdir() == str(folder)  # other files go where the user wants them


@pytest.mark.sample
def test_text_is_prepared_with_a_tmpdir_of_80_characters(
    slurm_config: PrepareConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / ("long" * 20)
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    tree = slurm_config.model_dump(mode="json", exclude_defaults=True) | {"executor": {"tasks": 2}}
    done = finish(start_prepare(tree, tmp_path))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "prepare.json").exists()
