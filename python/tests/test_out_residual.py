"""Gradients of bfloat16 and float16 where keys and values share large components: the rounding
residual of out, which passes of NumPy's doors return and torch and JAX keep between the passes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from helpers import random

import annulus

torch = pytest.importorskip("torch")

import annulus.torch  # noqa: E402  (imports torch)

SHAPE = (2, 24, 4, 8)
# of keys, of values
COMPONENTS = {"bfloat16": (16.0, 4.0), "float16": (64.0, 16.0)}
WITH, WITHOUT = 0.02, 0.05
DTYPES = list(COMPONENTS)


def tensors(dtype: str) -> list[Any]:
    """Returns q, k, v and dout, rounded to the type."""
    drawn = [random(*SHAPE, seed=seed, dtype="f8") for seed in range(4)]
    of_keys, of_values = COMPONENTS[dtype]
    drawn[1][..., 1] += of_keys
    drawn[1][..., 4] -= of_keys
    drawn[2][..., 0] += of_values
    drawn[2][..., 3] += of_values
    return [torch.tensor(x).to(getattr(torch, dtype)) for x in drawn]


def exact_dq(given: list[Any]) -> Any:
    """Computes dq of full attention in float64, from the rounded tensors."""
    q, k, v, dout = (x.double().transpose(1, 2) for x in given)
    q.requires_grad_()
    out = torch.softmax(q @ k.transpose(2, 3) / SHAPE[3] ** 0.5, -1) @ v
    (dq,) = torch.autograd.grad(out, q, dout)
    return dq.transpose(1, 2)


def error(dq: Any, given: list[Any]) -> float:
    """Returns the largest error of dq, relative to its largest element."""
    want = exact_dq(given)
    return float((dq.double() - want).abs().max() / want.abs().max())


@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [(1, "ring"), (2, "ring"), (3, "ring"), (2, "heads:2"), (2, "grid:1x2")],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_plan(dtype: str, ranks: int, strategy: str) -> None:
    given = tensors(dtype)
    q, k, v, dout = given
    lengths = dict(zip(("batch", "q_len", "q_heads", "head_dim"), SHAPE, strict=True))
    attention = annulus.Attention()
    with annulus.Plan(attention, **lengths, dtype=dtype, ranks=ranks, strategy=strategy) as plan:
        forward = plan.forward(q, k, v)
        residual = forward.out_residual
        assert residual.dtype == forward.out.dtype and residual.shape == forward.out.shape
        assert error(plan.backward(q, k, v, forward, dout).dq, given) < WITH
        without = dataclasses.replace(forward, out_residual=None)
        assert error(plan.backward(q, k, v, without, dout).dq, given) > WITHOUT
        wrong = dataclasses.replace(forward, out_residual=residual.float())
        with pytest.raises(annulus.InvalidArgument, match="out_residual"):
            plan.backward(q, k, v, wrong, dout)


def test_plan_of_other_types_and_of_forward_only_has_none() -> None:
    lengths = dict(zip(("batch", "q_len", "q_heads", "head_dim"), SHAPE, strict=True))
    x = np.ones(SHAPE, "float32")
    with annulus.Plan(annulus.Attention(), **lengths) as plan:
        forward = plan.forward(x, x, x)
        assert forward.out_residual is None
        with pytest.raises(annulus.InvalidArgument, match="out_residual"):
            plan.backward(x, x, x, dataclasses.replace(forward, out_residual=x), x)
    with annulus.Plan(annulus.Attention(), **lengths, dtype="float16", forward_only=True) as plan:
        x = x.astype("float16")
        assert plan.forward(x, x, x).out_residual is None


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_keeps_the_residual(dtype: str, is_compiled: bool) -> None:
    given = tensors(dtype)
    q, k, v = (x.requires_grad_() for x in given[:3])

    def attend(*inputs: Any) -> Any:
        return annulus.flash_attention(*inputs)

    function = torch.compile(attend, fullgraph=True) if is_compiled else attend
    out = function(q, k, v)
    (dq,) = torch.autograd.grad(out, q, given[3])
    assert error(dq, [x.detach() for x in given]) < WITH


def test_torch_saves_one_tensor_more_of_16_bits_and_none_of_others() -> None:
    def saved_bytes(dtype: Any) -> int:
        x = torch.ones(SHAPE, dtype=dtype, requires_grad=True)
        saved: list[int] = []

        def pack(tensor: Any) -> Any:
            saved.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            annulus.flash_attention(x, x, x)
        return sum(saved)

    elements, statistics = int(np.prod(SHAPE)), int(np.prod(SHAPE[:3]))
    # q, k, v and out; lse, max and sum
    assert saved_bytes(torch.float32) == 4 * 4 * elements + 3 * 4 * statistics
    assert saved_bytes(torch.bfloat16) == 5 * 2 * elements + 3 * 4 * statistics


@pytest.mark.parametrize("dtype", DTYPES)
def test_jax_keeps_the_residual(dtype: str) -> None:
    jax = pytest.importorskip("jax")
    given = tensors(dtype)
    q, k, v, dout = (jax.numpy.asarray(x.float().numpy()).astype(dtype) for x in given)
    for transform in (lambda function: function, jax.jit):
        attend = transform(lambda *inputs: annulus.flash_attention(*inputs))
        _, pull = jax.vjp(attend, q, k, v)
        dq = np.asarray(pull(dout)[0].astype("float32"))
        assert error(torch.tensor(dq), given) < WITH
