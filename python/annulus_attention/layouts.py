"""Layouts of grids and graphs, for ``layout=``: the rows of every rank, equal for queries and keys.

Rows that attend to each other lie on the same rank and near each other in its order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import _annulus
from ._check import LARGEST, integer
from ._errors import invalid

__all__ = ["boxes", "graph"]

Runs = list[list[tuple[int, int, int]]]
"""Rows of every rank as (first, step, count)."""


def boxes(shape: int | Sequence[int], ranks: int) -> tuple[Runs, Runs]:
    """Boxes of about equal size and least surface of a grid of one to three axes.

    The rows are the points of the grid in row-major order. A rank has them in patches of 8 × 8 or
    4 × 4 × 4 points, so that neighbouring rows share most keys of a ``masks.neighborhood``.
    """
    lens = shape if isinstance(shape, (tuple, list)) else [shape]
    rows = _annulus.boxes(
        [integer("shape", len_, least=1) for len_ in lens], integer("ranks", ranks, least=1)
    )
    return rows, rows


def graph(indptr: Any, indices: Any, ranks: int) -> tuple[Runs, Runs]:
    """Parts of equal length of the nodes of a graph in reverse Cuthill-McKee order.

    The rows are the nodes. The neighbours of node i are ``indices[indptr[i]:indptr[i + 1]]``, as in
    a symmetric matrix of ``scipy.sparse`` in CSR form. With one rank its rows are the order of all.
    """
    rows = _annulus.graph(
        _integers("indptr", indptr), _integers("indices", indices), integer("ranks", ranks, least=1)
    )
    return rows, rows


def _integers(name: str, values: Any) -> list[int]:
    listed = values.tolist() if hasattr(values, "tolist") else list(values)
    if not all(type(value) is int and abs(value) <= LARGEST // 2 for value in listed):
        raise invalid(name, type(values).__name__, "a list of integers of 64 bits")
    return listed
