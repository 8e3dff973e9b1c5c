"""Rings over mpi4py, of two and three processes. Skipped without the feature `mpi`.

    mpirun -n 3 python tests/test_mpi.py [started]

is the program of ``test_ctrl_c_on_one_rank_ends_the_pass_on_all``.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import random

import annulus_attention as annulus
from annulus_attention import mpi_shim

needs_mpi = pytest.mark.skipif(not annulus.HAS_MPI, reason="a build without the feature mpi")


def launch(
    ranks: int, program: str, limit: int = 300, program_arguments: Sequence[str] = ()
) -> str:
    """Runs a program on some ranks, and returns what it printed."""
    mpirun = shutil.which("mpirun.openmpi") or shutil.which("mpirun")
    assert mpirun, "a build with the feature mpi, and no mpirun"
    result = subprocess.run(
        [mpirun, "--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]
        + ["-n", str(ranks), sys.executable, str(Path(__file__).parent / program)]
        + list(program_arguments),
        capture_output=True,
        text=True,
        timeout=limit,
        # in a container the tests may run as root
        env={
            **os.environ,
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        },
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@needs_mpi
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_ring_of_processes(ranks: int) -> None:
    assert f"passed on {ranks} ranks" in launch(ranks, "mpi_program.py")


@needs_mpi
def test_the_example_gives_the_same_on_every_number_of_ranks() -> None:
    said = [launch(ranks, "../examples/ring_of_processes.py") for ranks in (1, 2, 3)]
    results = {text.partition(" on ")[0] for text in said}
    assert len(results) == 1 and results.pop().startswith("loss "), said
    assert "sent 0 bytes" in said[0] and "sent 0 bytes" not in said[1]


@needs_mpi
def test_decoding_gives_the_same_on_every_number_of_ranks() -> None:
    def said(text: str) -> list[str]:
        return [line.partition(", rank 0 sent")[0] for line in text.splitlines()]

    example = "../examples/decoding.py"
    one, two = (launch(ranks, example, program_arguments=["mpi"]) for ranks in (1, 2))
    assert said(one) == said(two) and len(said(one)) == 6, (one, two)
    assert "sent 0 bytes" in one and "sent 0 bytes" not in two


LENGTH = 131072


def interrupted(world: Any) -> None:
    """Rank 1 is interrupted in a pass of a minute: it raises KeyboardInterrupt, others an error."""
    ring = annulus.Attention().plan(
        batch=1, q_len=LENGTH, q_heads=4, head_dim=64, comm=world, threads=1
    )
    x = random(1, len(ring.q_rows), 4, 64)
    sent: list[float] = []

    def press() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    world.Barrier()
    began = time.monotonic()
    if world.rank == 1:
        threading.Timer(0.5, press).start()
    try:
        if "started" in sys.argv:
            ring.forward_start(x, x, x).wait()
        else:
            ring.forward(x, x, x)
    except KeyboardInterrupt:
        assert world.rank == 1 and time.monotonic() - sent[0] < 2
    except annulus.Error as error:
        assert world.rank != 1 and error.code == 44 and "rank 1 aborted" in str(error), error
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


@needs_mpi
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("form", [[], ["started"]])
def test_ctrl_c_on_one_rank_ends_the_pass_on_all(ranks: int, form: list[str]) -> None:
    said = launch(ranks, "test_mpi.py", program_arguments=form)
    assert said.count("ended") == ranks


@pytest.mark.skipif(annulus.HAS_MPI, reason="a build with the feature mpi")
def test_a_build_without_mpi_names_the_communicator() -> None:
    class Communicator:
        def py2f(self) -> int:
            return 0

        def allgather(self, value: object) -> list[object]:
            return [value]

    x = np.zeros((1, 4, 1, 2), np.float32)
    with pytest.raises(annulus.Unsupported, match="^comm is not supported: .*--features mpi"):
        annulus.ring_attention(x, x, x, comm=Communicator())


@pytest.mark.skipif(annulus.HAS_MPI, reason="a build with the feature mpi")
def test_a_build_that_loads_no_mpi_compiles_no_shim(capsys: pytest.CaptureFixture[str]) -> None:
    assert mpi_shim.main([]) == 2
    assert capsys.readouterr().err.startswith("usage: python -m annulus_attention.mpi_shim")
    assert mpi_shim.main(["nothing.so"]) == 1
    assert "this build of annulus loads no MPI" in capsys.readouterr().err
    assert not Path("nothing.so").exists()


if __name__ == "__main__":
    from mpi4py import MPI

    try:
        interrupted(MPI.COMM_WORLD)
    except BaseException:
        traceback.print_exc()
        MPI.COMM_WORLD.Abort(1)
