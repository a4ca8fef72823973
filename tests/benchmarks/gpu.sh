#!/usr/bin/env bash
# All measurements on a GPU machine that has only python3 with torch: no network, no venv.
#
#   make gpu-pack TEXT=FOLDER                               here: wheels, prepared tokens and the commit into .gpu/
#   tests/benchmarks/gpu.sh OUT                             there: at most 480 seconds
#   python tests/benchmarks/record.py OUT/DEVICE/DATE.json  here: add the results
#
# SECONDS_IN_ALL=240 changes the time, PARTS=trial,tests the parts (gpu.py has their order and shares).
# DEVICE=cpu SMALL=1 rehearses everything on a CPU; BARE=1 also makes the packages that a GPU machine may lack
# unimportable.
set -uo pipefail
started=$SECONDS
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
out=$(realpath -m "${1:?the folder for results, as in tests/benchmarks/gpu.sh OUT}")
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PYTHONPATH=$PWD:$work/site SWEEP_CACHE=$work/cache TMPDIR=$work PYTHONUNBUFFERED=1
if [ -n "${BARE:-}" ]; then
    mkdir "$work/bare"
    for name in mlflow optuna sqlalchemy datasets; do
        echo "raise ImportError('$name is hidden by BARE=1')" >"$work/bare/$name.py"
    done
    export PYTHONPATH=$work/bare:$PYTHONPATH
fi
[ -f .gpu/commit ] && SWEEP_COMMIT=$(cat .gpu/commit) && export SWEEP_COMMIT
[ -d .gpu/cache ] && cp -r .gpu/cache "$work/cache"
[ -f .gpu/data.json ] && export BENCHMARK_DATA=$PWD/.gpu/data.json
python3 -c "import pydantic" 2>/dev/null || # into a separate folder, to leave the environment unchanged
    python3 -m pip install --quiet --no-index --no-deps --target "$work/site" .gpu/wheels/*.whl || exit 1
python3 -c "import torch, numpy, pydantic, tokenizers, safetensors, pytest, pytest_timeout" || exit 1
python3 tests/benchmarks/gpu.py "$out" --seconds "$((${SECONDS_IN_ALL:-480} - SECONDS + started))" \
    --device "${DEVICE:-cuda}" ${SMALL:+--small} ${PARTS:+--parts "$PARTS"}
