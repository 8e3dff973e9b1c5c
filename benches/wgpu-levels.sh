#!/usr/bin/env bash
# Forward and backward TFLOP/s of every level that a wgpu adapter can run, beside a plain matrix product's in the same run (the roof). JSON lines.
#
#   usage: benches/wgpu-levels.sh [name=value]...     as `wgpu-levels` takes them: device=0 dims=64,128 lens=4096,8192,16384,32768 heads=16
#                                                      seconds=2 rounds=7 roof=4096; on a software adapter lens=256 heads=1 roof=256 is plenty
#
#   ANNULUS_BENCH_RUNNER  what runs the program, such as scripts/with-lavapipe (default: nothing)
set -euo pipefail
cd "$(dirname "$0")/.."
cargo build -q --release -p annulus-conformance --features wgpu --bin wgpu-levels
export XDG_RUNTIME_DIR=${XDG_RUNTIME_DIR:-/tmp}
timeout -k 5 7200 ${ANNULUS_BENCH_RUNNER:-} target/release/wgpu-levels "$@"
