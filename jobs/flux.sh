#!/bin/bash
# Runs one ring over all nodes of a Flux job, with one rank per socket or memory domain. The threads
# of a rank are the cores of its socket or domain.
#
#   flux batch jobs/flux.sh IN.safetensors OUT.safetensors [flags of `annulus attend`]
#
# Lines marked "site" need the site's values.
#FLUX: --job-name=annulus
#FLUX: --nodes=4
#FLUX: --nslots=8
#FLUX: --cores-per-slot=32
#FLUX: --exclusive
#FLUX: --time-limit=1h
set -euo pipefail
[ $# -ge 2 ] || { echo "usage: flux batch jobs/flux.sh IN OUT [flags]" >&2; exit 2; }
input=$1
output=$2
shift 2

# site: the MPI that the command was built with
# module load openmpi
annulus=${ANNULUS:-annulus}

# the values of --nslots and --cores-per-slot
ranks=${ANNULUS_RANKS:-8}
threads=${ANNULUS_THREADS:-32}
# site: the plugin of flux-shell that starts this MPI: pmix for OpenMPI 5; none for an MPI that uses
# PMI-1 (MPICH, OpenMPI 4 built with Flux)
options=()
[ -z "${ANNULUS_FLUX_PMI:-}" ] || options=(-o "pmi=$ANNULUS_FLUX_PMI")
# site: with a GPU for each rank (flags --backend hip or cuda), ANNULUS_GPUS=1 and --gpus-per-slot=1
# above. El Capitan: four MI300A a node, `module load rocm` for the ROCM_PATH that the command
# searches. With HSA_XNACK=1 tensors in host memory are not copied. Blocks in GPU memory are staged
# through host memory, so that Cray MPICH needs no support of GPUs; with MPICH_GPU_SUPPORT_ENABLED=1
# it sends from GPU memory, and needs its library of GPUs (LD_PRELOAD=libmpi_gtl_hsa.so).
[ -z "${ANNULUS_GPUS:-}" ] || {
  options+=(--gpus-per-task=1 -o gpu-affinity=per-task)
  export MPICH_GPU_SUPPORT_ENABLED=${MPICH_GPU_SUPPORT_ENABLED:-0}
}
run() {
  flux run --ntasks="$ranks" --cores-per-task="$threads" \
    -o cpu-affinity=per-task -o exit-on-error "${options[@]}" "$@"
}

# prints the host and cores of each rank, and warns of settings that are known to be slow
run "$annulus" doctor
run "$annulus" attend --transport mpi --threads "$threads" \
  --input "$input" --output "$output" "$@"
