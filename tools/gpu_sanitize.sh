#!/usr/bin/env bash
# Runs the kernel tests under compute-sanitizer (memcheck, racecheck, initcheck), beside this script as tools/gpu_bundle.sh
# built them with FLINT_RS_RACECHECK=1. Each test is a process, one a core: they leave the GPU idle most of the time. Writes logs
# into the folder given. COMPUTE_SANITIZER names the program; racecheck before 2026.3 (CUDA 13.4) takes barriers of Hopper for
# races. Cases that would take minutes are left out, and counted; whole models too, as their kernels are those of the other
# tests. Exit status: 0 when all ran and nothing was found.
set -uo pipefail

[[ $# -ge 1 && "$1" != -* ]] || { echo "usage: gpu_sanitize.sh OUT_FOLDER [memcheck|racecheck|initcheck ...]" >&2; exit 2; }
mkdir -p "$1"
out=$(cd "$1" && pwd)
shift
tools=("$@")
[[ $# -gt 0 ]] || tools=(memcheck racecheck initcheck)
program=$(command -v "${COMPUTE_SANITIZER:-compute-sanitizer}") || { echo "no ${COMPUTE_SANITIZER:-compute-sanitizer}" >&2; exit 2; }
program=$(realpath "$program")
cd "$(dirname "$0")"
if [[ " ${tools[*]} " == *" racecheck "* ]] && ! grep -q racecheck commit; then
    echo "racecheck: expected tests that were built with FLINT_RS_RACECHECK=1" >&2
    exit 2
fi

check() { # TOOL BINARY TEST
    local log="$out/$1.$2.$3.log" start=$SECONDS status left_out
    # The largest cases: racecheck follows every access to shared memory.
    local most=300
    [[ $1 == racecheck ]] && most=160
    FLINT_RS_SANITIZER=$most "$program" --tool "$1" --error-exitcode 1 "./$2" --ignored --exact --test-threads=1 --nocapture "$3" > "$log" 2>&1
    status=$?
    # Races that are warnings too.
    if [[ $1 == racecheck ]] && ! grep -q 'SUMMARY: 0 hazards' "$log"; then status=1; fi
    left_out=$(grep -o 'left out under' "$log" | wc -l)
    if [[ $status == 0 ]]; then
        echo "ok      $1 $2 $3  $((SECONDS - start)) s, $left_out cases left out"
    else
        echo "FAILED  $1 $2 $3  $((SECONDS - start)) s, status $status: $(grep -h 'SUMMARY\|panicked' "$log" | paste -sd' ')"
    fi
    return "$status"
}

{
    cat commit
    "$program" --version | tail -n 1
    nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
} | tee "$out/machine.txt"

failed=0
checks=()
for tool in "${tools[@]}"; do
    for binary in $(find . -maxdepth 1 -name 'gpu_*' -type f -executable ! -name '*.*' ! -name gpu_report -printf '%f\n' | sort |
        grep -vxE 'gpu_(batch|model|prefill_model|recall)'); do
        tests=$("./$binary" --list --ignored 2> "$out/$binary.list.log" | sed -n 's/: test$//p')
        [[ -n $tests ]] || { echo "FAILED  $binary lists no tests, see $binary.list.log"; failed=1; continue; }
        for test in $tests; do
            # It measures time.
            [[ $test == a_choice_takes_microseconds ]] && continue
            while (($(jobs -rp | wc -l) >= $(nproc))); do wait -n || true; done
            check "$tool" "$binary" "$test" &
            checks+=($!)
        done
    done
done
for check in "${checks[@]}"; do wait "$check" || failed=1; done
((${#checks[@]} > 0)) || { echo "FAILED  no tests"; failed=1; }
exit "$failed"
