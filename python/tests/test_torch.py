"""Every golden case through autograd, gradcheck in float64, element types, torch.compile; the
rounding residual of out, which passes of NumPy's doors return and torch and JAX keep between the
passes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from helpers import Case, batch, check, floats, naive, random
from test_mpi import launch, needs_mpi

import annulus_attention as annulus

torch = pytest.importorskip("torch")

import annulus_attention.torch  # noqa: E402  (imports torch)


@pytest.mark.parametrize("ranks", [1, 3])
def test_gradients(golden: Case, ranks: int) -> None:
    given = {name: torch.tensor(array) for name, array in floats(golden, "float64").items()}
    dout, dlse = given.pop("dout"), given.pop("dlse", None)
    for tensor in given.values():
        tensor.requires_grad_()
    ids = {name: torch.tensor(array) for name, array in batch(golden).items()}
    out, lse = annulus.ring_attention(
        **given, **ids, **golden.arguments, ranks=ranks, threads=1, return_lse=True
    )
    cotangents = (dout, torch.zeros_like(lse) if dlse is None else dlse)
    names = {"query": "dq", "key": "dk", "value": "dv"}
    gradients = torch.autograd.grad((out, lse), list(given.values()), cotangents)
    got = {
        names.get(name, f"d{name}"): gradient.numpy()
        for name, gradient in zip(given, gradients, strict=True)
    }
    assert set(got) | {"out", "lse"} == set(golden.expected)
    check(golden, "float64", {"out": out.detach(), "lse": lse.detach(), **got})


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("reproducible", {"reproducible": True, "strategy": "grid:2x2"}),
        ("bias", {"bias": torch.zeros(1, 1, 24, 24), "fused_backward": False}),
        (
            "attention_mask",
            {"attention_mask": torch.ones(1, 1, 24, 24) > 0, "fused_backward": False},
        ),
    ],
)
def test_unsupported_combinations_name_an_argument(name: str, arguments: dict[str, Any]) -> None:
    query, key, value = (torch.zeros(1, 24, 2, 8, requires_grad=True) for _ in range(3))
    with pytest.raises(annulus.Unsupported, match=f"^{name} ") as caught:
        annulus.ring_attention(query, key, value, ranks=4, **arguments)
    assert caught.value.argument == name


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("fused_backward", [True, False])
def test_gradcheck(ranks: int, fused_backward: bool) -> None:
    def tensor(*shape: int) -> Any:
        return torch.tensor(random(*shape, seed=sum(shape), dtype="f8"), requires_grad=True)

    # causal, grouped-query heads, sinks, bias, window and dropout
    inputs = (tensor(1, 7, 4, 3), tensor(1, 7, 2, 3), tensor(1, 7, 2, 5), tensor(4, 2))
    bias = tensor(1, 4, 1, 7) if not fused_backward else tensor(1, 4, 7, 7)

    def attend(q: Any, k: Any, v: Any, sinks: Any, bias: Any) -> Any:
        return annulus.torch.ring_attention(
            q,
            k,
            v,
            softmax_aux=sinks,
            bias=bias,
            causal=True,
            sliding_window=(4, 0),
            dropout_prob=0.2,
            dropout_seed=11,
            ranks=ranks,
            threads=1,
            fused_backward=fused_backward,
            return_lse=True,
        )

    assert torch.autograd.gradcheck(attend, (*inputs, bias))


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_element_types_and_strides(dtype: str) -> None:
    kind = getattr(torch, dtype)

    def tensor(heads: int) -> Any:
        # [batch, heads, seq, dim] in memory, as most models have it
        return torch.tensor(random(2, heads, 33, 16, seed=heads)).to(kind).transpose(1, 2)

    q, k, v = tensor(4), tensor(2), tensor(2)
    assert not q.is_contiguous()
    out, lse = annulus.flash_attention(q, k, v, causal=True, return_lse=True)
    assert out.dtype == kind
    assert lse.dtype == (torch.float64 if dtype == "float64" else torch.float32)
    want, want_lse = naive(*(x.double().numpy() for x in (q, k, v)), np.tri(33, dtype=bool))
    bound = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 3e-2, "float16": 3e-3}[dtype]
    assert abs(out.double().numpy() - want).max() < bound
    assert abs(lse.double().numpy() - want_lse).max() < max(bound / 100, 1e-5)
    q, k, v = (tensor.requires_grad_() for tensor in (q, k, v))
    annulus.flash_attention(q, k, v, causal=True).float().square().sum().backward()
    assert q.grad.dtype == k.grad.dtype == v.grad.dtype == kind
    assert q.grad.shape == q.shape and bool((q.grad != 0).any())


def test_inference_needs_no_gradient_and_compile_gives_the_eager_bits() -> None:

    q, k, v = (torch.tensor(random(1, 40, heads, 8, seed=heads)) for heads in (4, 2, 2))

    def model(q: Any, k: Any, v: Any) -> Any:
        return annulus.torch.flash_attention(q * 2, k, v, causal=True) + 1

    eager = model(q, k, v)
    assert (torch.compile(model, backend="eager")(q, k, v) == eager).all()
    with torch.no_grad():
        q.requires_grad_()
        out = annulus.flash_attention(q * 2, k, v, causal=True)
        assert not out.requires_grad and (out + 1 == eager).all()


def test_tensors_that_are_not_supported_are_named() -> None:
    q, k, v = (torch.tensor(random(1, 8, 2, 4, seed=seed)) for seed in range(3))
    with pytest.raises(annulus.Unsupported, match="key.*meta"):
        annulus.flash_attention(q, k.to("meta"), v)
    with pytest.raises(annulus.InvalidArgument, match="value: got elements float64"):
        annulus.flash_attention(q, k, v.double())

    with pytest.raises(annulus.InvalidArgument, match="query: got a ndarray"):
        annulus.torch.flash_attention(q.numpy(), k, v)
    with pytest.raises(annulus.Unsupported, match="return_max_sum"):
        annulus.flash_attention(
            q.requires_grad_(), k, v, normalize_output=False, return_max_sum=True
        )


def test_max_and_sum_have_no_gradient_in_transforms() -> None:
    def most(x: Any) -> Any:
        options = {"normalize_output": False, "return_max_sum": True}
        return annulus.torch.flash_attention(x, x, x, **options)[1].sum()

    x = torch.tensor(random(1, 5, 2, 4, dtype="f8"))
    for differentiate in (
        lambda: torch.func.grad(most)(x),
        lambda: torch.vmap(torch.func.grad(most))(x[None]),
        lambda: torch.func.grad(lambda y: torch.vmap(most)(y).sum())(x[None]),
    ):
        with pytest.raises(annulus.Unsupported, match="return_max_sum"):
            differentiate()


@needs_mpi
@pytest.mark.parametrize("ranks", [2, 3])
def test_losses_follow_those_of_one_process(ranks: int) -> None:
    told = launch(ranks, "torch_ranks_program.py", program_arguments=["training"])
    assert f"passed on {ranks} ranks" in told


@needs_mpi
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_agree_and_have_the_gradients_of_one_process(ranks: int) -> None:
    assert f"passed on {ranks} ranks" in launch(ranks, "torch_ranks_program.py")


SHAPE = (2, 24, 4, 8)
# large components, of keys and of values
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
