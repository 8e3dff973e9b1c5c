"""Plans that calls of torch and compiled programs of JAX reuse: those of the forward pass in the
backward pass, of one layer in the next, of one step in the next.

A plan is taken out of the cache while a pass runs, so that two threads never share one. Over a
communicator all ranks agree before each pass (``_agreement.py``) on the plan that they reuse;
without agreement they plan anew, together.

A forked child starts without plans: it cannot use those of its parent, and another thread of the
parent may have held a lock.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import _agreement
from ._agreement import check_equal, gathered
from ._arrays import Place
from ._calls import BATCH, Call, RankRows, Shapes, Tensors
from ._errors import ArrivalTimeout, Error
from ._plan import Plan, batch_arrays

CAPACITY = 8
"""Plans that are kept of this process, and of each communicator. Each keeps its buffers. A model
has a few kinds of layers, of which forward and backward share one plan.
"""

SECOND_DERIVATIVES = ("jvp", "double backward")
"""Passes whose plan has second derivatives."""

Arrays = dict[str, np.ndarray[Any, Any]]


@dataclass
class Cached:
    """A plan, and what has to be known of it to reuse it.

    Attributes:
        serial: Number of the plan among those of its cache, equal on all ranks.
        objects: Masks and functions whose identity is a part of the key: they live as long.
        batch: Batch that the plan was last adapted to.
    """

    plan: Plan
    serial: int
    objects: tuple[Any, ...]
    batch: Arrays = field(default_factory=dict)


class PlanCache:
    """Idle plans, the least recently used one first."""

    def __init__(self) -> None:
        self._idle: OrderedDict[Hashable, Cached] = OrderedDict()
        self._lock = threading.Lock()
        self._made = 0
        self._process = os.getpid()

    @property
    def is_of_parent(self) -> bool:
        """True in a forked child of the process that made the cache."""
        return self._process != os.getpid()

    def take(self, key: Hashable) -> Cached | None:
        """Removes a plan and returns it."""
        with self._lock:
            return self._idle.pop(key, None)

    def give(self, key: Hashable, cached: Cached) -> None:
        """Adds an idle plan, and closes the least recently used one if there are too many."""
        with self._lock:
            closing = [self._idle.pop(key, None)]
            self._idle[key] = cached
            if len(self._idle) > CAPACITY:
                closing.append(self._idle.popitem(last=False)[1])
        for old in closing:
            if old is not None:
                old.plan.close()

    def made(self) -> int:
        """Returns the number of the newest plan."""
        return self._made

    def next_serial(self, made: int) -> int:
        """Returns the number of a new plan, which follows the newest plan of all ranks."""
        with self._lock:
            self._made = max(self._made, made) + 1
            return self._made

    def clear(self) -> None:
        """Closes all idle plans."""
        if self.is_of_parent:
            return
        with self._lock:
            closing = list(self._idle.values())
            self._idle.clear()
        for old in closing:
            old.plan.close()

    def __len__(self) -> int:
        return len(self._idle)


_local = PlanCache()
_of_communicators: dict[int, PlanCache] = {}


def cache_of(comm: Any) -> PlanCache:
    """Returns the cache of a communicator, which ends with it, or that of this process."""
    _leave_parent()
    if comm is None:
        return _local
    name = id(comm)
    if name not in _of_communicators:
        cache = _of_communicators[name] = PlanCache()
        weakref.finalize(comm, _drop, name, cache)
    return _of_communicators[name]


def _leave_parent() -> None:
    """Forgets the caches of the parent in a forked child."""
    global _local
    if _local.is_of_parent:
        _of_communicators.clear()
        _local = PlanCache()


def _drop(name: int, cache: PlanCache) -> None:
    if _of_communicators.get(name) is cache:
        del _of_communicators[name]
    cache.clear()


def clear() -> None:
    """Closes all idle plans, and ends the agreement of their ranks, which begins anew."""
    _leave_parent()
    for cache in (_local, *_of_communicators.values()):
        cache.clear()
    _agreement.reset()


@dataclass(frozen=True)
class _RankState:
    """State of a rank, which all ranks compare before a pass."""

    rows: RankRows
    fields: dict[str, Any]
    """Equal on all ranks, else the pass is refused."""
    made: int
    """Number of its newest plan."""
    serial: int | None
    """Number of the cached plan that fits its arguments."""
    is_adapted: bool
    """True if that plan is adapted to its batch already."""


def _fields(shapes: Shapes, arrays: Arrays) -> dict[str, Any]:
    """Returns what is equal on all ranks, by the argument that errors name."""
    batch, _, q_heads, head_dim = shapes.query
    return {
        "query": f"{batch} × {q_heads} heads of {head_dim} {shapes.dtype}",
        "value": f"{shapes.value[2]} heads of {shapes.value[3]}",
        "bias": None if shapes.bias is None else f"{len(shapes.bias)} axes",
        "softmax_aux": shapes.softmax_aux,
        **{name: "given" if name in arrays else None for name in BATCH},
    }


@contextmanager
def plan_for(
    options: Hashable,
    call: Call,
    tensors: Tensors,
    batch: dict[str, Any],
    *,
    forward_only: bool,
    of_pass: str = "forward",
) -> Iterator[Plan]:
    """Lends a plan that is adapted to a batch; with a communicator, collectively.

    Args:
        options: Key of the options of the call, for which equal keys are the same options.
        call, tensors, batch, forward_only: As for ``plan_of``.
        of_pass: ``forward``, ``backward``, or one of ``SECOND_DERIVATIVES``, equal on all ranks.
    """
    cache = cache_of(call.comm)
    key, cached, arrays = _take(cache, options, call, tensors, batch, forward_only, of_pass)
    try:
        if arrays is not None:
            cached.plan.adapt(arrays)
            cached.batch = {name: array.copy() for name, array in arrays.items()}
        yield cached.plan
    except BaseException as error:
        # an interrupt ends the plan too
        is_usable = isinstance(error, Error) and not error.is_fatal
        # ranks that arrive after such a timeout would be answered by another call
        if is_usable and not isinstance(error, ArrivalTimeout):
            cache.give(key, cached)
        else:
            cached.plan.close()
        raise
    cache.give(key, cached)


def _take(
    cache: PlanCache,
    options: Hashable,
    call: Call,
    tensors: Tensors,
    batch: dict[str, Any],
    forward_only: bool,
    of_pass: str,
) -> tuple[Hashable, Cached, Arrays | None]:
    """Returns key and plan of a call, and the batch that the plan is yet to be adapted to."""
    prepared: list[tuple[Shapes, Place | None, Arrays]] = []
    found: list[Cached] = []
    is_second = of_pass in SECOND_DERIVATIVES

    def key() -> Hashable:
        return options, *prepared[0][:2], forward_only, is_second

    def prepare() -> _RankState:
        prepared.append((Shapes.of(*tensors), call.place(tensors[0]), batch_arrays(batch)))
        shapes, _, arrays = prepared[0]
        made, cached = cache.made(), cache.take(key())
        if cached is not None:
            found.append(cached)
        return _RankState(
            rows=shapes.rows,
            fields=_fields(shapes, arrays),
            made=made,
            serial=None if cached is None else cached.serial,
            is_adapted=cached is not None and _same(cached.batch, arrays),
        )

    try:
        told = gathered(call.comm, of_pass, prepare, call.deadline)
        if call.comm is not None:
            check_equal([state.fields for state in told], call.comm.rank)
    except BaseException:
        for cached in found:
            cache.give(key(), cached)
        raise
    shapes, place, arrays = prepared[0]
    if found and all(state.serial == found[0].serial for state in told):
        adapted = all(state.is_adapted for state in told)
        return key(), found[0], None if adapted else arrays
    for cached in found:
        cache.give(key(), cached)
    plan = call.plan(
        shapes,
        place,
        [state.rows for state in told],
        forward_only=forward_only,
        second_derivatives=is_second,
    )
    objects = (call.attention.mask, call.attention.bias_function)
    made = Cached(plan, cache.next_serial(max(state.made for state in told)), objects)
    return key(), made, arrays or None


def _same(one: Arrays, other: Arrays) -> bool:
    return one.keys() == other.keys() and all(
        np.array_equal(array, other[name]) for name, array in one.items()
    )
