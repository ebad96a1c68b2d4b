#!/bin/sh
# Fuzzes each reader for SECONDS (15) on the stable compiler; a finding is left in fuzz/artifacts and ends the run.
# Usage: fuzz/run.sh [SECONDS] [TARGET...]
set -eu
cd "$(dirname "$0")/.."
seconds=${1:-15}
[ $# -gt 0 ] && shift
[ $# -gt 0 ] || set -- gguf safetensors config tokenizer
cargo fuzz --version >/dev/null 2>&1 || cargo install cargo-fuzz --locked --version 0.13.2
# Coverage instrumentation is still an unstable flag; stable rustc takes it when told so. Without a sanitizer, because
# the readers are safe code whose mistakes are panics, overflows, hangs and large allocations: all seen without one.
export RUSTC_BOOTSTRAP=1
for target; do
    mkdir -p "fuzz/corpus/$target"
    cargo fuzz run --sanitizer none "$target" "fuzz/corpus/$target" "fuzz/seeds/$target" -- \
        -max_total_time="$seconds" -timeout=5 -rss_limit_mb=1024 -malloc_limit_mb=256 -max_len=16384 -verbosity=0 -print_final_stats=1
done
