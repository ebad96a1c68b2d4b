#!/usr/bin/env bash
# Runs what tools/gpu_bundle.sh built, beside this script, on a machine with a GPU and no Rust: installs the wheel into a folder
# of its own, runs every GPU test of Rust and of Python (which needs pytest, NumPy and torch there), then the benches for both
# formats. Writes logs, and CSV rows where all went well, into the folder given; more arguments go to the Rust bench, such as
# --contexts 1024 --batches 1,8. In front, --tests or --bench runs one part alone. Tests that were skipped are counted, each
# with its reason. Exit status: 0 when everything passed.
set -uo pipefail

usage() {
    echo "usage: gpu_check.sh [--tests | --bench] OUT_FOLDER [BENCH OPTIONS]" >&2
    exit 2
}

part=all
case "${1:-}" in
    --tests | --bench) part=${1#--}; shift ;;
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
skipped=0

run() { # NAME COMMAND...: its output goes to the log of that name, and the result to the summary
    local name=$1 start=$SECONDS
    shift
    if "$@" > "$out/$name.log" 2>&1; then
        # What the test runners say of themselves.
        local counts
        counts=$(grep -hoE '[0-9]+ (passed|skipped|ignored)' "$out/$name.log" | paste -sd' ')
        echo "ok      $name  $((SECONDS - start)) s  $counts"
    else
        echo "FAILED  $name  $((SECONDS - start)) s, see $name.log:"
        tail -n 15 "$out/$name.log"
        failed=1
    fi
    while read -r line; do
        echo "        $line"
        skipped=$((skipped + $(sed -nE 's/^SKIPPED \[([0-9]+)\].*/\1/p' <<< "$line")))
    done < <(grep '^SKIPPED \[' "$out/$name.log")
}

{
    cat "$here/commit"
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader || true
} | tee "$out/machine.txt"

site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
run install python3 -m pip install --no-index --no-deps --target "$site" "$here"/*.whl
export PYTHONPATH=$site

if [[ $part != bench ]]; then
    for test in $(find "$here" -maxdepth 1 -name 'gpu_*' -type f -executable ! -name '*.*' ! -name gpu_report | sort); do
        run "$(basename "$test")" "$test" --ignored --test-threads=2
    done
    run python python3 -m pytest -rs -c /dev/null --rootdir "$here" --noconftest -p no:cacheprovider -o markers=gpu "$here/test_gpu.py"
    echo "$skipped tests were skipped"
fi
if [[ $part != tests ]]; then
    for format in nvfp4 bf16; do
        run "bench_$format" "$here/gpu_report" --synthetic "$format" --date "$(date -I)" --out "$out/$format.csv" "$@"
        # Large steps have their memory for 256 sequences, which long contexts do not leave. Options ask for something else.
        [[ $# -gt 0 ]] || run "batches_$format" "$here/gpu_report" --synthetic "$format" --date "$(date -I)" \
            --contexts 1024 --batches 16,32,64,128,256 --out "$out/batches_$format.csv"
        [[ $# -gt 0 ]] || run "prompts_$format" "$here/gpu_report" --synthetic "$format" --date "$(date -I)" \
            --prefill 512,2048,8192,32768,100000,262000 --out "$out/prompts_$format.csv"
        [[ $# -gt 0 || $format == bf16 ]] || run load_nvfp4 "$here/gpu_report" --synthetic nvfp4 --date "$(date -I)" \
            --contexts 1024 --batches 1 --load "${TMPDIR:-/tmp}" --out "$out/load_nvfp4.csv"
        run "python_$format" python3 "$here/gpu_python.py" --synthetic "$format" --out "$out/python.csv"
    done
fi
exit "$failed"
