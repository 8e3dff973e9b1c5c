"""Attention as operators of torch, which ``torch.compile`` puts into its graph unopened.

    annulus::attend           out, lse, max, sum and ties; the last three are empty if normalised
    annulus::attend_backward  dq, dk, dv, then dbias and dsoftmax_aux of those that are given

An operator takes tensors and simple types. The options of a call are a text (``_options.py``), and
its plan comes from a cache (``_plan_cache.py``), so that forward and backward share one. The seed
of dropout is a tensor, so that a new seed in every step is not a new graph.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from .. import _options
from .._arrays import accumulator
from .._calls import BATCH, Call, Shapes, pass_forward
from .._errors import invalid
from .._plan_cache import plan_for
from .._results import Forward

_INPUTS = ", ".join(
    (
        "Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? softmax_aux",
        *(f"Tensor? {name}" for name in BATCH),
        "Tensor? dropout_seed, str options, bool forward_only",
    )
)
_STATISTICS = "Tensor lse, Tensor max, Tensor sum, Tensor ties"


def _read(given: tuple[Any, ...]) -> tuple[Call, Any, Any, dict[str, Any], bool]:
    """Returns call, key of its options, tensors, batch and forward_only of an operator's inputs."""
    tensors, batch = given[:5], dict(zip(BATCH, given[5:12], strict=True))
    dropout_seed, options, forward_only = given[12:]
    seed = None
    if dropout_seed is not None:
        if dropout_seed.dtype.is_floating_point or dropout_seed.numel() != 1:
            got = f"{dropout_seed.dtype} of shape {tuple(dropout_seed.shape)}"
            raise invalid("dropout_seed", got, "one integer")
        # int64 has the bits of an unsigned number
        seed = int(dropout_seed.item()) % 2**64
    return _options.read(options, seed), (options, seed), tensors, batch, forward_only


@torch.library.custom_op(
    "annulus::attend",
    mutates_args=(),
    device_types=("cpu", "cuda"),
    schema=f"({_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def attend(*given: Any) -> Any:
    """Computes a forward pass."""
    call, key, tensors, batch, forward_only = _read(given)
    with plan_for(key, call, tensors, batch, forward_only=forward_only) as plan:
        forward = pass_forward(plan, tensors)
    statistics = (forward.max, forward.sum, forward.ties)
    if call.attention.normalize_output:
        statistics = tuple(forward.lse.new_empty(0) for _ in statistics)
    return forward.out, forward.lse, *statistics


@attend.register_fake
def _(*given: Any) -> Any:
    query, key, value, bias, softmax_aux = given[:5]
    options = given[13]
    shapes = Shapes.of(query, key, value, bias, softmax_aux)
    batch, q_len, q_heads, _ = shapes.query
    acc = getattr(torch, accumulator(shapes.dtype))
    is_normalized = json.loads(options)["attention"]["normalize_output"]
    lse = (batch, q_heads, q_len)
    statistics = [lse] + [(0,) if is_normalized else lse] * 3
    out = query.new_empty((batch, q_len, q_heads, shapes.value[3]))
    return out, *(query.new_empty(shape, dtype=acc) for shape in statistics)


@torch.library.custom_op(
    "annulus::attend_backward",
    mutates_args=(),
    device_types=("cpu", "cuda"),
    schema=f"({_INPUTS}, Tensor out, {_STATISTICS}, Tensor dout, Tensor dlse) -> Tensor[]",
)
def attend_backward(*given: Any) -> Any:
    """Computes a backward pass."""
    call, options, tensors, batch, forward_only = _read(given[:15])
    query, key, value, bias, softmax_aux = tensors
    out, lse, *statistics, dout, dlse = given[15:]
    if call.attention.normalize_output:
        statistics = [None] * 3
    with plan_for(options, call, tensors, batch, forward_only=forward_only) as plan:
        gradients = plan.backward(
            query,
            key,
            value,
            Forward(out, lse, *statistics),
            dout,
            dlse,
            bias=bias,
            softmax_aux=softmax_aux,
        )
    all = (gradients.dq, gradients.dk, gradients.dv, gradients.dbias, gradients.dsoftmax_aux)
    return [gradient for gradient in all if gradient is not None]


@attend_backward.register_fake
def _(*given: Any) -> Any:
    return [
        torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        for tensor in given[:5]
        if tensor is not None
    ]


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, options, forward_only = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.options = options, forward_only


def _backward(ctx: Any, dout: Any, dlse: Any, *_: Any) -> Any:
    # max, sum and ties are never returned with a gradient
    tensors, results = ctx.saved_tensors[:13], ctx.saved_tensors[13:]
    gradients = iter(attend_backward(*tensors, *ctx.options, *results, dout, dlse))
    of_tensors = [None if tensor is None else next(gradients) for tensor in tensors[:5]]
    return *of_tensors, *(None for _ in tensors[5:]), None, None


attend.register_autograd(_backward, setup_context=_setup_context)
