"""The sbatch script: its golden text, signals, exact quoting for bash, and values that are refused."""

from __future__ import annotations

import dataclasses
import os
import shlex
import signal
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from electra_dist.errors import UserError
from launcher.slurm.batch_script import Container, SubmitRequest, batch_script

GOLDEN = Path(__file__).parent / "golden"
REQUEUED = SubmitRequest(
    run_dir="/shared/runs/large",
    script_file="/shared/runs/large/slurm/submission-0001.sh",
    config_file="/shared/runs/large/slurm/submission-0001.yaml",
    work_dir="/home/ada/electra",
    command="electra-dist submit --config configs/large_25pct_mask.yaml --nodes 8",
    python="/home/ada/electra/.venv/bin/python",
    job_name="large-0123abcd",
    num_nodes=8,
    gpus_per_node=8,
)
CHAIN = dataclasses.replace(
    REQUEUED,
    run_dir="/shared/it's a run",
    partition="gpu",
    time_limit="24:00:00",
    chain=5,
    signal_ahead_s=300,
    python="python",
    container=Container(image="/images/electra dist.sqsh", runtime="pyxis", mounts=("/data:/data:ro",)),
    sbatch_options=("account=vision", "comment=it's ours", "hold"),
)
APPTAINER = dataclasses.replace(CHAIN, container=Container(image="electra.sif", runtime="apptainer"))


@pytest.mark.parametrize(
    ("name", "request_", "excluded"),
    [("requeued", REQUEUED, ()), ("chain_pyxis", CHAIN, ("n3", "n7")), ("chain_apptainer", APPTAINER, ())],
)
def test_the_script_equals_its_golden_file_and_is_valid_bash(
    name: str, request_: SubmitRequest, excluded: tuple[str, ...]
):
    text = batch_script(request_, excluded)
    file = GOLDEN / f"{name}.sh"
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_text(text)
    assert text == file.read_text()
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


SUPERVISOR = """#!/bin/bash
trap 'sleep 0.2; exit 75' {signal}
echo ready
for i in $(seq 100); do sleep 0.1; done
"""


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM])
def test_a_signal_to_the_nodes_shell_alone_reaches_the_supervisor(tmp_path: Path, number: signal.Signals):
    """Slurm signals only the shell where it tracks processes by cgroup."""
    python = tmp_path / "supervisor"
    python.write_text(SUPERVISOR.format(signal=number.name))
    python.chmod(0o755)
    request = dataclasses.replace(REQUEUED, run_dir=str(tmp_path), work_dir=str(tmp_path), python=str(python))
    script = tmp_path / "script.sh"
    # The real supervisor, in Python, can handle a signal that its parent ignores. The bash script in its place cannot
    # trap such a signal, so the line that ignores them is removed.
    script.write_text(batch_script(request).replace("trap '' USR1 USR2 TERM", ":"))
    state = tmp_path / "slurm" / "job-7-0"
    state.mkdir(parents=True)
    environment = {**os.environ, "state": str(state), "SLURMD_NODENAME": "n1", "SLURM_NODEID": "0"}
    with subprocess.Popen(["bash", str(script), "node"], env=environment, stdout=subprocess.PIPE) as shell:
        assert shell.stdout and shell.stdout.readline() == b"ready\n"
        shell.send_signal(number)
        assert shell.wait(30) == 0  # a stop on purpose is no failure in the accounting
    assert (state / "exit-n1").read_text() == "75\n"


def test_the_nodes_shell_ends_with_a_supervisor_that_a_signal_has_killed(tmp_path: Path):
    python = tmp_path / "supervisor"
    python.write_text("#!/bin/bash\nkill -TERM $$\nsleep 60\n")
    python.chmod(0o755)
    script = tmp_path / "script.sh"
    request = dataclasses.replace(REQUEUED, run_dir=str(tmp_path), work_dir=str(tmp_path), python=str(python))
    script.write_text(batch_script(request).replace("trap '' USR1 USR2 TERM", ":"))
    state = tmp_path / "slurm" / "job-7-0"
    state.mkdir(parents=True)
    environment = {**os.environ, "state": str(state), "SLURMD_NODENAME": "n1", "SLURM_NODEID": "0"}
    assert subprocess.run(["bash", str(script), "node"], env=environment, timeout=30).returncode == 143
    assert (state / "exit-n1").read_text() == "143\n"


words = st.text(st.characters(codec="utf-8", exclude_characters="\0", exclude_categories=["Cs"]), min_size=1)


@given(run_dir=words, config=words, python=words)
def test_bash_reads_every_quoted_value_of_the_body_back_exactly(run_dir: str, config: str, python: str):
    request = dataclasses.replace(REQUEUED, run_dir="/r", config_file=config, python=python, script_file=run_dir)
    text = batch_script(request)
    settings = text[text.index("\nrun_dir=") : text.index("\nexport PYTHONUNBUFFERED=")]
    shown = subprocess.run(
        ["bash", "-c", settings + '\nprintf \'%s\\0\' "$script" "$config" "$python"'],
        capture_output=True,
        check=True,
        env={"LC_ALL": "C.UTF-8"},
    )
    assert shown.stdout.decode("utf-8").split("\0")[:3] == [run_dir, config, python]


@pytest.mark.parametrize("partition", ["a\\b", "two\nlines", "tab\there"])
def test_a_value_that_an_sbatch_line_cannot_carry_is_refused(partition: str):
    with pytest.raises(UserError, match="backslash"):
        batch_script(dataclasses.replace(REQUEUED, partition=partition))


@pytest.mark.parametrize("option", ["account=a\\nb", "account\\n#SBATCH --nodes=9", "account\\nx=1"])
def test_a_newline_in_an_option_of_the_user_is_refused(option: str):
    with pytest.raises(UserError, match="control character"):
        batch_script(dataclasses.replace(REQUEUED, sbatch_options=(option,)))


@pytest.mark.parametrize("option", ["nodes=3", "--exclude=n1", "signal=USR2@5"])
def test_an_sbatch_option_that_the_script_sets_itself_is_refused(option: str):
    with pytest.raises(UserError, match="sets `"):
        batch_script(dataclasses.replace(REQUEUED, sbatch_options=(option,)))


@pytest.mark.parametrize("request_", [CHAIN, APPTAINER])
@pytest.mark.parametrize("folder", ["/shared/lr=1,2", "/shared/12:30"])
def test_a_folder_that_a_list_of_mounts_cannot_hold_is_refused(request_: SubmitRequest, folder: str):
    with pytest.raises(UserError, match="no container can mount"):
        batch_script(dataclasses.replace(request_, run_dir=folder))
    batch_script(dataclasses.replace(request_, run_dir=folder, container=None))


def test_the_setup_file_is_read_on_every_node_before_the_supervisor_starts(tmp_path: Path):
    python = tmp_path / "supervisor"
    python.write_text('#!/bin/bash\necho "NCCL_SOCKET_IFNAME is $NCCL_SOCKET_IFNAME in $PWD"\n')
    python.chmod(0o755)
    (tmp_path / "set up.sh").write_text("export NCCL_SOCKET_IFNAME=ib0\n")
    state = tmp_path / "slurm" / "job-7-0"
    state.mkdir(parents=True)
    request = dataclasses.replace(
        REQUEUED,
        run_dir=str(tmp_path),
        work_dir=str(tmp_path),
        python=str(python),
        setup_file=str(tmp_path / "set up.sh"),
    )
    script = tmp_path / "script.sh"
    script.write_text(batch_script(request))
    environment = {**os.environ, "state": str(state), "SLURMD_NODENAME": "n1", "SLURM_NODEID": "0"}
    shown = subprocess.run(
        ["bash", str(script), "node"], env=environment, cwd="/", capture_output=True, text=True, timeout=60
    )
    assert shown.stdout == f"NCCL_SOCKET_IFNAME is ib0 in {tmp_path}\n"


def test_all_memory_of_the_nodes_is_asked_for_unless_the_user_asks_for_less():
    assert "#SBATCH --mem=0\n" in batch_script(REQUEUED)
    assert "--mem=0" not in batch_script(dataclasses.replace(REQUEUED, sbatch_options=("mem-per-gpu=64G",)))


def test_a_run_folder_with_blanks_and_quotes_is_one_word_of_the_shell():
    run_dir = """/shared/it's a "run"; echo $HOME `id`"""
    text = batch_script(dataclasses.replace(REQUEUED, run_dir=run_dir))
    [line] = [line for line in text.splitlines() if line.startswith("run_dir=")]
    assert shlex.split(line) == [f"run_dir={run_dir}"]
