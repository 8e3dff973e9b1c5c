"""The results of a pass; and passes on threads of their own, which overlap with the program."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ._errors import invalid

T = TypeVar("T")

POLL = 0.05
"""Seconds between two checks for signals, and between two requests to end a pass."""


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
class Statistics:
    """Statistics of the scores of a forward pass, with ``return_statistics=True``.

    The last axis of ``rows``, and the second of ``heads``: the largest scale·q·k before bias and
    soft cap, the largest score after them, and the entropy −Σ p·ln p of the probabilities, in
    which sinks count. All three are in float32 (float64 for float64 inputs), NaN where lse is.

    Attributes:
        rows: ``[batch, q_heads, q_len, 3]``; with a communicator, of this rank's queries. −∞, −∞
            and 0 for a query without a visible key and without sinks.
        heads: ``[q_heads, 3, 2]``: maximum and mean over all batch rows, and over all queries of
            all ranks that have a visible key; −∞ and NaN of a head without one.
    """

    rows: Any
    heads: Any

    @property
    def max_product(self) -> Any:
        """``[batch, q_heads, q_len]``: largest scale·q·k, before bias and soft cap."""
        return self.rows[..., 0]

    @property
    def max_score(self) -> Any:
        """``[batch, q_heads, q_len]``: largest score, after bias and soft cap."""
        return self.rows[..., 1]

    @property
    def entropy(self) -> Any:
        """``[batch, q_heads, q_len]``: entropy of the probabilities, in nats."""
        return self.rows[..., 2]

    @property
    def head_max_product(self) -> Any:
        """``[q_heads]``: largest scale·q·k of each head over all ranks, which QK-clip compares."""
        return self.heads[:, 0, 0]


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
        statistics: Of the scores, with ``return_statistics=True``.
        reports: Times and bytes of the ranks of this process.
    """

    out: Any
    lse: Any
    max: Any = None
    sum: Any = None
    ties: Any = None
    out_residual: Any = None
    reports: tuple[Report, ...] = ()
    statistics: Statistics | None = None


@dataclass(frozen=True)
class Gradients:
    """Outputs of a backward pass, each with the shape and element type of its input.

    Attributes:
        dq, dk, dv: Of query, key and value.
        dbias: Of the bias, or None.
        dsoftmax_aux: Of the sinks, or None.
        dlist_bias: Of the values of key_lists that were added to the scores, float64 of NumPy, or
            None.
        reports: Times and bytes of the ranks of this process.
    """

    dq: Any
    dk: Any
    dv: Any
    dbias: Any = None
    dsoftmax_aux: Any = None
    dlist_bias: Any = None
    reports: tuple[Report, ...] = ()


@dataclass(frozen=True)
class Jvp:
    """Outputs of a JVP.

    Attributes:
        out, lse: As ``Forward``.
        out_tangent, lse_tangent: Their derivatives along the tangents of the inputs; of lse 0 for
            a query without a visible key and without sinks.
        reports: Times and bytes of the ranks of this process.
    """

    out: Any
    lse: Any
    out_tangent: Any
    lse_tangent: Any
    reports: tuple[Report, ...] = ()


@dataclass(frozen=True)
class DoubleBackward:
    """Outputs of a double backward.

    Attributes:
        inputs: Gradients with respect to query, key, value, bias and softmax_aux.
        ddout, ddlse: Gradients with respect to dout and dlse, in their shapes.
        reports: Times and bytes of the ranks of this process.
    """

    inputs: Gradients
    ddout: Any
    ddlse: Any
    reports: tuple[Report, ...] = ()


class Pass(Generic[T]):
    """The thread of a pass. It holds references to the plan and the arrays of the pass.

    The thread does not keep the process alive: at the end of the program a pass is cancelled. A
    forked child does not have the thread: there the pass has ended, without a result.
    """

    def __init__(self, work: Callable[[], T], interrupt: Callable[[], None]) -> None:
        self._work: Callable[[], T] | None = work
        self._interrupt = interrupt
        self._result: list[T] = []
        self._error: BaseException | None = None
        self._process = os.getpid()
        # a join that a signal interrupts may take the thread for ended
        self._ended = threading.Event()
        self.thread = threading.Thread(target=self._run, name="annulus pass", daemon=True)
        RUNNING.add(self)
        self.thread.start()

    def _run(self) -> None:
        work, self._work = self._work, None
        assert work is not None
        try:
            self._result.append(work())
        except BaseException as error:
            # of the program that waits
            self._error = error
        finally:
            RUNNING.discard(self)
            self._ended.set()

    @property
    def is_of_parent(self) -> bool:
        """True in a forked child of the process that started the pass."""
        return self._process != os.getpid()

    def has_ended(self) -> bool:
        """True if the pass has ended."""
        # another thread of the parent may have held the lock of the event
        return self.is_of_parent or self._ended.is_set()

    def wait(self) -> T:
        """Waits for the end of the pass, and returns its result or raises its exception."""
        if self.is_of_parent:
            got = f"a pass of process {self._process}, from which this process was forked"
            raise invalid("plan", got, "a pass of a new plan, made in this process")
        try:
            while not self._ended.wait(POLL):
                pass
        except BaseException:
            self.cancel()
            raise
        if self._error is not None:
            raise self._error
        return self._result[0]

    def cancel(self) -> None:
        """Ends the pass and waits for its end, which is that of its tile or its wait."""
        if threading.current_thread() is self.thread:
            return
        while not self.has_ended():
            # again, because a pass that begins forgets what was requested before
            self._interrupt()
            self._ended.wait(POLL)


RUNNING: set[Pass[Any]] = set()
"""Passes that have not ended."""


def _cancel_all() -> None:
    for each in list(RUNNING):
        each.cancel()


atexit.register(_cancel_all)


class StartedPass(Generic[T]):
    """A pass of a plan on a thread of its own, as ``forward_start`` and ``backward_start`` return.

    Until ``wait`` has returned, no other method of the plan can be called, and the arrays of the
    pass stay as they are. When the last reference to an object that was not waited for goes, the
    pass is cancelled: the plan is dead on all ranks, unless the pass had ended.
    """

    def __init__(self, of: Pass[T], ended: Callable[[], None]) -> None:
        self._pass: Pass[T] | None = of
        self._ended = ended
        self._finalizer = weakref.finalize(self, _abandon, of, ended)
        # the end of the program cancels passes itself
        self._finalizer.atexit = False

    def test(self) -> bool:
        """True if the pass has ended, so that ``wait`` returns at once."""
        return self._pass is None or self._pass.has_ended()

    def wait(self) -> T:
        """Waits for the end of the pass, and returns its result or raises its exception.

        An exception of a signal handler, such as KeyboardInterrupt, ends the pass, and the plan
        with it; over MPI, on all ranks.
        """
        if self._pass is None:
            raise invalid("plan", "one without a pass under way", "one wait for each start")
        of, self._pass = self._pass, None
        self._finalizer.detach()
        try:
            return of.wait()
        finally:
            self._ended()


def _abandon(of: Pass[Any], ended: Callable[[], None]) -> None:
    of.cancel()
    ended()
