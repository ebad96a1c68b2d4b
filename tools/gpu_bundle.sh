#!/usr/bin/env bash
# Builds the GPU tests, the GPU bench and the wheel, stripped, with tools/gpu_check.sh and tools/gpu_sanitize.sh into dist/gpu:
# a folder that runs on a machine with a GPU, a driver and a C library of this age or newer, and no Rust. FLINT_RS_CUDA_TARGETS
# may name the card's target alone.
set -euo pipefail
cd "$(dirname "$0")/.."

out=dist/gpu
rm -rf "$out"
mkdir -p "$out"

{
    cargo test --locked --no-run --test 'gpu_*' --message-format=json-render-diagnostics
    cargo build --locked --bench gpu_report --message-format=json-render-diagnostics
} | python3 -c '
import json, sys
for line in sys.stdin:
    message = json.loads(line)
    if message.get("executable") and message["target"]["name"].startswith("gpu_"):
        print(message["target"]["name"], message["executable"])
' | while read -r name executable; do
    strip -o "$out/$name" "$executable"
done
python=.build/venv/bin/python
"${python%/*}/maturin" build --release --locked --out "$out" --interpreter "$python"

cp tools/gpu_check.sh tools/gpu_sanitize.sh tests/python/test_gpu.py benches/gpu_python.py "$out/"
mkdir -p "$out/python/flint_rs"
cp -r python/flint_rs/models "$out/python/flint_rs/"
echo "$(git rev-parse HEAD)${FLINT_RS_RACECHECK:+, built for racecheck}" > "$out/commit"
du -sh "$out"
