#!/usr/bin/env bash
# What a ring costs on one machine: 2 ranks of one thread against one process of 2 threads, forward and backward, in turns within one run.
#
#   usage: benches/ring-tax.sh [name=value]...      names as in `mpi-timing` (default: q_len=16384 heads=8 dim=64 rounds=7, causal, zigzag)
#
#   ANNULUS_BENCH_MPI    openmpi (default) or mpich
#   ANNULUS_BENCH_RANKS  ranks (default: 2)
#
# Prints a JSON line: ring_of_alone is the ring's throughput over that of the process alone, the median of the rounds' own ratios.
set -euo pipefail
cd "$(dirname "$0")/.."
mpi=${ANNULUS_BENCH_MPI:-openmpi} ranks=${ANNULUS_BENCH_RANKS:-2}
MPICC=mpicc.$mpi CARGO_TARGET_DIR=target/$mpi cargo build -q --release -p annulus-conformance --features mpi --bin mpi-timing
program=target/$mpi/release/mpi-timing
case $mpi in
  openmpi)
    # the process alone has as many threads as there are ranks: nobody is bound
    OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 timeout -k 5 1800 \
      mpirun.openmpi --oversubscribe --bind-to none -n "$ranks" "$program" tax q_len=16384 rounds=7 "$@"
    ;;
  mpich) UCX_LOG_LEVEL=error timeout -k 5 1800 mpirun.mpich -bind-to none -n "$ranks" "$program" tax q_len=16384 rounds=7 "$@" ;;
  *) echo "benches/ring-tax.sh: ANNULUS_BENCH_MPI: got $mpi, want openmpi or mpich" >&2; exit 2 ;;
esac
