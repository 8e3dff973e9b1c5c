"""Rank 1 is interrupted in a pass of a minute: it raises KeyboardInterrupt, the others an error.

mpirun -n 3 python tests/interrupted_program.py
mpirun -n 3 python tests/interrupted_program.py started
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from typing import Any

from helpers import random
from mpi4py import MPI

import annulus

WORLD = MPI.COMM_WORLD
LENGTH = 131072


def main() -> None:
    ring = annulus.Attention().plan(
        batch=1, q_len=LENGTH, q_heads=4, head_dim=64, comm=WORLD, threads=1
    )
    x = random(1, len(ring.q_rows), 4, 64)
    sent: list[float] = []

    def press() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    WORLD.Barrier()
    began = time.monotonic()
    if WORLD.rank == 1:
        threading.Timer(0.5, press).start()
    try:
        if "started" in sys.argv:
            ring.forward_start(x, x, x).wait()
        else:
            ring.forward(x, x, x)
    except KeyboardInterrupt:
        assert WORLD.rank == 1 and time.monotonic() - sent[0] < 2
    except annulus.Error as error:
        assert WORLD.rank != 1 and error.code == 44 and "rank 1 aborted" in str(error), error
        assert time.monotonic() - began < 5
    else:
        raise AssertionError("the pass was not interrupted")
    dead(lambda: ring.forward(x, x, x))
    print("ended\n", end="", flush=True)


def dead(call: Any) -> None:
    """The plan is poisoned on every rank."""
    try:
        call()
    except annulus.Error as error:
        assert error.code == 45 and error.is_fatal, error
    else:
        raise AssertionError("a plan that was interrupted is dead")


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        traceback.print_exc()
        WORLD.Abort(1)
