#!/usr/bin/env bash
# Compares annulus with peers: both run in turns on one pinned core, and the best CPU time of all
# rounds counts.
#
#   usage: benches/compare.sh OUT_FOLDER ROUNDS PEER_COMMAND... [-- BENCH_FLAGS...]...
#   e.g.   benches/compare.sh /tmp/out 3 \
#            "python3 ../shared/peers/bench_torch.py --ns 1024,2048 --dtypes f32,bf16" \
#            -- --ns 1024,2048 --dtype f32,bf16
#
# PEER_COMMAND  prints one JSON line per case, with the fields: peer what dtype threads batch heads
#               head_dim n causal gflops_cpu. The word "none" stands for no peer.
# BENCH_FLAGS   flags of one `annulus bench`; default of --what: fwd,fwd+bwd; of --threads: 1. Each
#               -- begins another one (`-- --dtype f32 -- --dtype bf16 --precision default`).
#
# A bench of N > 1 threads is pinned to cores 0 to N - 1, everything else to $ANNULUS_BENCH_CORE
# (default: 1). Each round also measures the limits of the core, multiply-adds and reads. Writes all
# lines to OUT_FOLDER/lines.jsonl, the tables to standard output and OUT_FOLDER/ratios.md, and the
# picture to OUT_FOLDER/rates.svg. Needs taskset and python3.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -ge 3 ] || { sed -n '2,18p' "$0"; exit 2; }
out=$1
rounds=$2
shift 2
peers=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
  [ "$1" = none ] || peers+=("$1")
  shift
done
# the flags of a bench are one word of the array, quoted for `bash -c`
benches=()
while [ "${1:-}" = -- ]; do
  shift
  flags=
  while [ $# -gt 0 ] && [ "$1" != -- ]; do
    flags+=" $(printf %q "$1")"
    shift
  done
  benches+=("$flags")
done
[ ${#benches[@]} -gt 0 ] || benches=("")
core=${ANNULUS_BENCH_CORE:-1}
mkdir -p "$out"
: > "$out/lines.jsonl"

cargo build --release -q -p annulus-cli
cargo build --release -q -p annulus-bench --features cpu --bin cpu-limits
for ((round = 1; round <= rounds; round++)); do
  taskset -c "$core" target/release/cpu-limits | tee -a "$out/lines.jsonl" > "$out/last"
  for peer in ${peers[@]+"${peers[@]}"}; do
    taskset -c "$core" bash -c "$peer" | tee -a "$out/lines.jsonl" > "$out/last"
  done
  for flags in "${benches[@]}"; do
    cores=$core
    [[ $flags == *--what* ]] || flags+=" --what fwd,fwd+bwd"
    if [[ $flags =~ --threads\ ([0-9]+) ]]; then
      [ "${BASH_REMATCH[1]}" = 1 ] || cores=0-$((BASH_REMATCH[1] - 1))
    else
      flags+=" --threads 1"
    fi
    taskset -c "$cores" bash -c "target/release/annulus bench $flags" |
      tee -a "$out/lines.jsonl" > "$out/last"
  done
done
rm -f "$out/last"
python3 benches/ratios.py "$out/lines.jsonl" | tee "$out/ratios.md"
python3 benches/ratios.py --svg "$out/lines.jsonl" > "$out/rates.svg"
