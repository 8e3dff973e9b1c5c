"""Forces from a learned energy: the force on a particle is the gradient of an energy that attention
computes over all particles, and training on forces differentiates it once more.

mpirun -n 3 python python/examples/forces.py
"""

import torch
from mpi4py import MPI
from torch import nn

import annulus_attention as annulus
import annulus_attention.torch

comm, particles = MPI.COMM_WORLD, 48
rows = torch.from_numpy(annulus.Attention().shard(particles, comm=comm).q_rows)

torch.manual_seed(0)  # equal particles and parameters on all ranks
positions = torch.randn(1, particles, 3, dtype=torch.float64)
offsets = positions[:, :, None] - positions[:, None]
target = (offsets * torch.exp(-offsets.square().sum(-1, keepdim=True))).sum(2)[:, rows]
embed, to_qkv = nn.Linear(3, 32).double(), nn.Linear(32, 3 * 32).double()
to_energy = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)).double()
model = nn.ModuleList([embed, to_qkv, to_energy])
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

for step in range(8):
    own = positions[:, rows].requires_grad_()
    x = torch.tanh(embed(own))
    q, k, v = to_qkv(x).unflatten(-1, (3, 4, 8)).unbind(2)
    y = annulus.ring_attention(q, k, v, comm=comm)  # attends to the particles of all ranks
    energy = to_energy(x + y.flatten(2)).sum()  # of this rank's particles
    # the ring adds what this rank's particles contribute to the energies of the other ranks
    (gradient,) = torch.autograd.grad(energy, own, create_graph=True)
    loss = (-gradient - target).square().sum() / particles
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        if parameter.grad is None:  # the bias of the energy moves no particle
            continue
        comm.Allreduce(MPI.IN_PLACE, parameter.grad.numpy())
    optimizer.step()
    total = comm.allreduce(loss.item())
    if comm.rank == 0:
        print(f"step {step} loss {total:.9f}")
