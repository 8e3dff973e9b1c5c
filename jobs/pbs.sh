#!/bin/bash
# Runs one ring over all nodes of a PBS job, with one rank per socket or memory domain. The threads
# of a rank are the cores of its socket or domain.
#
#   qsub -v IN=in.safetensors,OUT=out.safetensors,FLAGS="--causal" jobs/pbs.sh
#
# Lines marked "site" need the site's values.
# mpiprocs × ompthreads must be ncpus.
#PBS -N annulus
#PBS -l select=4:ncpus=64:mpiprocs=2:ompthreads=32
#PBS -l place=scatter:excl
#PBS -l walltime=01:00:00
#PBS -j oe
set -euo pipefail
cd "${PBS_O_WORKDIR:?this is a job script: submit it with qsub}"
input=${IN:?qsub -v IN=…}
output=${OUT:?qsub -v OUT=…}
read -ra flags <<<"${FLAGS:-}"

# site: the MPI that the command was built with
# module load openmpi
annulus=${ANNULUS:-annulus}

# PBS sets OMP_NUM_THREADS from ompthreads
threads=${OMP_NUM_THREADS:-1}
# PBS_NODEFILE has one line for each rank
ranks=$(wc -l <"${PBS_NODEFILE:?}")
per_node=$((ranks / $(sort -u "$PBS_NODEFILE" | wc -l)))

# site: OpenMPI (default) or an MPICH-like mpiexec (MPICH, Intel MPI, Cray)
case ${ANNULUS_MPIEXEC:-openmpi} in
  openmpi) launch=(mpirun -n "$ranks" --map-by "ppr:$per_node:node:PE=$threads" --bind-to core) ;;
  mpich) launch=(mpiexec -n "$ranks" -ppn "$per_node" -bind-to "core:$threads") ;;
  *)
    echo "jobs/pbs.sh: ANNULUS_MPIEXEC: got $ANNULUS_MPIEXEC, want openmpi or mpich" >&2
    exit 2
    ;;
esac

# prints the host and cores of each rank, and warns of settings that are known to be slow
"${launch[@]}" "$annulus" doctor
"${launch[@]}" "$annulus" attend --transport mpi --threads "$threads" \
  --input "$input" --output "$output" "${flags[@]}"
