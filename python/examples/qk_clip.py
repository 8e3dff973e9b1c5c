"""MuonClip over the ranks of mpi4py: Muon's update, then QK-clip by the largest score of each head.

mpirun -n 2 python python/examples/qk_clip.py

Sources: Jordan et al. 2024, Muon; Kimi Team 2025, Kimi K2, section 2.1.
"""

import torch
from mpi4py import MPI

import annulus_attention as annulus

comm, length, heads, dim, width = MPI.COMM_WORLD, 256, 4, 16, 64
tau, rate, momentum = 3.0, 0.3, 0.9
shard = annulus.Attention(causal=True).shard(length, comm=comm)

torch.manual_seed(0)  # equal on all ranks
x = torch.randn(1, length, width)[:, shard.q_rows]
target = torch.randn(1, length, width)[:, shard.q_rows]
w_q, w_k, w_v = (torch.randn(width, heads * dim).div(8).requires_grad_() for _ in range(3))
moments = [torch.zeros_like(w) for w in (w_q, w_k, w_v)]


def attended() -> tuple[torch.Tensor, annulus.Statistics]:
    q, k, v = ((x @ w).unflatten(-1, (heads, dim)) for w in (w_q, w_k, w_v))
    layout, route = shard.layout, shard.route
    out, statistics = annulus.ring_attention(
        q, k, v, causal=True, comm=comm, layout=layout, route=route, return_statistics=True
    )
    return out.flatten(2), statistics


def orthogonal(moment: torch.Tensor) -> torch.Tensor:
    """The nearest semi-orthogonal matrix, by Newton and Schulz's iteration."""
    y = moment / (moment.norm() + 1e-7)
    for _ in range(5):
        a = y @ y.T
        y = 3.4445 * y + (-4.7750 * a + 2.0315 * a @ a) @ y
    return y


for step in range(5):
    out, _ = attended()
    loss = (out - target).square().sum() / (length * width)
    gradients = torch.autograd.grad(loss, (w_q, w_k, w_v))
    with torch.no_grad():
        for w, moment, gradient in zip((w_q, w_k, w_v), moments, gradients, strict=True):
            comm.Allreduce(MPI.IN_PLACE, gradient.numpy())
            moment.mul_(momentum).add_(gradient)
            w -= rate * orthogonal(moment)
        largest = attended()[1].head_max_product  # over the rows of all ranks
        clip = (tau / largest.clamp(min=tau)).sqrt().repeat_interleave(dim)
        w_q *= clip
        w_k *= clip
        clipped = attended()[1].head_max_product
    total = comm.allreduce(loss.item())
    if comm.rank == 0:
        print(f"step {step} loss {total:.6f} largest {largest.max():.3f} -> {clipped.max():.3f}")
