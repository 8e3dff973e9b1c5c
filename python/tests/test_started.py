"""Passes on threads of their own: bits, misuse, exceptions, and what ends them."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest
from helpers import random

import annulus_attention as annulus

N = 64
Q, K, V = random(1, N, 4, 16), random(1, N, 2, 16, seed=1), random(1, N, 2, 16, seed=2)
LENGTHS: dict[str, Any] = {"batch": 1, "q_len": N, "q_heads": 4, "kv_heads": 2, "head_dim": 16}


@pytest.mark.parametrize("ranks", [1, 3])
def test_started_passes_have_the_bits_of_calls(ranks: int) -> None:
    with annulus.Attention(causal=True).plan(**LENGTHS, ranks=ranks, threads=1) as plan:
        forward = plan.forward(Q, K, V)
        gradients = plan.backward(Q, K, V, forward, Q)
        out = np.empty_like(Q)
        started = plan.forward_start(Q, K, V, out=out)
        while not started.test():
            time.sleep(0.001)
        assert started.test()
        again = started.wait()
        assert again.out is out and (out == forward.out).all() and (again.lse == forward.lse).all()
        assert len(again.reports) == ranks and again.reports[0].seconds > 0
        of_started = plan.backward_start(Q, K, V, forward, Q).wait()
        for name in ("dq", "dk", "dv"):
            assert (getattr(of_started, name) == getattr(gradients, name)).all(), name


class Gate:
    """A mask whose first pair waits for the program."""

    def __init__(self) -> None:
        self.is_closed = False
        self.entered, self.opened = threading.Event(), threading.Event()

    def __call__(self, i: int, j: int) -> bool:
        if self.is_closed:
            self.entered.set()
            assert self.opened.wait(60)
        return j <= i


def gated(**options: Any) -> tuple[Gate, annulus.Plan]:
    gate = Gate()
    mask = annulus.masks.function("waits for the program", gate)
    plan = annulus.Attention(mask=mask).plan(**LENGTHS, **options)
    gate.is_closed = True
    return gate, plan


def test_a_plan_refuses_other_calls_until_its_pass_has_ended() -> None:
    gate, plan = gated(ranks=2)
    started = plan.forward_start(Q, K, V)
    assert gate.entered.wait(60) and not started.test()
    for call in (
        lambda: plan.forward(Q, K, V),
        lambda: plan.forward_start(Q, K, V),
        lambda: plan.update(),
        lambda: plan.ranks,
        lambda: str(plan),
    ):
        with pytest.raises(annulus.InvalidArgument, match="pass under way") as refused:
            call()
        assert refused.value.argument == "plan"
    gate.opened.set()
    first = started.wait()
    with pytest.raises(annulus.InvalidArgument, match="one without a pass under way"):
        started.wait()
    assert (plan.forward(Q, K, V).out == first.out).all() and plan.ranks == 2


def test_arrays_live_until_the_pass_has_ended() -> None:
    gate, plan = gated()
    query = Q.copy()
    alive = weakref.ref(query)
    started = plan.forward_start(query, K, V)
    assert gate.entered.wait(60)
    del query
    gc.collect()
    assert alive() is not None
    gate.opened.set()
    out = started.wait().out
    gc.collect()
    assert alive() is None
    assert (out == plan.forward(Q, K, V).out).all()


def test_what_a_pass_raises_comes_from_wait() -> None:
    with annulus.Attention().plan(**LENGTHS) as plan:
        started = plan.forward_start(Q.astype("f8"), K, V)
        with pytest.raises(annulus.InvalidArgument) as refused:
            started.wait()
        assert refused.value.argument == "query"
        plan.forward(Q, K, V)

    raises = [False]

    def visible(i: int, j: int) -> bool:
        if raises[0]:
            raise KeyError("of the mask")
        return j <= i

    mask = annulus.masks.function("raises", visible)
    plan = annulus.Attention(mask=mask).plan(**LENGTHS, ranks=2)
    raises[0] = True
    with pytest.raises(annulus.Error) as failed:
        plan.forward_start(Q, K, V).wait()
    assert isinstance(failed.value.__cause__, KeyError) and failed.value.is_fatal


LONG: dict[str, Any] = {"batch": 1, "q_len": 65536, "q_heads": 4, "head_dim": 64, "threads": 1}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_pass_that_is_dropped_ends(ranks: int) -> None:
    x = random(1, 65536, 4, 64)
    plan = annulus.Attention().plan(**LONG, ranks=ranks)
    # of a minute
    started = plan.forward_start(x, x, x)
    time.sleep(0.3)
    assert not started.test()
    began = time.monotonic()
    del started
    assert time.monotonic() - began < 10
    with pytest.raises(annulus.Error) as dead:
        plan.forward(x, x, x)
    assert dead.value.code == 45
    closed = annulus.Attention().plan(**LONG, ranks=ranks)
    started = closed.forward_start(x, x, x)
    time.sleep(0.3)
    closed.close()
    assert time.monotonic() - began < 30 and started.test()
    with pytest.raises(annulus.Error):
        started.wait()


INTERRUPTED = """
import os, signal, sys, threading, time
import numpy as np
import annulus_attention as annulus

# a shell's background process inherits a SIGINT that is ignored
signal.signal(signal.SIGINT, signal.default_int_handler)
x = np.random.default_rng(0).standard_normal((1, 65536, 4, 64)).astype("f4")
plan = annulus.Attention().plan(
    batch=1, q_len=65536, q_heads=4, head_dim=64, ranks=int(sys.argv[2]), threads=1)
started = plan.forward_start(x, x, x)
if sys.argv[1] == "ends":
    # the program ends during the pass
    print("interrupted", flush=True)
    sys.exit(0)
sent = []
def press():
    sent.append(time.monotonic())
    os.kill(os.getpid(), signal.SIGINT)
threading.Timer(0.5, press).start()
try:
    started.wait()
except KeyboardInterrupt:
    late = time.monotonic() - sent[0]
else:
    sys.exit("the pass was not interrupted")
assert late < 5, late
try:
    plan.forward(x, x, x)
except annulus.Error as error:
    assert error.code == 45 and error.is_fatal, error
else:
    sys.exit("a plan that was interrupted is dead")
print("interrupted")
"""


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("what", ["ctrl-c", "ends"])
def test_ctrl_c_and_the_end_of_the_program_end_a_pass(what: str, ranks: int) -> None:
    # a pass of a minute
    began = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, what, str(ranks)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (result.stdout, result.returncode) == ("interrupted\n", 0), result.stderr
    assert time.monotonic() - began < 40
