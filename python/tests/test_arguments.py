"""Arguments: what each does, and errors that name the argument."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
from helpers import naive, random

import annulus_attention as annulus
from annulus_attention import biases, masks

N = 24
Q, K, V = random(1, N, 4, 8), random(1, N, 2, 8, seed=1), random(1, N, 2, 8, seed=2)
ROWS, KEYS = np.arange(N)[:, None], np.arange(N)[None, :]


@pytest.mark.parametrize(
    ("arguments", "visible"),
    [
        ({"causal": True}, KEYS <= ROWS),
        ({"sliding_window": 3}, abs(ROWS - KEYS) <= 3),
        ({"sliding_window": 3, "causal": True}, (KEYS <= ROWS) & (ROWS - KEYS <= 3)),
        ({"sliding_window": (None, 1)}, KEYS <= ROWS + 1),
        (
            {"sliding_window": (2, 0), "attention_sink_size": 4},
            ((KEYS <= ROWS) & (ROWS - KEYS <= 2)) | (KEYS < 4),
        ),
        ({"chunk_size": 7}, (ROWS // 7 == KEYS // 7) & (KEYS <= ROWS)),
        ({"prefix_len": 5}, (KEYS < 5) | (KEYS <= ROWS)),
        ({"mask_builder": masks.causal(-2)}, KEYS <= ROWS - 2),
        ({"mask_builder": masks.local((1, 2), offset=3)}, (KEYS >= ROWS + 2) & (KEYS <= ROWS + 5)),
        (
            {"mask_builder": masks.full() & masks.chunked_causal(5)},
            (ROWS // 5 == KEYS // 5) & (KEYS <= ROWS),
        ),
        ({"mask_builder": masks.causal() | masks.prefix(9)}, (KEYS < 9) | (KEYS <= ROWS)),
        (
            {"mask_builder": masks.dense(((ROWS * KEYS) % 3 == 0)[None, None])},
            (ROWS * KEYS) % 3 == 0,
        ),
        (
            {"mask_builder": masks.function("even", lambda i, j: (i + j) % 2 == 0)},
            (ROWS + KEYS) % 2 == 0,
        ),
        (
            {
                "mask_builder": masks.function(
                    "band", lambda i, j: abs(i - j) < 3, intervals=lambda i: [(i - 2, i + 3)]
                )
            },
            abs(ROWS - KEYS) < 3,
        ),
        (
            {"mask_builder": masks.per_head([masks.causal(h) for h in range(4)])},
            np.stack([KEYS <= ROWS + h for h in range(4)]),
        ),
        ({"q_segment_ids": (np.arange(N) // 9)[None]}, ROWS // 9 == KEYS // 9),
        ({"kv_segment_ids": (np.arange(N) // 9 - 1)[None]}, (ROWS // 9 == KEYS // 9) & (ROWS >= 9)),
        ({"attention_mask": (ROWS * KEYS % 5 - 1)[None, None]}, ROWS * KEYS % 5 != 1),
        (
            {"cum_seqlens_q": np.array([0, 10, 20]), "sliding_window": (None, 0)},
            (ROWS // 10 == KEYS // 10) & (KEYS <= ROWS) & (ROWS < 20) & (KEYS < 20),
        ),
        ({"q_positions": np.arange(N)[None] - 4, "causal": True}, KEYS <= ROWS - 4),
    ],
)
def test_masks(arguments: dict[str, Any], visible: Any) -> None:
    want, want_lse = naive(Q, K, V, visible)
    for ranks in (1, 3):
        out, lse = annulus.ring_attention(Q, K, V, **arguments, ranks=ranks, return_lse=True)
        assert abs(out - want).max() < 2e-6
        hidden = np.isneginf(want_lse)
        assert (np.isneginf(lse) == hidden).all()
        assert abs(lse[~hidden] - want_lse[~hidden]).max() < 2e-6


def test_bias_functions() -> None:
    slopes = [0.5, 0.25, 0.125, 0.0]
    tensor = np.stack([-slope * abs(ROWS - KEYS) for slope in slopes])[None].astype("f4")
    want = annulus.flash_attention(Q, K, V, bias=tensor)
    python = biases.function("alibi", lambda head, i, j: -slopes[head] * abs(i - j))
    for function in (biases.alibi(slopes), python):
        got = annulus.ring_attention(Q, K, V, bias_function=function, ranks=2)
        assert abs(got - want).max() < 1e-6
    published = annulus.flash_attention(Q, K, V, bias_function=biases.alibi(4))
    tensor = np.stack([-(2.0 ** (-2 * (h + 1))) * abs(ROWS - KEYS) for h in range(4)])[None]
    assert abs(published - annulus.flash_attention(Q, K, V, bias=tensor)).max() < 1e-6


def test_scale_cap_bias_order_and_unnormalised_output() -> None:
    bias = random(1, 4, N, N, seed=5)
    cap = 2.0
    q, k = Q.astype("f8"), np.repeat(K, 2, 2).astype("f8")
    scores = np.einsum("bihd,bjhd->bhij", q, k) * 0.7
    after, before = cap * np.tanh(scores / cap) + bias, cap * np.tanh((scores + bias) / cap)
    for order, s in (("after_soft_cap", after), ("before_soft_cap", before)):
        out, lse, most, total = annulus.flash_attention(
            Q,
            K,
            V,
            bias=bias,
            softmax_scale=0.7,
            logits_soft_cap=cap,
            bias_order=order,
            normalize_output=False,
            return_lse=True,
            return_max_sum=True,
        )
        assert abs(most - s.max(-1)).max() < 1e-5
        assert abs(total - np.exp(s - s.max(-1, keepdims=True)).sum(-1)).max() < 1e-4
        assert abs(lse - (most + np.log(total))).max() < 1e-5
        whole = annulus.flash_attention(
            Q, K, V, bias=bias, softmax_scale=0.7, logits_soft_cap=cap, bias_order=order
        )
        assert abs(out / total.transpose(0, 2, 1)[..., None] - whole).max() < 1e-5


def test_logits_dtype_and_precision() -> None:
    full = annulus.flash_attention(Q, K, V)
    rounded = annulus.flash_attention(Q, K, V, logits_dtype="bfloat16")
    assert 1e-5 < abs(full - rounded).max() < 5e-2
    for dtype in ("float32", np.float32, np.dtype("f4")):
        assert (annulus.flash_attention(Q, K, V, logits_dtype=dtype) == full).all()
    half = [x.astype(np.float16) for x in (Q, K, V)]
    narrow = annulus.ring_attention(*half, float32_logits=False)
    assert (narrow == annulus.ring_attention(*half, logits_dtype="float16")).all()
    assert (narrow != annulus.ring_attention(*half, float32_logits=True)).any()
    for precision in ("highest", "HIGH", "default", None):
        assert (annulus.flash_attention(Q, K, V, precision=precision) == full).all()


def test_dropout_does_not_depend_on_the_ring() -> None:
    options: dict[str, Any] = {"dropout_prob": 0.3, "dropout_seed": 2**63 + 5, "causal": True}
    want = annulus.flash_attention(Q, K, V, **options)
    assert (want != annulus.flash_attention(Q, K, V, causal=True)).any()
    for layout in ("contiguous", "zigzag", "striped"):
        got = annulus.ring_attention(Q, K, V, **options, ranks=3, layout=layout)
        assert abs(got - want).max() < 1e-6
    options["dropout_seed"] = None
    default = annulus.flash_attention(Q, K, V, **options)
    options["dropout_seed"] = 0
    assert (default == annulus.flash_attention(Q, K, V, **options)).all()


def test_custom_layout_route_and_threads() -> None:
    rows = [list(range(0, N, 2)), list(range(1, N, 2))]
    want = annulus.flash_attention(Q, K, V, causal=True)
    for route in ("relay_up", "relay_down", "direct"):
        got = annulus.ring_attention(
            Q, K, V, causal=True, ranks=2, layout=(rows, rows[::-1]), route=route, threads=2
        )
        assert abs(got - want).max() < 1e-6
    with pytest.raises(annulus.InvalidArgument, match="route: got rails-up, want several nodes"):
        annulus.ring_attention(Q, K, V, ranks=2, route="rails_up")
    with pytest.raises(annulus.InvalidArgument, match="route: got once-per-node, want several"):
        annulus.ring_attention(Q, K, V, ranks=2, route="once_per_node")


def test_receives_further_ahead_change_no_bit() -> None:
    want = annulus.ring_attention(Q, K, V, causal=True, ranks=3)
    got = annulus.ring_attention(Q, K, V, causal=True, ranks=3, receive_ahead=2)
    assert (got == want).all()


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("flash", {"attention_mask": np.zeros((1, 1, N, N), "f4")}, "attention_mask"),
    ("flash", {"attention_mask": np.ones((N, N), bool)}, "attention_mask"),
    ("flash", {"attention_mask": np.ones((1, 1, N, N + 1), bool)}, "attention_mask"),
    ("flash", {"key_lists": np.ones((N, N), bool)}, "key_lists"),
    ("flash", {"bias_table": "t5"}, "bias_table"),
    ("ring", {"return_statistics": 2}, "return_statistics"),
    ("flash", {"key_lists": (np.zeros(N, "i8"), np.zeros(0, "i8"))}, "key_lists"),
    ("ring", {"key_lists": (np.arange(N + 1), np.full(N, N))}, "key_lists"),
    ("flash", {"list_bias": True}, "list_bias"),
    ("flash", {"bias": np.zeros((N, N), "f4")}, "bias"),
    ("flash", {"bias": np.zeros((1, 3, N, N), "f4")}, "bias"),
    ("flash", {"bias": np.zeros((1, 1, N, N), "i4")}, "bias"),
    ("flash", {"softmax_scale": float("nan")}, "softmax_scale"),
    ("flash", {"softmax_scale": "1"}, "softmax_scale"),
    ("flash", {"softmax_scale": 10**400}, "softmax_scale"),
    ("flash", {"dropout_prob": 1.0}, "dropout_prob"),
    ("flash", {"dropout_prob": 0.1, "dropout_seed": -1}, "dropout_seed"),
    ("flash", {"dropout_prob": 0.1, "dropout_seed": 2**64}, "dropout_seed"),
    ("flash", {"causal": "yes"}, "causal"),
    ("flash", {"causal": 1}, "causal"),
    ("flash", {"cum_seqlens_q": np.array([0, 30])}, "cum_seqlens_q"),
    ("flash", {"cum_seqlens_q": np.array([0.0, 3.0])}, "cum_seqlens_q"),
    ("flash", {"cum_seqlens_k": np.array([1, 3])}, "cum_seqlens_k"),
    ("flash", {"sliding_window": -1}, "sliding_window"),
    ("flash", {"sliding_window": (1, 2, 3)}, "sliding_window"),
    ("flash", {"sliding_window": 1.5}, "sliding_window"),
    ("flash", {"logits_soft_cap": 0.0}, "logits_soft_cap"),
    ("flash", {"softmax_aux": np.zeros((3, 2), "f4")}, "softmax_aux"),
    ("flash", {"softmax_aux": np.zeros(0, "f4")}, "softmax_aux"),
    ("flash", {"softmax_aux": np.zeros((1, 4, 1), "f4")}, "softmax_aux"),
    ("flash", {"precision": "fastest"}, "precision"),
    ("flash", {"reproducible": "yes"}, "reproducible"),
    ("flash", {"logits_dtype": "int8"}, "logits_dtype"),
    ("flash", {"q_segment_ids": np.zeros((1, N + 1), int)}, "q_segment_ids"),
    ("flash", {"q_segment_ids": np.zeros(N, int)}, "q_segment_ids"),
    ("flash", {"q_segment_ids": np.full((1, N), 2**40)}, "q_segment_ids"),
    ("flash", {"q_positions": np.full((1, N), 2**62)}, "q_positions"),
    ("flash", {"attention_sink_size": 2}, "attention_sink_size"),
    ("flash", {"chunk_size": 0}, "chunk_size"),
    ("flash", {"mask_builder": np.tri(N)}, "mask"),
    ("flash", {"mask_builder": masks.per_head([masks.full()])}, "mask"),
    ("flash", {"bias_function": "alibi"}, "bias_function"),
    ("flash", {"bias_order": "first"}, "bias_order"),
    ("flash", {"alignment": "right"}, "alignment"),
    ("flash", {"threads": 0}, "threads"),
    ("flash", {"backend": "tpu"}, "backend"),
    ("flash", {"backend": 1}, "backend"),
    ("flash", {"device": -1}, "device"),
    # the CPU has no devices, and a GPU no threads
    ("flash", {"device": 0}, "device"),
    ("flash", {"backend": "wgpu", "threads": 2}, "threads"),
    ("ring", {"backend": "cuda", "threads": 2}, "threads"),
    ("flash", {"return_lse": 1}, "return_lse"),
    ("flash", {"return_max_sum": True}, "return_max_sum"),
    ("ring", {"ranks": 0}, "ranks"),
    ("ring", {"layout": "diagonal"}, "layout"),
    ("ring", {"layout": ([[0]], [[0]]), "ranks": 1}, "layout"),
    ("ring", {"layout": ([0, 1], [0]), "ranks": 2}, "layout"),
    ("ring", {"layout": ([[(0, 1, 2**63)], [2]], [[0], [1]]), "ranks": 2}, "layout"),
    ("ring", {"layout": ([[0]], None), "ranks": 1}, "layout"),
    ("ring", {"ranks": 10**6}, "ranks"),
    ("ring", {"route": "left"}, "route"),
    ("ring", {"route": np.zeros(2)}, "route"),
    ("ring", {"strategy": "heads"}, "strategy"),
    ("ring", {"strategy": "heads:0"}, "strategy"),
    ("ring", {"strategy": "grid:2"}, "strategy"),
    ("ring", {"strategy": "grid:1x2x3x4"}, "strategy"),
    ("ring", {"strategy": "once-per-node:0"}, "strategy"),
    ("ring", {"strategy": "pass_q"}, "strategy"),
    ("ring", {"strategy": 2}, "strategy"),
    # one rank has no groups of two
    ("ring", {"strategy": "heads:2"}, "strategy"),
    ("ring", {"machine": "machine.json"}, "machine"),
    ("ring", {"machine": 3, "strategy": "auto"}, "machine"),
    ("ring", {"machine": {"memory": float("nan")}, "strategy": "auto"}, "machine"),
    ("ring", {"machine": {"version": 1}, "strategy": "auto"}, "machine"),
    ("ring", {"documents": {"cum_seqlens_q": [0, N]}}, "documents"),
    ("ring", {"documents": [0, N], "strategy": "auto"}, "documents"),
    ("ring", {"documents": {"cum_seqlens_q": [0, N + 1]}, "strategy": "auto"}, "cum_seqlens_q"),
    ("ring", {"kv_block_size": 0}, "kv_block_size"),
    ("ring", {"receive_ahead": 0}, "receive_ahead"),
    ("ring", {"stream": -1}, "stream"),
    ("ring", {"stream": 1}, "stream"),
    ("ring", {"deadline": 0.1}, "deadline"),
    ("ring", {"comm": "world"}, "comm"),
    ("ring", {"fused_backward": True}, "fused_backward"),
    ("ring", {"float32_logits": True, "logits_dtype": "float32"}, "float32_logits"),
]
OBJECTS: list[tuple[Any, str]] = [
    (lambda: masks.local(3), "window"),
    (lambda: masks.local((1, 2, 3)), "window"),
    (lambda: masks.causal(1.5), "offset"),
    (lambda: masks.function("m", None), "visible"),
    (lambda: masks.function("m", max, intervals=[(0, 1)]), "intervals"),
    (lambda: masks.function(max, max), "name"),
    (lambda: biases.function("b", 3), "bias"),
    (lambda: biases.alibi([0.5, float("nan")]), "slopes"),
    (lambda: biases.alibi("ab"), "slopes"),
    (lambda: biases.alibi(0), "slopes"),
    (lambda: biases.alibi(10**12), "slopes"),
    (lambda: annulus.Attention(causal=True).shard(64, ranks=10**12, rank=1), "ranks"),
    (
        lambda: annulus.Cache(annulus.Attention(), batch=1, q_heads=1, head_dim=8, ranks=2000),
        "ranks",
    ),
]
UNSUPPORTED = [
    ("flash", "fwd_params"),
    ("flash", "bwd_params"),
    *(
        ("ring", name)
        for name in (
            "axis_name",
            "query_chunk_size",
            "key_chunk_size",
            "causal_block_size",
            "fwd_params",
            "bwd_params",
            "policy",
            "prevent_cse",
        )
    ),
]


def call(which: str) -> Any:
    return {"flash": annulus.flash_attention, "ring": annulus.ring_attention}[which]


@pytest.mark.parametrize(("which", "arguments", "name"), BAD)
def test_arguments_without_meaning_are_named(
    which: str, arguments: dict[str, Any], name: str
) -> None:
    with pytest.raises(ValueError, match=rf"{name}\b") as caught:
        call(which)(Q, K, V, **arguments)
    assert isinstance(caught.value, annulus.InvalidArgument)
    assert caught.value.code == 1 and caught.value.argument == name


@pytest.mark.parametrize(("make", "name"), OBJECTS)
def test_masks_biases_shards_and_caches_without_meaning_name_the_argument(
    make: Any, name: str
) -> None:
    with pytest.raises(annulus.InvalidArgument, match=rf"^{name}: got ") as caught:
        make()
    assert caught.value.argument == name


def test_a_layout_may_mix_rows_and_runs_of_rows() -> None:
    rows = [[(0, 2, N // 2)], [*range(1, N, 2)]]
    want = annulus.flash_attention(Q, K, V, causal=True)
    got = annulus.ring_attention(Q, K, V, causal=True, ranks=2, layout=(rows, rows))
    assert abs(got - want).max() < 1e-6


@pytest.mark.parametrize(("which", "name"), UNSUPPORTED)
def test_unsupported_arguments_are_named(which: str, name: str) -> None:
    with pytest.raises(NotImplementedError, match=f"^{name} is not supported") as caught:
        call(which)(Q, K, V, **{name: 128})
    assert isinstance(caught.value, annulus.Unsupported)
    assert caught.value.code == 2 and caught.value.argument == name


def test_every_parameter_is_tested() -> None:
    tested = {key for _, arguments, _ in BAD for key in arguments} | {n for _, n in UNSUPPORTED}
    # masked by other tests of this file, or by the golden cases
    tested |= {"query", "key", "value", "prefix_len", "normalize_output", "cum_seqlens_k"}
    tested |= {"kv_segment_ids", "kv_positions"}
    for which in ("flash", "ring"):
        assert set(inspect.signature(call(which)).parameters) <= tested


def test_shapes_that_do_not_fit_are_named() -> None:
    for q, k, v, message in [
        (Q, K[..., :4], V, "key: got shape"),
        (Q, K[:, :5], V, "value: got shape"),
        (Q[0], K, V, "query: got 3 axes"),
        (Q[:, :, :3], K, V, "q_heads: got 3"),
        (Q.astype("f8"), K, V, "key: got elements float32"),
        (Q.astype("i4"), K, V, "query: got elements int32"),
        (Q.astype(">U3"), K, V, "query: got elements str"),
    ]:
        with pytest.raises(annulus.InvalidArgument, match=message):
            annulus.flash_attention(q, k, v)


def test_lengths_beyond_any_memory() -> None:
    huge = np.broadcast_to(np.float32(0), (1, 2**45, 1, 1))
    with pytest.raises(MemoryError) as caught:
        annulus.flash_attention(huge, K[:, :, :1, :1], K[:, :, :1, :1], threads=1)
    # NumPy's own error of the output, or annulus's of the plan
    assert getattr(caught.value, "code", 20) == 20


def test_an_exception_in_a_mask_is_the_cause() -> None:
    def broken(i: int, j: int) -> bool:
        raise KeyError((i, j))

    for ranks in (1, 2):
        with pytest.raises(annulus.Error, match="panicked: broken raised KeyError") as caught:
            annulus.ring_attention(
                Q, K, V, mask_builder=masks.function("broken", broken), ranks=ranks
            )
        assert isinstance(caught.value.__cause__, KeyError)
        assert caught.value.code == 46 and caught.value.is_fatal
