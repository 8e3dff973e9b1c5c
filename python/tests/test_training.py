"""Training over a ring of mpi4py ranks: losses, gradients, and what the ranks agree on."""

from __future__ import annotations

import pytest
from test_mpi import launch, needs_mpi

pytest.importorskip("torch")


@needs_mpi
@pytest.mark.parametrize("ranks", [2, 3])
def test_losses_follow_those_of_one_process(ranks: int) -> None:
    assert f"passed on {ranks} ranks" in launch(ranks, "training_program.py")


@needs_mpi
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_agree_and_have_the_gradients_of_one_process(ranks: int) -> None:
    assert f"passed on {ranks} ranks" in launch(ranks, "torch_ranks_program.py")
