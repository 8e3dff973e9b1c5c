"""Training on packed documents: equal rows and work on each rank, whatever the lengths.

mpirun -n 2 python python/examples/packed_documents.py
"""

import numpy as np
import torch
from mpi4py import MPI
from torch import nn

import annulus_attention as annulus
import annulus_attention.torch

comm, lengths = MPI.COMM_WORLD, [150, 6, 40, 60]
length, starts = sum(lengths), np.cumsum([0, *lengths])
attention = annulus.Attention(causal=True)  # it assigns rows before there are tensors
shard = attention.shard(length, comm=comm, layout="balanced", cum_seqlens_q=starts)
rows, positions = torch.from_numpy(shard.q_rows), torch.from_numpy(shard.q_positions)
documents = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths))[rows]

torch.manual_seed(0)  # equal parameters on all ranks
tokens = torch.randint(50, (1, length + 1))
words, places = nn.Embedding(50, 64), nn.Embedding(max(lengths), 64)
to_qkv, to_logits = nn.Linear(64, 3 * 64), nn.Linear(64, 50)
model = nn.ModuleList([words, places, to_qkv, to_logits])
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
for step in range(5):
    x = words(tokens[:, rows]) + places(positions)  # positions start at 0 in each document
    q, k, v = to_qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
    with annulus.torch.context_parallel(shard, comm, segment_ids=documents[None]):
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    logits = to_logits(x + y.transpose(1, 2).flatten(2))
    loss = nn.functional.cross_entropy(logits[0], tokens[0, rows + 1], reduction="sum") / length
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        comm.Allreduce(MPI.IN_PLACE, parameter.grad.numpy())
    optimizer.step()
    total = comm.allreduce(loss.item())
    if comm.rank == 0:
        print(f"step {step} loss {total:.6f}")
