#!/usr/bin/env bash
# Train ELECTRA-Large with `deepspeed launcher/pretrain.py`, kill it with SIGKILL in the middle, resume it, and compare
# its losses with those of an uninterrupted run; then train ELECTRA-Small for the minutes that are left.
#
#   bash benchmarks/gpu_train.sh --make-carry           where there is a network: fills carried/corpus and wheels/
#   bash benchmarks/gpu_train.sh                        8 minutes on the GPU; results in $OUT, else benchmarks/results/
#   bash benchmarks/gpu_train.sh --minutes 20           another limit
#   bash benchmarks/gpu_train.sh --smoke                the demo's configuration and a few steps on the CPU
#
# --corpus FOLDER takes the rows of another corpus of 512 tokens a row. `gpu_train_parts/real_run.py` has all options.
set -euo pipefail
cd "$(dirname "$0")/.."
if [[ " $* " == *" --smoke "* ]]; then
    # A smoke run uses the CPU, also where there is a GPU.
    export DS_ACCELERATOR=cpu CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
fi
if [[ ${1:-} == --make-carry ]]; then
    PYTHON=${PYTHON:-$PWD/.venv/bin/python}
    exec "$PYTHON" benchmarks/gpu_train_parts/make_carry.py "${@:2}"
fi
source benchmarks/gpu_parts/find_python.sh
exec "$PYTHON" benchmarks/gpu_train_parts/real_run.py "$@"
