"""Checks of single arguments; every error names the argument."""

from __future__ import annotations

import json
import math
import operator
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from . import _arrays
from ._errors import invalid

LARGEST = 2**64 - 1

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

Rows = Sequence[Sequence[int | tuple[int, int, int]]]
"""Rows of every rank: row numbers, or runs of them as (first, step, count)."""
Machine = str | os.PathLike[str] | Mapping[str, Any]
"""A machine: the path of a machine file, or its fields."""
Documents = Mapping[str, Any]
"""Arrays of a whole batch, under the names of ``Plan.update``."""
LAYOUTS = ("contiguous", "zigzag", "striped")
DOCUMENTS = {
    "cum_seqlens_q": ("int64", 1),
    "cum_seqlens_k": ("int64", 1),
    "q_segment_ids": ("int32", 2),
    "kv_segment_ids": ("int32", 2),
    "q_positions": ("int64", 2),
    "kv_positions": ("int64", 2),
}
"""Element type and axes of the arrays of a batch by which a layout or a strategy is chosen."""
ROUTES = ("relay_up", "relay_down", "direct", "rails_up", "rails_down", "once_per_node")
BACKEND_NAMES = ("cpu", "wgpu", "cuda", "hip")
_COUNT = "[1-9][0-9]{0,8}"
STRATEGIES = re.compile(
    f"ring|auto|heads:{_COUNT}|grid:{_COUNT}(x{_COUNT}){{1,2}}|once-per-node(:{_COUNT})?"
    "|all-gather|all-to-all|pass-q"
)


def boolean(name: str, value: Any) -> bool:
    """Returns a bool."""
    # bools of NumPy are no subclass of bool
    if type(value).__name__ not in ("bool", "bool_"):
        raise invalid(name, repr(value), "True or False")
    return bool(value)


def integer(name: str, value: Any, *, least: int | None = 0) -> int:
    """Returns an integer that is at least ``least``."""
    try:
        number = operator.index(value)
    except TypeError:
        raise invalid(name, repr(value), "an integer") from None
    if isinstance(value, bool):
        raise invalid(name, value, "an integer")
    low = -(2**63) if least is None else least
    if not low <= number <= (2**63 - 1 if least is None else LARGEST):
        raise invalid(name, number, f"an integer of 64 bits, at least {low}")
    return number


def integer_or_none(name: str, value: Any, *, least: int = 0) -> int | None:
    """Returns an integer that is at least ``least``, or None."""
    return None if value is None else integer(name, value, least=least)


def number(name: str, value: Any) -> float:
    """Returns a finite number."""
    try:
        result = float(value)
    except (TypeError, ValueError):
        raise invalid(name, repr(value), "a number") from None
    except OverflowError:
        raise invalid(name, "an integer beyond the largest float", "a finite number") from None
    if isinstance(value, (bool, str)) or not math.isfinite(result):
        raise invalid(name, repr(value), "a finite number")
    return result


def number_or_none(name: str, value: Any) -> float | None:
    """Returns a finite number, or None."""
    return None if value is None else number(name, value)


def window(value: Any) -> tuple[int | None, int | None]:
    """Returns both sides of a sliding window. One integer stands for both."""
    if value is None:
        return None, None
    if isinstance(value, (tuple, list)):
        if len(value) != 2:
            raise invalid("sliding_window", value, "an integer or (left, right)")
        left, right = value
    else:
        left = right = value
    return integer_or_none("sliding_window", left), integer_or_none("sliding_window", right)


def choice(name: str, value: Any, choices: tuple[str, ...]) -> str:
    """Returns one of some names."""
    # an array, compared with a name, is no bool
    if not isinstance(value, str) or value not in choices:
        raise invalid(name, repr(value), f"one of {', '.join(choices)}")
    return value


def choice_or_none(name: str, value: Any, choices: tuple[str, ...]) -> str | None:
    """Returns one of some names, or None."""
    return None if value is None else choice(name, value, choices)


def precision(value: Any) -> str:
    """Returns the name of a precision: of NumPy, or of a member of jax.lax.Precision."""
    name = getattr(value, "name", value)
    return "highest" if name is None else str(name).lower()


def dtype_or_none(name: str, value: Any) -> str | None:
    """Returns the name of an element type, or None."""
    return None if value is None else _arrays.dtype_name(name, value)


def instance(name: str, value: Any, kind: type[T], module: str) -> T | None:
    """Returns an object of a module of the package, or None."""
    if value is not None and not isinstance(value, kind):
        raise invalid(name, repr(value), f"an object of annulus_attention.{module}")
    return value


def text(name: str, value: Any) -> str:
    """Returns a string."""
    if not isinstance(value, str):
        raise invalid(name, repr(value), "a string")
    return value


def bias_table(value: Any) -> str | None:
    """Returns the kind of a bias table, whose parameters the extension module reads."""
    return None if value is None else text("bias_table", value)


def function_of(name: str, value: F) -> F:
    """Returns a function."""
    if not callable(value):
        raise invalid(name, repr(value), "a function")
    return value


def strategy(value: Any) -> str:
    """Returns the name of a strategy."""
    if not isinstance(value, str) or not STRATEGIES.fullmatch(value):
        want = (
            "ring, heads:H, grid:QxK, grid:HxQxK, once-per-node:N with numbers from 1, "
            "once-per-node, all-gather, all-to-all, pass-q, or auto"
        )
        raise invalid("strategy", repr(value), want)
    return value


def machine(value: Any, strategy: str) -> str | dict[str, Any] | None:
    """Returns the path of a machine file, or its fields."""
    if value is None:
        return None
    if strategy != "auto":
        raise invalid("machine", repr(value), 'None, or strategy="auto"')
    if isinstance(value, (str, os.PathLike)):
        return os.fsdecode(value)
    if not isinstance(value, Mapping):
        raise invalid("machine", repr(value), "the path of a machine file, or its fields")
    try:
        fields: dict[str, Any] = json.loads(json.dumps(dict(value), allow_nan=False))
    except (TypeError, ValueError) as error:
        want = "numbers that are finite, strings, lists and dicts"
        raise invalid("machine", str(error), want) from None
    return fields


def documents(given: Documents) -> dict[str, np.ndarray[Any, Any]]:
    """Returns the arrays of documents that are given, in the element types of the module."""
    return {
        name: _arrays.integers(name, value, *DOCUMENTS[name])
        for name, value in given.items()
        if value is not None
    }


def documents_of_auto(value: Any, strategy: str) -> dict[str, np.ndarray[Any, Any]] | None:
    """Returns the checked documents for which ``auto`` chooses."""
    if value is None:
        return None
    names = ", ".join(DOCUMENTS)
    if not isinstance(value, Mapping):
        raise invalid("documents", repr(value), f"a dict of {names}")
    if strategy != "auto":
        raise invalid("documents", f"a batch, for the strategy {strategy}", 'None, or "auto"')
    for name in value:
        if name not in DOCUMENTS:
            raise invalid("documents", repr(name), f"arrays of the names {names}")
    return documents(value)


def layout(value: Any) -> Any:
    """Returns the name of a layout, or the rows of every rank."""
    if value is None or isinstance(value, str):
        return choice_or_none("layout", value, LAYOUTS)
    want = "a name, or (query rows, key rows) of every rank"
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise invalid("layout", repr(value), want)
    try:
        sides = [[[_checked_row(row) for row in rows] for rows in side] for side in value]
    except TypeError:
        raise invalid("layout", repr(value), want) from None
    if any(isinstance(row, tuple) for side in sides for rows in side for row in rows):
        # the extension module reads either numbers or runs
        run = [
            [[r if isinstance(r, tuple) else (r, 1, 1) for r in rows] for rows in side]
            for side in sides
        ]
        return tuple(run)
    return tuple(sides)


def _checked_row(row: Any) -> int | tuple[int, ...]:
    """Returns a row number, or a run of them as (first, step, count)."""
    if isinstance(row, (tuple, list)) and len(row) == 3:
        first, step, count = row
        numbers = [integer("layout", number, least=None) for number in (first, step)]
        return (*numbers, integer("layout", count))
    return integer("layout", row, least=None)
