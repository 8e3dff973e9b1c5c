"""Biases that are computed from positions, for ``bias_function=``. They have no gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ._annulus import BiasFunction
from ._check import function_of, integer, number, text
from ._errors import invalid

__all__ = ["BiasFunction", "alibi", "function"]


MOST_HEADS = 65536
"""Of published slopes: a number that is a mistake must not take all memory."""


def alibi(slopes: int | Sequence[float]) -> BiasFunction:
    """Attention with linear biases: −slope(head) · |i' − j'| (Press et al. 2022).

    Args:
        slopes: One slope for each query head, 0 for heads beyond the last; or the number of heads
            for the published slopes.
    """
    if isinstance(slopes, int):
        heads = integer("slopes", slopes, least=1)
        if heads > MOST_HEADS:
            raise invalid("slopes", heads, f"at most {MOST_HEADS} heads")
        return BiasFunction.published_alibi(heads)
    return BiasFunction.alibi([number("slopes", slope) for slope in slopes])


def function(name: str, bias: Callable[[int, int, int], float]) -> BiasFunction:
    """A bias that is a Python function, called for every visible pair under the GIL.

    Args:
        name: Ranks agree on it in place of the function: give functions that differ two names.
        bias: ``bias(head, i', j')``; a pure function. −∞ masks the pair.
    """
    return BiasFunction.function(text("name", name), function_of("bias", bias))
