#!/usr/bin/env bash
# Everything that a GPU is for, on a machine that has only python3 with torch: no network, no venv.
#
#   make gpu-pack                                   here: wheels and text into .gpu/
#   benchmarks/gpu.sh OUT tests throughput          there: parts, in this order; one tar comes back
#   benchmarks/gpu.sh OUT memory sweep steady
#
# DEVICE=cpu, with SMALL=1, rehearses all of it.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=$(realpath -m "$1")
shift
device=${DEVICE:-cuda}
work=$(mktemp -d)
export PYTHONPATH=$PWD SWEEP_CACHE=$work/cache PYTHONUNBUFFERED=1
mkdir -p "$out" "$work/results"
python3 -c "import pydantic, tokenizers, safetensors, pytest, pytest_timeout" 2>/dev/null ||
    python3 -m pip install --quiet --no-index --no-deps .gpu/wheels/*.whl

if [ -n "${SMALL:-}" ]; then
    steps=(--model quick --budget 32k --batches 4,8 --steady-seconds 2)
    rates=(--models quick --batches 1,8 --rounds 2 --precision fp32)
else
    steps=(--budget 8.192M --batches 1,8,32,64,128,256 --steady-seconds 60)
    rates=(--models reference --batches 1,8,32,64,128,256,512 --rounds 15 --precision bf16)
fi

for part in "$@"; do
    echo "== $part, $(date +%T)"
    case $part in
    tests)
        python3 -m pytest -m gpu -W default -p no:cacheprovider tests/training/test_steps.py \
            2>&1 | tee "$work/results/tests.log" | tail -40
        ;;
    throughput)
        python3 benchmarks/throughput.py --device "$device" "${rates[@]}" \
            --contenders "sweep,sweep eager,plain loop,plain loop compiled,matrix product" \
            --out "$work/results/throughput.json"
        ;;
    memory | sweep | steady)
        python3 benchmarks/gpu.py --text .gpu/text --out "$work/results" --device "$device" \
            --parts "$part" "${steps[@]}"
        ;;
    *)
        echo "no part $part: tests, throughput, memory, sweep, steady"
        exit 2
        ;;
    esac
    tar czf "$out/results.tar.gz" --exclude '*.pt' --exclude '*.safetensors' -C "$work/results" .
done
