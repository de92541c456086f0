#!/bin/bash
# electra-dist submit --config configs/large_25pct_mask.yaml --nodes 8
# Written by the command above. `electra-dist status RUN` shows where the run stands and what to do next.
#SBATCH --job-name=large-0123abcd
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --partition=gpu
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --no-requeue
#SBATCH --dependency=singleton
#SBATCH --chdir=/home/ada/electra
#SBATCH --output=/dev/null
#SBATCH --account=vision
#SBATCH --comment='it'"'"'s ours'
#SBATCH --hold

run_dir='/shared/it'"'"'s a run'
script=/shared/runs/large/slurm/submission-0001.sh
config=/shared/runs/large/slurm/submission-0001.yaml
python=python
work_dir=/home/ada/electra
setup=''
patience_s=900 retry_s=120 least_job_s=20
num_nodes=8 spare_nodes=0
export PYTHONUNBUFFERED=1
export PATH # Without an environment, bash has a default PATH that its programs do not see.

if [ "${1:-}" = node ]; then # srun runs this block once on each node; the lines after it run once per job.
    # Where Slurm tracks processes by cgroup, it signals this shell and none of its children: pass the signals on.
    supervisor= received=
    pass_to_supervisor() { received=$1; [ -z "$supervisor" ] || kill -"$1" "$supervisor"; }
    for signal in USR1 USR2 TERM; do trap "pass_to_supervisor $signal" "$signal"; done
    until cd "$work_dir" 2>/dev/null || [ "$SECONDS" -ge "$patience_s" ]; do sleep 2; done
    [ -z "$setup" ] || . "$setup"
    (   # An ignored signal stays ignored across exec: only processes with handlers, supervisor and ranks, act on it.
        trap '' USR1 USR2 TERM
        exec apptainer exec --nv --bind '/shared/it'"'"'s a run,/home/ada/electra' electra.sif "$python" -m launcher.supervise --config "$config" --node-rank "$SLURM_NODEID" \
            --nodes 8 --gpus-per-node 8 --master-addr "$master_addr" --master-port "$master_port" \
            --session "${state##*/}" --preflight
    ) &
    supervisor=$!
    [ -z "$received" ] || kill -"$received" "$supervisor" # It came before the supervisor's number was known.
    wait "$supervisor"
    while kill -0 "$supervisor" 2>/dev/null; do wait "$supervisor"; done # A trap ends a wait early.
    wait "$supervisor" # The shell keeps the exit code of the supervisor that has ended.
    code=$? SECONDS=0
    until { mkdir -p "$state" && echo "$code" >"$state/exit-$SLURMD_NODENAME"; } 2>/dev/null ||
        [ "$SECONDS" -ge "$patience_s" ]; do
        sleep 2
    done
    [ "$code" != 75 ] || code=0 # A stop on purpose is no failure in Slurm's accounting.
    exit "$code"
fi
ours() { apptainer exec --nv --bind '/shared/it'"'"'s a run,/home/ada/electra' electra.sif "$python" -m launcher.slurm.job "$@"; }
start_step() { # One task on each of $nodes. They are fewer than the nodes of the job if it has spare ones.
    # --export: srun would obey the one of sbatch, which a site may have set to NONE.
    srun --export=ALL --nodes="$num_nodes" --ntasks="$num_nodes" --nodelist="$nodes"         --kill-on-bad-exit=0 --wait=120 --cpu-bind=none bash "$script" node &
}

if [ "${1:-}" = watch ]; then # Slurm keeps a job with spare nodes even if this script has died with its node, $2.
    while sleep 30; do
        case $(sinfo --noheader --nodes="$2" --format=%T) in *down* | *fail*) scancel "$SLURM_JOB_ID" ;; esac
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
    for name in $(compgen -e); do
        case $name in
        SLURM_CONF | SLURM_CLUSTERS | SLURM_JWT) ;;
        SLURM_* | SLURMD_* | SRUN_* | SALLOC_* | \
            RANK | WORLD_SIZE | LOCAL_RANK | LOCAL_SIZE | \
            LOCAL_WORLD_SIZE | NODE_RANK | CROSS_RANK | CROSS_SIZE | \
            GROUP_RANK | GROUP_WORLD_SIZE | ROLE_* | TORCHELASTIC_* | \
            MASTER_ADDR | MASTER_PORT | PMI_* | PMI2_* | \
            PMIX_* | OMPI_COMM_WORLD_* | MV2_COMM_WORLD_* | CUDA_VISIBLE_DEVICES | \
            NVIDIA_VISIBLE_DEVICES | ROCR_VISIBLE_DEVICES | HIP_VISIBLE_DEVICES | ZE_AFFINITY_MASK | \
            GPU_DEVICE_ORDINAL | ELECTRA_DIST_* | state | master_addr | \
            master_port | SBATCH_ARRAY_INX | SBATCH_CPUS_PER_GPU | SBATCH_ERROR | \
            SBATCH_EXCLUSIVE | SBATCH_GPUS | SBATCH_INPUT | SBATCH_GPUS_PER_* | \
            SBATCH_JOB_NAME | SBATCH_MEM_PER_* | SBATCH_NO_KILL | SBATCH_NO_REQUEUE | \
            SBATCH_OPEN_MODE | SBATCH_OUTPUT | SBATCH_REQUEUE | SBATCH_SIGNAL | \
            SBATCH_TRES_PER_TASK | SBATCH_WAIT | SBATCH_ACCOUNT | SBATCH_PARTITION | \
            SBATCH_TIMELIMIT)
            unset "$name" ;;
        esac
    done
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
    :  # The next job of the chain takes over.
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
next) : ;;
again)
    keep_distance
    retry submit_again || echo "no replacement was submitted: the next link takes over" ;;
later)
    for job in $(pending); do retry scontrol update JobId="$job" StartTime=now+600; done
    retry submit_again --begin=now+600 || echo "no replacement was submitted" ;;
leave)
    :
    ;;
*) keep_distance ;;
esac
if [ -n "$exclude" ]; then # Jobs that wait, and this one if it was just requeued, must not use these nodes.
    for job in $(pending) ; do retry scontrol update JobId="$job" ExcNodeList="$exclude"; done
fi
[ "$code" != 75 ] || code=0 # A stop on purpose is no failure in Slurm's accounting.
exit "${code:-1}"
