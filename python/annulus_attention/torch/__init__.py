"""Attention for torch tensors, on the CPU and on NVIDIA GPUs: gradients in autograd, no graph break
under ``torch.compile``, and models whose attention is sharded by the sequence.

``annulus.flash_attention`` and ``annulus.ring_attention`` route torch tensors here.
"""

from ._calls import attend, clear_plans, flash_attention, ring_attention
from ._mask_pattern import MaskPattern, mask_pattern
from ._parallel import context_parallel, scaled_dot_product_attention
from ._transformers import attention_forward, register

__all__ = [
    "MaskPattern",
    "attend",
    "attention_forward",
    "clear_plans",
    "context_parallel",
    "flash_attention",
    "mask_pattern",
    "register",
    "ring_attention",
    "scaled_dot_product_attention",
]
