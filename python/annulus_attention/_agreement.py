"""Communicators of mpi4py: endpoints that plans share, and agreement of the ranks before a call
moves data.

Every rank sends every other one a message, and waits for theirs, at most for the deadline:

    position   (stretch, number): entries and exits of contexts so far, calls since then
    call       name of the call
    failure    text of the error with which the rank refuses the call, or None
    payload    what the ranks compare

Ranks run the same program, so a call has the same position on all of them. A message of an earlier
position belongs to a call that this rank has refused or left, and is dropped. A message of a later
position means that its rank does not make this call. So no message is taken for one of another
call. A wait that ends at its deadline leaves the ranks at unknown places of the program: the
channel is closed then, and further calls are refused on all ranks until ``reset``.

Messages travel over a duplicate of the communicator, so that they meet none of the program's.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

from . import _annulus
from ._errors import TIMEOUT, Error, invalid, mismatch, refused, unsupported

T = TypeVar("T")

DEADLINE = 120.0
"""Seconds of a wait without ``deadline=``, those of a pass."""
VARIABLE = "ANNULUS_DEADLINE"
EXIT = 2**62
"""Number of the message with which a rank leaves a context: after all calls."""
CLOSED = (-1, -1)
"""Position of the message with which a rank closes its channel."""
SPINS = 200
"""Polls without a pause, which take about 0.1 ms: ranks in step answer sooner."""
PAUSE = 0.001
"""Longest seconds between two polls, as in the transport of a plan."""


@dataclass(frozen=True)
class Message:
    """A rank's message about one call."""

    position: tuple[int, int]
    failure: str | None
    call: str = ""
    payload: Any = None


class Channel:
    """Messages between this rank and the others of a communicator."""

    def __init__(self, comm: Any) -> None:
        fortran_handle(comm)
        self._stretch = 0
        self._number = 0
        self._closed: str | None = None
        self._rank = comm.rank
        self._peers = [rank for rank in range(comm.size) if rank != comm.rank]
        self._kept: dict[int, Message] = {}
        """First message of a rank that belongs to a later call."""
        self._sends: list[Any] = []
        self._comm: Any = None
        self._duplicating: Any = None
        self._process = os.getpid()
        if self._peers:
            # collective, but waits for nobody
            self._comm, self._duplicating = comm.Idup()

    @property
    def position(self) -> tuple[int, int]:
        """Position of the next call."""
        return self._stretch, self._number

    def gathered(self, call: str, work: Callable[[], T], deadline: Any) -> list[T]:
        """Returns the results of ``work`` of all ranks, or raises on all if it fails on one."""
        position = self.position
        self._number += 1
        return self._exchanged(position, call, work, deadline)

    def enter(self, deadline: Any) -> None:
        """Begins a context. The first one waits for all ranks."""
        self._open(deadline)
        self._begin_stretch()

    def leave(self, deadline: Any) -> None:
        """Ends a context on all ranks, or raises if it has failed on one."""
        fields = {"context_parallel": f"{self._number} calls"}
        try:
            told = self._exchanged((self._stretch, EXIT), "exit", lambda: fields, deadline)
        finally:
            self._begin_stretch()
        check_equal(told, self._rank)

    def abandon(self, error: BaseException) -> None:
        """Ends a context with an error, which the other ranks raise too. Waits for nobody."""
        self._send(Message((self._stretch, EXIT), _text(error)))
        self._begin_stretch()

    def refuse(self, error: BaseException) -> None:
        """Refuses the next call, of which the other ranks raise an error. Waits for nobody."""
        self._send(Message(self.position, _text(error)))
        self._number += 1

    def free(self) -> None:
        """Frees the duplicate; not in a forked child, where calls of MPI disturb the parent."""
        from mpi4py import MPI

        if self._process != os.getpid():
            return
        if self._comm is not None and not MPI.Is_finalized() and self._is_open():
            self._comm.Free()
            self._comm = None

    def _exchanged(
        self, position: tuple[int, int], call: str, work: Callable[[], T], deadline: Any
    ) -> list[T]:
        end = self._open(deadline)
        try:
            own = Message(position, None, call, work())
        except BaseException as error:
            self._send(Message(position, _text(error)))
            raise
        self._send(own)
        told = {self._rank: own}
        with self._closed_by_a_timeout():
            for peer in self._peers:
                told[peer] = self._from(peer, position, end)
        for rank, message in told.items():
            if message.failure is not None:
                raise refused(rank, message.failure)
        messages = [told[rank] for rank in sorted(told)]
        check_equal([{"call": message.call} for message in messages], self._rank)
        return [message.payload for message in messages]

    def _begin_stretch(self) -> None:
        self._stretch, self._number = self._stretch + 1, 0

    def _open(self, deadline: Any) -> float:
        """Waits until messages can be sent, and returns the time at which waits end."""
        if self._closed is not None:
            raise Error(self._closed, TIMEOUT)
        end = time.monotonic() + seconds(deadline)
        with self._closed_by_a_timeout():
            self._await(self._is_open, end, "a rank")
        return end

    def _is_open(self) -> bool:
        if self._duplicating is not None and self._duplicating.Test():
            self._duplicating = None
        return self._duplicating is None

    def _send(self, message: Message) -> None:
        if self._peers and self._is_open():
            self._sends = [request for request in self._sends if not request.test()[0]]
            self._sends += [self._comm.isend(message, dest=peer) for peer in self._peers]

    def _from(self, peer: int, position: tuple[int, int], end: float) -> Message:
        """Returns the message of a rank about the call at a position."""
        while True:
            self._await(lambda: self._has_message(peer), end, f"rank {peer}")
            message = self._kept[peer]
            self._check_open(peer)
            if message.position > position:
                is_exit = message.position == (position[0], EXIT)
                otherwise = "it has left context_parallel" if is_exit else "it makes another call"
                raise refused(peer, (is_exit and message.failure) or otherwise)
            del self._kept[peer]
            if message.position == position:
                # this rank is late if the other one has given up since
                if self._has_message(peer):
                    self._check_open(peer)
                return message

    def _check_open(self, peer: int) -> None:
        message = self._kept[peer]
        if message.position == CLOSED:
            raise Error(f"rank {peer} ended its calls: {message.failure}", TIMEOUT)

    def _has_message(self, peer: int) -> bool:
        if peer not in self._kept:
            found = self._comm.improbe(source=peer)
            if found is None:
                return False
            self._kept[peer] = found.recv()
        return True

    def _await(self, is_there: Callable[[], bool], end: float, who: str) -> None:
        polls = 0
        while not is_there():
            if time.monotonic() > end:
                raise Error(f"{who} has not made this call within the deadline", TIMEOUT)
            polls += 1
            time.sleep(0 if polls < SPINS else min(PAUSE, (polls - SPINS) * 1e-5))

    @contextmanager
    def _closed_by_a_timeout(self) -> Iterator[None]:
        """Closes the channel if a wait ends at its deadline, or by an exception of a signal."""
        try:
            yield
        except BaseException as error:
            if not isinstance(error, Error) or error.code == TIMEOUT:
                self._close(error)
            raise

    def _close(self, error: BaseException) -> None:
        again = "annulus_attention.torch.clear_plans() on all ranks"
        how = f"{again}, or another communicator, begins anew"
        self._closed = f"calls over this communicator have ended: {_text(error)}; {how}"
        self._send(Message(CLOSED, _text(error)))


_channels: dict[int, Channel] = {}


def channel_of(comm: Any) -> Channel:
    """Returns the channel of a communicator, which ends with it. Raises in a forked child."""
    check_process()
    name = id(comm)
    if name not in _channels:
        channel = _channels[name] = Channel(comm)
        weakref.finalize(comm, _drop, name, channel).atexit = False
    return _channels[name]


def _drop(name: int, channel: Channel) -> None:
    if _channels.get(name) is channel:
        del _channels[name]
    channel.free()


def reset() -> None:
    """Frees all channels, so that calls begin anew. All ranks do so."""
    for name, channel in list(_channels.items()):
        _drop(name, channel)


def gathered(comm: Any, call: str, work: Callable[[], T], deadline: Any) -> list[T]:
    """Returns the results of ``work`` of all ranks, or raises on all if it fails on one.

    Collective over ``comm``. Without one, this process is the only rank.

    Args:
        call: Name of the call, equal on all ranks.
        deadline: Seconds of the wait for other ranks. Default: ``DEADLINE``.
    """
    return [work()] if comm is None else channel_of(comm).gathered(call, work, deadline)


def agreed(comm: Any, call: str, work: Callable[[], T], deadline: Any) -> T:
    """Returns the result of ``work``, which stays on this rank, or raises on all ranks if it fails
    on one. Collective as ``gathered``, which has its arguments.
    """
    results: list[T] = []
    gathered(comm, call, lambda: results.append(work()), deadline)
    return results[0]


@contextmanager
def one_call(comm: Any) -> Iterator[None]:
    """Lets the other ranks of a call raise an error if it fails here before it is agreed on."""
    channel = channel_of(comm)
    position = channel.position
    try:
        yield
    except BaseException as error:
        if channel.position == position:
            channel.refuse(error)
        raise


def check_equal(told: list[dict[str, Any]], own: int) -> None:
    """Checks that the fields of all ranks are equal."""
    for rank, theirs in enumerate(told):
        for field, value in theirs.items():
            mine = told[own][field]
            if value != mine:
                raise mismatch(field, f"{value} on rank {rank}", f"{mine} on rank {own}")


def seconds(deadline: Any) -> float:
    """Returns the seconds of a wait. A deadline without meaning is refused elsewhere."""
    try:
        replaced = os.environ.get(VARIABLE)
        if replaced is not None:
            return float(replaced) or float("inf")
        return float(deadline) if deadline >= 1 else DEADLINE
    except (TypeError, ValueError):
        return DEADLINE


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__


class Endpoint:
    """A duplicate of an mpi4py communicator, which several plans and caches share.

    It is passed as ``comm`` of ``Plan``, ``Attention.plan`` and ``Cache``. A plan over an endpoint
    takes no further communicator, of which an MPI has some thousands. All ranks make their plans
    over it in the same order, and use and close them independently of each other; but an error that
    ends a plan (``Error.is_fatal``) ends all plans over the endpoint.

    Args:
        comm: An mpi4py communicator, which lives until the last plan over the endpoint is made.
        deadline: Seconds within which all ranks make it. Default: 120.
    """

    def __init__(self, comm: Any, *, deadline: float | None = None) -> None:
        self._comm = comm
        communicator = fortran_handle(comm)
        agreed(comm, "endpoint", lambda: None, deadline)
        self._handle = _annulus.Endpoint.over_mpi(communicator)

    def close(self) -> None:
        """Frees the endpoint after the last plan and cache over it. They live on until then."""
        self._handle.close()

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def carrier(comm: Any) -> tuple[Any, Any]:
    """Returns what the module makes a transport of, and the communicator of the ranks."""
    if comm is None:
        return None, None
    if isinstance(comm, Endpoint):
        return comm._handle, comm._comm
    return fortran_handle(comm), comm


def check_communicator(comm: Any) -> None:
    """Checks that a communicator is one of mpi4py's."""
    if not hasattr(comm, "py2f") or not hasattr(comm, "allgather"):
        raise invalid("comm", repr(comm), "an mpi4py communicator")


def check_process() -> None:
    """Raises in a forked child of a process with MPI, where calls of MPI disturb the parent."""
    if _annulus.HAS_MPI:
        _annulus.check_mpi_process()


def _note_process() -> None:
    """Lets the module know of an MPI that it has not used yet, before this process forks."""
    if "mpi4py.MPI" in sys.modules:
        with suppress(Error):
            check_process()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_note_process)


def fortran_handle(comm: Any) -> int:
    if not _annulus.HAS_MPI:
        why = 'this build has no MPI; pip install ./python -C build-args="--features mpi"'
        raise unsupported("comm", why)
    check_communicator(comm)
    check_process()
    from mpi4py import MPI

    own, is_initialised = _annulus.mpi_library()
    own, other = (text.strip("\0\n ") for text in (own, MPI.Get_library_version()))
    made = "was built with" if _annulus.LINKS_MPI else "has loaded"
    advice = (
        "" if _annulus.LINKS_MPI else "; see ANNULUS_MPI_LIBRARY and annulus_attention.mpi_shim"
    )
    if own != other:
        names = f"{first_line(other)!r}, and annulus {made} {first_line(own)!r}"
        raise unsupported("comm", f"mpi4py uses {names}{advice}")
    if not is_initialised:
        why = f"mpi4py has not initialised the copy of {first_line(own)!r} that annulus {made}"
        raise unsupported("comm", f"{why}{advice}")
    return int(comm.py2f())


def first_line(text: str) -> str:
    return text.partition("\n")[0]
