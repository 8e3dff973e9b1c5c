#!/bin/bash
# One ring over all nodes of a Flux job: one rank for each socket (or whatever owns memory of its own), all cores of it as that rank's threads.
#
#   flux batch jobs/flux.sh IN.safetensors OUT.safetensors [flags of `annulus attend`]
#
# Lines that a site must look at are marked "site".
#FLUX: --job-name=annulus
#FLUX: --nodes=4
#FLUX: --nslots=8
#FLUX: --cores-per-slot=32
#FLUX: --exclusive
#FLUX: --time-limit=1h
set -euo pipefail
[ $# -ge 2 ] || { echo "usage: flux batch jobs/flux.sh IN OUT [flags]" >&2; exit 2; }
input=$1 output=$2
shift 2

# site: the MPI that the command was built with
# module load openmpi
annulus=${ANNULUS:-annulus}

# as many as in the head
ranks=${ANNULUS_RANKS:-8} threads=${ANNULUS_THREADS:-32}
# site: flux-shell's plugin for that MPI's start-up: pmix for OpenMPI 5, none for those that speak PMI-1 (MPICH, OpenMPI 4 built with flux)
options=()
[ -z "${ANNULUS_FLUX_PMI:-}" ] || options=(-o "pmi=$ANNULUS_FLUX_PMI")
run() { flux run --ntasks="$ranks" --cores-per-task="$threads" -o cpu-affinity=per-task -o exit-on-error "${options[@]}" "$@"; }

# who runs where, and settings that are known to be bad
run "$annulus" doctor
run "$annulus" attend --transport mpi --threads "$threads" --input "$input" --output "$output" "$@"
