"""JVP and double backward: plans, torch and JAX. Random configurations are those of
``second_derivatives.py``, which checks any number of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import random
from test_mpi import launch, needs_mpi

import annulus_attention as annulus

torch = pytest.importorskip("torch")

from second_derivatives import check  # noqa: E402

import annulus_attention.torch  # noqa: E402

SHAPE = (1, 6, 2, 3)
"""Of query, key and value: batch, rows, heads, dim."""


def test_random_configurations_agree_with_finite_differences() -> None:
    for number in range(16):
        check(number, fast=True)
    check(1, fast=False)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_passes_of_a_plan_are_those_of_autograd(dtype: str) -> None:
    """Also that the operators of torch have the bits of a plan."""
    q, k, v, dq, dk, dv, dout = (
        torch.tensor(random(*SHAPE, seed=seed)).to(getattr(torch, dtype)) for seed in range(7)
    )
    bias, dbias = (torch.tensor(random(2, 6, 6, seed=seed))[None].float() for seed in (8, 9))
    attention = annulus.Attention(causal=True)
    lengths = {"batch": 1, "q_len": 6, "q_heads": 2, "head_dim": 3}
    plan = annulus.Plan(
        attention,
        **lengths,
        dtype=dtype,
        bias_shape=bias.shape,
        ranks=2,
        threads=1,
        second_derivatives=True,
    )

    def attend(q: Any, k: Any, v: Any, bias: Any) -> Any:
        return annulus.ring_attention(
            q, k, v, bias=bias, causal=True, ranks=2, threads=1, return_lse=True
        )

    (out, lse), tangents = torch.func.jvp(attend, (q, k, v, bias), (dq, dk, dv, dbias))
    jvp = plan.jvp(q, k, v, dq, dk, dv, bias=bias, bias_tangent=dbias)
    assert len(jvp.reports) == 2 and jvp.reports[0].bytes_sent == jvp.reports[0].bytes_predicted
    assert torch.equal(jvp.out_tangent, tangents[0]) and torch.equal(jvp.lse_tangent, tangents[1])
    bound = {"float64": 1e-14, "float32": 1e-5, "bfloat16": 0.02}[dtype]
    assert (jvp.out - out).abs().max() < bound and (jvp.lse - lse).abs().max() < bound

    double = plan.double_backward(q, k, v, dout, dq, dk, dv, bias=bias, dbias_cotangent=dbias)
    leaves = [x.clone().requires_grad_() for x in (q, k, v, bias, dout)]
    out, _ = attend(*leaves[:4])
    first = torch.autograd.grad(out, leaves[:4], leaves[4], create_graph=True)
    second = torch.autograd.grad(first, leaves, (dq, dk, dv, dbias))
    of_inputs = double.inputs
    got = (of_inputs.dq, of_inputs.dk, of_inputs.dv, of_inputs.dbias, double.ddout)
    assert all(torch.equal(a, b) for a, b in zip(got, second, strict=True))
    assert torch.equal(double.ddout, jvp.out_tangent)
    assert double.ddlse.shape == (1, 2, 6)

    with pytest.raises(annulus.InvalidArgument, match="^second_derivatives"):
        annulus.Plan(attention, **lengths, threads=1).jvp(*(3 * [np.ones(SHAPE, "f4")] * 2))
    with pytest.raises(annulus.InvalidArgument, match="^dk_cotangent: .*elements"):
        plan.double_backward(q, k, v, dout, dq, dk.half(), dv, bias=bias)
    with pytest.raises(annulus.InvalidArgument, match="^value_tangent"):
        plan.jvp(q, k, v, dq, dk, None, bias=bias)


REFUSED: dict[str, dict[str, Any]] = {
    "the reproducible order": {"reproducible": True},
    "an output that is not normalised": {"normalize_output": False},
    "strategy": {"strategy": "pass-q", "ranks": 2},
    "the wgpu backend": {"backend": "wgpu"},
}


@pytest.mark.parametrize("by", REFUSED)
def test_what_has_no_second_derivative_is_refused_by_name(by: str) -> None:
    if REFUSED[by].get("backend", "cpu") not in annulus.BACKENDS:
        pytest.skip("not built with wgpu")
    x = torch.tensor(random(*SHAPE, seed=1)).float().requires_grad_()
    attend = lambda x: annulus.ring_attention(x, x, x, **REFUSED[by]).sum()  # noqa: E731
    (gradient,) = torch.autograd.grad(attend(x), x, create_graph=True)
    assert bool((gradient != 0).any())
    for call in (
        lambda: torch.autograd.grad(gradient.sum(), x),
        lambda: torch.func.jvp(attend, (x,), (x,)),
    ):
        with pytest.raises(annulus.Unsupported, match=f"^second_derivatives .*{by}") as caught:
            call()
        assert caught.value.argument == "second_derivatives"


def test_a_gradient_penalty_has_the_same_loss_on_any_number_of_ranks() -> None:
    losses = []
    for ranks in (1, 2, 3):
        torch.manual_seed(0)
        to_qkv = torch.nn.Linear(4, 12).double()
        optimizer = torch.optim.Adam(to_qkv.parameters(), lr=0.05)
        inputs = torch.tensor(random(1, 9, 4, seed=3, dtype="f8"), requires_grad=True)
        losses.append([])
        for _ in range(6):
            q, k, v = to_qkv(inputs).unflatten(-1, (3, 2, 2)).unbind(2)
            out = annulus.ring_attention(q, k, v, causal=True, ranks=ranks, threads=1)
            critic = out.tanh().sum()
            (gradient,) = torch.autograd.grad(critic, inputs, create_graph=True)
            loss = critic + 10 * (gradient.norm(dim=-1) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0][-1] < losses[0][0]
    assert np.abs(np.diff(losses, axis=0)).max() < 1e-10


@needs_mpi
def test_forces_and_derivatives_over_mpi() -> None:
    said = [launch(ranks, "../examples/forces.py") for ranks in (1, 2, 3)]
    steps = [[float(line.split()[-1]) for line in text.splitlines()] for text in said]
    assert len(steps[0]) == 8 and steps[0][-1] < 0.7 * steps[0][0]
    assert np.abs(np.diff(steps, axis=0)).max() < 2e-9
    told = launch(3, "second_derivatives.py", program_arguments=["4"])
    assert "4 configurations on 3 ranks of MPI: 0 failed" in told
