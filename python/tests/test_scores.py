"""Bias tables against the dense bias, and in T5 and Swin V2 of transformers. Statistics of the
scores against their definition, and QK-clip over ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import random
from test_mpi import launch, needs_mpi

import annulus_attention as annulus

torch = pytest.importorskip("torch")
import annulus_attention.torch  # noqa: E402


def entries(kind: str, i: Any, j: Any) -> Any:
    """The entry of each pair, from the definition; T5's from transformers."""
    name, text = kind.split(":")
    if name == "clipped":
        left, right = map(int, text.split(","))
        return np.clip(j - i, -left, right) + left
    if name.startswith("t5"):
        t5 = pytest.importorskip("transformers.models.t5.modeling_t5").T5Attention
        buckets, distance = map(int, text.split(","))
        relative = torch.from_numpy(j - i)
        return t5._relative_position_bucket(relative, name == "t5", buckets, distance).numpy()
    lengths = [tuple(map(int, part.split("x"))) for part in text.split(",")]
    shape, windows = lengths[0], lengths[-1]
    entry = 0
    for ci, cj, window in zip(
        np.unravel_index(i, shape), np.unravel_index(j, shape), windows, strict=True
    ):
        offset = np.clip(ci - cj, 1 - window, window - 1) + window - 1
        entry = entry * (2 * window - 1) + offset
    return entry


KINDS = ["clipped:5,90", "t5:32,128", "t5:8,20", "t5-causal:16,64", "grid:8x12", "grid:2x6x8,2x3x8"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 3])
def test_tables_equal_their_dense_bias_and_its_summed_gradient(kind: str, ranks: int) -> None:
    n, heads = 96, 4
    at = np.arange(n)
    entry = entries(kind, at[:, None], at[None])
    q, k, v, dout = (torch.from_numpy(random(2, n, heads, 8, seed=s, dtype="f8")) for s in range(4))
    of_heads = heads if ranks == 3 else 1
    count = annulus_entries(kind)
    table = torch.from_numpy(random(of_heads, count, seed=9, dtype="f8")).requires_grad_()
    options: dict[str, Any] = {"causal": True, "ranks": ranks, "logits_soft_cap": 3.0}
    tensors = [x.requires_grad_() for x in (q, k, v)]
    out = annulus.ring_attention(*tensors, bias=table, bias_table=kind, **options)
    dense = table[:, torch.from_numpy(entry)][None]
    want = annulus.ring_attention(*tensors, bias=dense, **options)
    assert torch.equal(out, want)
    got = torch.autograd.grad(out, (*tensors, table), dout)
    expected = torch.autograd.grad(want, (*tensors, table), dout)
    assert all(map(torch.equal, got[:3], expected[:3]))
    assert (got[3] - expected[3]).abs().max() <= 1e-12 * expected[3].abs().max()
    assert got[3].abs().max() > 0


def annulus_entries(kind: str) -> int:
    """The number of entries, from the definition."""
    name, text = kind.split(":")
    numbers = [int(x) for x in text.split(",")[-1].split("x")]
    if name == "clipped":
        return sum(map(int, text.split(","))) + 1
    if name.startswith("t5"):
        return int(text.split(",")[0])
    return int(np.prod([2 * window - 1 for window in numbers]))


def test_buckets_of_every_distance_are_those_of_t5() -> None:
    far = 3000
    for kind in ["t5:32,128", "t5:64,1000", "t5:12,50", "t5-causal:32,128", "t5-causal:7,100"]:
        count = int(kind.split(":")[1].split(",")[0])
        position = np.arange(-far, far + 1)
        want = entries(kind, np.zeros(1, int), position)
        # lse of a query with one key is the score, the number of the entry
        bias = np.arange(count, dtype="f8")[None]
        for first in range(0, len(position), 1000):
            keys = position[first : first + 1000]
            rows = np.arange(len(keys))[None]
            x = np.zeros((1, len(keys), 1, 1))
            # a segment of its own for each pair of a query at 0 and a key
            _, got = annulus.flash_attention(
                x,
                x,
                x,
                bias=bias,
                bias_table=kind,
                q_positions=0 * rows,
                kv_positions=keys[None],
                q_segment_ids=rows,
                return_lse=True,
            )
            assert (got[0, 0] == want[first : first + 1000]).all(), kind


def test_t5_of_transformers_with_a_table() -> None:
    modeling = pytest.importorskip("transformers.models.t5.modeling_t5")
    from transformers import T5Config, T5Model

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=50, d_model=32, d_kv=8, d_ff=64, num_heads=4, num_layers=2, dropout_rate=0.0
    )
    model = T5Model(config).double()
    ids = torch.randint(50, (2, 41))
    targets = torch.randint(50, (2, 37))

    def results() -> list[Any]:
        model.zero_grad()
        hidden = model(input_ids=ids, decoder_input_ids=targets, use_cache=False).last_hidden_state
        hidden.square().sum().backward()
        return [hidden.detach(), *(parameter.grad.clone() for parameter in model.parameters())]

    want = results()
    tables: dict[bool, Any] = {}

    def forward(
        self: Any, hidden_states: Any, *_: Any, key_value_states: Any = None, **__: Any
    ) -> Any:
        source = hidden_states if key_value_states is None else key_value_states
        heads = (-1, self.n_heads, self.key_value_proj_dim)
        q = self.q(hidden_states).unflatten(-1, heads[1:])
        k, v = (of(source).unflatten(-1, heads[1:]) for of in (self.k, self.v))
        options: dict[str, Any] = {"softmax_scale": 1.0}
        if key_value_states is None:
            # the first layer of a stack has the table of all
            if self.has_relative_attention_bias:
                tables[self.is_decoder] = self.relative_attention_bias.weight
            kind = "t5-causal" if self.is_decoder else "t5"
            buckets, distance = self.relative_attention_num_buckets, 128
            assert self.relative_attention_max_distance == distance
            options |= {
                "bias": tables[self.is_decoder].T,
                "bias_table": f"{kind}:{buckets},{distance}",
                "causal": self.is_decoder,
            }
        out = annulus.torch.flash_attention(q, k, v, **options)
        return self.o(out.flatten(2)), None, None

    original = modeling.T5Attention.forward
    modeling.T5Attention.forward = forward
    try:
        got = results()
    finally:
        modeling.T5Attention.forward = original
    assert len(got) == len(want)
    for x, y in zip(got, want, strict=True):
        assert (x - y).abs().max() <= 1e-9 * max(1.0, float(y.abs().max()))


def test_swin_v2_of_transformers_with_a_table() -> None:
    modeling = pytest.importorskip("transformers.models.swinv2.modeling_swinv2")
    from transformers import Swinv2Config, Swinv2Model

    torch.manual_seed(0)
    config = Swinv2Config(
        image_size=32,
        patch_size=2,
        num_channels=3,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        drop_path_rate=0.0,
    )
    model = Swinv2Model(config).double().eval()
    image = torch.randn(2, 3, 32, 32, dtype=torch.float64)

    def results() -> list[Any]:
        model.zero_grad()
        hidden = model(image).last_hidden_state
        hidden.square().sum().backward()
        of = (parameter.grad for parameter in model.parameters())
        return [hidden.detach(), *(None if grad is None else grad.clone() for grad in of)]

    want = results()
    calls = []

    def forward(
        self: Any, hidden_states: Any, attention_mask: Any = None, *_: Any, **__: Any
    ) -> Any:
        windows, rows, _ = hidden_states.shape
        shape = (windows, rows, self.num_attention_heads, self.attention_head_size)
        q, k, v = (of(hidden_states).view(shape) for of in (self.query, self.key, self.value))
        q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
        scale = torch.clamp(self.logit_scale, max=np.log(1 / 0.01)).exp()
        q = q * scale.view(1, 1, -1, 1)
        table = self.continuous_position_bias_mlp(self.relative_coords_table)
        table = 16 * torch.sigmoid(table.view(-1, self.num_attention_heads))
        options: dict[str, Any] = {"softmax_scale": 1.0}
        if attention_mask is not None:
            visible = (attention_mask == 0)[:, None].repeat(windows // len(attention_mask), 1, 1, 1)
            options["attention_mask"] = visible
            calls.append("masked")
        kind = f"grid:{self.window_size[0]}x{self.window_size[1]}"
        out = annulus.torch.flash_attention(q, k, v, bias=table.T, bias_table=kind, **options)
        calls.append(kind)
        return out.flatten(2), None

    original = modeling.Swinv2SelfAttention.forward
    modeling.Swinv2SelfAttention.forward = forward
    try:
        got = results()
    finally:
        modeling.Swinv2SelfAttention.forward = original
    assert {"grid:4x4", "masked"} <= set(calls)
    for x, y in zip(got, want, strict=True):
        assert (x is None) == (y is None)
        # eager adds −100 to the scores of masked pairs, annulus leaves them out
        assert x is None or (x - y).abs().max() <= 1e-9 * max(1.0, float(y.abs().max()))


def test_bad_tables_are_refused_by_name() -> None:
    x = np.ones((1, 8, 2, 4), "f4")
    table = np.ones((2, 5), "f4")
    for kind in ["clipped:2", "t5:1,1", "grid:0x1", "other:1"]:
        with pytest.raises(annulus.InvalidArgument, match="^bias_table: got"):
            annulus.flash_attention(x, x, x, bias=table, bias_table=kind)
    with pytest.raises(annulus.InvalidArgument, match="^bias_table: got"):
        annulus.flash_attention(x, x, x, bias=table, bias_table="clipped:3,3")
    with pytest.raises(annulus.InvalidArgument, match="^bias_table: got"):
        annulus.flash_attention(x, x, x, bias=table, bias_table=7)
    with pytest.raises(annulus.InvalidArgument, match="^bias"):
        annulus.flash_attention(x, x, x, bias_table="clipped:2,2")


SHAPES = {"query": (2, 37, 4, 8), "key": (2, 41, 2, 8), "value": (2, 41, 2, 5)}


def tensors() -> dict[str, Any]:
    shapes = {**SHAPES, "bias": (1, 4, 37, 41), "softmax_aux": (4, 2)}
    named = enumerate(shapes.items())
    return {name: random(*shape, seed=seed, dtype="f8") for seed, (name, shape) in named}


def defined(given: dict[str, Any], *, cap: float, before: bool) -> tuple[Any, Any]:
    """The statistics by row and by head, from the definition in float64."""
    key = np.repeat(given["key"], 2, axis=2)
    product = np.einsum("bihd,bjhd->bhij", given["query"], key) / np.sqrt(8)
    bias = given["bias"]
    score = cap * np.tanh((product + bias * before) / cap) + bias * (not before)
    i, j = np.arange(37)[:, None], np.arange(41)[None]
    visible = (j <= i) & (i % 5 != 0)  # some queries attend to no key
    largest = [np.where(visible, x, -np.inf).max(-1) for x in (product, score)]
    sinks = np.broadcast_to(given["softmax_aux"][None, :, None], (2, 4, 37, 2))
    weights = np.exp(np.concatenate([np.where(visible, score, -np.inf), sinks], -1))
    p = weights / weights.sum(-1, keepdims=True)
    entropy = -np.where(p > 0, p * np.log(np.where(p > 0, p, 1)), 0).sum(-1)
    rows = np.stack([*largest, entropy], -1)
    counted = rows[:, :, np.arange(37) % 5 != 0]
    heads = np.stack([counted.max((0, 2)), counted.mean((0, 2))], -1)
    return rows, heads


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("ranks", [1, 3])
def test_statistics_equal_their_definition(ranks: int, before: bool) -> None:
    given = tensors()
    mask = annulus.masks.function("no fifth", lambda i, j: i % 5 != 0)
    options = {"causal": True, "mask_builder": mask, "logits_soft_cap": 2.5}
    order = "before_soft_cap" if before else "after_soft_cap"
    out, statistics = annulus.ring_attention(
        **given, **options, bias_order=order, ranks=ranks, return_statistics=True
    )
    plain = annulus.ring_attention(**given, **options, bias_order=order, ranks=ranks)
    assert (out == plain).all()
    rows, heads = defined(given, cap=2.5, before=before)
    assert np.allclose(statistics.rows, rows, atol=1e-12, rtol=0)
    assert np.allclose(statistics.heads, heads, atol=1e-12, rtol=0)
    assert (statistics.max_score == statistics.rows[..., 1]).all()
    assert (statistics.entropy[:, :, 0] > 0).all()  # of the sinks


def attended(x: Any, weights: Any, ranks: int) -> Any:
    """Causal attention of four heads, and its statistics."""
    q, k, v = (torch.einsum("bnc,chd->bnhd", x, weight) for weight in weights)
    return annulus.ring_attention(
        q, k, v, causal=True, ranks=ranks, reproducible=True, return_statistics=True
    )


def test_qk_clip_bounds_the_next_scores_on_any_number_of_ranks() -> None:
    tau = 4.0
    results = []
    for ranks in (1, 2, 3):
        torch.manual_seed(0)
        x = torch.randn(2, 600, 16)
        weights = [(torch.randn(16, 4, 8) * (0.2 + 0.2 * h)).requires_grad_() for h in (2, 2, 0)]
        optimizer = torch.optim.SGD(weights, lr=0.1)
        out, _ = attended(x, weights, ranks)
        out.square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            _, before = attended(x, weights, ranks)
            largest = before.head_max_product
            clip = (tau / largest.clamp(min=tau)).sqrt()
            assert (clip < 1).any()
            for weight in weights[:2]:
                weight *= clip[:, None]
            _, after = attended(x, weights, ranks)
        assert (after.head_max_product <= tau * (1 + 1e-5)).all()
        kept = clip == 1
        assert (after.head_max_product[kept] == largest[kept]).all()
        results.append([*(weight.detach() for weight in weights), after.rows, after.heads])
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def test_compiled_calls_return_statistics_and_gradients() -> None:
    q, k, v = (torch.randn(1, 70, 2, 8, requires_grad=True) for _ in range(3))

    def call(q: Any, k: Any, v: Any) -> Any:
        out, lse, statistics = annulus.torch.flash_attention(
            q, k, v, causal=True, return_lse=True, return_statistics=True
        )
        return out, statistics.rows, statistics.heads, lse

    want = call(q, k, v)
    got = torch.compile(call, backend="aot_eager", fullgraph=True)(q, k, v)
    assert all(map(torch.equal, want, got))
    assert not want[1].requires_grad and not want[2].requires_grad
    plain = annulus.torch.flash_attention(q, k, v, causal=True)
    gradients = [torch.autograd.grad(out.sum(), (q, k, v)) for out in (want[0], got[0], plain)]
    assert all(map(torch.equal, gradients[0], gradients[1]))
    assert all(map(torch.equal, gradients[0], gradients[2]))


def test_jax_returns_statistics_and_gradients() -> None:
    jax = pytest.importorskip("jax")
    pytest.importorskip("annulus_attention.jax")
    q, k, v = (random(1, 70, 2, 8, seed=seed) for seed in range(3))
    want = annulus.flash_attention(q, k, v, causal=True, return_statistics=True)

    @jax.jit
    def call(q: Any, k: Any, v: Any) -> Any:
        out, statistics = annulus.flash_attention(q, k, v, causal=True, return_statistics=True)
        return out, statistics.rows, statistics.heads

    out, rows, heads = call(q, k, v)
    assert (np.asarray(out) == want[0]).all()
    assert (np.asarray(rows) == want[1].rows).all() and (np.asarray(heads) == want[1].heads).all()
    gradient = jax.grad(lambda q: call(q, k, v)[0].sum())(q)
    plain = jax.grad(lambda q: annulus.flash_attention(q, k, v, causal=True).sum())(q)
    assert (gradient == plain).all()


@needs_mpi
def test_the_example_clips_alike_on_every_number_of_ranks() -> None:
    said = [launch(ranks, "../examples/qk_clip.py").splitlines() for ranks in (1, 2, 3)]
    steps = [[line.split() for line in lines] for lines in said]
    numbers = [[[float(x) for x in line[3::2]] for line in lines] for lines in steps]
    assert len(numbers[0]) == 5
    for other in numbers[1:]:
        assert np.allclose(numbers[0], other, atol=5e-3, rtol=0), said
    assert any(largest > 3.0 for _, largest, _ in numbers[0]), said
    assert all(clipped <= 3.001 for *_, clipped in numbers[0]), said
