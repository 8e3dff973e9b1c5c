"""Axes of the arguments of ``scaled_dot_product_attention``, as torch has them: any number of axes
before the last two, which broadcast.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from .._errors import invalid
from ._calls import check_plain


def four_axes(
    query: Any, key: Any, value: Any, mask: Any, kv_len: int, *, enable_gqa: bool
) -> tuple[Any, ...]:
    """Returns query, key, value and mask of four axes, and the axes of the output before its last
    two, as torch broadcasts them. The last axis of the mask has ``kv_len`` keys.
    """
    q_axes, k_axes, v_axes = query.shape[:-2], key.shape[:-2], value.shape[:-2]
    kv_heads = None
    if enable_gqa:
        key, value, kv_heads = _grouped_heads(query, key, value)
        k_axes, v_axes = (*k_axes[:-1], q_axes[-1]), (*v_axes[:-1], q_axes[-1])
    axes = _broadcast("query", (), q_axes)
    axes = _broadcast("key", axes, k_axes)
    axes = _broadcast("value", axes, v_axes)
    if mask is not None:
        mask = _checked_mask(mask, axes, (query.shape[-2], kv_len))
    *batches, heads = axes if axes else (1,)
    batch = math.prod(batches)

    def whole(tensor: Any, heads: int) -> Any:
        if tensor.shape[:-2] == (batch, heads):
            return tensor
        shape = tensor.shape[-2:]
        return tensor.expand(*batches, heads, *shape).reshape(batch, heads, *shape)

    heads_of_kv = heads if kv_heads is None else kv_heads
    query, key, value = whole(query, heads), whole(key, heads_of_kv), whole(value, heads_of_kv)
    if mask is not None:
        *of_batch, of_heads, rows, keys = mask.shape
        if all(length == 1 for length in of_batch):
            mask = mask.reshape(1, of_heads, rows, keys)
        else:
            mask = mask.expand(*batches, -1, -1, -1).reshape(batch, of_heads, rows, keys)
    return query, key, value, mask, axes


def _grouped_heads(query: Any, key: Any, value: Any) -> tuple[Any, Any, int]:
    """Returns key and value with as many heads, and their number, a divisor of that of query."""
    heads = query.shape[-3] if query.ndim > 2 else None
    for name, tensor in (("key", key), ("value", value)):
        if heads is None or tensor.ndim < 3:
            raise invalid("enable_gqa", "True, for tensors without heads", "at least 3 axes")
        own = tensor.shape[-3]
        if heads != own and (own == 0 or heads % own):
            raise invalid(name, f"{own} heads", f"a divisor of {heads}, the heads of query")
    if key.shape[-3] != value.shape[-3]:
        key = key.repeat_interleave(heads // key.shape[-3], -3)
        value = value.repeat_interleave(heads // value.shape[-3], -3)
    return key, value, key.shape[-3]


def _broadcast(name: str, axes: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the axes to which both broadcast."""
    longer, shorter = (axes, other) if len(axes) >= len(other) else (other, axes)
    result = list(longer)
    for index, length in enumerate(shorter, len(longer) - len(shorter)):
        if result[index] == 1:
            result[index] = length
        elif length not in (1, result[index]):
            hint = "; enable_gqa permits fewer heads" if name in ("key", "value") else ""
            got = f"axes {tuple(other)} before the last two"
            raise invalid(name, got, f"axes that broadcast with {tuple(axes)}{hint}")
    return tuple(result)


def _checked_mask(mask: Any, axes: tuple[int, ...], pairs: tuple[int, int]) -> Any:
    """Returns attn_mask with the last two axes and one for each other of ``axes``, at least one."""
    if not isinstance(mask, torch.Tensor):
        raise invalid("attn_mask", f"a {type(mask).__name__}", "a torch tensor")
    check_plain("attn_mask", mask)
    if mask.dtype != torch.bool and not mask.dtype.is_floating_point:
        raise invalid("attn_mask", f"elements {mask.dtype}", "bools or floats")
    shape = (*(axes or (1,)), *pairs)
    # torch takes a mask of four axes for tensors of three
    extra = max(mask.ndim - len(shape), 0)
    fits = mask.ndim <= max(len(shape), 4) and all(length == 1 for length in mask.shape[:extra])
    for got, want in zip(mask.shape[::-1], shape[::-1], strict=False):
        fits = fits and got in (1, want)
    if not fits:
        raise invalid("attn_mask", f"shape {tuple(mask.shape)}", f"one that broadcasts to {shape}")
    mask = mask[(0,) * extra][(None,) * (len(shape) - mask.ndim)]
    return mask.expand(*mask.shape[:-2], *pairs) if mask.dtype == torch.bool else mask
