"""Masks over positions, for ``mask_builder=``; ``a & b`` and ``a | b`` combine masks. Selected
blocks of keys, for ``key_lists=``.

i' and j' are the positions of a query and of a key: their row numbers, unless ``cum_seqlens`` or
explicit positions say otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from . import _arrays, _key_lists
from ._annulus import Mask
from ._check import boolean, choice, function_of, integer, integer_or_none, text
from ._errors import invalid

__all__ = [
    "Mask",
    "causal",
    "chunked_causal",
    "dense",
    "full",
    "function",
    "key_blocks",
    "local",
    "neighborhood",
    "per_head",
    "prefix",
]


def full() -> Mask:
    """Every pair is visible."""
    return Mask.full()


def causal(offset: int = 0) -> Mask:
    """Visible if j' ≤ i' + offset."""
    return Mask.causal(integer("offset", offset, least=None))


def local(
    window: tuple[int | None, int | None], *, offset: int = 0, first_visible: int = 0
) -> Mask:
    """Visible if i' + offset − left ≤ j' ≤ i' + offset + right, or if j' < first_visible.

    Args:
        window: (left, right); ``None`` opens a side.
        offset: Shifts the window.
        first_visible: Number of first positions that every query attends to; 0 for none.
    """
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise invalid("window", repr(window), "(left, right)")
    left, right = window
    return Mask.local(
        integer_or_none("window", left),
        integer_or_none("window", right),
        integer("first_visible", first_visible),
        integer("offset", offset, least=None),
    )


def chunked_causal(size: int) -> Mask:
    """Visible if ⌊i'/size⌋ = ⌊j'/size⌋ and j' ≤ i'."""
    return Mask.chunked_causal(integer("size", size, least=1))


def prefix(length: int) -> Mask:
    """Visible if j' < length or j' ≤ i'."""
    return Mask.prefix(integer("length", length))


def neighborhood(
    shape: int | Sequence[int],
    window: int | Sequence[int | Sequence[int]],
    *,
    dilation: int | Sequence[int] = 1,
    causal: bool | Sequence[bool] = False,
    periodic: bool | Sequence[bool] = False,
    edge: str = "shift",
) -> Mask:
    """A window on a grid of one to three axes, whose points are the positions in row-major order.

    Every argument but ``shape`` and ``edge`` is one value for all axes, or one for each. The rules,
    beside those of NATTEN, are in ``docs/semantics.md``.

    Args:
        shape: Points of each axis.
        window: Points of the window on each axis: w has ⌊w/2⌋ before the query and ⌈w/2⌉ − 1 after
            it, or on a causal axis w − 1 before it; or (before, after).
        dilation: Distance between the points of a window.
        causal: No key after the query along the axis.
        periodic: The axis is a circle.
        edge: ``shift``: a window that passes the edge is shifted back, so that every query has all
            its keys, as in NATTEN; ``clip``: points outside are left out.
    """
    shapes = shape if isinstance(shape, (tuple, list)) else [shape]
    lens = [integer("shape", len_, least=1) for len_ in shapes]
    sizes: Any = window
    if len(lens) == 1 and _is_list(sizes) and len(sizes) == 2:
        sizes = [sizes]

    def flag(name: str) -> Callable[[Any], str]:
        return lambda value: str(int(boolean(name, value)))

    def size(value: Any) -> str:
        if not _is_list(value):
            return str(integer("window", value, least=1))
        if len(value) != 2:
            raise invalid("window", repr(value), "a number of points or (before, after)")
        return "+".join(str(integer("window", side)) for side in value)

    def listed(name: str, value: Any, one: Callable[[Any], str]) -> str:
        values = value if _is_list(value) else [value] * len(lens)
        if len(values) != len(lens):
            raise invalid(name, repr(value), f"one value, or {len(lens)}, one for each axis")
        return "x".join(one(element) for element in values)

    parts = [
        "x".join(map(str, lens)),
        listed("window", sizes, size),
        "dilation=" + listed("dilation", dilation, lambda d: str(integer("dilation", d, least=1))),
        "causal=" + listed("causal", causal, flag("causal")),
        "periodic=" + listed("periodic", periodic, flag("periodic")),
        "edge=" + choice("edge", edge, ("shift", "clip")),
    ]
    return Mask.neighborhood(":".join(parts))


def key_blocks(
    indptr: Any, indices: Any, block: int | Sequence[int], shape: Sequence[int]
) -> tuple[Any, Any, Any]:
    """Blocks of keys that each block of queries has selected, as ranges for ``key_lists=``.

    All queries of block n attend to the blocks ``indices[indptr[n]:indptr[n + 1]]``, ascending.

    Args:
        indptr: ``[blocks + 1]``, or by batch row and group of query heads ``[batch or 1, groups,
            blocks + 1]``.
        indices: Blocks of keys.
        block: Rows of a block; or (of queries, of keys).
        shape: (query rows, keys). The last block of each side may be short. With ``comm`` the rows
            of this rank, which its blocks of queries count from the first, and all keys.
    """
    sizes = block if isinstance(block, (tuple, list)) else [block, block]
    if len(sizes) != 2 or len(shape) != 2:
        raise invalid("block", repr((block, shape)), "two sizes and two lengths")
    of_queries, of_keys = (integer("block", size, least=1) for size in sizes)
    rows, keys = (integer("shape", length, least=0) for length in shape)
    return _key_lists.blocks(indptr, indices, (of_queries, of_keys), (rows, keys))


def _is_list(value: Any) -> bool:
    return isinstance(value, (tuple, list))


def dense(visible: Any) -> Mask:
    """Visible where an array is not zero, by row numbers.

    Args:
        visible: ``[batch or 1, q_heads or 1, q_len, kv_len]`` of the whole sequence, bools or
            integers.
    """
    return Mask.dense(_arrays.visible_pairs("visible", visible))


def per_head(masks: Sequence[Mask]) -> Mask:
    """One mask for each query head."""
    return Mask.per_head(list(masks))


def function(
    name: str,
    visible: Callable[[int, int], bool],
    *,
    intervals: Callable[[int], Sequence[tuple[int, int]]] | None = None,
) -> Mask:
    """A mask that is a Python function.

    Without ``intervals`` the kernels call ``visible`` for every pair, under the GIL, about a
    million pairs a second: a mask for tests and small sequences. With ``intervals`` they call that
    once for each query, and empty and full tiles cost nothing.

    Args:
        name: Ranks agree on it in place of the function: give functions that differ two names.
        visible: ``visible(i', j')``; a pure function.
        intervals: The same as half-open intervals of key positions,
            ``intervals(i') = [(low, high), …]``.
    """
    if intervals is not None:
        function_of("intervals", intervals)
    return Mask.function(text("name", name), function_of("visible", visible), intervals)
