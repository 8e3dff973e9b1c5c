#!/bin/bash
# One ring over all nodes of a PBS job: one rank for each socket (or whatever owns memory of its own), all cores of it as that rank's threads.
#
#   qsub -v IN=in.safetensors,OUT=out.safetensors,FLAGS="--causal" jobs/pbs.sh
#
# Lines that a site must look at are marked "site". mpiprocs · ompthreads = ncpus.
#PBS -N annulus
#PBS -l select=4:ncpus=64:mpiprocs=2:ompthreads=32
#PBS -l place=scatter:excl
#PBS -l walltime=01:00:00
#PBS -j oe
set -euo pipefail
cd "${PBS_O_WORKDIR:?this is a job script: qsub it}"
input=${IN:?qsub -v IN=…} output=${OUT:?qsub -v OUT=…}
read -ra flags <<<"${FLAGS:-}"

# site: the MPI that the command was built with
# module load openmpi
annulus=${ANNULUS:-annulus}

# PBS sets it from ompthreads
threads=${OMP_NUM_THREADS:-1}
# a line for each rank
ranks=$(wc -l <"${PBS_NODEFILE:?}")
per_node=$((ranks / $(sort -u "$PBS_NODEFILE" | wc -l)))

# site: OpenMPI (default) or an MPICH-like mpiexec (MPICH, Intel MPI, Cray)
case ${ANNULUS_MPIEXEC:-openmpi} in
  openmpi) launch=(mpirun -n "$ranks" --map-by "ppr:$per_node:node:PE=$threads" --bind-to core) ;;
  mpich) launch=(mpiexec -n "$ranks" -ppn "$per_node" -bind-to "core:$threads") ;;
  *) echo "jobs/pbs.sh: ANNULUS_MPIEXEC: got $ANNULUS_MPIEXEC, want openmpi or mpich" >&2; exit 2 ;;
esac

# who runs where, and settings that are known to be bad
"${launch[@]}" "$annulus" doctor
"${launch[@]}" "$annulus" attend --transport mpi --threads "$threads" --input "$input" --output "$output" "${flags[@]}"
