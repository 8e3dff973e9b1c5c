"""Key lists: the sparse arrays of other libraries as offsets and indices."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import _arrays
from ._errors import invalid

NAMES = ("key_list_offsets", "key_list_indices", "key_list_bias")
"""Arrays of a batch that ``key_lists`` stands for."""


def split(value: Any, queries: int, *, list_bias: bool = False) -> dict[str, Any]:
    """Returns the arrays of key lists: offsets ``[batch or 1, groups, queries + 1]`` and indices.

    Args:
        value: A CSR array of SciPy or torch of ``groups · queries`` rows, or (indptr, indices).
        queries: Query rows that the caller passes.
        list_bias: True to add the values of the array to the scores.
    """
    if value is None:
        if list_bias:
            raise invalid("list_bias", list_bias, "False, since no key_lists are given")
        return dict.fromkeys(NAMES)
    indptr, indices, values = _parts(value)
    if list_bias and values is None:
        raise invalid("list_bias", list_bias, "False, since (indptr, indices) have no values")
    offsets = _arrays.integers("key_lists", indptr, "int64", np.ndim(indptr))
    if offsets.ndim == 1:
        offsets = _by_group(offsets, queries)
    elif offsets.ndim != 3:
        want = "1, or 3: [batch or 1, groups, query rows + 1]"
        raise invalid("key_lists", f"indptr of {offsets.ndim} axes", want)
    return {
        "key_list_offsets": offsets,
        "key_list_indices": _arrays.integers("key_lists", indices, "int64", 1),
        "key_list_bias": values if list_bias else None,
    }


def numbers(name: str, value: Any) -> np.ndarray[Any, Any]:
    """Returns the bias of listed pairs as float64."""
    found = _arrays.tensor(name, value)
    if found.array.ndim != 1:
        raise invalid(name, f"{found.array.ndim} axes", "1: [listed pairs]")
    return np.ascontiguousarray(_arrays.converted(found, "float64"), dtype=np.float64)


def _parts(value: Any) -> tuple[Any, Any, Any]:
    """Returns indptr, indices and values."""
    if isinstance(value, tuple):
        if len(value) != 2:
            raise invalid("key_lists", f"a tuple of {len(value)}", "(indptr, indices)")
        return *value, None
    if _arrays.library(value) == "torch":
        if str(value.layout) != "torch.sparse_csr" or value.ndim != 2:
            got = f"a torch tensor of layout {value.layout} and {value.ndim} axes"
            raise invalid("key_lists", got, "torch.sparse_csr, [query rows, kv_len]")
        return value.crow_indices().cpu(), value.col_indices().cpu(), value.values()
    if getattr(value, "format", None) == "csr":
        return value.indptr, value.indices, value.data
    want = "a CSR array of SciPy or torch, or (indptr, indices)"
    raise invalid("key_lists", f"a {type(value).__name__}", want)


def _by_group(indptr: np.ndarray[Any, Any], queries: int) -> np.ndarray[Any, Any]:
    """Returns the offsets of groups of query heads, whose lists follow each other."""
    lists = len(indptr) - 1
    groups = lists // queries if queries else 1
    if lists < 0 or groups < 1 or lists != groups * queries:
        want = f"{queries}, the query rows, or as many for each group of query heads"
        raise invalid("key_lists", f"{max(lists, 0)} rows", want)
    starts = np.arange(groups)[:, None] * queries + np.arange(queries + 1)
    return np.ascontiguousarray(indptr[starts][None])


def columns(value: Any) -> int | None:
    """Returns the columns of key lists, if they have a shape."""
    shape = getattr(value, "shape", None)
    return None if shape is None or len(shape) != 2 else int(shape[1])
