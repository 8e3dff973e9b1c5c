#!/usr/bin/env bash
# Compares a ring of 2 ranks with one thread each to one process with 2 threads, on one machine:
# forward and backward, in turns.
#
#   usage: benches/ring-tax.sh [FLAG]...      flags of `annulus bench`; default: --what fwd+bwd
#                                             --ns 16384 --ds 64 --heads 8 --causal true
#
#   ANNULUS_BENCH_MPI    openmpi (default) or mpich
#   ANNULUS_BENCH_RANKS  ranks of the ring, and threads of the one process (default: 2)
#
# Prints the CPU time of the ring divided by that of the one process, the median of 7 pairs.
set -euo pipefail
cd "$(dirname "$0")/.."
mpi=${ANNULUS_BENCH_MPI:-openmpi}
ranks=${ANNULUS_BENCH_RANKS:-2}
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 UCX_LOG_LEVEL=error
# unbound, because the one process has as many threads as there are ranks
case $mpi in
  openmpi) launch="mpirun.openmpi --oversubscribe --bind-to none -n $ranks" ;;
  mpich) launch="mpirun.mpich -bind-to none -n $ranks" ;;
  *)
    echo "benches/ring-tax.sh: ANNULUS_BENCH_MPI: got $mpi, want openmpi or mpich" >&2
    exit 2
    ;;
esac
MPICC=mpicc.$mpi CARGO_TARGET_DIR=target/$mpi cargo build -q --release -p annulus-cli --features mpi
bench="target/$mpi/release/annulus bench"
[ $# -gt 0 ] || set -- --what fwd+bwd --ns 16384 --ds 64 --heads 8 --causal true
benches/pairs.py "$bench --threads $ranks" "$launch $bench --threads 1" 7 "$*"
