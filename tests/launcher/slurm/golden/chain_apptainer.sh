#!/bin/bash
# electra-dist submit --config configs/large_25pct_mask.yaml --nodes 8
# Written by the command above; `electra-dist status` of the run folder says where the run stands.
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

if [ "${1:-}" = node ]; then # one task per node; the lines below it are the job's own
    (   # Ignored signals stay ignored across exec: only the supervisor and the ranks, with handlers, act on them.
        trap '' USR1 USR2 TERM
        exec apptainer exec --nv --bind '/shared/it'"'"'s a run,/home/ada/electra' electra.sif "$python" -m launcher.supervise --config "$config" --node-rank "$SLURM_NODEID" \
            --nodes 8 --gpus-per-node 8 --master-addr "$master_addr" --master-port "$master_port" \
            --session "${state##*/}" --preflight
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
ours() { apptainer exec --nv --bind '/shared/it'"'"'s a run,/home/ada/electra' electra.sif "$python" -m launcher.slurm.job "$@"; }
start_step() { srun --kill-on-bad-exit=0 --wait=120 --cpu-bind=none bash "$script" node & }

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
next) : ;;
again) sbatch "$script" ;;
esac
if [ -n "$exclude" ]; then # also of this job, if it was just requeued
    for job in $(pending) ; do scontrol update JobId="$job" ExcNodeList="$exclude"; done
fi
exit "${code:-1}"
