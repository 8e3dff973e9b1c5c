"""The results of a pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Report:
    """Times and bytes of one pass on one rank.

    Attributes:
        seconds: Wall-clock time of the pass.
        waiting_seconds: Time in which the rank waited for others.
        bytes_sent: Payload bytes that the rank sent.
        bytes_predicted: Payload bytes that it sends by the schedule.
    """

    seconds: float
    waiting_seconds: float
    bytes_sent: int
    bytes_predicted: int


@dataclass(frozen=True)
class Forward:
    """Outputs of a forward pass, which are inputs of the backward pass.

    Attributes:
        out: ``[batch, q_len, q_heads, value_dim]``, in the inputs' element type.
        lse: ``[batch, q_heads, q_len]``, natural logarithm, float32 (float64 for float64 inputs).
            −∞ for a query without a visible key and without sinks.
        max: Maximum of the scores and sinks, shape of lse. None of a KV cache, as sum.
        sum: Σ e^(s − max), shape of lse. The backward pass computes probabilities from max and sum;
            with neither, from lse, wrong by a factor e^ε with |ε| up to 2⁻²⁴·|lse| in float32.
        ties: Number of keys and sinks that share the maximum. Only of an unnormalised output.
        out_residual: Rounding residual of out, shape and element type of out: out before it was
            rounded − out, rounded. Of bfloat16 and float16 on the CPU, of plans with a backward
            pass. Without it the backward pass computes ⟨dout, out⟩ from the rounded out, and dq is
            off where all keys share a large component.
        reports: Times and bytes of the ranks of this process.
    """

    out: Any
    lse: Any
    max: Any = None
    sum: Any = None
    ties: Any = None
    out_residual: Any = None
    reports: tuple[Report, ...] = ()


@dataclass(frozen=True)
class Gradients:
    """Outputs of a backward pass, each with the shape and element type of its input.

    Attributes:
        dq, dk, dv: Of query, key and value.
        dbias: Of the bias, or None.
        dsoftmax_aux: Of the sinks, or None.
        reports: Times and bytes of the ranks of this process.
    """

    dq: Any
    dk: Any
    dv: Any
    dbias: Any = None
    dsoftmax_aux: Any = None
    reports: tuple[Report, ...] = ()
