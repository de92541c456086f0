#!/usr/bin/env bash
# Run benchmarks/gpu.py on this machine with one command. It needs python 3.11 or newer with torch and triton.
#
#   bash benchmarks/gpu_run.sh                  9 minutes on the GPU; results in $OUT, else in benchmarks/results/
#   bash benchmarks/gpu_run.sh --minutes 20     another limit
#   bash benchmarks/gpu_run.sh --smoke          toy sizes on the CPU
#
# Other options go to gpu.py. Wheels in the folder wheels/ of the repository are installed without network into a
# temporary folder, which only this run sees; nothing else on the machine is changed. To fill it, where there is a
# network: python benchmarks/gpu_parts/carried_packages.py measure wheels --python 3.12
# (with `train` in place of `measure`, DeepSpeed is carried, too, and its steps are measured).
set -euo pipefail
cd "$(dirname "$0")/.."
source benchmarks/gpu_parts/find_python.sh

minutes=9
smoke=
options=()
while (($#)); do
    case $1 in
        --minutes) minutes=${2:?--minutes needs a number}; shift ;;
        --smoke) smoke=1; options+=(--smoke) ;;
        *) options+=("$1") ;;
    esac
    shift
done
output=${OUT:-benchmarks/results}
# A smoke run's figures have no meaning; without OUT they are not kept.
if [[ -z $smoke || -n ${OUT:-} ]]; then options+=(--output "$output"); fi

if [[ -z $smoke ]] && command -v nvidia-smi >/dev/null; then nvidia-smi || true; fi
# The benchmark ends by itself. A kernel that hangs is ended from outside; the JSON holds all cases before it.
limit=$("$PYTHON" -c "import sys; print(int(60 * float(sys.argv[1])) + 45)" "$minutes")
exec timeout --kill-after=10 "$limit" "$PYTHON" -u benchmarks/gpu.py --minutes "$minutes" "${options[@]}"
