"""Jobs of a corpus build: an array of parts, jobs that depend on it, quoting; `sbatch` is a script that records."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from electra_launcher.cli.corpus.submit import CorpusJobs, corpus_scripts, submit_corpus

from electra_dist.errors import UserError


def make_jobs(folder: Path, **changes: object) -> CorpusJobs:
    """Return a description of the jobs of a corpus; the arguments replace its fields."""
    fields: dict = {
        "output": "/data/a corpus",
        "folder": folder / "jobs",
        "build": ("--input", "/data/it's text", "--config", "/data/run.yaml"),
        "vocabulary": (),
        "merge": (),
        "num_parts": 16,
        "cpus": 8,
        "memory_gb": 32,
        "partition": None,
        "time_limit": "4:00:00",
        **changes,
    }
    return CorpusJobs(**fields)


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file to which a fake `sbatch` appends its arguments; the jobs have the ids 1, 2, ..."""
    calls = tmp_path / "calls"
    program = tmp_path / "bin/sbatch"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >> {calls}\nenv > {tmp_path}/given\nwc -l < {calls}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    return calls


def test_each_job_needs_the_success_of_the_one_before(sbatch: Path, tmp_path: Path) -> None:
    jobs = make_jobs(tmp_path, vocabulary=("--output", "/data/vocab.txt"))

    assert submit_corpus(jobs) == ["1", "2", "3"]

    calls = sbatch.read_text().splitlines()
    folder = tmp_path / "jobs"
    assert calls == [
        f"--parsable {folder}/vocabulary.sh",
        f"--parsable --dependency=afterok:1 --kill-on-invalid-dep=yes {folder}/parts.sh",
        f"--parsable --dependency=afterok:2 --kill-on-invalid-dep=yes {folder}/merge.sh",
    ]


def test_a_part_runs_the_command_with_its_number_in_the_array(tmp_path: Path) -> None:
    """The shell itself is the independent truth: it runs the script, with a Python that prints its arguments."""
    parts, merge = corpus_scripts(make_jobs(tmp_path))
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\nfor argument in "$@"; do echo "$argument"; done\n')
    program.chmod(0o755)

    def arguments(text: str) -> list[str]:
        """Return the arguments of `electra-dist corpus` that a script passes."""
        script = text.replace(sys.executable, str(program))
        environment = {"SLURM_ARRAY_TASK_ID": "3", "PATH": "/usr/bin:/bin"}
        done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()[2:]

    build = shlex.split("build --input \"/data/it's text\" --config /data/run.yaml --output '/data/a corpus'")
    assert arguments(parts.text) == ["corpus", *build, "--workers", "8", "--part", "3/16"]
    assert arguments(merge.text) == ["corpus", "merge", "/data/a corpus"]
    assert "#SBATCH --array=1-16\n" in parts.text
    assert "#SBATCH --requeue\n" in parts.text
    assert "--array" not in merge.text


def test_a_python_below_a_folder_with_blanks_and_quotes_is_one_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "it's $HOME" / "python"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\necho "$4"\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    for script in corpus_scripts(make_jobs(tmp_path, vocabulary=("--output", "/data/vocab.txt"))):
        done = subprocess.run(["bash", "-c", script.text], capture_output=True, text=True)
        assert done.stdout in ("vocab\n", "build\n", "merge\n"), done.stderr


def test_a_percent_sign_of_the_folder_is_none_of_slurms_placeholders(tmp_path: Path) -> None:
    for script in corpus_scripts(make_jobs(Path("/data/100%"))):
        assert "#SBATCH --output=/data/100%%/jobs/%x-" in script.text


def test_jobs_are_given_nothing_of_the_job_in_which_they_were_submitted(
    sbatch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted_in = {"SLURM_JOB_END_TIME": "1", "SLURM_MEM_PER_NODE": "64", "SBATCH_TIMELIMIT": "1", "RANK": "3"}
    kept = {"SLURM_CONF": "/etc/slurm.conf", "SBATCH_PARTITION": "cpu", "SBATCH_EXPORT": "NONE"}
    for name, value in (submitted_in | kept).items():
        monkeypatch.setenv(name, value)
    submit_corpus(make_jobs(tmp_path))  # which sets the time limit and no partition
    given = dict(line.split("=", 1) for line in (tmp_path / "given").read_text().splitlines() if "=" in line)
    assert kept.items() <= given.items()
    assert given.keys() & submitted_in.keys() == set()


def test_options_of_the_user_are_added_and_those_of_the_script_refused(tmp_path: Path) -> None:
    parts, _ = corpus_scripts(make_jobs(tmp_path, sbatch=("account=vision", "exclusive")))
    assert "#SBATCH --account=vision\n#SBATCH --exclusive\n" in parts.text
    with pytest.raises(UserError, match="the script sets `array` itself"):
        corpus_scripts(make_jobs(tmp_path, sbatch=("array=1-3",)))
    with pytest.raises(UserError, match="no backslash and no control character"):
        corpus_scripts(make_jobs(tmp_path, partition="a\nb"))


def test_without_slurm_the_error_names_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="sbatch is not installed"):
        submit_corpus(make_jobs(tmp_path))
