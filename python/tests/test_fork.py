"""Forked children: what the parent made is refused and harmless there, and new plans compute."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers import random

import annulus_attention as annulus
from annulus_attention import _plan_cache, _results

# more rows than one thread computes alone
N = 300
Q = random(1, N, 4, 16)
LENGTHS: dict[str, Any] = {"batch": 1, "q_len": N, "q_heads": 4, "head_dim": 16}
DEADLINE = 15
"""Seconds for a child, which takes far less."""

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork"),
    # of os.fork, in a process with threads
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


def in_child(work: Callable[[], object]) -> None:
    """Runs ``work`` in a forked child. Fails if it raises there or does not end."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        os._exit(status)
    end = time.monotonic() + DEADLINE
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            assert status == 0, f"the child failed ({status:#x})"
            return
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise AssertionError("hangs in a forked child")
        time.sleep(0.005)


def is_refused(name: str, call: Callable[[], object]) -> None:
    """Checks the error of a value that the parent made."""
    with pytest.raises(annulus.InvalidArgument, match=f"^{name}: got .* of process .* forked"):
        call()


@pytest.mark.parametrize(("ranks", "threads"), [(1, 1), (1, 2), (2, 1), (3, 2)])
def test_a_child_plans_anew_and_refuses_plans_of_its_parent(ranks: int, threads: int) -> None:
    attention = annulus.Attention(causal=True)
    plan = attention.plan(**LENGTHS, ranks=ranks, threads=threads)
    forward = plan.forward(Q, Q, Q)

    def work() -> None:
        is_refused("plan", lambda: plan.forward(Q, Q, Q))
        is_refused("plan", lambda: plan.backward(Q, Q, Q, forward, Q))
        is_refused("plan", lambda: plan.forward_start(Q, Q, Q))
        is_refused("plan", plan.update)
        is_refused("plan", lambda: plan.ranks)
        plan.close()
        with attention.plan(**LENGTHS, ranks=ranks, threads=threads) as own:
            assert (own.forward(Q, Q, Q).out == forward.out).all()

    in_child(work)
    # the child of a child, as daemon(3)
    in_child(lambda: in_child(work))
    assert (plan.forward(Q, Q, Q).out == forward.out).all()
    plan.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_child_refuses_caches_of_its_parent(ranks: int) -> None:
    def filled() -> annulus.Cache:
        of: dict[str, Any] = {"batch": 1, "q_heads": 4, "head_dim": 16, "threads": 2}
        cache = annulus.Cache(annulus.Attention(causal=True), **of, ranks=ranks)
        cache.append(Q, Q)
        return cache

    cache = filled()
    out = cache.attend(Q[:, :1]).out

    def work() -> None:
        is_refused("cache", lambda: cache.attend(Q[:, :1]))
        is_refused("cache", lambda: cache.append(Q, Q))
        is_refused("cache", lambda: cache.truncate(1))
        cache.close()
        assert (filled().attend(Q[:, :1]).out == out).all()

    in_child(work)
    assert (cache.attend(Q[:, :1]).out == out).all()


def test_calls_in_a_child_have_the_bits_of_its_parent() -> None:
    def calls() -> list[Any]:
        options: dict[str, Any] = {"causal": True, "threads": 2}
        results = [
            annulus.flash_attention(Q, Q, Q, **options),
            annulus.ring_attention(Q, Q, Q, ranks=3, **options),
        ]
        if torch is not None:
            x = torch.tensor(Q, requires_grad=True)
            out = of_torch.flash_attention(x, x, x, **options)
            results.append(out.detach().numpy())
            results.append(torch.autograd.grad(out.sum(), x)[0].numpy())
            y = x.detach()
            results.append(of_torch.ring_attention(y, y, y, ranks=2, **options).numpy())
        return results

    try:
        import torch

        import annulus_attention.torch as of_torch
    except ImportError:
        torch = None
    want = calls()

    def work() -> None:
        for got, one in zip(calls(), want, strict=True):
            assert (got == one).all()

    in_child(work)
    in_child(lambda: (_plan_cache.clear(), work()))
    work()


def test_a_lock_that_another_thread_holds_does_not_stop_a_child() -> None:
    cache = _plan_cache.cache_of(None)
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with cache._lock:
            held.set()
            release.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(60)
    try:

        def work() -> None:
            own = _plan_cache.cache_of(None)
            assert own is not cache and len(own) == 0
            assert own.take("a key") is None
            cache.clear()
            _plan_cache.clear()

        in_child(work)
    finally:
        release.set()
        thread.join()


def test_a_started_pass_is_not_waited_for_in_a_child() -> None:
    entered, opened = threading.Event(), threading.Event()
    closed = False

    def visible(i: int, j: int) -> bool:
        if closed and i == 0:
            entered.set()
            assert opened.wait(60)
        return j <= i

    mask = annulus.masks.function("waits", visible)
    plan = annulus.Attention(mask=mask).plan(**LENGTHS, ranks=2, threads=1)
    out = plan.forward(Q, Q, Q).out
    closed = True
    started = plan.forward_start(Q, Q, Q)
    assert entered.wait(60)

    def work() -> None:
        is_refused("plan", lambda: plan.forward(Q, Q, Q))
        assert started.test()
        is_refused("plan", started.wait)
        plan.close()

    in_child(work)
    # the exit handler
    in_child(_results._cancel_all)
    opened.set()
    assert (started.wait().out == out).all()


def test_a_process_forks_while_another_thread_computes() -> None:
    want = annulus.ring_attention(Q, Q, Q, ranks=2, threads=2)
    plan = annulus.Attention().plan(**LENGTHS, ranks=2, threads=2)
    ends = False

    def compute() -> None:
        while not ends:
            plan.forward(Q, Q, Q)
            annulus.flash_attention(Q, Q, Q, threads=2)

    thread = threading.Thread(target=compute)
    thread.start()

    def work() -> None:
        is_refused("plan", lambda: plan.forward(Q, Q, Q))
        assert (annulus.ring_attention(Q, Q, Q, ranks=2, threads=2) == want).all()

    try:
        for _ in range(10):
            in_child(work)
        # exec
        done = subprocess.run(
            [sys.executable, "-c", "import annulus_attention"], timeout=4 * DEADLINE
        )
        assert done.returncode == 0
    finally:
        ends = True
        thread.join()


def worker(number: int) -> np.ndarray[Any, Any]:
    """A call of a process of a pool."""
    assert number >= 0
    return np.asarray(annulus.flash_attention(Q, Q, Q, threads=2))


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_start_methods_of_multiprocessing(method: str) -> None:
    want = worker(0)
    with multiprocessing.get_context(method).Pool(2) as pool:
        for got in pool.map_async(worker, range(4)).get(8 * DEADLINE):
            assert (got == want).all()


def test_workers_of_a_data_loader() -> None:
    torch = pytest.importorskip("torch")
    from torch.utils.data import DataLoader, Dataset

    from annulus_attention.torch import flash_attention

    x = torch.tensor(Q)

    def attend() -> Any:
        return flash_attention(x, x, x, causal=True, threads=2)

    class Items(Dataset):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Any:
            return attend()

    want = attend()
    loader = DataLoader(
        Items(), num_workers=2, timeout=2 * DEADLINE, multiprocessing_context="fork"
    )
    assert sum(bool((got[0] == want).all()) for got in loader) == 4


def test_a_child_refuses_the_gpu_of_its_parent() -> None:
    def planned() -> annulus.Plan:
        return annulus.Attention().plan(**LENGTHS, ranks=2, backend="wgpu")

    try:
        plan = planned()
    except annulus.Unsupported as why:
        if "wgpu" in os.environ.get("ANNULUS_REQUIRE", "").split(","):
            raise
        pytest.skip(str(why))
    out = plan.forward(Q, Q, Q).out

    def work() -> None:
        is_refused("plan", lambda: plan.forward(Q, Q, Q))
        plan.close()
        with pytest.raises(annulus.Unsupported, match="^a GPU is not supported by a forked proc"):
            planned()
        annulus.flash_attention(Q, Q, Q, threads=2)

    in_child(work)
    assert (plan.forward(Q, Q, Q).out == out).all()
    plan.close()
