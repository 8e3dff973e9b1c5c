"""Trains a small graph transformer whose edges are key lists, over the ranks of MPI.

    python graph_transformer.py
    mpirun -n 3 python graph_transformer.py

Each rank has a part of the nodes and their edges. Attention follows the edges only, with a learned
number for each kind of edge, and receives the distinct neighbours of other ranks and no other rows.
The losses are the same for every number of ranks, up to rounding.
"""

import numpy as np
import torch
from mpi4py import MPI

import annulus_attention as annulus
import annulus_attention.torch  # noqa: F401

SIDE, HEADS, DIM, KINDS, STEPS = 18, 4, 8, 9, 6
comm = MPI.COMM_WORLD


def edges(rows):
    """Returns the edges of the nodes ``rows`` of a grid to their neighbours: CSR and kinds."""
    indptr, indices, kinds = [0], [], []
    for row in rows:
        y, x = divmod(row, SIDE)
        for kind in range(KINDS):
            there = [y + kind // 3 - 1, x + kind % 3 - 1]
            if all(0 <= at < SIDE for at in there):
                indices.append(there[0] * SIDE + there[1])
                kinds.append(kind)
        indptr.append(len(indices))
    return torch.tensor(indptr), torch.tensor(indices), torch.tensor(kinds)


def summed(parameters):
    """Adds the gradients of the parameters over all ranks."""
    for parameter in parameters:
        comm.Allreduce(MPI.IN_PLACE, parameter.grad.numpy())


def main():
    nodes = SIDE * SIDE
    rows = range(nodes * comm.rank // comm.size, nodes * (comm.rank + 1) // comm.size)
    indptr, indices, kinds = edges(rows)
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(nodes, HEADS * DIM, generator=generator)[rows.start : rows.stop]
    target = torch.randn(nodes, HEADS * DIM, generator=generator)[rows.start : rows.stop]
    weights = 0.2 * torch.randn(4, HEADS * DIM, HEADS * DIM, generator=generator)
    parameters = [*weights.clone(), torch.zeros(KINDS)]
    for parameter in parameters:
        parameter.requires_grad_()
    *maps, of_kind = parameters
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    for _ in range(STEPS):
        q, k, v = ((features @ of).view(1, len(rows), HEADS, DIM) for of in maps[:3])
        graph = torch.sparse_csr_tensor(indptr, indices, of_kind[kinds], (len(rows), nodes))
        out = annulus.torch.ring_attention(q, k, v, key_lists=graph, list_bias=True, comm=comm)
        out = features + out.reshape(len(rows), -1) @ maps[3]
        loss = ((out - target) ** 2).sum() / target.shape[1] / nodes
        optimizer.zero_grad()
        loss.backward()
        summed(parameters)
        optimizer.step()
        total = comm.allreduce(loss.item())
        if comm.rank == 0:
            print(f"{total:.6f}", flush=True)
    assert of_kind.abs().max() > 1e-4
    return np.float64(total)


if __name__ == "__main__":
    main()
