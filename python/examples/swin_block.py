"""A block like Swin's: attention in windows of an image, with a table of relative positions.

python python/examples/swin_block.py

Source: Liu et al. 2021, Swin Transformer, section 3.2. A window is one row of a batch.
"""

import torch
from torch import nn

import annulus_attention as annulus
import annulus_attention.torch


class SwinBlock(nn.Module):
    def __init__(self, width: int, heads: int, window: int, shift: int) -> None:
        super().__init__()
        self.heads, self.window, self.shift = heads, window, shift
        self.table = nn.Parameter(torch.randn(heads, (2 * window - 1) ** 2) * 0.02)
        self.kind = f"grid:{window}x{window}"
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.to_qkv, self.to_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def windows(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [batch, rows, columns, ...] as [windows, elements of a window, ...]."""
        x = x.unflatten(2, (-1, self.window)).unflatten(1, (-1, self.window))
        return x.transpose(2, 3).flatten(3, 4).flatten(0, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, rows, columns, width = x.shape
        size, shift = self.window, self.shift
        y = self.windows(self.before(x).roll((-shift, -shift), (1, 2)))
        q, k, v = self.to_qkv(y).unflatten(-1, (3, self.heads, -1)).unbind(2)
        # a shift puts parts of the image that are far apart into one window: they are segments
        edge = torch.bucketize(torch.arange(rows), torch.tensor([rows - size, rows - shift]) - 1)
        parts = edge[:, None] * 3 + edge if shift else torch.zeros(rows, columns)
        parts = self.windows(parts.expand(batch, -1, -1)).int()
        out = annulus.torch.flash_attention(
            q, k, v, bias=self.table, bias_table=self.kind, q_segment_ids=parts
        )
        out = self.to_out(out.flatten(2))
        out = out.view(batch, rows // size, columns // size, size, size, width)
        out = out.transpose(2, 3).reshape(x.shape).roll((shift, shift), (1, 2))
        x = x + out
        return x + self.mlp(self.after(x))


torch.manual_seed(0)
model = nn.Sequential(SwinBlock(32, 4, 8, 0), SwinBlock(32, 4, 8, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
image, target = torch.randn(2, 24, 24, 32), torch.randn(2, 24, 24, 32)
for step in range(5):
    loss = nn.functional.mse_loss(model(image), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss:.6f} largest gradient {model[0].table.grad.abs().max():.2e}")
