#!/bin/bash
# One ring over all nodes of a Slurm job: one rank for each socket (or whatever owns memory of its own), all cores of it as that rank's threads.
#
#   sbatch jobs/slurm.sh IN.safetensors OUT.safetensors [flags of `annulus attend`]
#
# Lines that a site must look at are marked "site".
#SBATCH --job-name=annulus
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=32
#SBATCH --exclusive
#SBATCH --time=01:00:00
# cores, not their second threads: the tiles fill a core's units
#SBATCH --hint=nomultithread
set -euo pipefail
[ $# -ge 2 ] || { echo "usage: sbatch jobs/slurm.sh IN OUT [flags]" >&2; exit 2; }
input=$1 output=$2
shift 2

# site: the MPI that the command was built with
# module load openmpi
annulus=${ANNULUS:-annulus}

# site: what Slurm calls that MPI's start-up: `srun --mpi=list` shows them (pmix for OpenMPI, pmi2 for MPICH and its kin)
mpi=${ANNULUS_SRUN_MPI:-pmix}
threads=${SLURM_CPUS_PER_TASK:-1}

# a step does not take over the job's cores a task by itself in newer Slurm
export SRUN_CPUS_PER_TASK=$threads
run() { srun --mpi="$mpi" --kill-on-bad-exit=1 --cpu-bind=cores --distribution=block:block "$@"; }

# who runs where, and settings that are known to be bad
run "$annulus" doctor
run "$annulus" attend --transport mpi --threads "$threads" --input "$input" --output "$output" "$@"
