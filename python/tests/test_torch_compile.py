"""The operators of torch: torch.compile without graph breaks, and plans that are reused."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
from helpers import random

import annulus_attention as annulus
from annulus_attention import masks

torch = pytest.importorskip("torch")

import annulus_attention.torch  # noqa: E402  (imports torch)
from annulus_attention import _options, _plan_cache  # noqa: E402

N = 40


def tensor(*shape: int, seed: int = 0, grad: bool = False) -> Any:
    return torch.tensor(random(*shape, seed=seed, dtype="f8"), requires_grad=grad)


def qkv(grad: bool = False) -> list[Any]:
    shapes = ((1, N, 4, 8), (1, N, 2, 8), (1, N, 2, 6))
    return [tensor(*shape, seed=seed, grad=grad) for seed, shape in enumerate(shapes)]


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch._dynamo.reset()
    annulus.torch.clear_plans()
    yield
    annulus.torch.clear_plans()


def plans_made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Records the plans that are made from now on."""
    made: list[Any] = []
    plan = _plan_cache.Call.plan

    def counted(*args: Any, **options: Any) -> Any:
        made.append(plan(*args, **options))
        return made[-1]

    monkeypatch.setattr(_plan_cache.Call, "plan", counted)
    return made


OPTIONS: dict[str, Any] = {
    "plain": {},
    "window": {"causal": True, "sliding_window": (7, 0), "attention_sink_size": 2},
    "mask": {"mask_builder": masks.causal(1) & masks.local((9, None))},
    "alibi": {"causal": True, "bias_function": annulus.biases.alibi(4)},
    "cap": {"logits_soft_cap": 2.0, "softmax_scale": 0.3, "logits_dtype": torch.float32},
    "dropout": {"dropout_prob": 0.25, "dropout_seed": 2**64 - 3},
    "segments": {"q_segment_ids": torch.arange(N)[None] // 9, "causal": True},
    "packed": {"cum_seqlens_q": torch.tensor([0, 11, 30]), "causal": True},
    "unnormalised": {"normalize_output": False},
    "two passes": {"ranks": 3, "fused_backward": False, "layout": "zigzag", "causal": True},
}


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_compiled_model_has_no_graph_break_and_the_eager_bits(name: str, backend: str) -> None:
    if backend == "inductor" and name not in ("window", "two passes"):
        pytest.skip("takes minutes")
    options = {"ranks": 2, "threads": 1, **OPTIONS[name]}
    sinks, bias = tensor(4, 2, seed=3, grad=True), tensor(1, 4, 1, N, seed=4, grad=True)

    def model(q: Any, k: Any, v: Any, sinks: Any, bias: Any) -> Any:
        out, lse = annulus.torch.ring_attention(
            q * 2, k, v, softmax_aux=sinks, bias=bias, return_lse=True, **options
        )
        return out + 1, lse

    def run(function: Any) -> list[Any]:
        inputs = (*qkv(grad=True), sinks, bias)
        results = function(*inputs)
        loss = results[0].square().sum() + results[1].nan_to_num(neginf=0).sum()
        return [*results, *torch.autograd.grad(loss, inputs)]

    eager = run(model)
    compiled = run(torch.compile(model, backend=backend, fullgraph=True))
    assert len(eager) == 7
    for one, other in zip(eager, compiled, strict=True):
        assert torch.equal(one, other) and one.stride() == other.stride()
    assert bool((eager[2] != 0).any())


def test_options_that_change_are_followed_by_a_compiled_model() -> None:
    q, k, v = qkv()

    def model(q: Any, mask: Any, causal: bool, seed: int) -> Any:
        return annulus.torch.flash_attention(
            q, k, v, causal=causal, mask_builder=mask, dropout_prob=0.5, dropout_seed=seed
        )

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    first, second = masks.local((5, 0)), masks.local((2, 0))
    outs = []
    for mask, causal, seed in (
        (first, True, 1),
        (first, True, 2),
        (first, True, 3),
        (first, False, 3),
        (second, True, 3),
        (None, False, 3),
    ):
        outs.append(compiled(q, mask, causal, seed))
        assert torch.equal(outs[-1], model(q, mask, causal, seed)), (mask, causal, seed)
    # the mask is causal already
    assert torch.allclose(outs[2], outs[3], atol=1e-14)
    distinct = [outs[0], outs[1], outs[2], outs[4], outs[5]]
    assert all(
        not torch.allclose(one, other) for i, one in enumerate(distinct) for other in distinct[:i]
    )


def test_new_seeds_make_no_new_graph() -> None:
    q, k, v = qkv()
    seen = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append(graph)
        return graph.forward

    def model(q: Any, seed: Any) -> Any:
        return annulus.torch.flash_attention(q, k, v, dropout_prob=0.5, dropout_seed=seed)

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for seed in range(5):
        got = compiled(q, torch.tensor(seed))
        assert torch.equal(got, model(q, seed))
    assert len(seen) == 1


def test_operators_are_registered_as_torch_wants_them() -> None:
    q, k, v = qkv(grad=True)
    call = annulus._calls.Call(annulus.Attention(causal=True), ranks=2, threads=1)
    inputs = (q, k, v, *[None] * (annulus.torch._ops._READ - 3), _options.spelled(call), False)
    torch.library.opcheck(annulus.torch._ops.attend, inputs)


def test_wrong_arguments_are_named_while_a_compiler_traces() -> None:
    q, k, v = qkv()

    def model(q: Any, **options: Any) -> Any:
        return annulus.torch.flash_attention(q, k, v, **options)

    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for options, name in (({"fwd_params": 1}, "fwd_params"), ({"softmax_scale": "x"}, "softmax")):
        with pytest.raises(Exception, match=name):
            compiled(q, **options)
    with pytest.raises(TypeError, match="causle"):
        model(q, causle=True)
    with pytest.raises(TypeError, match="multiple values.*query"):
        annulus.torch.flash_attention(q, k, v, query=q)
    with pytest.raises(TypeError, match="17 positional arguments, got 18"):
        annulus.torch.flash_attention(q, k, v, *[None] * 15)


def test_layers_and_steps_share_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    made = plans_made(monkeypatch)
    ids = [torch.arange(N)[None] // size for size in (9, 9, 7)]

    def step(segments: Any) -> Any:
        q, k, v = qkv(grad=True)
        x = q
        for _ in range(3):
            # the mask is another object in each layer, of the same pairs
            mask = masks.causal() & masks.local((20, 0))
            y = annulus.torch.ring_attention(
                x, k, v, ranks=2, threads=1, mask_builder=mask, q_segment_ids=segments
            )
            x = torch.cat([y, x[..., :2]], -1)
        x.square().sum().backward()
        return q.grad

    gradients = [step(segments) for segments in ids]
    assert len(made) == 1
    assert torch.equal(gradients[0], gradients[1]) and not torch.equal(gradients[0], gradients[2])
    # a mutated batch is another batch
    ids[0][:] = torch.arange(N)[None] // 7
    assert torch.equal(step(ids[0]), gradients[2])
    annulus.torch.clear_plans()
    assert torch.equal(step(ids[0]), gradients[2])
    assert len(made) == 2


def test_documents_choose_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    made = plans_made(monkeypatch)
    starts = [0, 16, 32, 48, 64]
    options = {"ranks": 4, "layout": "contiguous", "strategy": "auto", "cum_seqlens_q": starts}
    x = tensor(1, 64, 8, 8, grad=True)

    def step(documents: Any, function: Any = annulus.torch.ring_attention) -> Any:
        out = function(x, x, x, documents=documents, **options)
        return out, *torch.autograd.grad(out.square().sum(), x)

    want = step(None)
    for documents in (starts, torch.tensor(starts), starts):
        got = step({"cum_seqlens_q": documents})
        assert all(torch.allclose(*pair, atol=1e-12) for pair in zip(got, want, strict=True))
    assert [plan.strategy for plan in made] == ["heads:4", "ring"]
    # other documents are other options
    step({"q_segment_ids": torch.arange(64)[None] // 32})
    assert len(made) == 3
    compiled = torch.compile(annulus.torch.ring_attention, backend="aot_eager", fullgraph=True)
    again = step({"cum_seqlens_q": starts}, compiled)
    assert len(made) == 3 and all(torch.equal(*pair) for pair in zip(again, got, strict=True))


def test_plans_are_bounded_and_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = plans_made(monkeypatch)
    q, k, v = qkv()
    lengths = range(1, _plan_cache.CAPACITY + 4)
    for n in lengths:
        annulus.torch.flash_attention(q[:, :n], k, v)
    assert len(made) == len(lengths)
    assert len(_plan_cache.cache_of(None)) == _plan_cache.CAPACITY
    closed = [_is_closed(plan) for plan in made]
    assert closed == [True] * 3 + [False] * _plan_cache.CAPACITY
    # the last ones are there
    annulus.torch.flash_attention(q[:, : lengths[-1]], k, v)
    assert len(made) == len(lengths)
    annulus.torch.clear_plans()
    assert all(_is_closed(plan) for plan in made)


def _is_closed(plan: Any) -> bool:
    try:
        return not str(plan)
    except RuntimeError as error:
        return "closed" in str(error)


def test_a_mask_lives_as_long_as_a_plan_that_may_need_it() -> None:
    before = len(_options._objects)
    q, k, v = qkv(grad=True)
    mask = masks.function("even", lambda i, j: (i + j) % 2 == 0)
    out = annulus.torch.flash_attention(q, k, v, mask_builder=mask)
    del mask
    gc.collect()
    out.sum().backward()
    assert len(_options._objects) == before + 1
    out = annulus.torch.flash_attention(
        q, k, v, mask_builder=masks.function("odd", lambda i, j: (i + j) % 2 == 1)
    )
    annulus.torch.clear_plans()
    gc.collect()
    assert len(_options._objects) == before
    with pytest.raises(annulus.InvalidArgument, match="mask: got an object that was freed"):
        out.sum().backward()


def test_functions_of_one_name_have_plans_of_their_own() -> None:
    q, k, v = qkv()
    outs = []
    for offset in (0, 3):
        mask = masks.function("same", lambda i, j, offset=offset: j <= i + offset)
        outs.append(annulus.torch.flash_attention(q, k, v, mask_builder=mask))
        want = annulus.torch.flash_attention(q, k, v, mask_builder=masks.causal(offset))
        assert torch.allclose(outs[-1], want, atol=1e-14)


def test_threads_never_share_a_plan() -> None:
    q, k, v = qkv(grad=True)
    want = annulus.torch.flash_attention(q, k, v, causal=True, threads=1)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(20):
                out = annulus.torch.flash_attention(q, k, v, causal=True, threads=1)
                assert torch.equal(out, want)
                torch.autograd.grad(out.sum(), q)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_plan_that_failed_is_not_used_again() -> None:
    q, k, v = qkv()
    raises = [True]

    def visible(i: int, j: int) -> bool:
        if raises[0]:
            raise LookupError("not yet")
        return j <= i

    mask = masks.function("fails once", visible)
    with pytest.raises(annulus.Error) as caught:
        annulus.torch.flash_attention(q, k, v, mask_builder=mask)
    assert isinstance(caught.value.__cause__, LookupError)
    raises.clear()
    raises.append(False)
    got = annulus.torch.flash_attention(q, k, v, mask_builder=mask)
    assert torch.allclose(got, annulus.torch.flash_attention(q, k, v, causal=True), atol=1e-14)
