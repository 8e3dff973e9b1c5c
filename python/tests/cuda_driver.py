"""The CUDA driver through ctypes: what torch or CuPy would do beside annulus. Its memory, streams
and copies, and an array that is lent by DLPack or the CUDA array interface.

On a machine without a GPU, scripts/python-test puts the emulated driver in its place, of which new
memory is NaN and streams are ordered by events only.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_char_p, c_int, c_int64, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

import numpy as np

_cuda = ctypes.CDLL("libcuda.so.1")
# the deleter keeps the GIL: it is a function of Python
_capsule_new = ctypes.pythonapi.PyCapsule_New
_capsule_new.restype = ctypes.py_object
_capsule_new.argtypes = [c_void_p, c_char_p, c_void_p]

CODES = {"float64": (2, 64), "float32": (2, 32), "float16": (2, 16), "uint16": (4, 16)}
"""DLPack's type code and bits. bfloat16 is here an array of its bits."""


def _call(name: str, *arguments: Any) -> None:
    status = getattr(_cuda, name)(*arguments)
    assert status == 0, f"{name} returned {status}"


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        ("kind", c_int),
        ("number", c_int),
        ("axes", c_int),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
        ("context", c_void_p),
        ("deleter", c_void_p),
    ]


_Deleter = ctypes.CFUNCTYPE(None, c_void_p)


class Gpu:
    """The primary context of a GPU, current on this thread, and a stream of it."""

    def __init__(self, number: int = 0) -> None:
        self.number = number
        _call("cuInit", 0)
        device, self.context, handle = c_int(), c_void_p(), c_void_p()
        _call("cuDeviceGet", byref(device), number)
        _call("cuDevicePrimaryCtxRetain", byref(self.context), device)
        self.make_current()
        _call("cuStreamCreate", byref(handle), 1)
        self.stream = int(handle.value or 0)

    def make_current(self) -> None:
        _call("cuCtxSetCurrent", self.context)

    def upload(self, array: np.ndarray[Any, Any]) -> Array:
        """Copies an array to the GPU in the order of the stream. Its strides are kept."""
        order = sorted(range(array.ndim), key=lambda axis: -abs(array.strides[axis]))
        dense = np.ascontiguousarray(array.transpose(order))
        address = c_uint64()
        _call("cuMemAlloc_v2", byref(address), c_size_t(max(dense.nbytes, 1)))
        copy = (address, dense.ctypes.data_as(c_void_p), c_size_t(dense.nbytes))
        _call("cuMemcpyHtoDAsync_v2", *copy, c_void_p(self.stream))
        strides = [0] * array.ndim
        for axis, stride in zip(order, dense.strides, strict=True):
            strides[axis] = stride // dense.itemsize
        return Array(self, address.value, array.shape, tuple(strides), array.dtype.name)

    def download(self, array: Any, stream: int | None = None) -> np.ndarray[Any, Any]:
        """Copies a dense array of anybody's to the host, in the order of a stream."""
        interface = array.__cuda_array_interface__
        result = np.empty(interface["shape"], interface["typestr"])
        dense = tuple(np.empty(result.shape, result.dtype).strides)
        assert interface["strides"] in (None, dense)
        self.make_current()
        handle = self.stream if stream is None else stream
        to, source = result.ctypes.data_as(c_void_p), c_uint64(interface["data"][0])
        _call("cuMemcpyDtoHAsync_v2", to, source, c_size_t(result.nbytes), c_void_p(handle))
        return result


class Array:
    """An array in the memory of a GPU, as a library would lend it."""

    def __init__(
        self,
        gpu: Gpu,
        address: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: str,
    ) -> None:
        self.gpu, self.address, self.shape, self.strides = gpu, address, shape, strides
        self.dtype = "bfloat16" if dtype == "uint16" else dtype
        self._code = CODES[dtype]
        self.lent_to: list[int] = []
        self.given_back = 0
        self._deleter = _Deleter(self._give_back)

    def _give_back(self, _: Any) -> None:
        self.given_back += 1

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.gpu.number

    def __dlpack__(self, *, stream: int) -> Any:
        self.lent_to.append(stream)
        axes = len(self.shape)
        self._lent = (c_int64 * axes)(*self.shape), (c_int64 * axes)(*self.strides)
        code, bits = self._code
        lengths = self._lent
        self._tensor = _DLTensor(
            self.address, 2, self.gpu.number, axes, code, bits, 1, *lengths, 0, None
        )
        self._tensor.deleter = ctypes.cast(self._deleter, c_void_p)
        return _capsule_new(ctypes.addressof(self._tensor), b"dltensor", None)


class InterfaceOnly:
    """An array with the CUDA array interface and without DLPack."""

    def __init__(self, array: Array, stream: int | None, typestr: str = "<f4") -> None:
        self._array = array
        self.shape, self.dtype = array.shape, array.dtype
        size = int(typestr[2:])
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": array.shape,
            "typestr": typestr,
            "data": (array.address, False),
            "strides": tuple(stride * size for stride in array.strides),
            "stream": stream,
        }


def gpus() -> int:
    """Returns the number of GPUs of this machine."""
    count = c_int()
    _call("cuInit", 0)
    _call("cuDeviceGetCount", byref(count))
    return count.value


def make_no_context_current() -> None:
    """Leaves this thread without a current context."""
    _call("cuCtxSetCurrent", c_void_p())


def current_context() -> int | None:
    """Returns the context that is current on this thread."""
    context = c_void_p()
    _call("cuCtxGetCurrent", byref(context))
    return context.value


def new_stream(gpu: Gpu) -> int:
    """Returns another stream of a GPU."""
    gpu.make_current()
    handle = c_void_p()
    _call("cuStreamCreate", byref(handle), c_uint(1))
    return int(handle.value or 0)
