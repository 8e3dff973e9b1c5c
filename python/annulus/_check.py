"""Checks of single arguments; every error names the argument."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, TypeVar

from ._errors import invalid

LARGEST = 2**64 - 1

F = TypeVar("F", bound=Callable[..., Any])


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


def text(name: str, value: Any) -> str:
    """Returns a string."""
    if not isinstance(value, str):
        raise invalid(name, repr(value), "a string")
    return value


def function_of(name: str, value: F) -> F:
    """Returns a function."""
    if not callable(value):
        raise invalid(name, repr(value), "a function")
    return value
