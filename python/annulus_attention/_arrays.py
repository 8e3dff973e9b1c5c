"""Arrays of NumPy, torch, JAX and others as NumPy arrays without copies, and back.

NumPy has no bfloat16. Inside the package such an array is a view of 16-bit unsigned integers, with
its element type beside it.

Arrays in the memory of an NVIDIA GPU, those of torch, CuPy, JAX and others, come without copies by
DLPack, whose producer orders its work before that of the plan's stream, or by the CUDA array
interface. torch allocates results for torch tensors; for others a result is a ``DeviceArray`` that
JAX and CuPy take over.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import _annulus
from ._errors import invalid, unsupported

FLOATS = ("float64", "float32", "bfloat16", "float16")

DLPACK_CPU = 1
"""``kDLCPU`` of dlpack.h."""
DLPACK_CUDA = (2, 13)
"""``kDLCUDA`` and ``kDLCUDAManaged`` of dlpack.h."""


@dataclass(frozen=True)
class Tensor:
    """An array, the name of its element type, and the library that it came from.

    In host memory it is one of NumPy's, else a ``DeviceArray``.
    """

    array: Any
    dtype: str
    library: str


def library(value: object) -> str:
    """Returns the library of an array: ``torch``, ``jax`` or ``numpy`` for all others."""
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch is not None and isinstance(value, torch.Tensor):
        return "torch"
    if jax is not None and isinstance(value, jax.Array):
        return "jax"
    return "numpy"


def tensor(name: str, value: Any, *, writable: bool = False) -> Tensor:
    """Views an array of floats. Copies only strides that are no multiple of the element's size,
    unaligned elements and foreign byte orders, and never an array that is to be written.
    """
    array, dtype = _as_numpy(name, value)
    if dtype not in FLOATS:
        raise invalid(name, f"elements {dtype}", f"one of {', '.join(FLOATS)}")
    fits = (
        array.dtype.isnative
        and array.flags.aligned
        and all(stride % array.itemsize == 0 for stride in array.strides)
    )
    if writable and not (fits and array.flags.writeable):
        raise invalid(name, "an array that cannot be written in place", "a writable, aligned one")
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    elif not fits:
        array = array.copy()
    return Tensor(array, dtype, library(value))


def described(name: str, value: Any) -> tuple[tuple[int, ...], str]:
    """Returns the shape of an array of floats, and the name of its element type. Reads no element,
    so that the array may be one that JAX or torch traces.
    """
    found_library = library(value)
    if found_library != "numpy" or device_of(value) is not None:
        if found_library == "torch":
            check_memory(name, value, on_gpu=True)
        if not (hasattr(value, "shape") and hasattr(value, "dtype")):
            raise unsupported(name, "an array of a device without attributes shape and dtype")
        dtype = str(value.dtype).removeprefix("torch.")
        if dtype not in FLOATS:
            raise invalid(name, f"elements {dtype}", f"one of {', '.join(FLOATS)}")
        return tuple(value.shape), dtype
    found = tensor(name, value)
    return found.array.shape, found.dtype


def integers(name: str, value: Any, dtype: str, axes: int) -> np.ndarray[Any, Any]:
    """Returns an array of integers of an element type, which holds all their values."""
    array, found = _as_numpy(name, value if not isinstance(value, Sequence) else np.asarray(value))
    if array.dtype.kind not in "iu":
        raise invalid(name, f"elements {found}", "integers")
    if array.ndim != axes:
        raise invalid(name, f"{array.ndim} axes", f"{axes} axes")
    limits = np.iinfo(dtype)
    if array.size and not (limits.min <= int(array.min()) <= int(array.max()) <= limits.max):
        raise invalid(name, f"numbers {array.min()} to {array.max()}", f"numbers that fit {dtype}")
    return np.ascontiguousarray(array, dtype=dtype)


def visible_pairs(name: str, value: Any) -> np.ndarray[Any, Any]:
    """Returns a dense mask as bytes: 1 where it is not zero."""
    array, found = _as_numpy(name, value)
    if array.dtype.kind not in "iub":
        raise invalid(name, f"elements {found}", "bools or integers, non-zero where visible")
    if array.ndim != 4:
        want = "4: [batch or 1, q_heads or 1, q_len, kv_len]"
        raise invalid(name, f"{array.ndim} axes", want)
    return np.ascontiguousarray(array != 0).view(np.uint8)


def empty(shape: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
    """Returns an array of an element type, not initialised."""
    return np.empty(shape, "uint16" if dtype == "bfloat16" else dtype)


def accumulator(dtype: str) -> str:
    """Returns the element type of sums, lse, bias and sinks."""
    return "float64" if dtype == "float64" else "float32"


def converted(given: Tensor, dtype: str) -> np.ndarray[Any, Any]:
    """Returns a tensor in another element type; the tensor's own array if it has that type."""
    array: np.ndarray[Any, Any] = given.array
    if given.dtype == dtype:
        return array
    if given.dtype == "bfloat16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    if dtype != "bfloat16":
        return array.astype(dtype)
    bits = array.astype(np.float32).view(np.uint32)
    # to nearest, ties to even; a NaN keeps its upper bits, of which one says that it is quiet
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet = (bits >> 16) | 0x40
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(is_nan, quiet, rounded).astype(np.uint16)


def given_back(array: np.ndarray[Any, Any], dtype: str, like: str) -> Any:
    """Returns an array as one of a library."""
    if like == "torch":
        import torch

        if dtype == "bfloat16":
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)
    if dtype == "bfloat16":
        array = array.view(_bfloat16())
    if like == "jax":
        import jax.numpy

        return jax.numpy.asarray(array)
    return array


class Memory(ABC):
    """The memory of the arrays that a plan reads and writes."""

    @abstractmethod
    def tensor(self, name: str, value: Any, *, writable: bool = False) -> Tensor:
        """Views an array of floats."""

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: str, like: str) -> Any:
        """Returns an array of undefined elements."""

    def output(self, name: str, given: Any, shape: tuple[int, ...], dtype: str, like: str) -> Any:
        """Views an array that is to be written, or makes a new one."""
        if given is None:
            return self.empty(shape, dtype, like)
        if library(given) == "jax":
            raise unsupported(name, "a JAX array is never written")
        found = self.tensor(name, given, writable=True)
        if found.dtype != dtype or found.array.shape != shape:
            raise invalid(name, f"{found.dtype} {found.array.shape}", f"{dtype} {shape}")
        return found.array


class HostMemory(Memory):
    """The memory of the host."""

    def tensor(self, name: str, value: Any, *, writable: bool = False) -> Tensor:
        """Views an array of floats."""
        return tensor(name, value, writable=writable)

    def empty(self, shape: tuple[int, ...], dtype: str, like: str) -> np.ndarray[Any, Any]:
        """Returns an array of undefined elements."""
        return empty(shape, dtype)

    def converted(self, name: str, given: Tensor, dtype: str) -> np.ndarray[Any, Any]:
        """Returns a tensor in another element type."""
        return converted(given, dtype)

    def sinks(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Returns sinks with an axis of heads."""
        return array[None, :] if array.ndim == 1 else array

    def given_back(self, array: Any, dtype: str, like: str) -> Any:
        """Returns a result as an array of a library."""
        return given_back(array, dtype, like)


def dtype_name(argument: str, value: Any) -> str:
    """Returns the name of an element type that NumPy, torch or JAX would understand."""
    name = str(value).removeprefix("torch.") if not isinstance(value, type) else value.__name__
    if name not in FLOATS:
        try:
            name = np.dtype(value).name
        except TypeError:
            pass
    if name not in FLOATS:
        raise invalid(argument, value, f"one of {', '.join(FLOATS)}")
    return name


def _as_numpy(name: str, value: Any) -> tuple[np.ndarray[Any, Any], str]:
    found = library(value)
    if found == "torch":
        return _of_torch(name, value)
    if found == "jax":
        if isinstance(value, sys.modules["jax"].core.Tracer):
            raise unsupported(name, "an array that JAX traces; want its numbers")
        places = {device.platform for device in value.devices()}
        if places != {"cpu"}:
            raise unsupported(name, f"a JAX array on {', '.join(sorted(places))}; want one on cpu")
        array = np.asarray(value)
    elif isinstance(value, np.ma.MaskedArray):
        raise unsupported(name, "a masked array of NumPy; want its filled()")
    elif isinstance(value, np.ndarray):
        array = value
    elif hasattr(value, "__array_interface__") or hasattr(value, "__array__"):
        array = np.asarray(value)
    elif hasattr(value, "__dlpack__"):
        if int(value.__dlpack_device__()[0]) != DLPACK_CPU:
            raise unsupported(name, "an array in the memory of a device; want one on the CPU")
        array = np.from_dlpack(value)
    else:
        try:
            array = np.asarray(memoryview(value))
        except TypeError:
            want = "an array, or anything with DLPack or the buffer protocol"
            raise invalid(name, f"a {type(value).__name__}", want) from None
    if array.dtype.name == "bfloat16":
        return array.view(np.uint16), "bfloat16"
    return array, array.dtype.name


def device_of(value: Any) -> int | None:
    """Returns the number of the NVIDIA GPU whose memory an array is in, or None."""
    found = library(value)
    if found == "torch":
        return int(value.device.index or 0) if value.device.type == "cuda" else None
    jax = sys.modules.get("jax")
    if jax is not None and found == "jax":
        if isinstance(value, jax.core.Tracer) or len(value.devices()) > 1:
            return None
    if hasattr(value, "__dlpack_device__"):
        kind, number = (int(part) for part in value.__dlpack_device__())
        return number if kind in DLPACK_CUDA else None
    # an object with this interface only does not tell the number
    return 0 if hasattr(value, "__cuda_array_interface__") else None


def check_memory(name: str, value: Any, *, on_gpu: bool = False) -> None:
    """Checks that a torch tensor is dense and in host memory, or that of an NVIDIA GPU."""
    kinds = ("cpu", "cuda") if on_gpu else ("cpu",)
    if value.device.type not in kinds or str(value.layout) != "torch.strided":
        place = f"{value.device} ({value.layout})"
        raise unsupported(name, f"a torch tensor on {place}; want a dense one on cpu")


def _of_torch(name: str, value: Any) -> tuple[np.ndarray[Any, Any], str]:
    import torch

    check_memory(name, value)
    value = value.detach()
    if value.dtype == torch.bfloat16:
        return value.view(torch.int16).numpy().view(np.uint16), "bfloat16"
    array: np.ndarray[Any, Any] = value.numpy()
    return array, array.dtype.name


def _bfloat16() -> Any:
    try:
        import ml_dtypes
    except ImportError:
        raise unsupported("bfloat16", "NumPy needs the package ml_dtypes for it") from None
    return ml_dtypes.bfloat16


@dataclass(frozen=True)
class Place:
    """Where the arrays of a plan are: the number of the GPU, and the stream of the passes."""

    device: int
    stream: int


def current_stream(value: Any, device: int) -> int:
    """Returns torch's current stream for a tensor of torch, and the default stream for others."""
    if library(value) != "torch":
        return 0
    import torch

    stream: int = torch.cuda.current_stream(device).cuda_stream
    return stream


@dataclass(frozen=True)
class DeviceMemory(Memory):
    """The memory of the GPU that a plan computes on, with what ``HostMemory`` does."""

    place: Place

    def tensor(self, name: str, value: Any, *, writable: bool = False) -> Tensor:
        """Views an array of floats. The extension module refuses one that cannot be written."""
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
        return Tensor(array, array.dtype, _library_on_gpu(value))

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
        if library(value) == "torch":
            value = value.detach()
        # DLPack's number of the default stream is 1
        capsule = value.__dlpack__(stream=self.place.stream or 1)
        return _annulus.DeviceArray.of_dlpack(name, value, capsule)


def _library_on_gpu(value: Any) -> str:
    of_cupy = type(value).__module__.partition(".")[0] == "cupy"
    return "cupy" if of_cupy else library(value)
