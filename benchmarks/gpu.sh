#!/usr/bin/env bash
# Tests and measurements on a GPU machine that has only python3 with torch: no network, no venv.
#
#   make gpu-pack                                     here: wheels, text and the commit into .gpu/
#   benchmarks/gpu.sh OUT tests throughput            there: run parts in this order
#   python benchmarks/record.py OUT/DEVICE/DATE.json  here: add the results
#
# Time limits of the parts in minutes: tests 4, throughput 9.5, small 9.5, steady 9.5, sweep 9.5, memory 5, profile 4.
# OUT also holds the results of a part that ran out of time. BATCHES=1,64 chooses fewer batch sizes: steady needs more
# than a minute for each, so six do not fit in one call of ten minutes.
# DEVICE=cpu with SMALL=1 rehearses all parts except the tests, which need a GPU.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=$(realpath -m "$1")
shift
device=${DEVICE:-cuda}
work=$(mktemp -d)
mkdir -p "$out"
export PYTHONPATH=$PWD:$work/site SWEEP_CACHE=$work/cache PYTHONUNBUFFERED=1
[ -f .gpu/commit ] && SWEEP_COMMIT=$(cat .gpu/commit) && export SWEEP_COMMIT
python3 -c "import pydantic" 2>/dev/null || # into a separate folder, to leave the environment unchanged
    python3 -m pip install --quiet --no-index --no-deps --target "$work/site" .gpu/wheels/*.whl || exit 1
python3 -c "import torch, pydantic, tokenizers, safetensors, pytest, pytest_timeout" || exit 1
python3 -m pip list 2>/dev/null | grep -iE "^(torch|triton|pydantic|tokenizers|transformers|lightning) "

if [ -n "${SMALL:-}" ]; then
    reference=(--model quick --budget 32k --batches 4,8)
    rates=(--models quick --batches 1,8 --rounds 2 --precision fp32)
    tiny=("${rates[@]}") seconds=2 point=(--experiments quick --batches 1)
else
    reference=(--budget 8.192M --batches "${BATCHES:-1,8,32,64,128,256}")
    # most important first, because the time limit loses the last
    rates=(--models reference --batches "${BATCHES:-1,64,256,8,32,128}" --rounds 7 --precision bf16)
    tiny=(--models quick,small --batches 1,32 --rounds 7 --precision bf16) seconds=60
    point=(--precisions bf16 --modes compiled --batches 1,32,256)
fi
contenders="sweep,plain loop,plain loop compiled,transformers,transformers compiled"
contenders+=",lightning,lightning compiled,matrix product"
text=(--text .gpu/text --out "$out" --device "$device")

for part in "$@"; do
    echo "== $part, $(date +%T)"
    case $part in
    tests)
        timeout 240 python3 -m pytest -v --durations=10 -m gpu -W default -p no:cacheprovider \
            tests/training/test_steps.py 2>&1 | tee "$out/tests.log" | tail -40
        ;;
    throughput | small)
        chosen=("${rates[@]}")
        [ "$part" = small ] && chosen=("${tiny[@]}")
        timeout 570 python3 benchmarks/throughput.py --device "$device" "${chosen[@]}" \
            --contenders "$contenders" --out "$out"
        ;;
    memory)
        timeout 300 python3 benchmarks/memory.py --device "$device" "${point[@]}" --out "$out"
        ;;
    sweep) timeout 570 python3 benchmarks/gpu.py sweep "${text[@]}" "${reference[@]}" ;;
    steady) timeout 570 python3 benchmarks/gpu.py steady "${text[@]}" "${reference[@]}" --seconds "$seconds" ;;
    profile) timeout 240 python3 benchmarks/gpu.py profile "${text[@]}" "${reference[@]}" ;;
    *)
        echo "no part $part: tests, throughput, small, steady, sweep, memory, profile"
        exit 2
        ;;
    esac || echo "$part ended with $?"
done
