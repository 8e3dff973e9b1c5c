"""Biases that are computed from positions, for ``bias_function=``. They have no gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ._annulus import BiasFunction
from ._check import integer

__all__ = ["BiasFunction", "alibi", "function"]


def alibi(slopes: int | Sequence[float]) -> BiasFunction:
    """Attention with linear biases: −slope(head) · |i' − j'| (Press et al. 2022).

    Args:
        slopes: One slope for each query head, or the number of heads for the published slopes.
    """
    if isinstance(slopes, int):
        return BiasFunction.published_alibi(integer("slopes", slopes, least=1))
    return BiasFunction.alibi([float(slope) for slope in slopes])


def function(name: str, bias: Callable[[int, int, int], float]) -> BiasFunction:
    """A bias that is a Python function, called for every visible pair under the GIL.

    Args:
        name: Ranks agree on it in place of the function: give functions that differ two names.
        bias: ``bias(head, i', j')``; a pure function. −∞ masks the pair.
    """
    return BiasFunction.function(name, bias)
