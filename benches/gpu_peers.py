"""Times PyTorch's attention on one GPU, backend by backend, and a bf16 matrix product (the roof).
Prints JSON lines like those of `cuda-levels`.

    usage: python3 benches/gpu_peers.py [--device cuda:0] [--batch 4] [--heads 16] [--dims 64,128]
                                        [--lens 8192,16384] [--dtypes bf16,f16,f32] [--seconds 1]
                                        [--roof 8192]

A case that a backend does not support is a line with the field `unsupported`. FLOPs count visible
pairs: forward 4*batch*heads*len^2*dim, half of that with a causal mask; backward 2.5 times as many.
--device cpu checks the script on a machine without a GPU; its times are not comparable.
"""

import argparse
import json
import time

import torch
import torch.nn.functional as functional
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


def words(text):
    return text.split(",")


def numbers(text):
    return [int(word) for word in words(text)]


def measure(device, seconds, work):
    """Mean seconds of `work`, repeated for about `seconds` after four calls that do not count."""

    def passes(count):
        start = time.perf_counter()
        for _ in range(count):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    passes(3)
    count = max(1, min(1000, int(seconds / max(passes(1), 1e-6))))
    return passes(count) / count


def emit(line, seconds, flops):
    rates = {"ms": round(seconds * 1e3, 4), "tflops": round(flops / seconds / 1e12, 2)}
    print(json.dumps({**line, **rates}), flush=True)


def roof(options, device, gpu):
    """Times one bf16 matrix product, the upper limit of the rates of attention."""
    n = options.roof
    left, right = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds = measure(device, options.seconds, lambda: left @ right)
    line = {"peer": "torch-matmul", "gpu": gpu, "what": "gemm", "dtype": "bf16", "n": n}
    emit(line, seconds, 2 * n**3)


def attention(options, device, gpu, backend, name, length, dim, causal):
    """Times a forward and a backward pass on one of PyTorch's backends."""
    shape = (options.batch, options.heads, length, dim)
    line = {
        "peer": f"torch-sdpa-{backend}",
        "gpu": gpu,
        "dtype": name,
        "batch": options.batch,
        "heads": options.heads,
        "head_dim": dim,
        "n": length,
        "causal": causal,
    }
    q, k, v = (
        torch.randn(shape, device=device, dtype=DTYPES[name], requires_grad=True) for _ in range(3)
    )
    dout = torch.randn(shape, device=device, dtype=DTYPES[name])
    pairs = options.batch * options.heads * length**2 * (0.5 if causal else 1.0)

    def forward_pass():
        return functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    with sdpa_kernel(BACKENDS[backend]):
        try:
            # detached, so that no graph is kept
            forward = measure(device, options.seconds, lambda: forward_pass().detach())
            out = forward_pass()
            backward = measure(
                device,
                options.seconds,
                lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True),
            )
        except (RuntimeError, NotImplementedError) as error:
            reason = str(error).splitlines()[0][:200]
            print(json.dumps({**line, "unsupported": reason}), flush=True)
            return
    emit({**line, "what": "fwd"}, forward, 4 * pairs * dim)
    emit({**line, "what": "bwd"}, backward, 10 * pairs * dim)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--dims", type=numbers, default=[64, 128])
    parser.add_argument("--lens", type=numbers, default=[8192, 16384])
    parser.add_argument("--dtypes", type=words, default=["bf16", "f16", "f32"])
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--roof", type=int, default=8192)
    options = parser.parse_args()
    device = torch.device(options.device)
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "no GPU"
    versions = {"version": torch.__version__, "cudnn": torch.backends.cudnn.version()}
    print(json.dumps({"peer": "torch", **versions}), flush=True)
    roof(options, device, gpu)
    for name in options.dtypes:
        for length in options.lens:
            for dim in options.dims:
                for causal in (False, True):
                    for backend in BACKENDS:
                        attention(options, device, gpu, backend, name, length, dim, causal)


if __name__ == "__main__":
    main()
