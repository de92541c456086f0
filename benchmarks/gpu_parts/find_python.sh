# Sourced by gpu_run.sh, gpu_train.sh and one_gpu.sh in the repository's root. Sets PYTHON and PYTHONPATH, and
# installs the wheels of the folder wheels/, if there are any, into a new folder under /tmp, which only this run sees.
if [[ -z ${PYTHON:-} ]]; then
    if [[ -x .venv/bin/python ]]; then PYTHON=$PWD/.venv/bin/python; else PYTHON=$(command -v python3); fi
fi
site=
if compgen -G "wheels/*.whl" >/dev/null; then
    site=$(mktemp -d)
    "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --disable-pip-version-check \
        --target "$site" wheels/*.whl
fi
export PYTHONPATH="$PWD:$PWD/kernels${site:+:$site}${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1
