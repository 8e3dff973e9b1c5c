"""The argument space of ``scaled_dot_product_attention`` against torch's own: shapes, masks, types,
autocast, tensor subclasses, activation checkpointing, and the transforms of ``torch.func``.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
import unittest
from types import ModuleType
from typing import Any

import pytest
from helpers import random

import annulus_attention as annulus

torch = pytest.importorskip("torch")

from torch.autograd import forward_ad  # noqa: E402
from torch.nn.attention import SDPBackend, bias, sdpa_kernel  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import annulus_attention.torch  # noqa: E402  (imports torch)

ours = annulus.torch.scaled_dot_product_attention
BOUND = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 4e-2}


def theirs(*tensors: Any, **options: Any) -> Any:
    """Computes torch's formula."""
    with sdpa_kernel(SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(*tensors, **options)


def leaf(*shape: int, seed: int = 0, dtype: Any = torch.float64) -> Any:
    return torch.tensor(random(*shape, seed=seed, dtype="f8")).to(dtype).requires_grad_()


def compare(tensors: list[Any], **options: Any) -> None:
    """Compares results and gradients."""
    mask = options.get("attn_mask")
    leaves = [*tensors, mask] if mask is not None and mask.requires_grad else tensors
    results = []
    for function in (ours, theirs):
        out = function(*tensors, **options)
        weights = torch.linspace(-1, 1, out.numel()).to(out.dtype).view(out.shape)
        gradients = torch.autograd.grad(out, leaves, weights, allow_unused=True)
        results.append([out, *gradients])
    bound = BOUND[tensors[0].dtype]
    for got, want in zip(*results, strict=True):
        # torch leaves out gradients of empty tensors
        want = torch.zeros_like(got) if want is None else want
        assert got.shape == want.shape and got.dtype == want.dtype
        assert torch.allclose(got, want, atol=bound * max([1.0, *want.abs().flatten().tolist()]))


SHAPES: list[Any] = [
    # two axes, three, four, five
    ((5, 8), (7, 8), (7, 6)),
    ((3, 5, 8), (3, 7, 8), (3, 7, 6)),
    ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 6)),
    ((2, 3, 4, 5, 8), (2, 3, 4, 7, 8), (2, 3, 4, 7, 6)),
    # broadcast
    ((2, 4, 5, 8), (1, 4, 7, 8), (2, 1, 7, 6)),
    ((1, 1, 5, 8), (2, 4, 7, 8), (4, 7, 6)),
    ((2, 1, 5, 8), (7, 8), (4, 7, 6)),
    ((2, 2, 3, 4, 5, 8), (3, 1, 7, 8), (4, 7, 6)),
    # empty
    ((0, 4, 5, 8), (0, 4, 7, 8), (0, 4, 7, 6)),
    ((2, 0, 5, 8), (2, 0, 7, 8), (2, 0, 7, 6)),
    ((0, 5, 8), (0, 7, 8), (0, 7, 6)),
    ((2, 4, 0, 8), (2, 4, 7, 8), (2, 4, 7, 6)),
    ((2, 4, 5, 8), (2, 4, 0, 8), (2, 4, 0, 6)),
    ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 0)),
]
GROUPED: list[Any] = [
    ((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 6)),
    ((4, 5, 8), (2, 7, 8), (2, 7, 6)),
    ((2, 4, 5, 8), (2, 1, 7, 8), (2, 2, 7, 6)),
    ((2, 4, 5, 8), (1, 2, 7, 8), (2, 2, 7, 6)),
    ((2, 3, 4, 5, 8), (2, 3, 2, 7, 8), (2, 3, 2, 7, 6)),
    ((0, 4, 5, 8), (0, 2, 7, 8), (0, 2, 7, 6)),
]


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("shapes", SHAPES + GROUPED)
def test_shapes(shapes: Any, dtype: Any) -> None:
    tensors = [leaf(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes)]
    q_len, kv_len = shapes[0][-2], shapes[1][-2]
    gqa = {"enable_gqa": shapes in GROUPED}
    for options in ({}, {"is_causal": True}, {"scale": -0.3}, {"scale": 0.0}, {"dropout_p": 1.0}):
        compare(tensors, **options, **gqa)
    for last in ((q_len, kv_len), (kv_len,), (1, kv_len), (q_len, 1), (1,)):
        numbers = leaf(*last, seed=9, dtype=dtype)
        for mask in (numbers, numbers > 0):
            compare(tensors, attn_mask=mask, **gqa)


@pytest.mark.parametrize("axes", [(2, 4), (2, 1), (1, 4), (1, 1), (4,), (1,)])
@pytest.mark.parametrize("last", [(5, 7), (1, 7), (5, 1)])
def test_masks_of_batch_rows_and_heads(axes: Any, last: Any) -> None:
    q, k, v = leaf(2, 4, 5, 8), leaf(1, 4, 7, 8, seed=1), leaf(2, 1, 7, 6, seed=2)
    numbers = leaf(*axes, *last, seed=3)
    for mask in (numbers, numbers > 0):
        compare([q, k, v], attn_mask=mask)
    five = [leaf(3, *x.shape, seed=seed) for seed, x in enumerate((q, k, v))]
    for leading in ((), (1,) * (3 - len(axes)), (3,) if len(axes) == 2 else ()):
        compare(five, attn_mask=leaf(*leading, *axes, *last, seed=3))


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"dropout_p": None}, "dropout_p"),
        ({"dropout_p": "0.1"}, "dropout_p"),
        ({"dropout_p": 1.5}, "dropout_p"),
        ({"attn_mask": [[True] * 7] * 5}, "attn_mask"),
        ({"attn_mask": torch.ones(5, 8)}, "attn_mask"),
        ({"attn_mask": torch.ones(3, 1, 5, 7)}, "attn_mask"),
        ({"attn_mask": torch.ones(1, 2, 4, 5, 7)}, "attn_mask"),
        ({"attn_mask": torch.ones(5, 7, dtype=torch.complex64)}, "attn_mask"),
        ({"is_causal": None}, "is_causal"),
        ({"scale": "a"}, "softmax_scale"),
        ({"query": torch.ones(8)}, "query"),
        ({"query": [[1.0]]}, "query"),
        ({"key": torch.ones(2, 3, 7, 8)}, "key"),
        ({"key": torch.ones(2, 4, 7, 9)}, "key"),
        ({"key": torch.ones(2, 3, 7, 8), "enable_gqa": True}, "key"),
        ({"key": torch.ones(7, 8), "enable_gqa": True}, "enable_gqa"),
        ({"value": torch.ones(2, 4, 6, 8)}, "value"),
        # other types than that of query
        ({"key": torch.ones(2, 4, 7, 8, dtype=torch.bfloat16)}, "key"),
        ({"value": torch.ones(2, 4, 7, 8, dtype=torch.float64)}, "value"),
        ({"query": torch.ones(2, 4, 5, 8, dtype=torch.int64)}, "query"),
    ],
)
def test_arguments_without_meaning_are_named(options: dict[str, Any], argument: str) -> None:
    x = {name: torch.ones(2, 4, length, 8) for name, length in (("query", 5), ("key", 7))}
    with pytest.raises(annulus.InvalidArgument) as caught:
        ours(**{**x, "value": x["key"], **options})
    assert caught.value.argument == argument


def test_samples_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("expecttest") is None:
        # torch.testing._internal imports it, for a base class that is not used here
        stand_in = ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "expecttest", stand_in)
    from torch.testing._internal.common_methods_invocations import op_db

    (info,) = [each for each in op_db if each.name.endswith("functional." + ours.__name__)]
    compared = 0
    for dtype in (torch.float64, torch.float32):
        for sample in info.sample_inputs("cpu", dtype, requires_grad=True):
            if sample.kwargs.get("dropout_p", 0.0) in (0.0, 1.0):
                compare([sample.input, *sample.args], **sample.kwargs)
                compared += 1
    assert compared >= 20


FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16])
def test_autocast_is_that_of_torch(target: Any) -> None:
    for types in itertools.product(FLOATS, repeat=3):
        tensors = [leaf(1, 2, 5, 8, seed=i, dtype=dtype) for i, dtype in enumerate(types)]
        for mask in (None, leaf(5, 5, seed=4, dtype=types[1]), leaf(5, 5, seed=4) > -1):
            results = []
            for function in (ours, theirs):
                with torch.autocast("cpu", dtype=target):
                    try:
                        results.append(function(*tensors, attn_mask=mask))
                    except (RuntimeError, annulus.InvalidArgument) as error:
                        results.append(error)
            got, want = results
            if isinstance(want, RuntimeError):
                # torch takes no mask of float64; here any float is taken
                has_wide_mask = mask is not None and mask.dtype == torch.float64
                assert isinstance(got, annulus.InvalidArgument) or has_wide_mask, types
            else:
                assert got.dtype == want.dtype and torch.allclose(got, want, atol=0.03), types
    with torch.autocast("cpu", dtype=target):
        layer = annulus.torch.attention_forward(None, *[leaf(1, 2, 5, 8, dtype=torch.float32)] * 3)
        assert layer[0].dtype == target
        compiled = torch.compile(lambda x: ours(x, x, x), backend="aot_eager", fullgraph=True)
        assert compiled(leaf(1, 2, 5, 8, dtype=torch.float32)).dtype == target


@pytest.mark.parametrize("lengths", [(3, 3), (5, 7), (1, 4)])
def test_causal_biases(lengths: tuple[int, int]) -> None:
    q_len, kv_len = lengths
    tensors = [leaf(2, 4, n, 8, seed=n) for n in (q_len, kv_len, kv_len)]
    for make in (bias.causal_upper_left, bias.causal_lower_right):
        mask = make(*lengths)
        compare(tensors, attn_mask=mask)
        compiled = torch.compile(ours, backend="eager")(*tensors, attn_mask=mask)
        assert torch.equal(compiled, ours(*tensors, attn_mask=mask))
        with pytest.raises(annulus.InvalidArgument, match="attn_mask: got a CausalBias"):
            ours(*tensors, attn_mask=make(q_len, kv_len + 1))
        with pytest.raises(annulus.InvalidArgument, match="is_causal"):
            ours(*tensors, attn_mask=mask, is_causal=True)


class Doubled(torch.Tensor):
    """A tensor that is twice its storage."""

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError


class Named(torch.Tensor):
    """A tensor without functions of its own."""


def test_tensor_subclasses_are_served_or_refused_by_name() -> None:
    x = leaf(1, 2, 3, 8).detach()
    others: list[Any] = [
        torch.nested.nested_tensor([x[0], x[0]]),
        torch.nested.nested_tensor([x[0], x[0]], layout=torch.jagged),
        x.as_subclass(Doubled),
        torch.masked.masked_tensor(x, x > 0),
        x.to_sparse(),
    ]
    rows = x.transpose(1, 2)
    for other in others:
        for name in ("query", "key", "value", "attn_mask"):
            given = dict.fromkeys(("query", "key", "value"), x) | {name: other}
            with pytest.raises(annulus.Unsupported) as caught:
                ours(**given)
            assert caught.value.argument == name
        for name in ("query", "bias", "softmax_aux", "attention_mask", "q_segment_ids"):
            given = dict.fromkeys(("query", "key", "value"), rows) | {name: other}
            with pytest.raises(annulus.Unsupported) as caught:
                annulus.torch.flash_attention(**given)
            assert caught.value.argument == name
    for plain in (x.as_subclass(Named), torch.nn.Parameter(x)):
        assert torch.allclose(ours(plain, x, x), ours(x, x, x), atol=1e-14)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_activation_checkpointing(reentrant: bool, dropout: float) -> None:
    def model(q: Any, k: Any) -> Any:
        return ours(ours(q, k, k, dropout_p=dropout), k, k, dropout_p=dropout)

    def run(function: Any) -> Any:
        torch.manual_seed(3)
        q, k = leaf(1, 2, 5, 8), leaf(1, 2, 7, 8, seed=1)
        function(q, k).sin().sum().backward()
        return q.grad, k.grad

    got = run(lambda *given: checkpoint(model, *given, use_reentrant=reentrant))
    assert all(torch.allclose(*pair, atol=1e-12) for pair in zip(got, run(model), strict=True))


KEYS = leaf(1, 2, 4, 3, seed=5).detach()
X = leaf(1, 2, 4, 3, seed=6).detach()
STACK = torch.stack([X, X.sin(), KEYS])


def loss(function: Any) -> Any:
    return lambda x: function(x, KEYS, KEYS.cos(), is_causal=True).sin().sum()


def batched(function: Any) -> Any:
    x = X.clone().requires_grad_()
    out = function(x, KEYS, KEYS)
    return torch.autograd.grad(out, x, STACK, is_grads_batched=True)[0]


DERIVATIVES: dict[str, Any] = {
    "grad": lambda f: torch.func.grad(loss(f))(X),
    "vjp": lambda f: torch.func.vjp(lambda x: f(x, KEYS, x), X)[1](KEYS)[0],
    "jacrev": lambda f: torch.func.jacrev(lambda x: f(x, KEYS, KEYS))(X),
    "gradients of samples": lambda f: torch.vmap(torch.func.grad(loss(f)))(STACK),
    "gradient of a vmap": lambda f: torch.func.grad(
        lambda x: torch.vmap(lambda y: f(y, KEYS, KEYS))(x).sin().sum()
    )(STACK),
    "vmap of another axis": lambda f: torch.vmap(lambda x: f(x, KEYS, KEYS), in_dims=3)(
        STACK.permute(1, 2, 3, 0, 4)
    ),
    "vmap of vmap": lambda f: torch.vmap(torch.vmap(lambda x: f(x, KEYS, KEYS)))(STACK[None]),
    "masks": lambda f: torch.vmap(lambda m: f(X, KEYS, KEYS, attn_mask=m))(STACK @ X.mT),
    "batched gradients": batched,
    "vectorized jacobian": lambda f: torch.autograd.functional.jacobian(
        lambda x: f(x, KEYS, KEYS), X, vectorize=True
    ),
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_transforms_of_reverse_mode(name: str) -> None:
    got, want = DERIVATIVES[name](ours), DERIVATIVES[name](theirs)
    assert got.shape == want.shape and torch.allclose(got, want, atol=1e-12)
    assert bool((got != 0).any())


def dual(function: Any) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(loss(function)(forward_ad.make_dual(X, X.cos()))).tangent


def twice(function: Any) -> Any:
    x = X.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(function)(x), x, create_graph=True)
    return torch.autograd.grad(gradient.sum(), x)[0]


SECOND: dict[str, Any] = {
    "jvp": lambda f: torch.func.jvp(loss(f), (X,), (X.cos(),))[1],
    "jacfwd": lambda f: torch.func.jacfwd(loss(f))(X),
    "linearize": lambda f: torch.func.linearize(loss(f), X)[1](X.cos()),
    "hessian": lambda f: torch.func.hessian(loss(f))(X),
    "jvp of a vmap": lambda f: torch.func.jvp(torch.vmap(loss(f)), (STACK,), (STACK,))[1],
    "vmap of a jvp": lambda f: torch.vmap(lambda t: torch.func.jvp(loss(f), (X,), (t,))[1])(STACK),
    "jvp of a gradient": lambda f: torch.func.jvp(torch.func.grad(loss(f)), (X,), (X.cos(),))[1],
    "gradient of a jvp": lambda f: torch.func.grad(
        lambda x: torch.func.jvp(loss(f), (x,), (x.cos(),))[1]
    )(X),
    "dual tensor": dual,
    "gradient of a gradient": lambda f: torch.func.grad(
        lambda x: torch.func.grad(loss(f))(x).sin().sum()
    )(X),
    "jacrev of jacrev": lambda f: torch.func.jacrev(torch.func.jacrev(loss(f)))(X),
    "double backward": twice,
    "functional.jvp": lambda f: torch.autograd.functional.jvp(loss(f), X, X)[1],
    "functional.hessian": lambda f: torch.autograd.functional.hessian(loss(f), X),
}


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("name", SECOND)
def test_second_derivatives_and_forward_mode(name: str, is_compiled: bool) -> None:
    """Compiled, they are right or an error."""
    torch._dynamo.reset()
    want = SECOND[name](theirs)
    if is_compiled:
        try:
            got = torch.compile(SECOND[name], backend="eager")(ours)
        except Exception as error:
            assert "forward mode" in str(error) or "double backward" in str(error)
            return
    else:
        got = SECOND[name](ours)
    assert got.shape == want.shape and torch.allclose(got, want, atol=1e-11)
    assert bool((got != 0).any())


@pytest.mark.parametrize(
    ("name", "call"),
    {
        "forward mode twice": lambda: torch.func.jacfwd(torch.func.jacfwd(loss(ours)))(X),
        "a third derivative": lambda: torch.func.grad(
            lambda x: torch.func.jvp(torch.func.grad(loss(ours)), (x,), (x,))[1].sum()
        )(X),
    }.items(),
)
def test_derivatives_that_do_not_exist_are_errors(name: str, call: Any) -> None:
    with pytest.raises(annulus.Unsupported, match=f"^{name}"):
        call()


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}, {"attn_mask": True}])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_symbolic_sizes_compile_without_a_graph_break(options: Any, backend: str) -> None:
    torch._dynamo.reset()

    def model(q: Any, k: Any, mask: Any, **options: Any) -> Any:
        given = {**options, "attn_mask": mask} if "attn_mask" in options else options
        return ours(q * 2, k, k, **given)

    compiled = torch.compile(model, backend=backend, dynamic=True, fullgraph=True)
    for batch, q_len, kv_len in ((2, 5, 7), (3, 6, 9), (2, 8, 4)):
        q, k = leaf(batch, 4, q_len, 8), leaf(batch, 4, kv_len, 8, seed=1)
        mask = leaf(q_len, kv_len).detach() > -1
        results = []
        for function in (compiled, model):
            out = function(q, k, mask, **options)
            results.append([out, *torch.autograd.grad(out.sin().sum(), (q, k))])
        assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_scales_and_lengths_that_change_compile_without_a_graph_break() -> None:
    torch._dynamo.reset()

    def model(x: Any, scale: float) -> Any:
        return annulus.torch.flash_attention(x, x, x, softmax_scale=scale * x.shape[-1] ** -0.5)

    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for length, scale in ((5, 0.5), (6, 0.6), (7, 0.7), (9, 0.7), (11, 0.5)):
        x = leaf(1, length, 2, 8)
        assert torch.equal(compiled(x, scale), model(x, scale))
