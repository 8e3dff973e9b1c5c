"""Arrays in the memory of an NVIDIA GPU: those of torch, CuPy, JAX and others, without copies.

An array comes by DLPack, whose producer orders its work before that of the plan's stream, or by the
CUDA array interface. torch allocates results for torch tensors; for others a result is a
``DeviceArray`` that JAX and CuPy take over.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from . import _annulus, _arrays
from ._arrays import Tensor, device_of
from ._errors import invalid, unsupported


@dataclass(frozen=True)
class Place:
    """Where the arrays of a plan are: the number of the GPU, and the stream of the passes."""

    device: int
    stream: int


def current_stream(value: Any, device: int) -> int:
    """Returns torch's current stream for a tensor of torch, and the default stream for others."""
    if _arrays.library(value) != "torch":
        return 0
    import torch

    stream: int = torch.cuda.current_stream(device).cuda_stream
    return stream


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of the GPU that a plan computes on, with what ``HostMemory`` does."""

    place: Place

    def tensor(self, name: str, value: Any) -> Tensor:
        """Views an array of floats."""
        place = self.place
        if device_of(value) is None:
            want = f"one in the memory of GPU {place.device}"
            raise invalid(name, "an array in host memory", want)
        if hasattr(value, "__dlpack__"):
            array = self._by_dlpack(name, value)
        else:
            made = _annulus.DeviceArray.of_interface
            array = made(name, value, place.device, place.stream)
        if array.device != place.device:
            raise invalid(name, f"memory of GPU {array.device}", f"memory of GPU {place.device}")
        return Tensor(array, array.dtype, _library(value))

    def output(
        self, name: str, given: Any, shape: tuple[int, ...], dtype: str, like: str
    ) -> _annulus.DeviceArray:
        """Views an array that is to be written, or makes a new one."""
        if given is None:
            return self.empty(shape, dtype, like)
        if _arrays.library(given) == "jax":
            raise unsupported(name, "a JAX array is never written")
        found = self.tensor(name, given)
        if found.dtype != dtype or found.array.shape != shape:
            raise invalid(name, f"{found.dtype} {found.array.shape}", f"{dtype} {shape}")
        array: _annulus.DeviceArray = found.array
        return array

    def empty(self, shape: tuple[int, ...], dtype: str, like: str) -> _annulus.DeviceArray:
        """Returns an array of undefined elements. That of torch is allocated by torch, in the order
        of the stream, since torch reuses freed memory in that order.
        """
        place = self.place
        if like != "torch":
            return _annulus.DeviceArray.empty(place.device, place.stream, list(shape), dtype)
        import torch

        stream = torch.cuda.default_stream(place.device)
        if place.stream != 0:
            stream = torch.cuda.ExternalStream(place.stream, device=place.device)
        with torch.cuda.stream(stream):
            made = torch.empty(shape, dtype=getattr(torch, dtype), device=f"cuda:{place.device}")
        return self._by_dlpack("out", made)

    def converted(self, name: str, given: Tensor, dtype: str) -> Any:
        """Returns the array of a tensor, which has an element type already."""
        if given.dtype != dtype:
            want = f"elements {dtype}: an array in the memory of a GPU is not converted"
            raise invalid(name, f"elements {given.dtype}", want)
        return given.array

    def sinks(self, array: Any) -> Any:
        """Returns sinks as the extension module reads them."""
        return array

    def given_back(self, array: Any, dtype: str, like: str) -> Any:
        """Returns a result as an array of a library."""
        if like == "torch":
            return array.base
        if like == "jax":
            import jax

            return jax.dlpack.from_dlpack(array)
        if like == "cupy":
            return sys.modules["cupy"].from_dlpack(array)
        return array

    def _by_dlpack(self, name: str, value: Any) -> _annulus.DeviceArray:
        if _arrays.library(value) == "torch":
            value = value.detach()
        # DLPack's number of the default stream is 1
        capsule = value.__dlpack__(stream=self.place.stream or 1)
        return _annulus.DeviceArray.of_dlpack(name, value, capsule)


def _library(value: Any) -> str:
    library = _arrays.library(value)
    return "cupy" if type(value).__module__.partition(".")[0] == "cupy" else library
