"""Compose the part of the batch script that runs once per job, on the job's first node.

Guarantee: if the run folder is full or cannot be reached when a job begins or ends, the job waits for up to
`cluster.storage_patience_s`. After that it ends, and a job that begins ten minutes later continues the run; no job of
a chain is lost. A Slurm command that fails is repeated: as long as Slurm's controller does not answer, and for two
minutes otherwise. If it still fails, the job that waits in the queue (the next job of a chain, or the standby job)
continues the run.

How: the programs `launcher.slurm.job begin` and `launcher.slurm.job end` record the job and decide how the run goes
on. The script carries the decision out.

Cost: a job that crashes or gets no verdict holds its nodes for at least 20 s, so that a fault of the site does not use
up a chain within seconds.
"""

from __future__ import annotations

RETRY_S = 120  # how long a failed Slurm command is repeated while Slurm's controller answers
LEAST_JOB_S = 20  # shortest time between the start of a job that crashes or gets no verdict, and its end
LATER_S = 600  # how much later the run goes on after its storage stayed away, as in train/restart_pause.py


def job_part(chain: bool, unset: str) -> str:
    """Return the part of the batch script that runs once per job, as shell text.

    In a `chain` (jobs submitted together that run one after another), the next job already waits in the queue. So the
    script does nothing after a stop on purpose, such as at the time limit, or after a node was found unhealthy. After
    a crash or an outage of storage, it submits itself once more, to replace this job. Without a chain, it requeues the
    job in all these cases. If that fails, a standby job, which waits in the queue until this job has ended, continues
    the run. `unset` are shell lines that unset variables which a submitted job must not inherit (`unset_lines`).
    """
    # Each placeholder in _JOB_PART is replaced by shell commands.
    if chain:
        pieces = {
            "@STANDBY@": ":  # The next job of the chain takes over.",
            "@NEXT@": ":",
            "@AGAIN@": 'retry submit_again || echo "no replacement was submitted: the next link takes over"',
            "@LATER@": f'retry submit_again --begin=now+{LATER_S} || echo "no replacement was submitted"',
            "@LEAVE@": ":",
            "@SELF@": "",
            "@DIED@": 'scancel "$SLURM_JOB_ID"',
        }
    else:
        requeue = (
            'retry scontrol requeue "$SLURM_JOB_ID" || echo "the job cannot be requeued: the standby job takes over"'
        )
        pieces = {
            "@STANDBY@": _STANDBY,
            "@NEXT@": requeue,
            "@AGAIN@": requeue,
            "@LATER@": f'{requeue}\n    retry scontrol update JobId="$SLURM_JOB_ID" StartTime=now+{LATER_S}',
            "@LEAVE@": '[ "$told" != TERM ] || cancel_standby',
            "@SELF@": '"$SLURM_JOB_ID"',
            "@DIED@": 'scontrol requeue "$SLURM_JOB_ID" || scancel "$SLURM_JOB_ID"',
        }
    text = _JOB_PART
    for placeholder, commands in pieces.items():
        text = text.replace(placeholder, commands)
    return text.replace("@LATER_S@", str(LATER_S)).replace("@UNSET@", unset)


_STANDBY = r"""if waiting=$(list_pending) && [ -z "$waiting" ]; then # This is the standby job: it needs one itself.
        submit_again || echo "no standby job was submitted: if this job cannot be requeued, submit the run again"
    fi"""

_JOB_PART = r"""
if [ "${1:-}" = watch ]; then # Slurm keeps a job with spare nodes even if this script has died with its node, $2.
    while sleep 30; do
        case $(sinfo --noheader --nodes="$2" --format=%T) in *down* | *fail*) @DIED@ ;; esac
    done
fi

told= step= watch=
pass_on() { told=$1; [ -z "$step" ] || kill -USR1 "$step"; } # srun forwards the signal to the task on every node.
trap 'pass_on USR1' USR1
trap 'pass_on TERM' TERM

retry() { # Repeats a command of Slurm until it succeeds: as long as the controller is away, otherwise for $retry_s.
    local pause=1 end=$((SECONDS + retry_s))
    until "$@"; do
        scontrol ping 2>/dev/null | grep -q UP || end=$((SECONDS + retry_s))
        [ "$SECONDS" -lt "$end" ] || return 1
        sleep "$pause"
        pause=$((pause < 30 ? 2 * pause : 30))
    done
}
submit_again() ( # A subshell, because this job still needs what its successor must not believe.
    @UNSET@
    sbatch "$@" "$0"
)
list_pending() { squeue --noheader --user="$(id -un)" --name="$SLURM_JOB_NAME" --states=PENDING --format=%A; }
pending() { retry list_pending; }
cancel_pending() { for job in $(pending); do retry scancel "$job"; done; }
cancel_standby() { # It must not continue a cancelled run. This job may wait itself, if Slurm has preempted it.
    for job in $(pending); do [ "$job" = "$SLURM_JOB_ID" ] || retry scancel "$job"; done
}
keep_distance() { [ "$SECONDS" -ge "$least_job_s" ] || sleep $((least_job_s - SECONDS)); }
ask() { SLURM_TIME_FORMAT=%s squeue --noheader --jobs="$SLURM_JOB_ID" --Format="$1:20" | tr -d ' '; }

choose_nodes() { # Sets nodes (the first $num_nodes) and watcher (the last) of those in order; fails if too few are.
    local down up
    down=$(retry sinfo --noheader --Node --nodes="$SLURM_JOB_NODELIST" --format='%N %T' |
        awk '$2 ~ /down|drain|fail|boot|power|unknown|[*]$/ { print $1 }')
    up=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | grep -vxF "$(printf '%s\n' "" $down ${exclude//,/ })")
    nodes=$(head -n "$num_nodes" <<<"$up" | paste -sd ,) watcher=$(tail -n 1 <<<"$up")
    [ "$(grep -c . <<<"$up")" -ge "$num_nodes" ]
}
run_job() { # Runs the ranks, again and on other nodes as long as a node fails and the job has a spare one.
    local before=
    # Not from the environment: Slurm before 23.02 sets no such variable, so it may be that of an earlier job.
    SLURM_JOB_END_TIME=$(ask EndTime)
    export SLURM_JOB_END_TIME
    nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n "$num_nodes" | paste -sd ,)
    watcher=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | tail -n 1)
    while :; do
        [ "$spare_nodes" = 0 ] || start_watch
        run_ranks
        case $action-$code in next-69 | again-*) ;; *) break ;; esac # 69: a node is unhealthy.
        before=$nodes
        [ "$spare_nodes" -gt 0 ] && [ -z "$told" ] && choose_nodes && [ "$nodes" != "$before" ] || break
        echo "$action: $why; the job goes on with its spare nodes, on $nodes"
        replacements=$((replacements + 1))
    done
}
start_watch() { # On another node than this one, so that it outlives this script.
    [ -z "$watch" ] || kill "$watch" 2>/dev/null
    srun --export=ALL --overlap --nodes=1 --ntasks=1 --nodelist="$watcher" bash "$script" watch "$SLURMD_NODENAME" &
    watch=$!
}
run_ranks() { # Records a start of the ranks, runs them on $nodes, and sets action, code, exclude and why.
    local start=${SLURM_RESTART_COUNT:-0} queued_at= started_at
    state=$run_dir/slurm/job-$SLURM_JOB_ID-$start
    [ "$replacements" = 0 ] || state+=-$replacements
    echo "job $SLURM_JOB_ID, start $start, on $nodes"
    master_addr=${nodes%%,*}
    # The supervisors use 64 ports from this one on; jobs with consecutive numbers use different ports.
    master_port=$((10000 + (SLURM_JOB_ID + start + replacements) % 300 * 64))
    export state master_addr master_port
    started_at=$(date +%s)
    if [ "$replacements" = 0 ]; then
        started_at=$(ask StartTime)
        queued_at=$(ask EligibleTime)                       # For a link of a chain: when the link before it ended.
        [ "$start" = 0 ] || queued_at=$(ask SubmitTime)     # For a requeued job: the time of the requeue.
    fi
    local identity=(--config "$config" --job "$SLURM_JOB_ID" --restart "$start" --replacements "$replacements")
    ours begin "$run_dir" "${identity[@]}" --nodes "$nodes" --submitted "$queued_at" --started "$started_at"
    code=$?
    case $code in
    75) action=later why="the run folder stayed full or away" && return ;;
    78) action=stop why="the job was refused; fix what the line above names, then submit again" && return ;;
    esac
    @STANDBY@
    if [ "$told" != TERM ]; then # An early USR1 may be dropped: the ranks know when the job ends and save in time.
        start_step
        step=$!
        wait "$step"
        while kill -0 "$step" 2>/dev/null; do wait "$step"; done # A trap ends a wait early.
        step=
    fi
    verdict=$(ours end "$run_dir" "${identity[@]}" --state "$state" --told "$told" --end-time "$SLURM_JOB_END_TIME")
    [ $? != 75 ] || verdict="later|75||the run folder stayed full or away"
    IFS='|' read -r action code exclude why <<<"$verdict"
}

action= code= exclude= why= replacements=0
log=$run_dir/slurm/job-$SLURM_JOB_ID.log
until { cd "$work_dir" && mkdir -p "$run_dir/slurm" && : >>"$log"; } 2>/dev/null; do # A shared folder is full or away.
    if [ "$SECONDS" -ge "$patience_s" ] || [ -n "$told" ]; then
        action=later code=75 why="the run folder stayed full or away"
        break
    fi
    sleep 2
done
if [ -z "$action" ]; then
    exec >>"$log" 2>&1 # Slurm ends a job at once whose output file it cannot open.
    [ -z "$setup" ] || . "$setup"
    run_job
fi
echo "${action:-no verdict}: ${why:-launcher.slurm.job could not be run}"
case $action in
done | stop) cancel_pending ;;
next) @NEXT@ ;;
again)
    keep_distance
    @AGAIN@ ;;
later)
    for job in $(pending); do retry scontrol update JobId="$job" StartTime=now+@LATER_S@; done
    @LATER@ ;;
leave)
    @LEAVE@
    ;;
*) keep_distance ;;
esac
if [ -n "$exclude" ]; then # Jobs that wait, and this one if it was just requeued, must not use these nodes.
    for job in $(pending) @SELF@; do retry scontrol update JobId="$job" ExcNodeList="$exclude"; done
fi
[ "$code" != 75 ] || code=0 # A stop on purpose is no failure in Slurm's accounting.
exit "${code:-1}"
"""
