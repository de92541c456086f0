"""The sbatch script of a run, as a pure function of what was asked for: one file that a person can read and rerun.

Guarantee: equal requests give equal text. Every value is quoted for where it stands: for the shell in the body, for
Slurm's own parser in an #SBATCH line; what that parser cannot carry is refused before anything is submitted.

What the script does, on the first node of the job, outside any container:
  1. notes the job in RUN/slurm/jobs.jsonl (`launcher.slurm.job begin`),
  2. starts one task on each node (`srun`): `launcher.supervise`, which checks that node, then starts and watches its
     ranks,
  3. passes USR1 (ahead of the time limit) and TERM on as USR1: the ranks save and end with 75,
  4. asks `launcher.slurm.job end` for a verdict, which reads the ledger and the exit code of every node, and does
     what it says: cancel what is left of the chain, leave out a node, requeue, or replace a link that crashed.

Slurm ends a job as FAILED, without a requeue, when a node crashes and is back within SlurmdTimeout: step 4 is what
brings such a run back. srun's own exit code is not looked at: it is the highest of all nodes' codes.

Where it stops: when the first node dies, this script dies with it; Slurm then requeues the job (`--requeue`) or goes
on with the next link of the chain.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Literal

from electra_dist.errors import UserError

SCRIPT_ENDS_WITHIN_S = 120  # how long tasks of other nodes may still save after the first has ended


@dataclass(frozen=True, kw_only=True)
class Container:
    """An image that the ranks run in."""

    image: str
    runtime: Literal["pyxis", "apptainer"]  # pyxis: srun's --container-* options (enroot)
    mounts: tuple[str, ...] = ()  # SOURCE or SOURCE:TARGET, beside the run's and the working folder


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """The options of a submission that become part of the batch script."""

    num_nodes: int
    gpus_per_node: int  # also ranks per node; 0: a machine without GPUs, one rank per node
    partition: str | None = None
    time_limit: str | None = None  # as sbatch's --time
    chain: int = 0  # jobs one after another, none requeued; 0: one job that is requeued
    signal_ahead_s: int = 120  # seconds before the limit at which the ranks are told; Slurm may be 60 s early
    container: Container | None = None
    sbatch_options: tuple[str, ...] = ()  # more `name=value` or `name`, for example account=vision


@dataclass(frozen=True, kw_only=True)
class SubmitRequest(JobOptions):
    """What is submitted. Paths are absolute and seen by every node."""

    run_dir: str
    script_file: str  # where the text will lie: the nodes run it again, with `node` as its argument
    config_file: str  # resolved config
    work_dir: str  # what relative paths of the config are relative to
    command: str  # what a person typed, for the reader of the script
    python: str  # interpreter of the ranks; inside the container if there is one
    job_name: str


_OURS = {
    *("job-name", "nodes", "ntasks-per-node", "gpus-per-node", "partition", "time", "signal", "requeue", "no-requeue"),
    *("dependency", "open-mode", "chdir", "output", "error", "exclude", "array", "parsable", "wrap", "export"),
}


def batch_script(request: SubmitRequest, excluded_nodes: tuple[str, ...] = ()) -> str:
    """The text of the script.

    Raises:
        UserError: a value that an #SBATCH line cannot carry, or an option that the script sets itself.
    """
    directives = "".join(f"#SBATCH {line}\n" for line in _directives(request, excluded_nodes))
    return (
        "#!/bin/bash\n"
        f"# {_one_line(request.command)}\n"
        "# Written by the command above; `electra-dist status` of the run folder says where the run stands.\n"
        f"{directives}{_settings(request)}{_node_part(request)}{_job_part(request)}"
    )


def _directives(request: SubmitRequest, excluded_nodes: tuple[str, ...]) -> list[str]:
    log = f"{request.run_dir}/slurm/job-".replace("%", "%%") + "%j.log"
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
        ("output", log),
        ("exclude", ",".join(excluded_nodes) or None),
    ]
    for option in request.sbatch_options:
        name, equals, value = option.lstrip("-").partition("=")
        if not name or name in _OURS:
            raise UserError(f"--sbatch {option}: the script sets `{name}` itself; leave it out or use its own option")
        options.append((name, value if equals else ""))
    given = [(name, value) for name, value in options if value is not None]
    return [f"--{name}" if value == "" else f"--{name}={_directive(value)}" for name, value in given]


def _directive(value: object) -> str:
    """Quoted as Slurm reads it: like a shell, but a backslash is never literal."""
    text = str(value)
    if "\\" in text or not text.isprintable():
        raise UserError(f"{text!r}: an #SBATCH line can carry no backslash and no control character; choose another")
    return shlex.quote(text)


def _settings(request: SubmitRequest) -> str:
    return f"""
run_dir={shlex.quote(request.run_dir)}
script={shlex.quote(request.script_file)}
config={shlex.quote(request.config_file)}
python={shlex.quote(request.python)}
export state=$run_dir/slurm/job-$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}
export PYTHONUNBUFFERED=1
"""


def _node_part(request: SubmitRequest) -> str:
    """What each node's task runs, and the two ways into the container: for the ranks, and for a command of ours."""
    srun, prefix, ours = "", "", ""
    if request.container is not None:
        image, mounts = (
            request.container.image,
            ",".join((request.run_dir, request.work_dir, *request.container.mounts)),
        )
        if request.container.runtime == "pyxis":
            flags = [f"--container-image={image}", f"--container-mounts={mounts}"]
            srun = " " + shlex.join([*flags, f"--container-workdir={request.work_dir}"])
            ours = f'srun --overlap --nodes=1 --ntasks=1 --nodelist="$SLURMD_NODENAME"{srun} '
        else:
            prefix = ours = shlex.join(["apptainer", "exec", "--nv", "--bind", mounts, image]) + " "
    return f"""
if [ "${{1:-}}" = node ]; then # one task per node; the lines below it are the job's own
    (   # Ignored signals stay ignored across exec: only the supervisor and the ranks, with handlers, act on them.
        trap '' USR1 USR2 TERM
        exec {prefix}{_start_ranks(request)}
    ) &
    supervisor=$!
    # Where Slurm tracks processes by cgroup it signals this shell and none of its children.
    for signal in USR1 USR2 TERM; do trap "kill -$signal $supervisor" "$signal"; done
    wait "$supervisor"
    code=$?
    while [[ " 138 140 143 " = *" $code "* ]]; do # a trap has ended the wait, not the supervisor
        wait "$supervisor"
        code=$?
    done
    echo "$code" >"$state/exit-$SLURMD_NODENAME"
    exit "$code"
fi
ours() {{ {ours}"$python" -m launcher.slurm.job "$@"; }}
start_step() {{ srun --kill-on-bad-exit=0 --wait={SCRIPT_ENDS_WITHIN_S} --cpu-bind=none{srun} bash "$script" node & }}
"""


def _start_ranks(request: SubmitRequest) -> str:
    """What starts and watches the ranks of one node, and ends with an exit code of errors.py."""
    ranks = max(1, request.gpus_per_node)
    return (
        '"$python" -m launcher.supervise --config "$config" --node-rank "$SLURM_NODEID" \\\n'
        f"            --nodes {request.num_nodes} --gpus-per-node {ranks} "
        '--master-addr "$master_addr" --master-port "$master_port" \\\n'
        '            --session "${state##*/}" --preflight'
    )


def _job_part(request: SubmitRequest) -> str:
    """A stop on purpose is followed by the next link, a crash by a link in its place; without a chain by a requeue."""
    requeue = 'scontrol requeue "$SLURM_JOB_ID"'
    on_stop, on_crash = (":", 'sbatch "$script"') if request.chain else (requeue, requeue)
    itself = "" if request.chain else '"$SLURM_JOB_ID"'
    return _JOB_PART.replace("@SELF@", itself).replace("@NEXT@", on_stop).replace("@AGAIN@", on_crash)


def _one_line(text: str) -> str:
    return " ".join(text.split())


_JOB_PART = r"""
told= step=
pass_on() { told=$1; [ -z "$step" ] || kill -USR1 "$step"; } # srun sends it to every rank
trap 'pass_on USR1' USR1
trap 'pass_on TERM' TERM

mkdir -p "$state"
echo "job $SLURM_JOB_ID, start ${SLURM_RESTART_COUNT:-0}, on $SLURM_JOB_NODELIST"
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd ,)
master_addr=${nodes%%,*}
master_port=$((10000 + (SLURM_JOB_ID + ${SLURM_RESTART_COUNT:-0}) % 300 * 64)) # the first of 64
export master_addr master_port
ask() { SLURM_TIME_FORMAT=%s squeue --noheader --jobs="$SLURM_JOB_ID" --Format="$1:20" | tr -d ' '; }
export SLURM_JOB_END_TIME=${SLURM_JOB_END_TIME:-$(ask EndTime)}
queued=EligibleTime                                      # of a link: when the one before had ended
[ "${SLURM_RESTART_COUNT:-0}" = 0 ] || queued=SubmitTime # Slurm's name for the time of a requeue
ours begin "$run_dir" --job "$SLURM_JOB_ID" --restart "${SLURM_RESTART_COUNT:-0}" --nodes "$nodes" \
    --submitted "$(ask "$queued")" --started "$(ask StartTime)"
if [ "$told" != TERM ]; then # a USR1 that comes this early the ranks make up for: they know the job's end themselves
    start_step
    step=$!
    wait "$step"
    while kill -0 "$step" 2>/dev/null; do wait "$step"; done # a trap ends a wait early
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
if [ -n "$exclude" ]; then # also of this job, if it was just requeued
    for job in $(pending) @SELF@; do scontrol update JobId="$job" ExcNodeList="$exclude"; done
fi
exit "${code:-1}"
"""
