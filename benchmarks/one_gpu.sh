#!/usr/bin/env bash
# Train configs/small_one_gpu.yaml (ELECTRA-Small on 25 M tokens) on a machine with one GPU and no network, in legs.
#
#   bash benchmarks/one_gpu.sh prepare --corpus DIR     where there is a network: fills carried/ and wheels/ (60 MB)
#   bash benchmarks/one_gpu.sh --minutes 8              one leg on the GPU machine; repeat it until its exit code is 0
#   bash benchmarks/one_gpu.sh --arm mlm                masked language modelling at equal FLOPs; or rtd: T = 1
#
# Copy the repository with carried/ and wheels/ to the GPU machine. A leg stops in time, saves, and ends with exit code
# 75; the next one resumes at the same step. The last one scores the model and ends with 0. Each leg writes weights in
# bf16, metrics and scores into $OUT, else into RUN/returned. The state of the run stays in runs/ on the GPU machine:
# if the machine is lost between two legs, copy runs/ (0.3 GB) away and back, or the run begins again.
#
# `prepare --smoke` and `--smoke` do the same with a toy model on the CPU. --help lists all options of both.
set -euo pipefail
begun=$(date +%s)
cd "$(dirname "$0")/.."
if [[ " $* " == *" --smoke "* ]]; then
    # A smoke run uses the CPU, also where there is a GPU.
    export DS_ACCELERATOR=cpu CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
fi
if [[ ${1:-} == prepare ]]; then
    PYTHON=${PYTHON:-$PWD/.venv/bin/python}
    export PYTHONPATH="$PWD:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}"
    exec "$PYTHON" benchmarks/one_gpu_parts/prepare.py "${@:2}"
fi
source benchmarks/gpu_parts/find_python.sh
exec "$PYTHON" benchmarks/one_gpu_parts/leg.py --begun "$begun" "$@"
