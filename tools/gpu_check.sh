#!/usr/bin/env bash
# Runs what tools/gpu_bundle.sh built, beside this script: every GPU test, then the bench for both formats. Writes a log, and
# CSV rows where all went well, into the folder given; more arguments go to the bench, such as --contexts 1024 --batches 1,8.
# `--tests` and `--bench` in front run one part alone. Exit status: 0 when everything passed.
set -uo pipefail

usage() {
    echo "usage: gpu_check.sh [--tests | --bench] OUT_FOLDER [BENCH OPTIONS]" >&2
    exit 2
}

part=all
case "${1:-}" in
    --tests) part=tests; shift ;;
    --bench) part=bench; shift ;;
esac
[[ $# -ge 1 && "$1" != -* ]] || usage
out=$1
shift
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$out"
out=$(cd "$out" && pwd)
# Where the tests look for the model that ships.
cd "$here"
failed=0

run() { # NAME COMMAND...: its output goes to the log of that name, and the result to the summary
    local name=$1 start=$SECONDS
    shift
    if "$@" > "$out/$name.log" 2>&1; then
        echo "ok      $name  $((SECONDS - start)) s"
    else
        echo "FAILED  $name  $((SECONDS - start)) s, see $name.log:"
        tail -n 15 "$out/$name.log"
        failed=1
    fi
}

{
    cat "$here/commit"
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader || true
} | tee "$out/machine.txt"

if [[ $part != bench ]]; then
    for test in "$here"/gpu_*; do
        name=$(basename "$test")
        [[ $name == gpu_report || $name == *.sh ]] && continue
        run "$name" "$test" --ignored --test-threads=2
    done
fi
if [[ $part != tests ]]; then
    for format in nvfp4 bf16; do
        run "bench_$format" "$here/gpu_report" --synthetic "$format" --date "$(date -I)" --out "$out/$format.csv" "$@"
    done
fi
exit "$failed"
