"""The Python examples of the documents run as they are printed."""

from __future__ import annotations

import importlib.util

import docs_program
import pytest
from test_mpi import launch, needs_mpi

HAS_TORCH = importlib.util.find_spec("torch") is not None
PAGES = list(docs_program.PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_examples_run(page: str) -> None:
    assert docs_program.run(page, set()) >= 1


@needs_mpi
@pytest.mark.parametrize(
    "have",
    ["mpi", pytest.param("mpi torch", marks=pytest.mark.skipif(not HAS_TORCH, reason="no torch"))],
)
def test_examples_run_over_mpi(have: str) -> None:
    # one rank has the rows of all, so that examples may pass whole arrays or those of their rank
    said = launch(1, "docs_program.py", program_arguments=have.split())
    assert all(page in said for page in PAGES)


def test_only_examples_in_device_memory_never_run() -> None:
    every = [
        text
        for page, heading in docs_program.PAGES.items()
        for text in docs_program.paragraphs(page, heading)
    ]
    assert len(every) >= 15
    assert sum("gpu" in docs_program.needs(text) for text in every) == 2
