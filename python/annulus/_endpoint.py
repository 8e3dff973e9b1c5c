"""A communicator that several plans and caches share."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from types import TracebackType
from typing import Any

from . import _annulus
from ._errors import Error, invalid, unsupported


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
        # that module imports this one
        from ._agreement import agreed

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
    advice = "" if _annulus.LINKS_MPI else "; see ANNULUS_MPI_LIBRARY and annulus.mpi_shim"
    if own != other:
        names = f"{first_line(other)!r}, and annulus {made} {first_line(own)!r}"
        raise unsupported("comm", f"mpi4py uses {names}{advice}")
    if not is_initialised:
        why = f"mpi4py has not initialised the copy of {first_line(own)!r} that annulus {made}"
        raise unsupported("comm", f"{why}{advice}")
    return int(comm.py2f())


def first_line(text: str) -> str:
    return text.partition("\n")[0]
