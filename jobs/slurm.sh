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

# site: with a GPU for each rank (flags --backend hip or cuda), the numbers of a node's GPUs in the
# order of its memory domains, and as many tasks a node. Frontier and LUMI, whose MI250X are two
# GPUs each: ANNULUS_GPU_ORDER="4 5 2 3 6 7 0 1", --ntasks-per-node=8 --gpus-per-node=8
# --cpus-per-task=7, and `module load rocm`, which sets the ROCM_PATH that the command searches.
order=${ANNULUS_GPU_ORDER:-}
# Blocks in GPU memory are staged through host memory, so that Cray MPICH needs no support of GPUs.
# site: with MPICH_GPU_SUPPORT_ENABLED=1 it sends from GPU memory, and refuses to start unless its
# library of GPUs is linked or preloaded (LD_PRELOAD=libmpi_gtl_hsa.so).
if [ -n "$order" ]; then
  export MPICH_GPU_SUPPORT_ENABLED=${MPICH_GPU_SUPPORT_ENABLED:-0}
  export MPICH_OFI_NIC_POLICY=${MPICH_OFI_NIC_POLICY:-NUMA}
fi

# on_gpu COMMAND...: runs a command with the GPU of this rank. ROCR_VISIBLE_DEVICES and
# CUDA_VISIBLE_DEVICES renumber: the GPU is number 0 then.
on_gpu() {
  local gpus
  read -ra gpus <<<"$order"
  export ROCR_VISIBLE_DEVICES=${gpus[SLURM_LOCALID]} CUDA_VISIBLE_DEVICES=${gpus[SLURM_LOCALID]}
  exec "$@"
}
export -f on_gpu
export order
bound=()
[ -z "$order" ] || bound=(bash -c 'on_gpu "$@"' -)

# since Slurm 22.05 srun does not inherit --cpus-per-task of the job
export SRUN_CPUS_PER_TASK=$threads
run() { srun --mpi="$mpi" --kill-on-bad-exit=1 --cpu-bind=cores --distribution=block:block "$@"; }

# prints the host and cores of each rank, and warns of settings that are known to be slow
run "$annulus" doctor
run "${bound[@]}" "$annulus" attend --transport mpi --threads "$threads" \
  --input "$input" --output "$output" "$@"
