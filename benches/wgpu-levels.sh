#!/usr/bin/env bash
# Measures forward and backward TFLOP/s of every level that a wgpu adapter can run, and of a plain
# matrix product in the same run (the roof). Prints JSON lines.
#
#   usage: benches/wgpu-levels.sh [name=value]...     names as in `wgpu-levels`; default:
#                                                     device=0 dims=64,128 heads=16
#                                                     lens=4096,8192,16384,32768
#                                                     seconds=2 rounds=7 roof=4096
#
# A software adapter needs smaller sizes, such as lens=256 heads=1 roof=256.
#
#   ANNULUS_BENCH_RUNNER  command that runs the program, such as scripts/with-lavapipe (default:
#                         none)
set -euo pipefail
cd "$(dirname "$0")/.."
cargo build -q --release -p annulus-bench --features wgpu --bin wgpu-levels
export XDG_RUNTIME_DIR=${XDG_RUNTIME_DIR:-/tmp}
timeout -k 5 7200 ${ANNULUS_BENCH_RUNNER:-} target/release/wgpu-levels "$@"
