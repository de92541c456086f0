#!/bin/bash
# One Slurm job of a run. `electra-dist submit` writes this file behind the #SBATCH lines and the settings of a run.
#
# Slurm runs it on the first node of the job, outside any container. There it
#   1. waits until the run folder can be written, and records the job (`electra_launcher.slurm.job begin`);
#   2. starts itself once on each node (srun), with the argument `node`: the supervisor (electra_launcher.supervise) checks the
#      node, then starts and watches its ranks;
#   3. sends USR1 to them when it receives USR1 (ahead of the time limit) or TERM: they save and end with exit code 75;
#   4. asks `electra_launcher.slurm.job end`, which reads the ledger and the exit code of each node, how the run goes on. In a
#      job with spare nodes, it starts the ranks again without a node that is down or unhealthy;
#   5. carries the answer out: requeues the job or submits a replacement, excludes nodes, or cancels waiting jobs.
#
# Without a chain, a standby job waits in the queue: it continues the run if this job cannot be requeued, or has died
# with its first node. In a chain, the next job does so. srun's exit code is the highest of all nodes, and is not used.
# When a node crashes and is back within SlurmdTimeout, Slurm ends the job as FAILED without a requeue; steps 4 and 5
# then continue the run.
#
# shellcheck disable=SC2154 # `submit` assigns run_dir, script, config, python and the other settings.

retry_s=120     # how long a command of Slurm that fails is repeated while Slurm's controller answers
least_job_s=20  # shortest time from the start to the end of a job that crashes, so that a chain is not used up at once
later_s=600     # how much later the run goes on after its storage stayed away, as in train/run.py
save_s=120      # how long the tasks of other nodes may still save once the task of one node has ended

export PYTHONUNBUFFERED=1
export PATH # Without an environment, bash has a default PATH that its programs do not see.
told='' step='' watch='' supervisor='' received=''
action='' code='' exclude='' why='' replacements=0

in_chain() { [ "$chain" -gt 0 ]; }

# The part of a node: the supervisor, and its exit code.

run_node() { # Runs the supervisor of this node, and writes its exit code into the folder of this start of the ranks.
    local state=$run_dir/slurm/$session
    # Where Slurm tracks processes by cgroup, it signals this shell and none of its children: pass the signals on.
    trap 'pass_to_supervisor USR1' USR1
    trap 'pass_to_supervisor USR2' USR2
    trap 'pass_to_supervisor TERM' TERM
    [ -z "$archive" ] || import_from_this_node
    until cd "$work_dir" 2>/dev/null || [ "$SECONDS" -ge "$patience_s" ]; do sleep 2; done
    read_setup
    (   # An ignored signal stays ignored across exec: only processes with handlers, supervisor and ranks, act on it.
        trap '' USR1 USR2 TERM
        exec "${apptainer[@]}" "$python" -m electra_launcher.supervise --config "$config" --node-rank "$SLURM_NODEID" \
            --nodes "$num_nodes" --gpus-per-node "$ranks_per_node" \
            --master-addr "$master_addr" --master-port "$master_port" \
            --session "$session" --preflight "${supervise_options[@]}"
    ) &
    supervisor=$!
    [ -z "$received" ] || kill -"$received" "$supervisor" # It came before the supervisor's number was known.
    wait_for "$supervisor"
    code=$? SECONDS=0
    until { mkdir -p "$state" && echo "$code" >"$state/exit-$SLURMD_NODENAME"; } 2>/dev/null ||
        [ "$SECONDS" -ge "$patience_s" ]; do
        sleep 2
    done
    leave
}
pass_to_supervisor() {
    received=$1
    [ -z "$supervisor" ] || kill -"$1" "$supervisor"
}
import_from_this_node() { # Unpacks $archive on the node's own disk, unless an earlier job has, and sets PYTHONPATH.
    local folder name unpacked
    folder=${SLURM_TMPDIR:-${TMPDIR:-/tmp}}/electra-dist-environments-$(id -u)
    name=$(basename "$archive" .tar)
    (umask 077 && mkdir -p "$folder")
    if ! is_private "$folder"; then # Another user could have put code there.
        echo "$folder is not private; packages are imported from the shared file system"
        return
    fi
    if [ ! -d "$folder/$name" ]; then
        unpacked=$(mktemp -d "$folder/unpacking.XXXXXX")
        tar -xf "$archive" -C "$unpacked" && mv -T "$unpacked" "$folder/$name"
        rm -rf "$unpacked" # What is left if the disk is full, or another job was faster.
    fi
    [ ! -d "$folder/$name" ] || export PYTHONPATH="$folder/$name${PYTHONPATH:+:$PYTHONPATH}"
}
is_private() { [ -d "$1" ] && [ ! -L "$1" ] && [[ $(stat -c '%u %a' "$1") =~ ^$(id -u)" "[0-7]?[0-7]00$ ]]; }
read_setup() {
    # shellcheck source=/dev/null # a file of the user
    [ -z "$setup" ] || . "$setup"
}
wait_for() { # Waits for a child of this shell and returns its exit code, which the shell keeps. A trap ends a wait.
    wait "$1"
    while kill -0 "$1" 2>/dev/null; do wait "$1"; done
    wait "$1"
}
leave() { # Ends this shell with $code.
    [ "$code" != 75 ] || code=0 # A stop on purpose is no failure in Slurm's accounting.
    exit "${code:-1}"
}

# The part of the spare nodes.

watch_node() { # Ends the job when its first node, $1, is down: Slurm keeps a job with spare nodes although this
    # script has died with it.
    while sleep 30; do
        case $(sinfo --noheader --nodes="$1" --format=%T) in
        *down* | *fail*) { ! in_chain && scontrol requeue "$SLURM_JOB_ID"; } || scancel "$SLURM_JOB_ID" ;;
        esac
    done
}
start_watch() { # On another node than this one, so that it outlives this script.
    [ -z "$watch" ] || kill "$watch" 2>/dev/null
    srun --export=ALL --overlap --nodes=1 --ntasks=1 --nodelist="$watcher" bash "$script" watch "$SLURMD_NODENAME" &
    watch=$!
}
choose_nodes() { # Sets nodes (the first $num_nodes) and watcher (the last) of those in order; fails if too few are.
    local down up
    down=$(retry sinfo --noheader --Node --nodes="$SLURM_JOB_NODELIST" --format='%N %T' |
        awk '$2 ~ /down|drain|fail|boot|power|unknown|[*]$/ { print $1 }')
    up=$(scontrol show hostnames "$SLURM_JOB_NODELIST" |
        grep -vxF "$(printf '%s\n' '' "$down" "$(tr , '\n' <<<"$exclude")")")
    nodes=$(head -n "$num_nodes" <<<"$up" | paste -sd ,)
    watcher=$(tail -n 1 <<<"$up")
    [ "$(grep -c . <<<"$up")" -ge "$num_nodes" ]
}

# Commands of Slurm, which are repeated.

retry() { # Repeats a command until it succeeds: as long as the controller is away, otherwise for $retry_s.
    local pause=1 end=$((SECONDS + retry_s))
    until "$@"; do
        scontrol ping 2>/dev/null | grep -q UP || end=$((SECONDS + retry_s))
        [ "$SECONDS" -lt "$end" ] || return 1
        sleep "$pause"
        pause=$((pause < 30 ? 2 * pause : 30))
    done
}
# shellcheck disable=SC2120 # `retry` hands its arguments on.
submit_again() ( # A subshell, because this job still needs what its successor must not believe.
    local name pattern
    for name in $(compgen -e); do
        [[ " ${handed_on[*]} " != *" $name "* ]] || continue
        for pattern in "${left_out[@]}"; do
            # shellcheck disable=SC2053 # a pattern
            [[ $name != $pattern ]] || unset "$name"
        done
    done
    sbatch "$@" "$0"
)
requeue() {
    retry scontrol requeue "$SLURM_JOB_ID" || echo "the job cannot be requeued: the standby job takes over"
}
list_pending() { squeue --noheader --user="$(id -un)" --name="$SLURM_JOB_NAME" --states=PENDING --format=%A; }
pending() { retry list_pending; }
ask() { SLURM_TIME_FORMAT=%s squeue --noheader --jobs="$SLURM_JOB_ID" --Format="$1:20" | tr -d ' '; }

# The part of the job's first node.

bookkeeping() { # Runs electra_launcher.slurm.job on this node, in the container if there is one.
    local in_container=("${apptainer[@]}")
    if [ "${#pyxis[@]}" -gt 0 ]; then
        in_container=(srun --export=ALL --overlap --nodes=1 --ntasks=1 --nodelist="$SLURMD_NODENAME" "${pyxis[@]}")
    fi
    "${in_container[@]}" "$python" -m electra_launcher.slurm.job "$@"
}
start_step() { # One task on each of $nodes. They are fewer than the nodes of the job if it has spare ones.
    # --export: srun would obey the one of sbatch, which a site may have set to NONE.
    srun --export=ALL --nodes="$num_nodes" --ntasks="$num_nodes" --nodelist="$nodes" \
        --kill-on-bad-exit=0 --wait="$save_s" --cpu-bind=none "${pyxis[@]}" bash "$script" node &
    step=$!
}
pass_to_step() { # srun forwards the signal to the task on every node.
    told=$1
    [ -z "$step" ] || kill -USR1 "$step"
}
run_job() {
    trap 'pass_to_step USR1' USR1
    trap 'pass_to_step TERM' TERM
    open_log
    if [ -z "$action" ]; then
        read_setup
        run_on_nodes
    fi
    echo "${action:-no verdict}: ${why:-electra_launcher.slurm.job could not be run}"
    go_on
    leave
}
open_log() { # Slurm ends a job at once whose output file it cannot open: so the log is opened here.
    local log=$run_dir/slurm/job-$SLURM_JOB_ID.log
    until { cd "$work_dir" && mkdir -p "$run_dir/slurm" && : >>"$log"; } 2>/dev/null; do # The folder is full or away.
        if [ "$SECONDS" -ge "$patience_s" ] || [ -n "$told" ]; then
            storage_is_away
            return
        fi
        sleep 2
    done
    exec >>"$log" 2>&1
}
storage_is_away() { action=later code=75 why="the run folder stayed full or away"; }
run_on_nodes() { # Runs the ranks, again and on other nodes as long as a node fails and the job has a spare one.
    local before
    # Not from the environment: Slurm before 23.02 sets no such variable, so it may be that of an earlier job.
    SLURM_JOB_END_TIME=$(ask EndTime)
    export SLURM_JOB_END_TIME
    nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n "$num_nodes" | paste -sd ,)
    watcher=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | tail -n 1)
    while :; do
        [ "$spare_nodes" = 0 ] || start_watch
        run_ranks
        case $action-$code in
        next-69 | again-*) ;; # 69: a node is unhealthy.
        *) return ;;
        esac
        before=$nodes
        if [ "$spare_nodes" = 0 ] || [ -n "$told" ] || ! choose_nodes || [ "$nodes" = "$before" ]; then
            return
        fi
        echo "$action: $why; the job goes on with its spare nodes, on $nodes"
        replacements=$((replacements + 1))
    done
}
run_ranks() { # Records a start of the ranks, runs them on $nodes, and sets action, code, exclude and why.
    local restart=${SLURM_RESTART_COUNT:-0} queued_at='' started_at verdict
    session=job-$SLURM_JOB_ID-$restart
    [ "$replacements" = 0 ] || session+=-$replacements
    echo "job $SLURM_JOB_ID, start $restart, on $nodes"
    master_addr=${nodes%%,*}
    # The supervisors use 64 ports from this one on; jobs with consecutive numbers use different ports.
    master_port=$((10000 + (SLURM_JOB_ID + restart + replacements) % 300 * 64))
    export session master_addr master_port
    started_at=$(date +%s)
    if [ "$replacements" = 0 ]; then
        started_at=$(ask StartTime)
        queued_at=$(ask EligibleTime)                       # For a link of a chain: when the link before it ended.
        [ "$restart" = 0 ] || queued_at=$(ask SubmitTime)   # For a requeued job: the time of the requeue.
    fi
    bookkeeping begin "$run_dir" --session "$session" --config "$config" --nodes "$nodes" \
        --submitted "$queued_at" --started "$started_at"
    code=$?
    if [ "$code" = 75 ]; then
        storage_is_away
        return
    elif [ "$code" = 78 ]; then
        action=stop why="the job was refused; fix what the line above names, then submit again"
        return
    fi
    in_chain || ensure_standby
    if [ "$told" != TERM ]; then # An early USR1 may be dropped: the ranks know when the job ends and save in time.
        start_step
        wait_for "$step"
        step=''
    fi
    verdict=$(bookkeeping end "$run_dir" --session "$session" --config "$config" \
        --told "$told" --end-time "$SLURM_JOB_END_TIME")
    case $? in
    75) storage_is_away ;;
    *) IFS='|' read -r action code exclude why <<<"$verdict" ;;
    esac
}
ensure_standby() { # The standby job, once it runs, needs one itself.
    local waiting
    if waiting=$(list_pending) && [ -z "$waiting" ]; then
        # shellcheck disable=SC2119
        submit_again || echo "no standby job was submitted: if this job cannot be requeued, submit the run again"
    fi
}
go_on() { # Carries the verdict out.
    local job waiting
    case $action in
    done | stop) for job in $(pending); do retry scancel "$job"; done ;;
    next) in_chain || requeue ;;
    again)
        keep_distance
        if in_chain; then
            retry submit_again || echo "no replacement was submitted: the next link takes over"
        else
            requeue
        fi
        ;;
    later)
        for job in $(pending); do retry scontrol update JobId="$job" StartTime="now+$later_s"; done
        if in_chain; then
            retry submit_again --begin="now+$later_s" || echo "no replacement was submitted"
        else
            requeue
            retry scontrol update JobId="$SLURM_JOB_ID" StartTime="now+$later_s"
        fi
        ;;
    leave)
        if ! in_chain && [ "$told" = TERM ]; then # The standby job must not continue a cancelled run.
            for job in $(pending); do
                [ "$job" = "$SLURM_JOB_ID" ] || retry scancel "$job" # Slurm may have preempted this job: it waits.
            done
        fi
        ;;
    *) keep_distance ;;
    esac
    if [ -n "$exclude" ]; then # Jobs that wait, and this one if it was just requeued, must not use these nodes.
        waiting=$(pending)
        in_chain || waiting+=" $SLURM_JOB_ID"
        for job in $waiting; do retry scontrol update JobId="$job" ExcNodeList="$exclude"; done
    fi
}
keep_distance() { [ "$SECONDS" -ge "$least_job_s" ] || sleep $((least_job_s - SECONDS)); }

case ${1:-} in
node) run_node ;;
watch) watch_node "$2" ;;
*) run_job ;;
esac
