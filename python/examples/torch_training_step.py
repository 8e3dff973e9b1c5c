"""Training over the ranks of mpi4py: each process has its rows of every sequence.

mpirun -n 2 python python/examples/torch_training_step.py
"""

import torch
from mpi4py import MPI
from torch import nn

import annulus_attention as annulus
import annulus_attention.torch

comm, length = MPI.COMM_WORLD, 256
shard = annulus.Attention(causal=True).shard(length, comm=comm)
rows, positions = torch.from_numpy(shard.q_rows), torch.from_numpy(shard.q_positions)

torch.manual_seed(0)  # equal parameters on all ranks
tokens = torch.randint(50, (1, length + 1))
inputs, targets = tokens[:, rows], tokens[:, rows + 1]
words, places = nn.Embedding(50, 64), nn.Embedding(length, 64)
to_qkv, to_logits = nn.Linear(64, 3 * 64), nn.Linear(64, 50)
model = nn.ModuleList([words, places, to_qkv, to_logits])
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

for step in range(5):
    x = words(inputs) + places(positions)
    q, k, v = to_qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
    with annulus.torch.context_parallel(shard, comm):  # attends to the rows of all ranks
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    logits = to_logits(x + y.transpose(1, 2).flatten(2))
    loss = nn.functional.cross_entropy(logits[0], targets[0], reduction="sum") / length
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        comm.Allreduce(MPI.IN_PLACE, parameter.grad.numpy())
    optimizer.step()
    total = comm.allreduce(loss.item())
    if comm.rank == 0:
        print(f"step {step} loss {total:.6f}")
