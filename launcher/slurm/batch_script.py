"""Compose the sbatch script of a run, as a pure function of the request: one file that a person can read and rerun.

Guarantee: equal requests give equal text. Every value is quoted: for the shell in the body of the script, for Slurm's
own parser in an #SBATCH line. A value that an #SBATCH line cannot hold is refused before anything is submitted.

How: the script runs on the first node of the job, outside any container. It
  1. records the job in RUN/slurm/jobs.jsonl (`launcher.slurm.job begin`);
  2. starts one task on each node (`srun`): `launcher.supervise`, which checks the node, then starts and watches its
     ranks;
  3. sends USR1 to the tasks when it receives USR1 (ahead of the time limit) or TERM: the ranks save a checkpoint and
     end with exit code 75;
  4. runs `launcher.slurm.job end`, which reads the run's ledger (its list of events) and the exit code of every node,
     and prints a verdict; then carries the verdict out (job_part.py): cancels the rest of the chain (jobs submitted
     together that run one after another), excludes nodes, requeues the job, or submits a replacement for a job that
     crashed. In a job with spare nodes, it starts the ranks again without a node that is down or unhealthy.

When a node crashes and is back within SlurmdTimeout, Slurm ends the job as FAILED without a requeue; step 4 then
continues the run. srun's own exit code is not used, because it is only the highest of all nodes' codes.

Limits: when the first node dies, this script dies with it. Slurm then requeues the job (`--requeue`) or starts the
next job of the chain.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Literal

from electra_dist.corpus.prepare.slurm_submission import directive, unset_lines
from electra_dist.errors import UserError
from launcher.slurm.environment_archive import staging_lines
from launcher.slurm.job_part import LEAST_JOB_S, RETRY_S, job_part
from launcher.slurm.sbatch import user_options

SCRIPT_ENDS_WITHIN_S = 120  # how long the tasks of other nodes may still save once a task has ended (srun --wait)


@dataclass(frozen=True, kw_only=True)
class Container:
    """Container image in which the ranks run, the runtime that starts it, and the folders that are mounted into it."""

    image: str  # as the runtime names it: a file or a registry reference
    runtime: Literal["pyxis", "apptainer"]  # pyxis: srun's --container-* options (enroot)
    mounts: tuple[str, ...] = ()  # SOURCE or SOURCE:TARGET; the run folder and the working folder are always mounted


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """The options of `electra-dist submit` that become part of the batch script, such as nodes and time limit."""

    num_nodes: int  # number of nodes on which ranks run
    spare_nodes: int = 0  # number of idle extra nodes of the job; they replace nodes that die or are unhealthy
    gpus_per_node: int  # also the number of ranks per node; 0: no GPUs, one CPU rank per node
    partition: str | None = None  # None: the cluster's default
    time_limit: str | None = None  # in the format of sbatch's --time; None: the partition's default
    chain: int = 0  # number of jobs that run one after another, without requeue; 0: one job that is requeued
    signal_ahead_s: int = 120  # how long before the time limit the ranks receive USR1; Slurm may send it 60 s earlier
    container: Container | None = None  # None: the ranks run without a container
    sbatch_options: tuple[str, ...] = ()  # further sbatch options, `name=value` or `name`, such as account=vision
    accept_new_numerics: bool = False  # also continue a run begun by a version with other random draws or rounding
    setup_file: str | None = None  # shell file that the script and every node source first, for example for modules
    stage_environment: bool = False  # whether every node first unpacks the run's Python packages on its own disk


@dataclass(frozen=True, kw_only=True)
class SubmitRequest(JobOptions):
    """All values from which the batch script is made, except the nodes to exclude.

    All paths are absolute and visible on every node.
    """

    run_dir: str
    script_file: str  # path of the batch script; every node runs the script once more, with the argument `node`
    config_file: str  # path of the config with all overrides applied
    work_dir: str  # working folder of the job, to which relative paths in the config refer
    storage_patience_s: int = 900  # seconds that a job waits for a full or unreachable run folder before it ends
    command: str  # the command line that the user typed, quoted in a comment of the script
    python: str  # Python interpreter of the ranks; a path inside the container if there is one
    environment_archive: str = ""  # tar file of the installed Python packages, for each node to unpack; "": none
    job_name: str


_RESERVED_OPTIONS = {  # sbatch options that the script sets itself or relies on
    *("job-name", "nodes", "ntasks-per-node", "gpus-per-node", "partition", "time", "signal", "requeue", "no-requeue"),
    *("dependency", "open-mode", "chdir", "output", "error", "exclude", "array", "parsable", "wrap", "export"),
    *("exclusive", "begin", "no-kill"),
}


def batch_script(request: SubmitRequest, excluded_nodes: tuple[str, ...] = ()) -> str:
    """Return the text of the batch script. Its jobs will not run on `excluded_nodes`. Pure.

    A UserError means that a value for an #SBATCH line has a backslash or a control character, that `sbatch_options`
    names an option that the script sets itself, or that a container cannot mount a folder.
    """
    options = _options(request, excluded_nodes)
    directives = "".join(f"#SBATCH {_option_text(name, value)}\n" for name, value in options)
    unset = unset_lines([name for name, _ in options])
    head = (
        "#!/bin/bash\n"
        f"# {_one_line(request.command)}\n"
        "# Written by the command above. `electra-dist status RUN` shows where the run stands and what to do next.\n"
    )
    return head + directives + _settings(request) + _node_part(request) + job_part(request.chain > 0, unset)


def _options(request: SubmitRequest, excluded_nodes: tuple[str, ...]) -> list[tuple[str, object]]:
    """Return the sbatch options of the job as pairs of name and value; a flag has the value ""."""
    further_options = user_options(request.sbatch_options, _RESERVED_OPTIONS)
    sets_memory = any(name in ("mem", "mem-per-cpu", "mem-per-gpu") for name, _ in further_options)
    options: list[tuple[str, object]] = [  # None leaves an option out.
        ("job-name", request.job_name),
        ("nodes", request.num_nodes + request.spare_nodes),
        ("no-kill", "" if request.spare_nodes else None),  # Slurm keeps the job when one of its nodes dies.
        ("ntasks-per-node", 1),
        ("gpus-per-node", request.gpus_per_node or None),
        ("exclusive", ""),
        ("mem", None if sets_memory else 0),  # 0: all memory of the node, where the default is a part of it
        ("partition", request.partition),
        ("time", request.time_limit),
        ("signal", f"B:USR1@{request.signal_ahead_s}"),
        ("no-requeue" if request.chain else "requeue", ""),
        ("dependency", "singleton"),
        ("chdir", request.work_dir),
        ("output", "/dev/null"),  # The script opens the log itself, once the run folder can be written.
        ("exclude", ",".join(excluded_nodes) or None),
        *further_options,
    ]
    return [(name, value) for name, value in options if value is not None]


def _option_text(name: str, value: object) -> str:
    """Return an sbatch option as `--name=value`, or as `--name` if the value is "", quoted for an #SBATCH line."""
    option = f"--{directive(name)}"
    return option if value == "" else f"{option}={directive(value)}"


def _settings(request: SubmitRequest) -> str:
    """Return the lines of the script that set its shell variables: paths, times in seconds, and numbers of nodes."""
    return f"""
run_dir={shlex.quote(request.run_dir)}
script={shlex.quote(request.script_file)}
config={shlex.quote(request.config_file)}
python={shlex.quote(request.python)}
work_dir={shlex.quote(request.work_dir)}
setup={shlex.quote(request.setup_file or "")}
patience_s={request.storage_patience_s} retry_s={RETRY_S} least_job_s={LEAST_JOB_S}
num_nodes={request.num_nodes} spare_nodes={request.spare_nodes}
export PYTHONUNBUFFERED=1
export PATH # Without an environment, bash has a default PATH that its programs do not see.
"""


@dataclass(frozen=True, kw_only=True)
class _ContainerText:
    """Shell text that makes the script's Python programs run in a container; all fields are "" without a container."""

    srun_options: str = ""  # for the `srun` that starts a task on every node; begins with a blank
    ranks_prefix: str = ""  # in front of `python -m launcher.supervise`, on every node; ends with a blank
    ours_prefix: str = ""  # in front of `python -m launcher.slurm.job`, on the first node; ends with a blank


def _container_text(request: SubmitRequest) -> _ContainerText:
    """Return the shell text, quoted, that makes the script's Python programs run in the container of `request`."""
    container = request.container
    if container is None:
        return _ContainerText()
    for folder in (request.run_dir, request.work_dir):
        if "," in folder or ":" in folder:  # They separate folders, and source and target, in a list of mounts.
            raise UserError(
                f"{folder}: no container can mount a folder whose path has a comma or a colon; rename it, or leave "
                f"out --container"
            )
    mounts = ",".join((request.run_dir, request.work_dir, *container.mounts))
    if container.runtime == "apptainer":
        prefix = shlex.join(["apptainer", "exec", "--nv", "--bind", mounts, container.image]) + " "
        # `apptainer exec` in front of each command starts the container.
        return _ContainerText(ranks_prefix=prefix, ours_prefix=prefix)
    # With pyxis, options of srun start the container. srun starts launcher.supervise in any case. The script runs
    # launcher.slurm.job directly, so that gets an srun of its own for one task on the first node.
    pyxis_options = [
        f"--container-image={container.image}",
        f"--container-mounts={mounts}",
        f"--container-workdir={request.work_dir}",
    ]
    srun_options = " " + shlex.join(pyxis_options)
    return _ContainerText(
        srun_options=srun_options,
        ours_prefix=f'srun --export=ALL --overlap --nodes=1 --ntasks=1 --nodelist="$SLURMD_NODENAME"{srun_options} ',
    )


def _node_part(request: SubmitRequest) -> str:
    """Return the lines of the script that every node runs, and the shell functions `start_step` and `ours`.

    Slurm runs the script on the first node, without an argument. There, `start_step` calls srun, which runs the script
    once more on every node, with the argument `node`. On each node, the script then starts the supervisor, passes
    signals on to it, and writes its exit code to a file in the folder `$state`. `ours` runs
    `python -m launcher.slurm.job` on the first node, in the container if there is one.

    `$state` is RUN/slurm/job-ID-RESTART, where RESTART counts the requeues of the job. After spare nodes have replaced
    others N times, -N is appended. So each start of the ranks has a new folder.
    """
    container = _container_text(request)
    staging = staging_lines(request.environment_archive) if request.environment_archive else ""
    srun_options = f"--kill-on-bad-exit=0 --wait={SCRIPT_ENDS_WITHIN_S} --cpu-bind=none{container.srun_options}"
    return f"""
if [ "${{1:-}}" = node ]; then # srun runs this block once on each node; the lines after it run once per job.
    # Where Slurm tracks processes by cgroup, it signals this shell and none of its children: pass the signals on.
    supervisor= received=
    pass_to_supervisor() {{ received=$1; [ -z "$supervisor" ] || kill -"$1" "$supervisor"; }}
    for signal in USR1 USR2 TERM; do trap "pass_to_supervisor $signal" "$signal"; done{staging}
    until cd "$work_dir" 2>/dev/null || [ "$SECONDS" -ge "$patience_s" ]; do sleep 2; done
    [ -z "$setup" ] || . "$setup"
    (   # An ignored signal stays ignored across exec: only processes with handlers, supervisor and ranks, act on it.
        trap '' USR1 USR2 TERM
        exec {container.ranks_prefix}{_supervise_command(request)}
    ) &
    supervisor=$!
    [ -z "$received" ] || kill -"$received" "$supervisor" # It came before the supervisor's number was known.
    wait "$supervisor"
    while kill -0 "$supervisor" 2>/dev/null; do wait "$supervisor"; done # A trap ends a wait early.
    wait "$supervisor" # The shell keeps the exit code of the supervisor that has ended.
    code=$? SECONDS=0
    until {{ mkdir -p "$state" && echo "$code" >"$state/exit-$SLURMD_NODENAME"; }} 2>/dev/null ||
        [ "$SECONDS" -ge "$patience_s" ]; do
        sleep 2
    done
    [ "$code" != 75 ] || code=0 # A stop on purpose is no failure in Slurm's accounting.
    exit "$code"
fi
ours() {{ {container.ours_prefix}"$python" -m launcher.slurm.job "$@"; }}
start_step() {{ # One task on each of $nodes. They are fewer than the nodes of the job if it has spare ones.
    # --export: srun would obey the one of sbatch, which a site may have set to NONE.
    srun --export=ALL --nodes="$num_nodes" --ntasks="$num_nodes" --nodelist="$nodes" \
        {srun_options} bash "$script" node &
}}
"""


def _supervise_command(request: SubmitRequest) -> str:
    """Return the shell command that starts the supervisor of one node (launcher.supervise), which starts its ranks."""
    ranks = max(1, request.gpus_per_node)
    numerics_option = " --accept-new-numerics" if request.accept_new_numerics else ""
    return (
        '"$python" -m launcher.supervise --config "$config" --node-rank "$SLURM_NODEID" \\\n'
        f"            --nodes {request.num_nodes} --gpus-per-node {ranks} "
        '--master-addr "$master_addr" --master-port "$master_port" \\\n'
        f'            --session "${{state##*/}}" --preflight{numerics_option}'
    )


def _one_line(text: str) -> str:
    """Replace each sequence of white space, line breaks included, by one space."""
    return " ".join(text.split())
