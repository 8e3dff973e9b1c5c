"""Every golden case with gradients under jax.jit; the bits of jitted and eager calls; JAX's
transformations; jax.nn.dot_product_attention.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import Case, batch, check, chosen_strategies, floats, naive, random
from test_mpi import launch, needs_mpi

import annulus_attention as annulus

jax = pytest.importorskip("jax")
jax.config.update("jax_enable_x64", True)
jnp = jax.numpy

import annulus_attention.jax  # noqa: E402  (imports jax)


@pytest.mark.parametrize("ranks", [1, 3])
def test_gradients(golden: Case, ranks: int) -> None:
    given = {name: jnp.asarray(array) for name, array in floats(golden, "float64").items()}
    dout = given.pop("dout")
    dlse = given.pop("dlse", jnp.zeros(golden.expected["lse"].shape))
    ids = {name: jnp.asarray(array) for name, array in batch(golden).items()}

    @jax.jit
    def compute(given: Any, ids: Any, cotangents: Any) -> Any:
        def attend(given: Any) -> Any:
            return annulus.ring_attention(
                **given, **ids, **golden.arguments, ranks=ranks, threads=1, return_lse=True
            )

        results, backward = jax.vjp(attend, given)
        return results, backward(cotangents)[0]

    (out, lse), gradients = compute(given, ids, (dout, dlse))
    names = {"query": "dq", "key": "dk", "value": "dv"}
    got = {names.get(name, f"d{name}"): array for name, array in gradients.items()}
    assert set(got) | {"out", "lse"} == set(golden.expected)
    check(golden, "float64", {"out": out, "lse": lse, **got})


def arrays(length: int, dtype: Any = jnp.float32) -> list[Any]:
    return [
        jnp.asarray(random(2, length, heads, 32, seed=heads)).astype(dtype) for heads in (4, 2, 2)
    ]


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_jit_gives_the_eager_bits(dtype: str) -> None:
    q, k, v = arrays(65, dtype)

    def attend(q: Any, k: Any, v: Any) -> Any:
        return annulus.jax.ring_attention(q, k, v, causal=True, sliding_window=20, ranks=2)

    eager, jitted = attend(q, k, v), jax.jit(attend)(q, k, v)
    assert isinstance(eager, jax.Array) and eager.dtype == jitted.dtype == dtype
    assert (eager == jitted).all()
    want, _ = naive(q, k, v, np.tri(65, dtype=bool) & ~np.tri(65, k=-21, dtype=bool))
    bound = {"float32": 1e-5, "float64": 1e-12, "bfloat16": 3e-2, "float16": 3e-3}[dtype]
    assert abs(np.asarray(eager).astype("f8") - want).max() < bound

    def loss(q: Any, k: Any, v: Any) -> Any:
        return (attend(q, k, v).astype("float32") ** 2).sum()

    gradients = jax.grad(loss, (0, 1, 2))
    for eager, jitted in zip(gradients(q, k, v), jax.jit(gradients)(q, k, v), strict=True):
        assert eager.dtype == dtype and (eager == jitted).all()
        assert (eager != 0).any()


def test_long_sequences_pass_through_jit() -> None:
    """Callbacks with large arguments must not wait for the thread that runs them."""
    q, k, v = arrays(4096)
    attend = jax.jit(lambda q, k, v: annulus.flash_attention(q, k * 1.5, v, causal=True))
    jitted = attend(q, k, v).block_until_ready()
    assert (jitted == annulus.flash_attention(q, k * 1.5, v, causal=True)).all()


def test_vmap_and_sums_of_calls() -> None:
    q, k, v = arrays(17)
    stacked = [jnp.stack([array, 2 * array]) for array in (q, k, v)]
    attend = lambda q, k, v: annulus.flash_attention(q, k, v, causal=True)  # noqa: E731
    mapped = jax.vmap(attend)(*stacked)
    assert (mapped[0] == attend(q, k, v)).all()
    assert (mapped[1] == attend(2 * q, 2 * k, 2 * v)).all()


def test_arguments_are_refused_while_tracing() -> None:
    q, k, v = arrays(8)
    with pytest.raises(annulus.InvalidArgument, match="key: got shape"):
        jax.jit(lambda q, k, v: annulus.flash_attention(q, k[:, :, :, :8], v))(q, k, v)
    with pytest.raises(annulus.Unsupported, match="return_max_sum"):
        jax.jit(
            lambda q: annulus.flash_attention(q, k, v, normalize_output=False, return_max_sum=True)
        )(q)
    with pytest.raises(annulus.InvalidArgument, match="query: got elements int32"):
        annulus.flash_attention(q.astype("int32"), k, v)


def test_a_compiled_program_keeps_its_mask() -> None:
    q, k, v = arrays(12)
    mask = annulus.masks.function("even keys", lambda query, key: key % 2 == 0 and key <= query)
    attend = jax.jit(lambda q, mask=mask: annulus.flash_attention(q, k, v, mask_builder=mask))
    first = attend(q)
    del mask
    gc.collect()
    assert (attend(q) == first).all()


def test_documents_choose_the_strategy_of_a_compiled_program() -> None:
    x = jnp.asarray(random(1, 64, 8, 8))
    starts = np.arange(0, 65, 16)
    options: dict[str, Any] = {"ranks": 4, "layout": "contiguous", "strategy": "auto"}

    def attend(x: Any, starts: Any, documents: Any) -> Any:
        batch = {"cum_seqlens_q": starts, "documents": documents}
        return annulus.jax.ring_attention(x, x, x, **options, **batch)

    want = annulus.flash_attention(x, x, x, cum_seqlens_q=starts)
    annulus.jax.clear_plans()
    for documents, strategy in ((None, "heads:4"), ({"cum_seqlens_q": starts}, "ring")):
        attend_jitted = jax.jit(lambda x, starts, given=documents: attend(x, starts, given))
        with chosen_strategies() as strategies:
            assert abs(attend_jitted(x, starts) - want).max() < 1e-5
            loss = jax.jit(jax.grad(lambda x, given=documents: attend(x, starts, given).sum()))
            # a call returns before its program has run
            assert loss(x).block_until_ready().shape == x.shape
        assert set(strategies) == {strategy}
    with pytest.raises(annulus.Unsupported, match="cum_seqlens_q is not supported: .* traces"):
        jax.jit(lambda starts: attend(x, np.arange(0, 65, 16), {"cum_seqlens_q": starts}))(starts)


def test_a_refused_pass_reaches_the_caller() -> None:
    q, k, v = arrays(8)
    attend = jax.jit(lambda ids: annulus.flash_attention(q, k, v, q_segment_ids=ids))
    with pytest.raises(jax.errors.JaxRuntimeError, match="INVALID_ARGUMENT: q_segment_ids: got"):
        attend(jnp.zeros((2, 9), jnp.int32)).block_until_ready()


def test_a_program_of_another_process_is_refused() -> None:
    with pytest.raises(annulus.Unsupported, match="compiled in another process"):
        annulus.jax._execute(json.dumps({"process": "another"}), [], [])


QUERY, VALUE = (jnp.asarray(random(2, 6, heads, 4, seed=heads), "float64") for heads in (4, 2))
LAYERS = jnp.stack([VALUE, 2 * VALUE])


def naive_in_jax(q: Any, v: Any) -> Any:
    """Causal attention of 4 query heads and 2 KV heads, whose keys are their values."""
    k = jnp.repeat(v, 2, 2)
    scores = jnp.einsum("bihd,bjhd->bhij", q, k) / 2
    scores = jnp.where(np.tri(6, dtype=bool), scores, -jnp.inf)
    return jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(scores), k)


TRANSFORMED: dict[str, Callable[[Any], Callable[[Any], Any]]] = {
    "jit": lambda f: lambda q: jax.jit(f)(q, VALUE),
    "nested jit": lambda f: jax.jit(lambda q: jax.jit(f)(q, VALUE)),
    "checkpoint": lambda f: lambda q: jax.checkpoint(f)(q, VALUE),
    "checkpoint that saves all": lambda f: (
        lambda q: jax.checkpoint(f, policy=jax.checkpoint_policies.everything_saveable)(q, VALUE)
    ),
    "scan of checkpoint": lambda f: (
        lambda q: jax.lax.scan(jax.checkpoint(lambda q, v: (f(q, v), None)), q, LAYERS)[0]
    ),
    "cond": lambda f: (
        lambda q: jax.lax.cond(q.sum() > 0, lambda q: f(q, VALUE), lambda q: f(q, 2 * VALUE), q)
    ),
    "map": lambda f: lambda q: jax.lax.map(lambda v: f(q, v), LAYERS),
    "fori_loop": lambda f: lambda q: jax.lax.fori_loop(0, 2, lambda i, q: f(q, LAYERS[i]), q),
    "vmap of jit": lambda f: lambda q: jax.vmap(jax.jit(f), (None, 0))(q, LAYERS),
    "jit of vmap over queries": lambda f: (
        lambda q: jax.jit(jax.vmap(f, (0, None)))(jnp.stack([q, -q]), VALUE)
    ),
    "vmap of grad": lambda f: (
        lambda q: (
            jax.vmap(jax.grad(lambda v: jax.jit(f)(jax.lax.stop_gradient(q), v).sum()))(LAYERS)
            + q.sum()
        )
    ),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_gradients_of_functions_that_are_traced_first(name: str) -> None:
    def value_and_gradient(attend: Any) -> Any:
        transformed = TRANSFORMED[name](attend)
        return jax.value_and_grad(lambda q: (transformed(q) ** 2).sum())(QUERY)

    def attend(q: Any, v: Any) -> Any:
        return annulus.ring_attention(q, v, v, causal=True, ranks=2, threads=1, return_lse=True)[0]

    want = value_and_gradient(naive_in_jax)
    for got, expected in zip(value_and_gradient(attend), want, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-10)


def test_gradients_of_a_traced_call_with_every_operand() -> None:
    operands = (QUERY, VALUE, jnp.asarray(random(2, 1, 6, 6), "float64"), jnp.ones((4, 3)))
    ids = jnp.asarray([[0, 0, 1, 1, 1, -1]] * 2, jnp.int32)

    def loss(q: Any, v: Any, bias: Any, sinks: Any, ids: Any, **options: Any) -> Any:
        results = annulus.flash_attention(
            *(q, v, v),
            bias=bias,
            softmax_aux=sinks,
            q_segment_ids=ids,
            kv_segment_ids=ids,
            attention_mask=jnp.tril(jnp.ones((1, 1, 6, 6), bool)),
            threads=1,
            return_lse=True,
            **options,
        )
        return sum((jnp.where(jnp.isfinite(part), part, 0) ** 2).sum() for part in results)

    every = tuple(range(4))
    for options in (
        {},
        {"dropout_prob": 0.5, "dropout_seed": 3},
        {"normalize_output": False},
        {"logits_soft_cap": 2.0, "sliding_window": (3, 1)},
    ):
        # traced while it is differentiated, as the golden cases are, and before
        of = lambda *args, options=options: loss(*args, **options)  # noqa: E731
        want = jax.jit(jax.grad(of, every))(*operands, ids)
        got = jax.grad(lambda *args, of=of: jax.jit(of)(*args), every)(*operands, ids)
        assert all((a == b).all() and (a != 0).any() for a, b in zip(got, want, strict=True))
        integers = jax.grad(jax.jit(of), 4, allow_int=True)(*operands, ids)
        assert integers.dtype == jax.dtypes.float0


@pytest.mark.parametrize("ranks", [1, 3])
def test_second_derivatives(ranks: int) -> None:
    """Against those of an attention of jnp, with respect to every tensor and the cotangent of a
    gradient.
    """
    bias = jnp.asarray(random(1, 4, 6, 6, seed=4, dtype="f8"))
    sinks = jnp.asarray(random(4, 2, seed=5, dtype="f8"))
    visible = np.tri(6, dtype=bool)

    def ours(q: Any, k: Any, v: Any, bias: Any, sinks: Any) -> Any:
        return annulus.ring_attention(
            q,
            k,
            v,
            bias=bias,
            softmax_aux=sinks,
            causal=True,
            ranks=ranks,
            threads=1,
            return_lse=True,
        )

    def theirs(q: Any, k: Any, v: Any, bias: Any, sinks: Any) -> Any:
        k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], 2) for x in (k, v))
        scores = jnp.einsum("bihd,bjhd->bhij", q, k) / q.shape[3] ** 0.5 + bias
        scores = jnp.where(visible, scores, -jnp.inf)
        extra = jnp.broadcast_to(sinks[None, :, None], (*scores.shape[:3], 2))
        lse = jax.nn.logsumexp(jnp.concatenate([scores, extra], -1), -1)
        return jnp.einsum("bhij,bjhd->bihd", jnp.exp(scores - lse[..., None]), v), lse

    def loss(attend: Any, *tensors: Any) -> Any:
        out, lse = attend(*tensors)
        return jnp.sin(out).sum() + (lse**2).sum()

    q, kv = QUERY[:1], VALUE[:1]
    tensors = (q, kv, jnp.cos(kv), bias, sinks)
    every = tuple(range(5))

    def penalty(attend: Any, *tensors: Any) -> Any:
        gradients = jax.grad(functools.partial(loss, attend), every)(*tensors)
        return sum(jnp.sin(3 * gradient).sum() for gradient in gradients)

    for wrap in (lambda f: f, jax.jit, jax.checkpoint):
        got, want = (
            jax.grad(wrap(functools.partial(penalty, attend)), every)(*tensors)
            for attend in (ours, theirs)
        )
        for a, b in zip(got, want, strict=True):
            assert abs(a - b).max() < 1e-10 * (1 + abs(b).max()) and (a != 0).any()
    if ranks == 1:
        q, kv = q[:, :2, :2, :2], kv[:, :2, :1, :2]
        bias, sinks, visible = bias[:, :2, :2, :2], sinks[:2], visible[:2, :2]
        hessians = [
            jax.jacrev(jax.jacrev(lambda k: loss(attend, q, k, k, bias, sinks)))(kv)  # noqa: B023
            for attend in (ours, theirs)
        ]
        assert abs(hessians[0] - hessians[1]).max() < 1e-10 * abs(hessians[1]).max()


def test_what_has_no_derivative_is_refused() -> None:
    attend = lambda q: annulus.flash_attention(q, VALUE, VALUE, threads=1)  # noqa: E731
    loss = lambda q: (attend(q) ** 2).sum()  # noqa: E731
    for f in (attend, jax.jit(attend), jax.checkpoint(attend)):
        for call in (
            lambda f=f: jax.jvp(f, (QUERY,), (QUERY,)),
            lambda f=f: jax.linearize(f, QUERY)[1](QUERY),
            lambda f=f: jax.jacfwd(f)(QUERY),
        ):
            with pytest.raises(TypeError, match="forward-mode"):
                call()
    for f in (loss, jax.jit(loss)):
        gradient = jax.grad(f)
        for call in (
            lambda f=f: jax.hessian(f)(QUERY),
            lambda g=gradient: jax.jvp(g, (QUERY,), (QUERY,)),
        ):
            with pytest.raises(TypeError, match="forward-mode"):
                call()
        twice = lambda q, g=gradient: jax.grad(lambda q: g(q).sum())(q).sum()  # noqa: E731
        with pytest.raises(annulus.Unsupported, match="^a third derivative is not supported"):
            jax.grad(twice)(QUERY)
    for name in ("softmax_scale", "dropout_seed", "causal", "sliding_window"):
        with pytest.raises(annulus.InvalidArgument, match=f"^{name}: got .*Tracer"):
            jax.jit(lambda x, name=name: annulus.flash_attention(QUERY, VALUE, VALUE, **{name: x}))(
                1
            )


def test_numbers_that_jax_would_cut_are_refused() -> None:
    big = np.full((2, 6), 2**40)
    attend = jax.jit(lambda q: annulus.flash_attention(q, VALUE, VALUE, q_positions=big).sum())
    assert jnp.isfinite(attend(QUERY))
    with jax.enable_x64(False):
        q = QUERY.astype("float32")
        with pytest.raises(annulus.InvalidArgument, match="^q_positions: .* jax_enable_x64"):
            jax.jit(lambda q: annulus.flash_attention(q, q, q, q_positions=big))(q)


CASES: list[dict[str, Any]] = [
    {},
    {"mask": (2, 4, 7, 5), "bias": (1, 4, 1, 5), "scale": -0.3},
    {"bias": (7, 5), "dtype": "bfloat16"},
    {"bias": (2, 1, 7, 5), "local_window_size": 1, "is_causal": True},
    {"mask": (4, 1, 5), "local_window_size": (0, 2), "key_value_seq_lengths": [3, 0]},
    {"query_seq_lengths": [2, 9], "is_causal": True, "traced_scale": 0.7},
    {"query_seq_lengths": [7, 0], "key_value_seq_lengths": [5, 2], "batch": 2},
    {"is_causal": True, "batch": None, "mask": (1, 7, 1), "traced_scale": 0.0},
]


@pytest.mark.parametrize("case", CASES, ids=[" ".join(case) or "plain" for case in CASES])
def test_the_drop_in_of_jax(case: dict[str, Any]) -> None:
    given = dict(case)
    batch, dtype = given.pop("batch", 2), given.pop("dtype", "float32")
    leading = () if batch is None else (batch,)
    q, k, v = (
        jnp.asarray(random(*leading, length, heads, 8, seed=seed), dtype)
        for seed, (length, heads) in enumerate([(7, 4), (5, 2), (5, 2)])
    )
    bias, mask = given.pop("bias", None), given.pop("mask", None)
    bias = None if bias is None else jnp.asarray(random(*bias, seed=3))
    mask = None if mask is None else jnp.asarray(random(*mask, seed=4) > 0)
    traced_scale = given.pop("traced_scale", None)
    for name in ("query_seq_lengths", "key_value_seq_lengths"):
        if name in given:
            given[name] = jnp.asarray(given[name], jnp.int32)

    def compute(attend: Any) -> Any:
        def out(q: Any, k: Any, v: Any, bias: Any, scale: Any) -> Any:
            scaled = {} if scale is None else {"scale": scale}
            return attend(q, k, v, bias, mask, **scaled, **given)

        operands = (q, k, v, bias, None if traced_scale is None else jnp.float32(traced_scale))
        used = tuple(i for i, operand in enumerate(operands) if operand is not None)
        weights = jnp.asarray(random(*q.shape, seed=5))
        loss = lambda *args: (out(*args).astype("float32") * weights).sum()  # noqa: E731
        gradients = jax.grad(jax.jit(loss), used)(*operands)
        return out(*operands), jax.jit(out)(*operands), *gradients

    got, want = map(compute, (annulus.jax.dot_product_attention, jax.nn.dot_product_attention))
    bound = 3e-5 if dtype == "float32" else 4e-2
    for a, b in zip(got, want, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(*(x.astype("float64") for x in (a, b)), rtol=bound, atol=bound)


def test_the_residual_of_the_drop_in() -> None:
    attend = annulus.jax.dot_product_attention
    mask = jnp.asarray([[True] * 6, [False] * 6, *[[True, False] * 3] * 4])
    q, v = QUERY.astype("float32"), VALUE.astype("float32")
    out, lse = attend(q, v, v, mask=mask, return_residual=True)
    scores = jnp.einsum("bihd,bjhd->bihj", q, jnp.repeat(v, 2, 2)) / 2
    want = jax.nn.logsumexp(jnp.where(mask[:, None], scores, -2.3819763e38), -1)
    np.testing.assert_allclose(lse, want, rtol=1e-5)
    assert (out == attend(q, v, v, mask=mask)).all()
    of = lambda q: attend(q, v, v, mask=mask, return_residual=True)[1].sum()  # noqa: E731
    assert (jax.grad(of)(q) == 0).all()


def test_what_the_drop_in_refuses() -> None:
    q, v = QUERY, VALUE

    def refuses(argument: str, kind: Any = annulus.InvalidArgument, **given: Any) -> None:
        arguments = {"query": q, "key": v, "value": v, **given}
        for call in (
            lambda: annulus.jax.dot_product_attention(**arguments),
            lambda: jax.jit(
                lambda q: annulus.jax.dot_product_attention(**{**arguments, "query": q})
            )(arguments["query"]),
        ):
            with pytest.raises(kind) as caught:
                call()
            assert caught.value.argument == argument

    refuses("implementation", annulus.Unsupported, implementation="xla")
    refuses("key", key=v.astype("float32"))
    refuses("value", value=v[..., :2])
    refuses("query", query=q[:, :, :3])
    refuses("query", query=q[None])
    refuses("query", query=jnp.ones((2, 6, 4, 4), int))
    refuses("bias", bias=jnp.ones((2, 3, 6, 6)))
    refuses("bias", bias=jnp.ones((6, 6), complex))
    refuses("mask", mask=jnp.ones((6, 6)))
    refuses("mask", mask=jnp.ones((5, 6), bool))
    refuses("query_seq_lengths", query_seq_lengths=jnp.ones(2, jnp.int64))
    refuses("key_value_seq_lengths", key_value_seq_lengths=jnp.ones(3, jnp.int32))
    for window in (-1, (1, -1), (1, 2, 3), (None, 0), 1.5):
        refuses("local_window_size", local_window_size=window)
    refuses("scale", scale=np.ones(2))
    refuses("scale", scale=float("nan"))
    refuses("is_causal", is_causal="yes")
    refuses("return_residual", return_residual=1)


def test_the_drop_in_of_lengths_zero() -> None:
    attend = annulus.jax.dot_product_attention
    for q, v in ((QUERY[:0], VALUE[:0]), (QUERY[:, :0], VALUE), (QUERY, VALUE[:, :0])):
        for f in (attend, jax.jit(attend)):
            assert (f(q, v, v) == jax.nn.dot_product_attention(q, v, v)).all()


def test_the_drop_in_promotes_no_type() -> None:
    q, v = (x.astype("bfloat16") for x in (QUERY, VALUE))
    mask = jnp.ones((6, 6), bool)
    attend = annulus.jax.dot_product_attention
    with jax.numpy_dtype_promotion("strict"):
        of = lambda s: attend(q, v, v, mask=mask, scale=s, return_residual=True)  # noqa: E731
        for got, want in zip(jax.jit(of)(0.5), of(0.5), strict=True):
            assert got.dtype == want.dtype == q.dtype
            np.testing.assert_allclose(*(x.astype("f4") for x in (got, want)), rtol=1e-2)


def test_sharded_arrays() -> None:
    """A process of its own, since the number of XLA's devices is set before jax is imported."""
    result = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "jax_program.py"), "sharded"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"},
    )
    assert result.returncode == 0, result.stdout + result.stderr


@needs_mpi
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_arrays_over_ranks(ranks: int) -> None:
    assert f"passed on {ranks} ranks" in launch(
        ranks, "jax_program.py", program_arguments=["ranks"]
    )
