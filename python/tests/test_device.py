"""Arrays in the memory of an NVIDIA GPU, over the driver of the machine or an emulated one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import cuda_driver as cuda
import numpy as np
import pytest
from helpers import run_rank
from test_mpi import launch, needs_mpi

import annulus_attention as annulus

DIMS: dict[str, int] = dict(batch=1, q_len=70, q_heads=4, kv_heads=2, head_dim=16)
ATTENTION = annulus.Attention(causal=True, sliding_window=(40, 0))
TOLERANCE = {"float32": 2e-5, "float16": 4e-3}


@pytest.fixture
def gpu() -> Any:
    return cuda.Gpu()


def arrays(dtype: str = "float32", seed: int = 3) -> list[np.ndarray[Any, Any]]:
    """query, key, value and dout, of which key has heads before rows in memory."""
    random = np.random.default_rng(seed)
    shapes = [(1, 70, heads, 16) for heads in (4, 2, 2, 4)]
    made = [random.standard_normal(shape).astype(dtype) for shape in shapes]
    made[1] = np.ascontiguousarray(made[1].transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    return made


def on_gpu(gpu: Any, **options: Any) -> annulus.Plan:
    given = {"backend": "cuda", "device": gpu.number, "stream": gpu.stream, **options}
    return annulus.Plan(ATTENTION, **DIMS, **given)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_plan_of_device_arrays_gives_the_numbers_of_the_cpu(gpu: Any, dtype: str) -> None:
    query, key, value, dout = arrays(dtype)
    sinks = np.array([0.5, -1.0], "float32")
    shape = (1, 4, 1, 70)
    bias = np.random.default_rng(4).standard_normal(shape).astype("float32")
    options = dict(dtype=dtype, softmax_aux_shape=(2,), bias_shape=shape)
    given = dict(bias=bias, softmax_aux=sinks)
    with annulus.Plan(ATTENTION, **DIMS, **options, threads=1) as cpu:
        want = cpu.forward(query, key, value, **given)
        wanted = cpu.backward(query, key, value, want, dout, **given)
    lent = [gpu.upload(array) for array in (query, key, value, dout)]
    lent_given = {name: gpu.upload(array) for name, array in given.items()}
    with on_gpu(gpu, **options) as plan:
        forward = plan.forward(*lent[:3], **lent_given)
        got = plan.backward(*lent[:3], forward, lent[3], **lent_given)
        assert (plan.ranks, plan.strategy) == (1, "ring")
    near = dict(rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    for name in ("out", "lse"):
        array = getattr(forward, name)
        assert isinstance(array, annulus.DeviceArray)
        np.testing.assert_allclose(gpu.download(array), getattr(want, name), **near)
    for name in ("dq", "dk", "dv", "dbias", "dsoftmax_aux"):
        expected = getattr(wanted, name)
        array = getattr(got, name)
        assert array.shape == expected.shape
        np.testing.assert_allclose(gpu.download(array), expected, rtol=1e-2, atol=10 * near["atol"])
    # each array was lent to the plan's stream, and is given back
    for array in (*lent, *lent_given.values()):
        assert set(array.lent_to) == {gpu.stream}
        assert array.given_back == len(array.lent_to)


def test_an_unnormalised_output_has_its_statistics_on_the_gpu(gpu: Any) -> None:
    query, key, value, dout = arrays()
    attention = annulus.Attention(causal=True, normalize_output=False)
    with annulus.Plan(attention, **DIMS, threads=1) as cpu:
        want = cpu.forward(query, key, value)
        wanted = cpu.backward(query, key, value, want, dout)
    lent = [gpu.upload(array) for array in (query, key, value, dout)]
    with annulus.Plan(attention, **DIMS, backend="cuda", device=0, stream=gpu.stream) as plan:
        forward = plan.forward(*lent[:3])
        got = plan.backward(*lent[:3], forward, lent[3])
    for name in ("out", "lse", "max", "sum", "ties"):
        array = gpu.download(getattr(forward, name))
        np.testing.assert_allclose(array, getattr(want, name), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(gpu.download(got.dq), wanted.dq, rtol=1e-3, atol=1e-3)


def test_outputs_are_written_in_place_and_batches_come_from_the_host(gpu: Any) -> None:
    query, key, value, _ = arrays()
    ids = np.repeat([[0, 1]], 35, axis=1).astype("int32")
    with annulus.Plan(ATTENTION, **DIMS, threads=1) as cpu:
        cpu.update(q_segment_ids=ids)
        want = cpu.forward(query, key, value)
    lent = [gpu.upload(array) for array in (query, key, value)]
    out = gpu.upload(np.zeros((1, 70, 4, 16), "float32"))
    with on_gpu(gpu) as plan:
        plan.update(q_segment_ids=ids)
        result = plan.forward(*lent, out=out)
        assert result.out is out
    view = annulus.DeviceArray.of_dlpack("out", out, out.__dlpack__(stream=gpu.stream))
    np.testing.assert_allclose(gpu.download(view), want.out, rtol=1e-4, atol=1e-5)


def test_one_call_computes_where_the_arrays_are(gpu: Any) -> None:
    query, key, value, _ = arrays()
    want = annulus.flash_attention(query, key, value, causal=True, return_lse=True)
    lent = [gpu.upload(array) for array in (query, key, value)]
    got = annulus.flash_attention(*lent, causal=True, return_lse=True, stream=gpu.stream)
    for array, expected in zip(got, want, strict=True):
        np.testing.assert_allclose(gpu.download(array), expected, rtol=1e-4, atol=1e-5)
    # without a stream, the default one: DLPack's number 1
    lent[0].lent_to.clear()
    out = annulus.ring_attention(*lent, causal=True)
    assert set(lent[0].lent_to) == {1}
    np.testing.assert_allclose(gpu.download(out, stream=0), want[0], rtol=1e-4, atol=1e-5)


def test_bfloat16_comes_and_goes_by_dlpack(gpu: Any) -> None:
    query, key, value, _ = (array.view("uint32") >> 16 for array in arrays())
    lent = [gpu.upload(array.astype("uint16")) for array in (query, key, value)]
    out = annulus.flash_attention(*lent, stream=gpu.stream)
    assert (out.dtype, out.shape) == ("bfloat16", (1, 70, 4, 16))
    with pytest.raises(AttributeError, match="bfloat16"):
        _ = out.__cuda_array_interface__
    again = annulus.DeviceArray.of_dlpack("out", out, out.__dlpack__(stream=gpu.stream))
    assert again.dtype == "bfloat16"


def test_an_array_with_the_interface_only_is_read_after_its_stream(gpu: Any) -> None:
    query, key, value, _ = arrays()
    other = cuda.new_stream(gpu)
    lent = [cuda.InterfaceOnly(gpu.upload(array), gpu.stream) for array in (query, key, value)]
    # the copies are queued in gpu.stream, and the pass runs in another one
    with on_gpu(gpu, stream=other) as plan:
        out = plan.forward(*lent).out
    windowed = annulus.flash_attention(query, key, value, causal=True, sliding_window=(40, 0))
    np.testing.assert_allclose(gpu.download(out, stream=other), windowed, rtol=1e-4, atol=1e-5)
    lent[0].__cuda_array_interface__["mask"] = lent[1]
    with pytest.raises(ValueError, match="query: got a masked array"):
        annulus.flash_attention(*lent)


def test_a_result_is_lent_after_the_work_that_writes_it(gpu: Any) -> None:
    query, key, value, _ = arrays()
    want = annulus.flash_attention(query, key, value)
    lent = [gpu.upload(array) for array in (query, key, value)]
    out = annulus.flash_attention(*lent, stream=gpu.stream)
    other = cuda.new_stream(gpu)
    taken = annulus.DeviceArray.of_dlpack("out", out, out.__dlpack__(stream=other))
    assert taken.base is out
    np.testing.assert_allclose(gpu.download(taken, stream=other), want, rtol=1e-4, atol=1e-5)
    with pytest.raises(BufferError, match="copied"):
        out.__dlpack__(copy=True)
    with pytest.raises(BufferError, match="stays"):
        out.__dlpack__(dl_device=(1, 0))
    # one capsule is taken twice, and nobody takes the other
    capsule, _ = out.__dlpack__(), out.__dlpack__()
    annulus.DeviceArray.of_dlpack("out", out, capsule)
    with pytest.raises(ValueError, match="new one"):
        annulus.DeviceArray.of_dlpack("out", out, capsule)


class TorchLike(cuda.Array):
    """What the package asks of a tensor of torch in the memory of GPU 0."""

    device = SimpleNamespace(type="cuda", index=0)
    layout = "torch.strided"

    def detach(self) -> TorchLike:
        return self


def test_results_for_torch_are_allocated_by_torch_for_the_stream(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: list[Any] = []

    @contextmanager
    def stream(given: Any) -> Iterator[None]:
        entered.append(given)
        yield

    def tensor(array: np.ndarray[Any, Any]) -> Any:
        made = gpu.upload(array)
        made.__class__ = TorchLike
        return made

    def empty(shape: tuple[int, ...], dtype: str, device: str) -> Any:
        assert (dtype, device, len(entered)) == ("a type", "cuda:0", len(allocated) + 1)
        allocated.append(tensor(np.zeros(shape, "float32")))
        return allocated[-1]

    allocated: list[Any] = []
    of_cuda = SimpleNamespace(
        stream=stream,
        ExternalStream=lambda handle, device: (handle, device),
        default_stream=lambda device: ("default", device),
    )
    torch = SimpleNamespace(Tensor=TorchLike, cuda=of_cuda, empty=empty, float32="a type")
    monkeypatch.setitem(sys.modules, "torch", torch)
    query, key, value, dout = arrays()
    lent = [tensor(array) for array in (query, key, value, dout)]
    with on_gpu(gpu) as plan:
        forward = plan.forward(*lent[:3])
        assert [forward.out, forward.lse, forward.max, forward.sum] == allocated
        gradients = plan.backward(*lent[:3], forward, lent[3])
        assert [gradients.dq, gradients.dk, gradients.dv] == allocated[4:]
    assert entered == [(gpu.stream, 0)] * 7
    with on_gpu(gpu, stream=0) as plan:
        plan.forward(*lent[:3])
    assert entered[7:] == [("default", 0)] * 4
    monkeypatch.undo()
    want = annulus.flash_attention(query, key, value, causal=True, sliding_window=(40, 0))
    view = annulus.DeviceArray.of_dlpack("out", forward.out, forward.out.__dlpack__(stream=1))
    np.testing.assert_allclose(gpu.download(view), want, rtol=1e-4, atol=1e-5)


def needs_a_second_gpu() -> None:
    """Skips the test on a machine with one GPU."""
    if cuda.gpus() < 2:
        pytest.skip("this machine has one GPU, and the test needs two")


@pytest.mark.parametrize("current", ["none", "of another GPU"])
def test_the_current_context_stays_the_callers(gpu: Any, current: str) -> None:
    query, key, value, _ = arrays()
    lent = [gpu.upload(array) for array in (query, key, value)]
    cuda.make_no_context_current()
    before = None
    if current == "of another GPU":
        needs_a_second_gpu()
        before = cuda.Gpu(1).context.value
    with on_gpu(gpu) as plan:
        assert cuda.current_context() == before
        result = plan.forward(*lent)
        assert cuda.current_context() == before
    del result
    assert cuda.current_context() == before
    gpu.make_current()


def test_arrays_that_do_not_fit_are_refused_by_name(gpu: Any) -> None:
    query, key, value, _ = arrays()
    lent = [gpu.upload(array) for array in (query, key, value)]
    with on_gpu(gpu) as plan:
        with pytest.raises(ValueError, match="query: got an array in host memory"):
            plan.forward(query, *lent[1:])
        with pytest.raises(ValueError, match="key: got elements float16"):
            plan.forward(lent[0], gpu.upload(key.astype("float16")), lent[2])
        with pytest.raises(ValueError, match=r"v: .*69"):
            plan.forward(*lent[:2], gpu.upload(value[:, :69]))
        with pytest.raises(ValueError, match="out: got memory that overlaps query"):
            plan.forward(*lent, out=lent[0])
        # none of these has ended the plan
        plan.forward(*lent)
    with annulus.Plan(ATTENTION, **DIMS, threads=1) as cpu:
        with pytest.raises(NotImplementedError, match="query .*memory of a device"):
            cpu.forward(*lent)
    with pytest.raises(NotImplementedError, match="backend .*memory of GPU 0"):
        annulus.flash_attention(*lent, backend="wgpu")
    with pytest.raises(ValueError, match="device: got 3, want 0"):
        annulus.flash_attention(*lent, device=3)
    with pytest.raises(ValueError, match="stream: got 0, want None"):
        annulus.flash_attention(query, key, value, stream=0)


def test_memory_of_another_gpu_is_refused(gpu: Any) -> None:
    query, key, value, _ = arrays()
    lent = [gpu.upload(array) for array in (query, key, value)]
    needs_a_second_gpu()
    elsewhere = cuda.Gpu(1).upload(query)
    with on_gpu(gpu) as plan:
        with pytest.raises(ValueError, match="query: got memory of GPU 1, want memory of GPU 0"):
            plan.forward(elsewhere, *lent[1:])
        # that has not ended the plan
        plan.forward(*lent)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (dict(backend="cpu"), "backend: got 'cpu', want \"cuda\""),
        (dict(device=None), "device: got None, want the number"),
        (dict(ranks=2), "ring of 2 ranks in one process"),
        (dict(threads=2), "threads: got 2, want None"),
        (dict(strategy="grid:1x1"), "strategy"),
        (dict(head_dim=300), "head .*dim of 300 is not supported by cuda"),
        (dict(device=99999), "device: got 99999"),
    ],
)
def test_a_plan_that_cannot_be_made_says_why(gpu: Any, options: Any, what: str) -> None:
    with pytest.raises(annulus.Error, match=what):
        annulus.Plan(
            ATTENTION, **{**DIMS, "backend": "cuda", "device": 0, "stream": gpu.stream, **options}
        )


@needs_mpi
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_ring_of_processes_has_its_rows_on_gpus(ranks: int) -> None:
    assert f"passed on {ranks} ranks" in launch(ranks, "test_device.py")


RANK_DIMS: dict[str, int] = dict(batch=1, q_len=90, q_heads=4, kv_heads=2, head_dim=16)


def near(gpu: Any, got: Any, want: Any) -> None:
    np.testing.assert_allclose(gpu.download(got), want, rtol=1e-3, atol=1e-4)


def of_rank(world: Any) -> None:
    """One rank of an MPI program, with its rows in the memory of a GPU of its own."""
    rank, ranks = world.rank, world.size
    gpu = cuda.Gpu(rank)
    on_gpu: dict[str, Any] = dict(backend="cuda", device=rank, stream=gpu.stream)
    attention = annulus.Attention(causal=True)
    random = np.random.default_rng(5)
    whole = [random.standard_normal((1, 90, heads, 16)).astype("float32") for heads in (4, 2, 2, 4)]
    with annulus.Plan(attention, **RANK_DIMS, threads=1) as alone:
        want = alone.forward(*whole[:3])
        wanted = alone.backward(*whole[:3], want, whole[3])
    with annulus.Plan(attention, **RANK_DIMS, comm=world, **on_gpu) as plan:
        sides = (plan.q_rows, plan.kv_rows, plan.kv_rows, plan.q_rows)
        own = [array[:, rows] for array, rows in zip(whole, sides, strict=True)]
        lent = [gpu.upload(array) for array in own]
        forward = plan.forward(*lent[:3])
        gradients = plan.backward(*lent[:3], forward, lent[3])
        near(gpu, forward.out, want.out[:, plan.q_rows])
        near(gpu, forward.lse, want.lse[:, :, plan.q_rows])
        for name, rows in (("dq", plan.q_rows), ("dk", plan.kv_rows), ("dv", plan.kv_rows)):
            near(gpu, getattr(gradients, name), getattr(wanted, name)[:, rows])
        if ranks > 1:
            assert forward.reports[0].bytes_sent == forward.reports[0].bytes_predicted > 0
        # one rank passes an array in host memory: every rank gets an error, none waits for it
        try:
            plan.forward(own[0] if rank == 0 else lent[0], *lent[1:3])
        except annulus.Error as error:
            want_start = "query: got an array in host memory" if rank == 0 else "rank 0 refused"
            assert str(error).startswith(want_start), error
        else:
            raise AssertionError("an array in host memory was taken")
        plan.forward(*lent[:3])
    # one call, of which each rank passes its own rows in ascending order
    rows = np.array_split(np.arange(90), ranks)[rank]
    lent = [gpu.upload(array[:, rows]) for array in whole[:3]]
    out = annulus.ring_attention(*lent, causal=True, comm=world, stream=gpu.stream)
    near(gpu, out, want.out[:, rows])


if __name__ == "__main__":
    from mpi4py import MPI

    run_rank(lambda: of_rank(MPI.COMM_WORLD), MPI.COMM_WORLD)
