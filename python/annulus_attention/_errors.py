"""Exceptions. Each is an ``annulus.Error``, and the built-in exception that fits."""

from __future__ import annotations

import inspect


class Error(Exception):
    """An error of annulus.

    Codes 1 to 19 are the caller's fault and leave a plan usable, 20 to 39 are missing resources or
    ranks, and from 40 on the plan is dead.

    Attributes:
        code: Stable integer of this kind of error.
        argument: Name of the argument, if the error is about one.
    """

    def __init__(self, message: str, code: int, argument: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.argument = argument
        self._got_want = (message, "a valid argument")

    @property
    def is_fatal(self) -> bool:
        """True if the plan that raised this cannot be used any more."""
        return self.code >= 40


class InvalidArgument(Error, ValueError):
    """An argument has a value or shape that has no meaning. Nothing was written."""


class Unsupported(Error, NotImplementedError):
    """A meaningful combination that cannot be computed here. Nothing was written."""


class OutOfMemory(Error, MemoryError):
    """Memory could not be had."""


class ArrivalTimeout(Error, TimeoutError):
    """A rank has not made the call within the arrival deadline.

    Nothing was done: the plan is usable, and this rank makes the same call again.
    """


INVALID_ARGUMENT = 1
UNSUPPORTED = 2
RANK_MISMATCH = 3
REFUSED = 4
OUT_OF_MEMORY = 20
ARRIVAL_TIMEOUT = 22
TIMEOUT = 42

RENAMED = {"key_list_bias": "list_bias"}
"""Names of the library whose argument has another name here."""


def from_code(code: int, message: str, argument: str | None) -> Error:
    """Returns the exception of an error of the extension module."""
    classes: dict[int, type[Error]] = {
        INVALID_ARGUMENT: InvalidArgument,
        UNSUPPORTED: Unsupported,
        OUT_OF_MEMORY: OutOfMemory,
        ARRIVAL_TIMEOUT: ArrivalTimeout,
    }
    argument = RENAMED.get(argument or "", argument)
    if code == UNSUPPORTED:
        argument = argument or _first_argument(message)
    return classes.get(code, Error)(message, code, argument)


def _first_argument(message: str) -> str | None:
    """Returns the argument with whose name a message of the extension module begins."""
    # modules that import this one
    from ._calls import ring_attention
    from ._plan import Plan

    name = message.split(maxsplit=1)[0]
    name = RENAMED.get(name, name)
    calls = (ring_attention, Plan.__init__, Plan.backward)
    return name if any(name in inspect.signature(call).parameters for call in calls) else None


def invalid(argument: str, got: object, want: object) -> InvalidArgument:
    """Returns the exception of an argument without meaning."""
    message = f"{argument}: got {got}, want {want}"
    error = InvalidArgument(message, INVALID_ARGUMENT, argument)
    error._got_want = (str(got), str(want))
    return error


def unsupported(argument: str, why: str) -> Unsupported:
    """Returns the exception of an argument that is not supported."""
    return Unsupported(f"{argument} is not supported: {why}", UNSUPPORTED, argument)


def argument_got_want(error: Exception) -> tuple[str, str, str]:
    """Returns what an error of an argument says, in three parts."""
    if isinstance(error, Error):
        return (error.argument or "an argument", *error._got_want)
    return type(error).__name__, str(error), "a valid argument"


def refused(rank: int, what: str) -> Error:
    """Returns the exception of a call that another rank refused."""
    return Error(f"rank {rank} refused the call: {what}", REFUSED)


def mismatch(field: str, theirs: str, own: str) -> Error:
    """Returns the exception of a field that differs between ranks."""
    return Error(f"{field} differs between ranks: {theirs}, {own}", RANK_MISMATCH, field)
