"""A transformer that torch trains over a ring of mpi4py ranks."""

from __future__ import annotations

import pytest
from test_mpi import launch, needs_mpi

pytest.importorskip("torch")


@needs_mpi
@pytest.mark.parametrize("ranks", [2, 3])
def test_losses_follow_those_of_one_process(ranks: int) -> None:
    assert f"passed on {ranks} ranks" in launch(ranks, "training_program.py")
