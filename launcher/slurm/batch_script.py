"""Write the sbatch script of a run, as a pure function of the request: one file that a person can read and rerun.

Guarantee: equal requests give equal text. Every value is quoted for its place: for the shell in the body, for Slurm's
own parser in an #SBATCH line. A value that an #SBATCH line cannot hold is refused before anything is submitted.

How: the script runs on the first node of the job, outside any container. It
  1. records the job in RUN/slurm/jobs.jsonl (`launcher.slurm.job begin`);
  2. starts one task on each node (`srun`): `launcher.supervise`, which checks the node, then starts and watches its
     ranks;
  3. passes USR1 (ahead of the time limit) and TERM on as USR1: the ranks save and end with 75;
  4. runs `launcher.slurm.job end`, which reads the ledger and the exit code of every node and prints a verdict, and
     carries the verdict out: it cancels the rest of the chain, excludes nodes, requeues the job, or submits a
     replacement for a job that crashed. (A chain is several jobs that are submitted together and run one after
     another.)

When a node crashes and is back within SlurmdTimeout, Slurm ends the job as FAILED without a requeue; step 4 then
continues the run. srun's own exit code is not used, because it is only the highest of all nodes' codes.

Limits: when the first node dies, this script dies with it. Slurm then requeues the job (`--requeue`) or starts the
next job of the chain.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Literal

from launcher.slurm.environment_archive import staging_lines
from launcher.slurm.sbatch import directive, user_options

SCRIPT_ENDS_WITHIN_S = 120  # how long the tasks of other nodes may still save after the first one has ended


@dataclass(frozen=True, kw_only=True)
class Container:
    """Container image in which the ranks run, the runtime that starts it, and the folders that are mounted into it."""

    image: str  # as the runtime names it: a file or a registry reference
    runtime: Literal["pyxis", "apptainer"]  # pyxis: srun's --container-* options (enroot)
    mounts: tuple[str, ...] = ()  # SOURCE or SOURCE:TARGET; the run folder and the working folder are always mounted


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """The options of `electra-dist submit` that become part of the batch script, such as nodes and time limit."""

    num_nodes: int
    gpus_per_node: int  # also the number of ranks per node; 0: no GPUs, one CPU rank per node
    partition: str | None = None  # None: the cluster's default
    time_limit: str | None = None  # in the format of sbatch's --time; None: the partition's default
    chain: int = 0  # number of jobs that run one after another, without requeue; 0: one job that is requeued
    signal_ahead_s: int = 120  # how long before the time limit the ranks receive USR1; Slurm may send it 60 s earlier
    container: Container | None = None  # None: the ranks run without a container
    sbatch_options: tuple[str, ...] = ()  # further sbatch options, `name=value` or `name`: account=vision
    accept_new_numerics: bool = False  # the run may continue with other draws than the version that began it had
    stage_environment: bool = False  # every node copies the Python packages to its own disk before the ranks start


@dataclass(frozen=True, kw_only=True)
class SubmitRequest(JobOptions):
    """Everything on which the text of the batch script depends, except the nodes to exclude.

    All paths are absolute and visible on every node.
    """

    run_dir: str
    script_file: str  # where the script will lie; every node runs it again with the argument `node`
    config_file: str  # the resolved config
    work_dir: str  # base of the relative paths in the config
    command: str  # the command line that the user typed, quoted in a comment of the script
    python: str  # Python interpreter of the ranks; a path inside the container if there is one
    environment_archive: str = ""  # the packages of `python` in one file; "": the ranks import from where they are
    job_name: str


_RESERVED_OPTIONS = {  # sbatch options that the script sets itself or relies on
    *("job-name", "nodes", "ntasks-per-node", "gpus-per-node", "partition", "time", "signal", "requeue", "no-requeue"),
    *("dependency", "open-mode", "chdir", "output", "error", "exclude", "array", "parsable", "wrap", "export"),
}


def batch_script(request: SubmitRequest, excluded_nodes: tuple[str, ...] = ()) -> str:
    """Return the text of the batch script. Pure.

    Args:
        request: what to run, where and how.
        excluded_nodes: nodes that Slurm must not use, because a fault of them was recorded recently (a strike).

    Raises:
        UserError: a value has a backslash or a control character, which an #SBATCH line cannot hold, or
            `sbatch_options` names an option that the script sets itself.
    """
    directives = "".join(f"#SBATCH {line}\n" for line in _directives(request, excluded_nodes))
    head = (
        "#!/bin/bash\n"
        f"# {_one_line(request.command)}\n"
        "# Written by the command above. `electra-dist status RUN` shows where the run stands and what to do next.\n"
    )
    return head + directives + _settings(request) + _node_part(request) + _job_part(request)


def _directives(request: SubmitRequest, excluded_nodes: tuple[str, ...]) -> list[str]:
    """Return the sbatch options of the job, one `--name` or `--name=value` for each #SBATCH line.

    Args:
        request: what to run, where and how.
        excluded_nodes: names of nodes that Slurm must not use.

    Raises:
        UserError: a value cannot be written into an #SBATCH line, or the user set an option that the script sets
            itself.
    """
    log_file = f"{request.run_dir}/slurm/job-".replace("%", "%%") + "%j.log"  # sbatch replaces %j by the job id
    # Pairs of name and value. None leaves the option out; "" makes it a flag, an option without a value.
    options: list[tuple[str, object]] = [
        ("job-name", request.job_name),
        ("nodes", request.num_nodes),
        ("ntasks-per-node", 1),
        ("gpus-per-node", request.gpus_per_node or None),
        ("exclusive", ""),
        ("partition", request.partition),
        ("time", request.time_limit),
        ("signal", f"B:USR1@{request.signal_ahead_s}"),
        ("no-requeue" if request.chain else "requeue", ""),
        ("dependency", "singleton"),
        ("open-mode", "append"),
        ("chdir", request.work_dir),
        ("output", log_file),
        ("exclude", ",".join(excluded_nodes) or None),
        *user_options(request.sbatch_options, _RESERVED_OPTIONS),
    ]
    directives = []
    for name, value in options:
        if value is None:
            continue
        option = f"--{directive(name)}"
        directives.append(option if value == "" else f"{option}={directive(value)}")
    return directives


def _settings(request: SubmitRequest) -> str:
    """Return the part of the script that sets shell variables: run folder, script, config, Python, state folder.

    Each node writes its exit code into the state folder, RUN/slurm/job-ID-RESTART. RESTART is the number of requeues,
    so a job that Slurm requeues has a new folder each time.
    """
    return f"""
run_dir={shlex.quote(request.run_dir)}
script={shlex.quote(request.script_file)}
config={shlex.quote(request.config_file)}
python={shlex.quote(request.python)}
export state=$run_dir/slurm/job-$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}
export PYTHONUNBUFFERED=1
"""


@dataclass(frozen=True, kw_only=True)
class _ContainerText:
    """Pieces of shell text that make the script's Python programs run in the container; empty without a container.

    The batch script itself runs outside the container, on the first node. It starts two kinds of programs in it:
    `launcher.supervise` on every node, which starts the ranks, and `launcher.slurm.job` on the first node, which
    records the job and decides what follows its end.
    """

    srun_options: str = ""  # for the `srun` that starts a task on every node; begins with a blank
    ranks_prefix: str = ""  # in front of `python -m launcher.supervise`, on every node; ends with a blank
    ours_prefix: str = ""  # in front of `python -m launcher.slurm.job`, on the first node; ends with a blank


def _container_text(request: SubmitRequest) -> _ContainerText:
    """Return the pieces of shell text that run the script's Python programs in the container, quoted for the shell.

    Two programs run in the container: `launcher.supervise` (starts and watches the ranks) on every node, and
    `launcher.slurm.job` (records the begin and the end of the job) on the first node. With apptainer, `apptainer exec`
    in front of each command starts the container.

    With pyxis, options of srun start it. `launcher.supervise` is started by srun in any case, so the options are added
    to that srun. The script runs `launcher.slurm.job` directly, so a separate srun for one task on the first node is
    put in front of it. The run folder and the working folder are always mounted.
    """
    container = request.container
    if container is None:
        return _ContainerText()
    mounts = ",".join((request.run_dir, request.work_dir, *container.mounts))
    if container.runtime == "apptainer":
        prefix = shlex.join(["apptainer", "exec", "--nv", "--bind", mounts, container.image]) + " "
        return _ContainerText(ranks_prefix=prefix, ours_prefix=prefix)
    pyxis_options = [
        f"--container-image={container.image}",
        f"--container-mounts={mounts}",
        f"--container-workdir={request.work_dir}",
    ]
    srun_options = " " + shlex.join(pyxis_options)
    return _ContainerText(
        srun_options=srun_options,
        ours_prefix=f'srun --overlap --nodes=1 --ntasks=1 --nodelist="$SLURMD_NODENAME"{srun_options} ',
    )


def _node_part(request: SubmitRequest) -> str:
    """Return the part of the script that every node runs, followed by the definitions of two shell functions.

    Slurm runs the script on the first node, without an argument. There, the function `start_step` calls srun, which
    runs the script once more on every node, with the argument `node`. With this argument, the script only starts the
    node's supervisor, which starts the ranks, passes signals on to it, and writes its exit code into the state folder.

    The function `ours` runs `python -m launcher.slurm.job` with its arguments on the first node, in the container if
    there is one. The part of the script that runs once per job calls both functions.
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
    (   # An ignored signal stays ignored across exec: only processes with handlers, supervisor and ranks, act on it.
        trap '' USR1 USR2 TERM
        exec {container.ranks_prefix}{_supervise_command(request)}
    ) &
    supervisor=$!
    [ -z "$received" ] || kill -"$received" "$supervisor" # It came before the supervisor's number was known.
    wait "$supervisor"
    while kill -0 "$supervisor" 2>/dev/null; do wait "$supervisor"; done # A trap ends a wait early.
    wait "$supervisor" # The shell keeps the exit code of the supervisor that has ended.
    code=$?
    echo "$code" >"$state/exit-$SLURMD_NODENAME"
    exit "$code"
fi
ours() {{ {container.ours_prefix}"$python" -m launcher.slurm.job "$@"; }}
start_step() {{ srun {srun_options} bash "$script" node & }}
"""


def _supervise_command(request: SubmitRequest) -> str:
    """Return the shell command that starts and watches the ranks of one node (launcher.supervise)."""
    ranks = max(1, request.gpus_per_node)
    numerics_option = " --accept-new-numerics" if request.accept_new_numerics else ""
    return (
        '"$python" -m launcher.supervise --config "$config" --node-rank "$SLURM_NODEID" \\\n'
        f"            --nodes {request.num_nodes} --gpus-per-node {ranks} "
        '--master-addr "$master_addr" --master-port "$master_port" \\\n'
        f'            --session "${{state##*/}}" --preflight{numerics_option}'
    )


def _job_part(request: SubmitRequest) -> str:
    """Return the part of the script that runs once per job, on its first node.

    It records the begin of the job with `launcher.slurm.job begin`, starts a task on each node, which starts the
    node's ranks, and waits until all tasks have ended. Then it carries out what `launcher.slurm.job end` decides.

    If the decision is that the run goes on, the text depends on the request. In a chain (several jobs that are
    submitted together and run one after another), the next job already waits in the queue. So nothing is done after a
    stop on purpose, such as at the time limit, or because of an unhealthy node. After a crash, the script is submitted
    once more, to replace the lost job. Without a chain, the job is requeued in all these cases.
    """
    if request.chain:
        on_stop = ":"  # the shell's command that does nothing
        on_crash = 'sbatch "$script"'
        requeued_job = ""
    else:
        on_stop = 'scontrol requeue "$SLURM_JOB_ID"'
        on_crash = on_stop
        requeued_job = '"$SLURM_JOB_ID"'
    return _JOB_PART.replace("@SELF@", requeued_job).replace("@NEXT@", on_stop).replace("@AGAIN@", on_crash)


def _one_line(text: str) -> str:
    """Return a text as one line: each sequence of white space, line breaks included, is replaced by one space."""
    return " ".join(text.split())


_JOB_PART = r"""
told= step=
pass_on() { told=$1; [ -z "$step" ] || kill -USR1 "$step"; } # srun forwards the signal to the task on every node.
trap 'pass_on USR1' USR1
trap 'pass_on TERM' TERM

mkdir -p "$state"
echo "job $SLURM_JOB_ID, start ${SLURM_RESTART_COUNT:-0}, on $SLURM_JOB_NODELIST"
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd ,)
master_addr=${nodes%%,*}
# The supervisors use 64 ports from this one on; jobs with consecutive numbers use different ports.
master_port=$((10000 + (SLURM_JOB_ID + ${SLURM_RESTART_COUNT:-0}) % 300 * 64))
export master_addr master_port
ask() { SLURM_TIME_FORMAT=%s squeue --noheader --jobs="$SLURM_JOB_ID" --Format="$1:20" | tr -d ' '; }
export SLURM_JOB_END_TIME=${SLURM_JOB_END_TIME:-$(ask EndTime)}
queued=EligibleTime                                      # For a link of a chain: when the link before it ended.
[ "${SLURM_RESTART_COUNT:-0}" = 0 ] || queued=SubmitTime # For a requeued job: the time of the requeue.
ours begin "$run_dir" --job "$SLURM_JOB_ID" --restart "${SLURM_RESTART_COUNT:-0}" --nodes "$nodes" \
    --submitted "$(ask "$queued")" --started "$(ask StartTime)"
if [ "$told" != TERM ]; then # An early USR1 may be dropped: the ranks know when the job ends and save in time.
    start_step
    step=$!
    wait "$step"
    while kill -0 "$step" 2>/dev/null; do wait "$step"; done # A trap ends a wait early.
    step=
fi

pending() { squeue --noheader --user="$(id -un)" --name="$SLURM_JOB_NAME" --states=PENDING --format=%A; }
IFS='|' read -r action code exclude why <<<"$(ours end "$run_dir" --config "$config" --job "$SLURM_JOB_ID" \
    --restart "${SLURM_RESTART_COUNT:-0}" --state "$state" --told "$told" --end-time "$SLURM_JOB_END_TIME")"
echo "${action:-no verdict}: ${why:-launcher.slurm.job could not be run}"
case $action in
done | stop) for job in $(pending); do scancel "$job"; done ;;
next) @NEXT@ ;;
again) @AGAIN@ ;;
esac
if [ -n "$exclude" ]; then # Jobs that wait, and this one if it was just requeued, must not use these nodes.
    for job in $(pending) @SELF@; do scontrol update JobId="$job" ExcNodeList="$exclude"; done
fi
exit "${code:-1}"
"""
