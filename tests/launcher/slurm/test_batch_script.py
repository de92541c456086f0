"""The sbatch script: shellcheck, signals on a node, exact quoting for bash, and values that are refused."""

from __future__ import annotations

import dataclasses
import os
import shlex
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from electra_launcher.slurm.batch_script import JOB_FILE, Container, JobOptions, Submission, batch_script
from hypothesis import given, settings
from hypothesis import strategies as st

from electra_dist.config.load import load_config
from electra_dist.corpus.prepare.sbatch_environment import HANDED_ON, environment_of_submission, patterns_left_out
from electra_dist.errors import UserError

LARGE = load_config(Path(__file__).parents[3] / "configs" / "large_25pct_mask.yaml", ["run_dir=/shared/runs/large"])
REQUEUED = Submission(
    options=JobOptions(num_nodes=8, gpus_per_node=8),
    config=LARGE,
    command="electra-dist submit --config configs/large_25pct_mask.yaml --nodes 8",
    work_dir="/home/ada/electra",
    python="/home/ada/electra/.venv/bin/python",
)
CHAIN = JobOptions(
    num_nodes=8,
    gpus_per_node=8,
    partition="gpu",
    time_limit="24:00:00",
    chain=5,
    signal_ahead_s=300,
    container=Container(image="/images/electra dist.sqsh", runtime="pyxis", mounts=("/data:/data:ro",)),
    sbatch_options=("account=vision", "comment=it's ours", "hold"),
)
APPTAINER = dataclasses.replace(CHAIN, container=Container(image="electra.sif", runtime="apptainer"))


def with_options(**changes: Any) -> Submission:
    """Return the submission with other options of its jobs."""
    return dataclasses.replace(REQUEUED, options=dataclasses.replace(REQUEUED.options, **changes))


def in_folder(run_dir: str, options: JobOptions = REQUEUED.options, **changes: Any) -> Submission:
    """Return the submission of a run in another folder."""
    config = LARGE.model_copy(update={"run_dir": run_dir})
    return dataclasses.replace(REQUEUED, config=config, options=options, **changes)


def on_node(folder: Path, text: str) -> Submission:
    """Return a submission whose interpreter, `text` as a program, runs on this machine."""
    program = folder / "supervisor"
    program.write_text(text)
    program.chmod(0o755)
    return in_folder(str(folder), work_dir=str(folder), python=str(program))


def node_environment() -> dict[str, str]:
    """Return the environment variables that srun and job.sh give to the part of a node."""
    names = {"session": "job-7-0", "master_addr": "n1", "master_port": "10448"}
    return {**os.environ, **names, "SLURMD_NODENAME": "n1", "SLURM_NODEID": "0"}


SCRIPTS = {
    "requeued": REQUEUED,
    "chain_pyxis": dataclasses.replace(in_folder("/shared/it's a run", CHAIN), excluded_nodes=("n3", "n7")),
    "chain_apptainer": in_folder("/shared/it's a run", APPTAINER),
    "spare nodes": with_options(spare_nodes=2, accept_new_numerics=True),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_script_is_valid_bash_and_the_same_for_equal_submissions(name: str):
    text = batch_script(SCRIPTS[name])
    assert text == batch_script(dataclasses.replace(SCRIPTS[name]))
    assert text.endswith(JOB_FILE.read_text().removeprefix("#!/bin/bash"))
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


@pytest.mark.parametrize("name", [*SCRIPTS, "job.sh alone"])
def test_shellcheck_finds_nothing(name: str):
    """In a whole script, it also finds settings that job.sh does not read, and variables that nothing sets."""
    if not (shellcheck := shutil.which("shellcheck")):
        pytest.skip("shellcheck is not on PATH")
    text = batch_script(SCRIPTS[name]) if name in SCRIPTS else JOB_FILE.read_text()
    done = subprocess.run([shellcheck, "-"], input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_bash_reads_the_command_of_a_container_back_exactly():
    mounts = "/shared/it's a run,/home/ada/electra"
    apptainer = ["apptainer", "exec", "--nv", "--bind", mounts, "electra.sif"]
    options = [
        "--container-image=/images/electra dist.sqsh",
        f"--container-mounts={mounts},/data:/data:ro",
        "--container-workdir=/home/ada/electra",
    ]
    for name, expected in (("chain_apptainer", ("apptainer", apptainer)), ("chain_pyxis", ("pyxis", options))):
        array, words = expected
        text = batch_script(SCRIPTS[name]).partition("\nretry_s=")[0]
        shown = subprocess.run(
            ["bash", "-c", f"{text}\nprintf '%s\\0' \"${{{array}[@]}}\""], capture_output=True, text=True, check=True
        )
        assert shown.stdout.split("\0")[:-1] == words


SUPERVISOR = """#!/bin/bash
trap 'sleep 0.2; exit 75' {signal}
echo ready
for i in $(seq 100); do sleep 0.1; done
"""


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM])
def test_a_signal_to_the_nodes_shell_alone_reaches_the_supervisor(tmp_path: Path, number: signal.Signals):
    """Slurm signals only the shell where it tracks processes by cgroup."""
    submission = on_node(tmp_path, SUPERVISOR.format(signal=number.name))
    script = tmp_path / "script.sh"
    # The real supervisor, in Python, can handle a signal that its parent ignores. The bash script in its place cannot
    # trap such a signal, so the line that ignores them is removed.
    script.write_text(batch_script(submission).replace("trap '' USR1 USR2 TERM", ":"))
    with subprocess.Popen(["bash", str(script), "node"], env=node_environment(), stdout=subprocess.PIPE) as shell:
        assert shell.stdout and shell.stdout.readline() == b"ready\n"
        shell.send_signal(number)
        assert shell.wait(30) == 0  # a stop on purpose is no failure in the accounting
    assert (tmp_path / "slurm" / "job-7-0" / "exit-n1").read_text() == "75\n"


def test_the_nodes_shell_ends_with_a_supervisor_that_a_signal_has_killed(tmp_path: Path):
    submission = on_node(tmp_path, "#!/bin/bash\nkill -TERM $$\nsleep 60\n")
    script = tmp_path / "script.sh"
    script.write_text(batch_script(submission).replace("trap '' USR1 USR2 TERM", ":"))
    assert subprocess.run(["bash", str(script), "node"], env=node_environment(), timeout=30).returncode == 143
    assert (tmp_path / "slurm" / "job-7-0" / "exit-n1").read_text() == "143\n"


words = st.text(st.characters(codec="utf-8", exclude_characters="\0", exclude_categories=["Cs"]), min_size=1)


@given(run_dir=words, work_dir=words, python=words)
def test_bash_reads_every_quoted_value_of_the_settings_back_exactly(run_dir: str, work_dir: str, python: str):
    submission = in_folder(f"/r{run_dir}", work_dir="/w", python=python)
    with_setup = dataclasses.replace(submission.options, setup_file=work_dir)
    text = batch_script(dataclasses.replace(submission, options=with_setup))
    assignments = text[text.index("\nrun_dir=") : text.index("\nretry_s=")]
    shown = subprocess.run(
        ["bash", "-c", assignments + '\nprintf \'%s\\0\' "$run_dir" "$script" "$config" "$python" "$setup"'],
        capture_output=True,
        check=True,
        env={"LC_ALL": "C.UTF-8"},
    )
    files = [str(submission.script_file), str(submission.config_file)]
    assert shown.stdout.decode("utf-8").split("\0")[:-1] == [f"/r{run_dir}", *files, python, work_dir]


PATTERNS = patterns_left_out(["time"])
OF_THE_USER = ("HOME", "SBATCH_QOS", "RANKS", "MY_RANK", "Sessions")
NAMES = st.sampled_from([*(pattern.replace("*", "X") for pattern in PATTERNS), *HANDED_ON, *OF_THE_USER])
VALUES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=9)


@settings(max_examples=15, deadline=None)
@given(st.dictionaries(NAMES, VALUES, min_size=5))
def test_a_job_that_submits_another_one_unsets_what_python_leaves_out(environment: dict[str, str]):
    functions = batch_script(with_options(time_limit="4:00:00")).rpartition("\ncase ${1:-} in")[0]
    script = f"{functions}\nsbatch() {{ /usr/bin/env -0; }}\nsubmit_again"
    shown = subprocess.run(["/bin/bash", "-c", script], env=environment, capture_output=True, check=True)
    left = dict(entry.split("=", 1) for entry in shown.stdout.decode().split("\0") if entry)
    for name in ("PWD", "OLDPWD", "SHLVL", "_", "PATH", "PYTHONUNBUFFERED"):  # bash and the script set them
        left.pop(name, None)
    assert left == environment_of_submission(environment, ["time"])


@pytest.mark.parametrize("partition", ["a\\b", "two\nlines", "tab\there"])
def test_a_value_that_an_sbatch_line_cannot_carry_is_refused(partition: str):
    with pytest.raises(UserError, match="backslash"):
        batch_script(with_options(partition=partition))


@pytest.mark.parametrize("option", ["account=a\\nb", "account\\n#SBATCH --nodes=9", "account\\nx=1"])
def test_a_newline_in_an_option_of_the_user_is_refused(option: str):
    with pytest.raises(UserError, match="control character"):
        batch_script(with_options(sbatch_options=(option,)))


@pytest.mark.parametrize("option", ["nodes=3", "--exclude=n1", "signal=USR2@5"])
def test_an_sbatch_option_that_the_script_sets_itself_is_refused(option: str):
    with pytest.raises(UserError, match="sets `"):
        batch_script(with_options(sbatch_options=(option,)))


@pytest.mark.parametrize("options", [CHAIN, APPTAINER])
@pytest.mark.parametrize("folder", ["/shared/lr=1,2", "/shared/12:30"])
def test_a_folder_that_a_list_of_mounts_cannot_hold_is_refused(options: JobOptions, folder: str):
    with pytest.raises(UserError, match="no container can mount"):
        batch_script(in_folder(folder, options))
    batch_script(in_folder(folder, dataclasses.replace(options, container=None)))


def test_the_setup_file_is_read_on_every_node_before_the_supervisor_starts(tmp_path: Path):
    submission = on_node(tmp_path, '#!/bin/bash\necho "NCCL_SOCKET_IFNAME is $NCCL_SOCKET_IFNAME in $PWD"\n')
    (tmp_path / "set up.sh").write_text("export NCCL_SOCKET_IFNAME=ib0\n")
    options = dataclasses.replace(submission.options, setup_file=str(tmp_path / "set up.sh"))
    script = tmp_path / "script.sh"
    script.write_text(batch_script(dataclasses.replace(submission, options=options)))
    shown = subprocess.run(
        ["bash", str(script), "node"], env=node_environment(), cwd="/", capture_output=True, text=True, timeout=60
    )
    assert shown.stdout == f"NCCL_SOCKET_IFNAME is ib0 in {tmp_path}\n"


def test_all_memory_of_the_nodes_is_asked_for_unless_the_user_asks_for_less():
    assert "#SBATCH --mem=0\n" in batch_script(REQUEUED)
    assert "--mem=0" not in batch_script(with_options(sbatch_options=("mem-per-gpu=64G",)))


def test_a_run_folder_with_blanks_and_quotes_is_one_word_of_the_shell():
    run_dir = """/shared/it's a "run"; echo $HOME `id`"""
    text = batch_script(in_folder(run_dir))
    [line] = [line for line in text.splitlines() if line.startswith("run_dir=")]
    assert shlex.split(line) == [f"run_dir={run_dir}"]
