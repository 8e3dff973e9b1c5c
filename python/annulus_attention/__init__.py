"""Exact attention, forward and backward, over sequences that do not fit one device.

    import annulus_attention as annulus

    out = annulus.flash_attention(query, key, value, causal=True)
    out = annulus.ring_attention(query, key, value, causal=True, ranks=4)
    out = annulus.ring_attention(query, key, value, causal=True, comm=MPI.COMM_WORLD)

Arrays are ``[batch, seq, heads, dim]``, of NumPy, torch, JAX or anything with DLPack or the buffer
protocol, in host memory or in that of an NVIDIA GPU. ``Attention`` and ``Plan`` serve repeated and
backward passes; ``Cache`` serves decoding; ``annulus.torch`` and ``annulus.jax`` have gradients.
"""

from . import biases, layouts, masks
from ._agreement import Endpoint
from ._annulus import HAS_MPI
from ._attention import Attention, Shard
from ._cache import Cache
from ._calls import flash_attention, ring_attention
from ._errors import ArrivalTimeout, Error, InvalidArgument, OutOfMemory, Unsupported
from ._plan import BACKENDS, Plan
from ._results import (
    DoubleBackward,
    Forward,
    Gradients,
    Jvp,
    Report,
    StartedPass,
    Statistics,
)

__version__ = "0.1.0"

__all__ = [
    "BACKENDS",
    "HAS_MPI",
    "ArrivalTimeout",
    "Attention",
    "Cache",
    "DoubleBackward",
    "Endpoint",
    "Error",
    "Forward",
    "Gradients",
    "InvalidArgument",
    "Jvp",
    "OutOfMemory",
    "Plan",
    "Report",
    "Shard",
    "StartedPass",
    "Statistics",
    "Unsupported",
    "biases",
    "flash_attention",
    "layouts",
    "masks",
    "ring_attention",
]

if "cuda" in BACKENDS:
    from ._annulus import DeviceArray as DeviceArray

    __all__ += ["DeviceArray"]
