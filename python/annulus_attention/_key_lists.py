"""Key lists: the sparse arrays of other libraries as offsets and indices."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import _arrays
from ._errors import invalid

NAMES = ("key_list_offsets", "key_list_indices", "key_list_ends", "key_list_bias")
"""Arrays of a batch that ``key_lists`` stands for."""


def split(value: Any, queries: int, *, list_bias: Any = False) -> dict[str, Any]:
    """Returns the arrays of key lists: offsets ``[batch or 1, groups, queries + 1]`` and indices.

    Args:
        value: A CSR or BSR array of SciPy or torch of ``groups · queries`` rows, (indptr, indices),
            or (indptr, starts, ends).
        queries: Query rows that the caller passes.
        list_bias: True to add the values of the array to the scores; or these numbers.
    """
    is_flag = isinstance(list_bias, bool | np.bool_)
    if value is None:
        if not is_flag or list_bias:
            raise invalid("list_bias", list_bias, "False, since no key_lists are given")
        return dict.fromkeys(NAMES)
    indptr, indices, ends, values = _parts(value)
    if not is_flag:
        values, list_bias = list_bias, True
    if list_bias and values is None:
        raise invalid("list_bias", list_bias, "False, since the pairs of key_lists have no values")
    offsets = _arrays.integers("key_lists", indptr, "int64", np.ndim(indptr))
    if offsets.ndim == 1:
        offsets = _by_group(offsets, queries)
    elif offsets.ndim != 3:
        want = "1, or 3: [batch or 1, groups, query rows + 1]"
        raise invalid("key_lists", f"indptr of {offsets.ndim} axes", want)
    return {
        "key_list_offsets": offsets,
        "key_list_indices": _arrays.integers("key_lists", indices, "int64", 1),
        "key_list_ends": None if ends is None else _arrays.integers("key_lists", ends, "int64", 1),
        "key_list_bias": values if list_bias else None,
    }


def numbers(name: str, value: Any) -> np.ndarray[Any, Any]:
    """Returns the bias of listed pairs as float64."""
    found = _arrays.tensor(name, value)
    if found.array.ndim != 1:
        raise invalid(name, f"{found.array.ndim} axes", "1: [listed pairs]")
    return np.ascontiguousarray(_arrays.converted(found, "float64"), dtype=np.float64)


def blocks(
    indptr: Any, indices: Any, block: tuple[int, int], shape: tuple[int, int]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Returns the ranges of keys (indptr, starts, ends) of selected blocks of keys.

    Args:
        indptr: Offsets of each block of queries, ``[..., blocks + 1]``.
        indices: Blocks of keys of each block of queries, ascending.
        block: Rows of a block of queries and of a block of keys.
        shape: Query rows and keys; the last block of each side may be short.
    """
    rows, keys = shape
    offsets = _arrays.integers("key_lists", indptr, "int64", np.ndim(indptr))
    of_blocks = _arrays.integers("key_lists", indices, "int64", 1)
    planes = offsets.reshape(-1, offsets.shape[-1] if offsets.ndim else 1)
    if planes.shape[1] != -(-rows // block[0]) + 1:
        got = f"{planes.shape[1] - 1} blocks of queries"
        raise invalid("key_lists", got, f"{-(-rows // block[0])}, since there are {rows} rows")
    row = np.arange(rows) // block[0]
    first = planes[:, row].ravel()
    counts = planes[:, row + 1].ravel() - first
    ends_at = planes[:, -1]
    if (counts < 0).any() or (first < 0).any() or (ends_at > len(of_blocks)).any():
        at = int(np.argmax((counts < 0) | (first < 0))) % max(rows, 1)
        want = f"ascending offsets from 0 to {len(of_blocks)}, the number of blocks"
        raise invalid("key_lists", f"row {at}: offsets that do not fit", want)
    total = np.concatenate([[0], np.cumsum(counts)])
    entries = np.repeat(first - total[:-1], counts) + np.arange(total[-1])
    starts = of_blocks[entries] * block[1]
    stops = starts + block[1]
    stops = np.where(starts < keys, np.minimum(stops, keys), stops)
    lists = total[np.arange(len(planes))[:, None] * rows + np.arange(rows + 1)]
    whole = lists.reshape(*offsets.shape[:-1], rows + 1)
    return np.ascontiguousarray(whole), starts, stops


def _parts(value: Any) -> tuple[Any, Any, Any, Any]:
    """Returns indptr, indices, ends or None, and values or None."""
    if isinstance(value, tuple):
        if len(value) not in (2, 3):
            want = "(indptr, indices) or (indptr, starts, ends)"
            raise invalid("key_lists", f"a tuple of {len(value)}", want)
        indptr, indices, ends = (*value, None)[:3]
        return indptr, indices, ends, None
    if _arrays.library(value) == "torch":
        layout = str(value.layout)
        if layout not in ("torch.sparse_csr", "torch.sparse_bsr") or value.ndim != 2:
            got = f"a torch tensor of layout {value.layout} and {value.ndim} axes"
            raise invalid("key_lists", got, "torch.sparse_csr or sparse_bsr, [query rows, kv_len]")
        indptr, indices = value.crow_indices().cpu(), value.col_indices().cpu()
        if layout == "torch.sparse_bsr":
            size = tuple(value.values().shape[1:3])
            return *blocks(indptr, indices, size, tuple(value.shape)), None
        return indptr, indices, None, value.values()
    if getattr(value, "format", None) == "csr":
        return value.indptr, value.indices, None, value.data
    if getattr(value, "format", None) == "bsr":
        return *blocks(value.indptr, value.indices, value.blocksize, value.shape), None
    want = "a CSR or BSR array of SciPy or torch, (indptr, indices) or (indptr, starts, ends)"
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
