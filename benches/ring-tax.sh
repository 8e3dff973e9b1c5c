#!/usr/bin/env bash
# Compares a ring of 2 ranks with one thread each to one process with 2 threads, on one machine:
# forward and backward, in turns in one run.
#
#   usage: benches/ring-tax.sh [name=value]...      names as in `mpi-timing`; default:
#                                                   q_len=16384 heads=8 dim=64 rounds=7
#                                                   mask=causal layout=zigzag
#
#   ANNULUS_BENCH_MPI    openmpi (default) or mpich
#   ANNULUS_BENCH_RANKS  ranks of the ring, and threads of the one process (default: 2)
#
# Prints a JSON line. ring_of_alone is the throughput of the ring divided by that of the one
# process, the median of the ratios of all rounds.
set -euo pipefail
cd "$(dirname "$0")/.."
mpi=${ANNULUS_BENCH_MPI:-openmpi}
ranks=${ANNULUS_BENCH_RANKS:-2}
MPICC=mpicc.$mpi CARGO_TARGET_DIR=target/$mpi cargo build -q --release -p annulus-bench \
  --features mpi --bin mpi-timing
program=target/$mpi/release/mpi-timing
case $mpi in
  openmpi)
    # unbound, because the one process has as many threads as there are ranks
    OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 timeout -k 5 1800 \
      mpirun.openmpi --oversubscribe --bind-to none -n "$ranks" \
      "$program" tax q_len=16384 rounds=7 "$@"
    ;;
  mpich)
    UCX_LOG_LEVEL=error timeout -k 5 1800 \
      mpirun.mpich -bind-to none -n "$ranks" "$program" tax q_len=16384 rounds=7 "$@"
    ;;
  *)
    echo "benches/ring-tax.sh: ANNULUS_BENCH_MPI: got $mpi, want openmpi or mpich" >&2
    exit 2
    ;;
esac
