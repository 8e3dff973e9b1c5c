"""Attention for torch tensors, on the CPU and on NVIDIA GPUs: gradients in autograd, no graph break
under ``torch.compile``, and models whose attention is sharded by the sequence.

``annulus.flash_attention`` and ``annulus.ring_attention`` route torch tensors here.

First and second derivatives and forward mode are those of autograd and of ``torch.func``, also with
``vmap``. Third derivatives, forward mode of forward mode and ``functionalize`` raise a
NotImplementedError, and so does a second derivative that the plan lacks (``Plan``'s
``second_derivatives``). A graph of ``torch.compile`` has first derivatives by reverse mode, and
raises for others. Activation checkpointing recomputes a call with its
seed of dropout. Saved are the inputs, out, three statistics of each row (four if not normalised)
and, of bfloat16 and float16 on the CPU, the rounding residual of out, a tensor of its size: without
it dq and dk are off where keys or queries share a large component.

``torch.compile`` traces the operators with ``fullgraph=True``, the eager bits and symbolic sizes.
Options are constants of the graph, so masks and bias functions are made outside of the compiled
function; ``dropout_seed`` may be a tensor of one integer. Over ``comm`` a call is a graph break.

Plans are reused by backward passes, layers and steps with equal options, seed, shapes, element type
and masks (Python functions: the same object). The last 8 idle plans are kept, and as many for each
communicator; ``clear_plans`` frees them.

Inside autocast, ``scaled_dot_product_attention`` and ``attention_forward`` cast their tensors as
torch does. Otherwise mixed types of query, key and value are refused, and so are tensor subclasses
with operations of their own (nested, masked, ``DTensor``).
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
