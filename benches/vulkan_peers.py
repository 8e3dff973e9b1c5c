"""Times llama.cpp's Vulkan flash attention, the peer of the wgpu backend, on one GPU. Prints JSON
lines like those of `wgpu-levels`.

    usage: python3 benches/vulkan_peers.py FOLDER [--device 0] [--heads 16] [--dims 64,128]
                                           [--lens 8192] [--seconds 0.5] [--prec f32,default]
           python3 benches/vulkan_peers.py FOLDER --check

FOLDER has libggml-base.so and libggml-vulkan.so of a build of llama.cpp for Vulkan: built from
source, or bins/linux-x64-vulkan of the npm package @node-llama-cpp/linux-x64-vulkan. Needs numpy.

llama.cpp has three kernels: cm2 (NVIDIA's matrices of a workgroup), cm1 (matrices of a subgroup,
as in level `matrix`) and scalar. It chooses the first that the device supports; the environment
variables GGML_VK_DISABLE_COOPMAT2 and GGML_VK_DISABLE_COOPMAT exclude the first two. Queries and
output are f32, keys and values f16. --prec: precision of the accumulators, f32 as in annulus, or
what llama.cpp takes by default, which may be f16.

A time is of one operation, by the host's clock: several in one graph, with the device idle before
and after. FLOPs count visible pairs: 4*heads*len^2*dim, half of that with a causal mask.
--check compares outputs with numpy in f64; the status is 1 if one is wrong.
"""

import argparse
import ctypes
import itertools
import json
import os
import sys
import time

import numpy

F32, F16 = 0, 1  # enum ggml_type
PRECISIONS = {"default": 0, "f32": 10}  # enum ggml_prec
POINTER, SIZE, FLOAT, INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_float, ctypes.c_int
DIMS = [ctypes.c_int64] * 4


class InitParams(ctypes.Structure):
    """struct ggml_init_params"""

    _fields_ = [("mem_size", SIZE), ("mem_buffer", POINTER), ("no_alloc", ctypes.c_bool)]


SIGNATURES = {
    "ggml_init": (POINTER, [InitParams]),
    "ggml_free": (None, [POINTER]),
    "ggml_new_tensor_4d": (POINTER, [POINTER, INT, *DIMS]),
    "ggml_flash_attn_ext": (POINTER, [POINTER] * 5 + [FLOAT] * 3),
    "ggml_flash_attn_ext_set_prec": (None, [POINTER, INT]),
    "ggml_new_graph": (POINTER, [POINTER]),
    "ggml_build_forward_expand": (None, [POINTER, POINTER]),
    "ggml_backend_alloc_ctx_tensors": (POINTER, [POINTER, POINTER]),
    "ggml_backend_buffer_free": (None, [POINTER]),
    "ggml_backend_tensor_set": (None, [POINTER, POINTER, SIZE, SIZE]),
    "ggml_backend_tensor_get": (None, [POINTER, POINTER, SIZE, SIZE]),
    "ggml_backend_graph_compute": (INT, [POINTER, POINTER]),
    "ggml_backend_supports_op": (ctypes.c_bool, [POINTER, POINTER]),
    "ggml_backend_vk_init": (POINTER, [SIZE]),
}


def load(folder):
    """The functions of both libraries by name."""
    base = ctypes.CDLL(os.path.join(folder, "libggml-base.so"), mode=ctypes.RTLD_GLOBAL)
    vulkan = ctypes.CDLL(os.path.join(folder, "libggml-vulkan.so"))
    functions = {}
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(vulkan if "_vk_" in name else base, name)
        function.restype, function.argtypes = result, arguments
        functions[name[len("ggml_") :]] = function
    return functions


class Attention:
    """One attention, several times in a graph, on a device."""

    def __init__(self, ggml, backend, *, dim, length, heads, causal, precision, times):
        self.ggml, self.backend = ggml, backend
        self.scale = dim**-0.5
        shape = (heads, length, dim)
        numbers = numpy.random.default_rng(7)
        self.q = numbers.standard_normal(shape, numpy.float32)
        self.k = numbers.standard_normal(shape, numpy.float32).astype(numpy.float16)
        self.v = numbers.standard_normal(shape, numpy.float32).astype(numpy.float16)
        self.mask = None
        if causal:
            hidden = numpy.triu(numpy.ones((length, length), bool), 1)
            self.mask = numpy.where(hidden, numpy.float16(-numpy.inf), numpy.float16(0))
        self.context = ggml["init"](InitParams(1 << 20, None, True))
        new = ggml["new_tensor_4d"]
        inputs = [new(self.context, F32, dim, length, heads, 1)]
        inputs += [new(self.context, F16, dim, length, heads, 1) for _ in range(2)]
        inputs.append(new(self.context, F16, length, length, 1, 1) if causal else None)
        self.graph = ggml["new_graph"](self.context)
        for _ in range(times):
            self.output = ggml["flash_attn_ext"](self.context, *inputs, self.scale, 0.0, 0.0)
            ggml["flash_attn_ext_set_prec"](self.output, precision)
            ggml["build_forward_expand"](self.graph, self.output)
        self.supported = ggml["backend_supports_op"](backend, self.output)
        self.buffer = ggml["backend_alloc_ctx_tensors"](self.context, backend)
        for tensor, array in zip(inputs, (self.q, self.k, self.v, self.mask)):
            if tensor is not None:
                data = array.ctypes.data_as(POINTER)
                ggml["backend_tensor_set"](tensor, data, 0, array.nbytes)

    def compute(self):
        """Computes the graph and waits for it."""
        status = self.ggml["backend_graph_compute"](self.backend, self.graph)
        if status != 0:
            raise RuntimeError(f"ggml_backend_graph_compute: status {status}")

    def error(self):
        """Relative error of the output against f64, of all elements together."""
        heads, length, dim = self.q.shape
        got = numpy.empty((length, heads, dim), numpy.float32)
        data = got.ctypes.data_as(POINTER)
        self.ggml["backend_tensor_get"](self.output, data, 0, got.nbytes)
        q, k, v = (array.astype(numpy.float64) for array in (self.q, self.k, self.v))
        scores = q @ k.transpose(0, 2, 1) * self.scale
        if self.mask is not None:
            scores += self.mask
        weights = numpy.exp(scores - scores.max(-1, keepdims=True))
        want = weights @ v / weights.sum(-1, keepdims=True)
        difference = got.transpose(1, 0, 2) - want
        return float(numpy.linalg.norm(difference) / numpy.linalg.norm(want))

    def close(self):
        self.ggml["backend_buffer_free"](self.buffer)
        self.ggml["free"](self.context)


def measure(ggml, backend, seconds, case):
    """Seconds of one operation: the median of three graphs."""
    few = Attention(ggml, backend, **case, times=2)
    if not few.supported:
        few.close()
        return None
    few.compute()
    start = time.perf_counter()
    few.compute()
    one = (time.perf_counter() - start) / 2
    few.close()
    times = max(2, min(500, int(seconds / 3 / max(one, 1e-6))))
    many = Attention(ggml, backend, **case, times=times)
    rounds = []
    for _ in range(4):  # the first does not count
        start = time.perf_counter()
        many.compute()
        rounds.append((time.perf_counter() - start) / times)
    many.close()
    return sorted(rounds[1:])[1]


def error_of(ggml, backend, case):
    """Relative error of a case against f64."""
    attention = Attention(ggml, backend, **case, times=1)
    attention.compute()
    error = attention.error()
    attention.close()
    return error


def main():
    parser = argparse.ArgumentParser(description="llama.cpp's Vulkan flash attention")
    parser.add_argument("folder")
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--dims", default="64,128")
    parser.add_argument("--lens", default="8192")
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--prec", default="f32,default")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    ggml = load(options.folder)
    backend = ggml["backend_vk_init"](options.device)
    lens = [131] if options.check else [int(word) for word in options.lens.split(",")]
    dims = [int(word) for word in options.dims.split(",")]
    right = True
    for dim, length, causal, precision in itertools.product(
        dims, lens, (False, True), options.prec.split(",")
    ):
        case = {"dim": dim, "length": length, "heads": options.heads, "causal": causal}
        line = {"peer": "llama.cpp", "what": "forward", "dim": dim, "len": length}
        line |= {"heads": options.heads, "causal": causal, "precision": precision}
        case["precision"] = PRECISIONS[precision]
        if options.check:
            error = error_of(ggml, backend, case)
            right &= error < 5e-3
            print(json.dumps({**line, "error": error}), flush=True)
            continue
        seconds = measure(ggml, backend, options.seconds, case)
        if seconds is None:
            print(json.dumps({**line, "unsupported": True}), flush=True)
            continue
        flops = 4 * options.heads * length * length * dim / (2 if causal else 1)
        rate = {"seconds": seconds, "tflops": round(flops / seconds / 1e12, 2)}
        print(json.dumps({**line, **rate}), flush=True)
    sys.exit(0 if right else 1)


main()
