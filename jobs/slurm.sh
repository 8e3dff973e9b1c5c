#!/bin/bash
# Runs one ring over all nodes of a Slurm job, with one rank per socket or memory domain. The
# threads of a rank are the cores of its socket or domain.
#
#   sbatch jobs/slurm.sh IN.safetensors OUT.safetensors [flags of `annulus attend`]
#
# Lines marked "site" need the site's values.
#SBATCH --job-name=annulus
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=32
#SBATCH --exclusive
#SBATCH --time=01:00:00
# one thread per core: the kernels use the vector units of a core fully
#SBATCH --hint=nomultithread
set -euo pipefail
[ $# -ge 2 ] || { echo "usage: sbatch jobs/slurm.sh IN OUT [flags]" >&2; exit 2; }
input=$1
output=$2
shift 2

# site: the MPI that the command was built with
# module load openmpi
annulus=${ANNULUS:-annulus}

# site: Slurm's plugin that starts this MPI (pmix for OpenMPI, pmi2 for MPICH and MPIs derived from
# it); `srun --mpi=list` prints the plugins
mpi=${ANNULUS_SRUN_MPI:-pmix}
threads=${SLURM_CPUS_PER_TASK:-1}

# since Slurm 22.05 srun does not inherit --cpus-per-task of the job
export SRUN_CPUS_PER_TASK=$threads
run() { srun --mpi="$mpi" --kill-on-bad-exit=1 --cpu-bind=cores --distribution=block:block "$@"; }

# prints the host and cores of each rank, and warns of settings that are known to be slow
run "$annulus" doctor
run "$annulus" attend --transport mpi --threads "$threads" \
  --input "$input" --output "$output" "$@"
