"""Plans: every golden case, repeated passes, batches, backends, closing, threads, and Ctrl-C."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from helpers import Case, batch, check, floats, naive, random
from helpers import plan as plan_of

import annulus_attention as annulus

N = 64
Q, K, V = random(1, N, 4, 16), random(1, N, 2, 16, seed=1), random(1, N, 2, 16, seed=2)
LENGTHS: dict[str, Any] = {"batch": 1, "q_len": N, "q_heads": 4, "kv_heads": 2, "head_dim": 16}


def test_a_plan_serves_many_passes() -> None:
    with annulus.Attention(causal=True).plan(**LENGTHS, ranks=2) as plan:
        assert (plan.rank, plan.ranks, plan.layout, plan.dtype) == (0, 2, "zigzag", "float32")
        assert (plan.q_rows == np.arange(N)).all() and (plan.kv_rows == np.arange(N)).all()
        assert "2 ranks, zigzag" in str(plan)
        first = plan.forward(Q, K, V)
        assert (plan.forward(Q, K, V).out == first.out).all()
        other = plan.forward(-Q, K, V)
        assert (other.out != first.out).any()
        assert len(first.reports) == 2 and first.reports[0].seconds > 0
        assert first.reports[0].bytes_sent == first.reports[0].bytes_predicted > 0
        gradients = plan.backward(Q, K, V, first, np.ones_like(first.out))
        again = plan.backward(Q, K, V, first, np.ones_like(first.out))
        assert (gradients.dk == again.dk).all() and gradients.dbias is None


def test_reproducible_bits_do_not_depend_on_the_ranks() -> None:
    q, k, v = (random(1, 600, 2, 16, seed=seed) for seed in (1, 2, 3))
    lengths = {"batch": 1, "q_len": 600, "q_heads": 2, "head_dim": 16}
    attention = annulus.Attention(causal=True, reproducible=True)
    results = []
    for ranks in (1, 3):
        with attention.plan(**lengths, ranks=ranks) as plan:
            assert plan.numerics.startswith("cpu ")
            forward = plan.forward(q, k, v)
            gradients = plan.backward(q, k, v, forward, np.ones_like(forward.out))
        results.append((forward.out, forward.lse, gradients.dq, gradients.dk, gradients.dv))
    assert all((one == three).all() for one, three in zip(*results, strict=True))
    out = annulus.ring_attention(q, k, v, causal=True, reproducible=True, ranks=2)
    assert (out == results[0][0]).all()


def test_strategies_give_the_same_attention() -> None:
    lengths = {**LENGTHS, "dtype": "float64"}
    q, k, v = (x.astype("f8") for x in (Q, K, V))
    attention = annulus.Attention(causal=True)
    with attention.plan(**lengths, ranks=4) as plan:
        assert plan.strategy == "ring"
        ring = plan.forward(q, k, v)
        gradients = plan.backward(q, k, v, ring, ring.out)
    published = {
        "all-gather": "ring",
        "all-to-all": "heads:4",
        "once-per-node:2": "ring",
        "pass-q": "grid:1x4",
    }
    for strategy in ("heads:2", "heads:4", "grid:2x2", "grid:2x1x2", "auto", *published):
        with attention.plan(**lengths, ranks=4, strategy=strategy) as plan:
            assert strategy == "auto" or plan.strategy == published.get(strategy, strategy)
            assert (plan.rank, plan.ranks, len(plan.q_rows)) == (0, 4, N)
            forward = plan.forward(q, k, v)
            others = plan.backward(q, k, v, forward, ring.out)
        assert all(report.bytes_sent == report.bytes_predicted for report in forward.reports)
        assert abs(forward.out - ring.out).max() < 1e-14
        assert abs(others.dk - gradients.dk).max() < 1e-13
    out = annulus.ring_attention(q, k, v, causal=True, ranks=4, strategy="heads:4")
    assert abs(out - ring.out).max() < 1e-14
    with pytest.raises(annulus.InvalidArgument, match="strategy"):
        attention.plan(**lengths, ranks=3, strategy="heads:2")


def test_batches_change_and_go_away() -> None:
    ids = (np.arange(N) // 20)[None]
    with annulus.Attention().plan(**LENGTHS, ranks=3) as plan:
        whole = plan.forward(Q, K, V).out
        plan.update(q_segment_ids=ids)
        want, _ = naive(Q, K, V, ids.T == ids)
        assert abs(plan.forward(Q, K, V).out - want).max() < 2e-6
        with pytest.raises(annulus.InvalidArgument, match="q_segment_ids"):
            plan.update(q_segment_ids=ids[:, 1:])
        assert abs(plan.forward(Q, K, V).out - want).max() < 2e-6
        plan.update()
        assert (plan.forward(Q, K, V).out == whole).all()


def test_gradients_against_differences() -> None:
    q, k, v = (x.astype("f8") for x in (Q, K, V))
    dout, dlse = random(1, N, 4, 16, seed=3, dtype="f8"), random(1, 4, N, seed=4, dtype="f8")
    attention = annulus.Attention(causal=True, sliding_window=(9, 0), logits_soft_cap=3.0)
    with attention.plan(**LENGTHS, dtype="float64", ranks=2, backward_mode="two_pass") as plan:

        def loss(q: Any) -> float:
            forward = plan.forward(q, k, v)
            return float((forward.out * dout).sum() + (forward.lse * dlse).sum())

        gradients = plan.backward(q, k, v, plan.forward(q, k, v), dout, dlse)
        direction = random(*q.shape, seed=5, dtype="f8")
        slope = (loss(q + 1e-6 * direction) - loss(q - 1e-6 * direction)) / 2e-6
        assert abs(slope - (gradients.dq * direction).sum()) < 1e-6


def test_a_closed_plan_and_a_forward_only_plan_refuse() -> None:
    plan = annulus.Attention().plan(**LENGTHS, forward_only=True)
    forward = plan.forward(Q, K, V)
    with pytest.raises(annulus.InvalidArgument, match="backward"):
        plan.backward(Q, K, V, forward, forward.out)
    with pytest.raises(annulus.InvalidArgument, match="query: got elements float64"):
        plan.forward(Q.astype("f8"), K, V)
    with pytest.raises(annulus.InvalidArgument, match="^q: got"):
        plan.forward(Q[:, 1:], K, V)
    plan.close()
    plan.close()
    with pytest.raises(RuntimeError, match="closed"):
        plan.forward(Q, K, V)


def test_other_python_threads_run_during_a_pass() -> None:
    q, k, v = (random(1, 4096, 4, 64, seed=seed) for seed in range(3))
    ticks = []
    done = threading.Event()

    def tick() -> None:
        while not done.wait(0.001):
            ticks.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    began = time.monotonic()
    annulus.flash_attention(q, k, v, threads=1)
    ended = time.monotonic()
    done.set()
    thread.join()
    during = [at for at in ticks if began < at < ended]
    assert len(during) >= 5, f"{len(during)} ticks in {ended - began:.3f} s"


def test_a_plan_in_use_refuses_a_second_call() -> None:
    # the mask function runs during the pass, on a thread of the ring's
    refused = []

    def visible(i: int, j: int) -> bool:
        if not refused:
            with pytest.raises(RuntimeError, match="in use"):
                plans[0].forward(Q, K, V)
            refused.append(True)
        return j <= i

    mask = annulus.masks.function("calls the plan", visible)
    plans: list[Any] = [annulus.Attention(mask=mask).plan(**LENGTHS, ranks=1)]
    refused.clear()
    plans[0].forward(Q, K, V)
    assert refused


INTERRUPTED = """
import os, signal, sys, threading, time
import numpy as np
import annulus_attention as annulus

# a shell's background process inherits a SIGINT that is ignored
signal.signal(signal.SIGINT, signal.default_int_handler)
ranks = int(sys.argv[1])
x = np.random.default_rng(0).standard_normal((1, 65536, 4, 64)).astype("f4")
plan = annulus.Attention().plan(
    batch=1, q_len=65536, q_heads=4, head_dim=64, ranks=ranks, threads=1)
small = annulus.Attention().plan(batch=1, q_len=8, q_heads=4, head_dim=64)
sent = []
def press():
    sent.append(time.monotonic())
    os.kill(os.getpid(), signal.SIGINT)
threading.Timer(0.5, press).start()
try:
    plan.forward(x, x, x)
except KeyboardInterrupt:
    late = time.monotonic() - sent[0]
else:
    sys.exit("the pass was not interrupted")
assert late < 1.5, late
try:
    plan.forward(x, x, x)
except annulus.Error as error:
    assert error.code == 45 and error.is_fatal, error
else:
    sys.exit("a plan that was interrupted is dead")
small.forward(x[:, :8], x[:, :8], x[:, :8])
print("interrupted")
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_ctrl_c_ends_a_pass(ranks: int) -> None:
    # a pass of a minute
    result = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(ranks)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert result.stdout == "interrupted\n", result.stderr


def test_importing_the_package_imports_neither_torch_nor_jax() -> None:
    others = "{'jax', 'torch', 'mpi4py'}"
    code = f"import sys, annulus_attention; print(sorted({others} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "[]\n", result.stderr


RINGS: list[dict[str, Any]] = [
    {"ranks": 1},
    {"ranks": 2, "layout": "zigzag"},
    {"ranks": 3, "layout": "striped"},
    {"ranks": 4, "layout": "contiguous"},
]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_flash_attention(golden: Case, dtype: str) -> None:
    given = floats(golden, dtype)
    for name in ("dout", "dlse"):
        given.pop(name, None)
    out, lse = annulus.flash_attention(
        **given, **batch(golden), **golden.arguments, return_lse=True
    )
    assert out.dtype == lse.dtype == dtype
    check(golden, dtype, {"out": out, "lse": lse})


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("ring", RINGS[1:], ids=lambda ring: ring["layout"])
def test_ring_attention(golden: Case, dtype: str, ring: dict[str, Any]) -> None:
    given = floats(golden, dtype)
    for name in ("dout", "dlse"):
        given.pop(name, None)
    out, lse = annulus.ring_attention(
        **given, **batch(golden), **golden.arguments, **ring, return_lse=True
    )
    check(golden, dtype, {"out": out, "lse": lse})


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("ring", RINGS, ids=lambda ring: ring.get("layout", "single"))
def test_gradients(golden: Case, dtype: str, ring: dict[str, Any]) -> None:
    given = floats(golden, dtype)
    dout, dlse = given.pop("dout"), given.pop("dlse", None)
    with plan_of(golden, dtype, **ring) as planned:
        if batch(golden):
            planned.update(**batch(golden))
        forward = planned.forward(**given)
        gradients = planned.backward(**given, forward=forward, dout=dout, dlse=dlse)
    names = [name for name in golden.expected if name.startswith("d")]
    assert {"dq", "dk", "dv"} <= set(names)
    results = {name: getattr(gradients, name) for name in names}
    assert all(array.dtype == dtype for array in results.values())
    check(golden, dtype, {"out": forward.out, "lse": forward.lse, **results})


DIMS: dict[str, int] = dict(batch=1, q_len=96, q_heads=4, kv_heads=2, head_dim=16)


def windowed(**options: Any) -> annulus.Plan:
    attention = annulus.Attention(causal=True, sliding_window=(40, 0))
    return annulus.Plan(attention, **DIMS, **options)


@pytest.fixture
def on_gpu() -> Iterator[annulus.Plan]:
    """A ring of three ranks on wgpu."""
    try:
        made = windowed(ranks=3, backend="wgpu")
    except annulus.Unsupported as why:
        if "wgpu" in os.environ.get("ANNULUS_REQUIRE", "").split(","):
            raise
        pytest.skip(str(why))
    with made:
        yield made


def inputs() -> list[np.ndarray[Any, Any]]:
    random = np.random.default_rng(3)
    shapes = [(1, 96, heads, 16) for heads in (4, 2, 2, 4)]
    return [random.standard_normal(shape).astype(np.float32) for shape in shapes]


def test_wgpu_gives_the_numbers_of_the_cpu(on_gpu: annulus.Plan) -> None:
    query, key, value, dout = inputs()
    with windowed(ranks=1, threads=1) as cpu:
        want = cpu.forward(query, key, value)
        want_gradients = cpu.backward(query, key, value, want, dout)
    got = on_gpu.forward(query, key, value)
    gradients = on_gpu.backward(query, key, value, got, dout)
    assert on_gpu.numerics != cpu_numerics()
    for name in ("out", "lse"):
        np.testing.assert_allclose(getattr(got, name), getattr(want, name), rtol=1e-4, atol=1e-5)
    for name in ("dq", "dk", "dv"):
        expected = getattr(want_gradients, name)
        np.testing.assert_allclose(getattr(gradients, name), expected, rtol=1e-3, atol=1e-4)


def cpu_numerics() -> str:
    with windowed(threads=1) as cpu:
        return cpu.numerics


def test_one_call_takes_the_backend(on_gpu: annulus.Plan) -> None:
    query, key, value, _ = inputs()
    options = dict(causal=True, sliding_window=(40, 0))
    want = on_gpu.forward(query, key, value).out
    got = annulus.ring_attention(query, key, value, ranks=3, backend="wgpu", **options)
    np.testing.assert_array_equal(got, want)


def test_a_cache_takes_the_backend(on_gpu: annulus.Plan) -> None:
    query, key, value, _ = inputs()
    want = on_gpu.forward(query, key, value).out
    attention = annulus.Attention(causal=True, sliding_window=(40, 0))
    lengths = dict(batch=1, q_heads=4, kv_heads=2, head_dim=16)
    cache = annulus.Cache(attention, **lengths, page_rows=7, ranks=2, backend="wgpu")
    for rows in (slice(0, 90), slice(90, 91), slice(91, 96)):
        cache.append(key[:, rows], value[:, rows])
        got = cache.attend(query[:, rows]).out
        np.testing.assert_allclose(got, want[:, rows], rtol=1e-4, atol=1e-5)
    cache.close()
    reproducible = annulus.Attention(causal=True, reproducible=True)
    with pytest.raises(annulus.Unsupported, match="reproducible"):
        annulus.Cache(reproducible, **lengths, backend="wgpu")


def test_a_backend_that_is_not_there_is_refused_by_name() -> None:
    assert annulus.BACKENDS[0] == "cpu"
    for name in ("wgpu", "cuda", "hip"):
        # a number that no machine has, or a build without it, or a machine without a driver
        with pytest.raises(annulus.Error, match=f"{name}|device"):
            windowed(backend=name, device=99)
        with pytest.raises(annulus.Error, match=f"{name}|device"):
            annulus.Cache(
                annulus.Attention(), batch=1, q_heads=1, head_dim=8, backend=name, device=99
            )
