"""Every golden case with gradients under jax.jit; the bits of jitted and eager calls."""

from __future__ import annotations

import gc
import json
from typing import Any

import numpy as np
import pytest
from golden import Case
from helpers import batch, check, chosen_strategies, floats, naive, random

import annulus

jax = pytest.importorskip("jax")
jax.config.update("jax_enable_x64", True)
jnp = jax.numpy

import annulus.jax  # noqa: E402  (imports jax)


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
            assert loss(x).shape == x.shape
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
