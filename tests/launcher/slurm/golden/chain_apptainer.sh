#!/bin/bash
# electra-dist submit --config configs/large_25pct_mask.yaml --nodes 8
# Written by the command above. `electra-dist status RUN` shows where the run stands and what to do next.
#SBATCH --job-name=large-0123abcd
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --partition=gpu
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --no-requeue
#SBATCH --dependency=singleton
#SBATCH --open-mode=append
#SBATCH --chdir=/home/ada/electra
#SBATCH --output='/shared/it'"'"'s a run/slurm/job-%j.log'
#SBATCH --account=vision
#SBATCH --comment='it'"'"'s ours'
#SBATCH --hold

run_dir='/shared/it'"'"'s a run'
script=/shared/runs/large/slurm/submission-0001.sh
config=/shared/runs/large/slurm/submission-0001.yaml
python=python
export state=$run_dir/slurm/job-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}
export PYTHONUNBUFFERED=1

if [ "${1:-}" = node ]; then # srun runs this block once on each node; the lines after it run once per job.
    # Where Slurm tracks processes by cgroup, it signals this shell and none of its children: pass the signals on.
    supervisor= received=
    pass_to_supervisor() { received=$1; [ -z "$supervisor" ] || kill -"$1" "$supervisor"; }
    for signal in USR1 USR2 TERM; do trap "pass_to_supervisor $signal" "$signal"; done
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
    code=$?
    echo "$code" >"$state/exit-$SLURMD_NODENAME"
    exit "$code"
fi
ours() { apptainer exec --nv --bind '/shared/it'"'"'s a run,/home/ada/electra' electra.sif "$python" -m launcher.slurm.job "$@"; }
start_step() { srun --kill-on-bad-exit=0 --wait=120 --cpu-bind=none bash "$script" node & }

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
next) : ;;
again) sbatch "$script" ;;
esac
if [ -n "$exclude" ]; then # Jobs that wait, and this one if it was just requeued, must not use these nodes.
    for job in $(pending) ; do scontrol update JobId="$job" ExcNodeList="$exclude"; done
fi
exit "${code:-1}"
