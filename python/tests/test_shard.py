"""The rows of ranks before there is a plan, and the size of messages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import chosen_strategies, random

import annulus_attention as annulus
from annulus_attention import _options
from annulus_attention._calls import Call

CUSTOM = ([[4, 0, 2], [1, 3, 5, 6]], [[0, 1, 2, 3], [6, 5, 4]])


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped", None])
@pytest.mark.parametrize("lengths", [(0, 4), (2, 7), (64, 64), (113, 203)])
def test_ranks_share_all_rows(ranks: int, layout: str | None, lengths: tuple[int, int]) -> None:
    q_len, kv_len = lengths
    attention = annulus.Attention(causal=True, alignment="bottom_right")
    shards = [
        attention.shard(q_len, kv_len=kv_len, ranks=ranks, rank=rank, layout=layout)
        for rank in range(ranks)
    ]
    for name, length in (("q_rows", q_len), ("kv_rows", kv_len)):
        rows = np.concatenate([getattr(shard, name) for shard in shards])
        assert (np.sort(rows) == np.arange(length)).all()
    for rank, shard in enumerate(shards):
        assert (shard.rank, shard.ranks, shard.q_len, shard.kv_len) == (rank, ranks, *lengths)
        assert shard.layout == (layout or shards[0].layout)
        assert (shard.q_positions == shard.q_rows + kv_len - q_len).all()
        assert (shard.kv_positions == shard.kv_rows).all()


def test_rows_of_each_layout() -> None:
    def rows(layout: Any, ranks: int, length: int) -> list[list[int]]:
        attention = annulus.Attention()
        shards = (attention.shard(length, ranks=ranks, rank=i, layout=layout) for i in range(ranks))
        return [shard.q_rows.tolist() for shard in shards]

    assert rows("contiguous", 2, 7) == [[0, 1, 2], [3, 4, 5, 6]]
    assert rows("zigzag", 2, 8) == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert rows("striped", 2, 7) == [[0, 2, 4, 6], [1, 3, 5]]
    assert rows(CUSTOM, 2, 7) == CUSTOM[0]


def test_the_default_layout_depends_on_the_mask() -> None:
    def layout(**mask: Any) -> Any:
        return annulus.Attention(**mask).shard(4096, ranks=4, rank=0).layout

    assert layout() == "contiguous" != layout(causal=True)
    plan = annulus.Attention(causal=True).plan(
        batch=1, q_len=4096, q_heads=1, head_dim=4, ranks=4, threads=1
    )
    assert layout(causal=True) == plan.layout


def test_a_custom_layout_is_given_back() -> None:
    shard = annulus.Attention().shard(7, ranks=2, rank=1, layout=CUSTOM)
    assert shard.layout == CUSTOM and shard.kv_rows.tolist() == [6, 5, 4]


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_documents_are_balanced_before_there_are_tensors(ranks: int) -> None:
    starts = np.cumsum([0, 900, 20, 130, 1, 549])
    attention = annulus.Attention(causal=True)
    shards = [
        attention.shard(1600, ranks=ranks, rank=rank, layout="balanced", cum_seqlens_q=starts)
        for rank in range(ranks)
    ]
    rows = np.concatenate([shard.q_rows for shard in shards])
    assert (np.sort(rows) == np.arange(1600)).all()
    for shard in shards:
        assert abs(len(shard.q_rows) - 1600 / ranks) <= 16 and shard.route is not None
        start = starts[np.searchsorted(starts, shard.q_rows, side="right") - 1]
        assert (shard.q_positions == shard.q_rows - start).all()
        assert shard.layout == shards[0].layout
    x = random(1, 1600, 2, 8, dtype="f8")
    options = {"cum_seqlens_q": starts, "causal": True, "threads": 1}
    first = shards[0]
    got = annulus.ring_attention(
        x, x, x, ranks=ranks, layout=first.layout, route=first.route, **options
    )
    assert abs(got - annulus.flash_attention(x, x, x, **options)).max() < 1e-13
    # the ids of the same documents give the same rows, but positions of the whole sequence
    ids = np.repeat(np.arange(5), np.diff(starts))[None]
    by_ids = attention.shard(1600, ranks=ranks, rank=0, layout="balanced", q_segment_ids=ids)
    assert (by_ids.q_rows == first.q_rows).all() and (by_ids.q_positions == first.q_rows).all()


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_strategy_is_chosen_for_documents(ranks: int) -> None:
    length, starts = 320, np.arange(0, 321, 80)
    attention = annulus.Attention(causal=True)
    q, dout = (random(1, length, 4, 8, seed=seed, dtype="f8") for seed in (0, 3))
    k, v = (random(1, length, 4, 8, seed=seed, dtype="f8") for seed in (1, 2))
    lengths: dict[str, Any] = {"batch": 1, "q_len": length, "q_heads": 4, "head_dim": 8}

    def results(**options: Any) -> tuple[str, int, Any]:
        """Strategy, bytes of a forward pass, and outputs and gradients."""
        with attention.plan(**lengths, dtype="float64", threads=1, **options) as plan:
            plan.update(cum_seqlens_q=starts)
            forward = plan.forward(q, k, v)
            gradients = plan.backward(q, k, v, forward, dout)
            sent = sum(report.bytes_sent for report in forward.reports)
            arrays = (forward.out, forward.lse, gradients.dq, gradients.dk, gradients.dv)
            return plan.strategy, sent, arrays

    _, _, want = results()
    for layout in ("contiguous", "striped", "balanced"):
        shards = [
            attention.shard(length, ranks=ranks, rank=rank, layout=layout, cum_seqlens_q=starts)
            for rank in range(ranks)
        ]
        rows = np.concatenate([shard.q_rows for shard in shards])
        assert (np.sort(rows) == np.arange(length)).all()
        given = {"ranks": ranks, "layout": shards[0].layout, "route": shards[0].route}
        documents = shards[0].documents
        strategy, sent, got = results(**given, strategy="auto", documents=documents)
        assert all(abs(one - other).max() < 1e-13 for one, other in zip(got, want, strict=True))
        if layout == "contiguous":
            # no document is on two ranks
            assert (strategy, sent) == ("ring", 0)
    # without a layout, that of the plan
    _, _, got = results(ranks=ranks, strategy="auto", documents={"cum_seqlens_q": starts})
    assert all(abs(one - other).max() < 1e-13 for one, other in zip(got, want, strict=True))
    assert attention.shard(length, ranks=ranks, rank=0).documents is None


def test_documents_change_the_strategy_that_the_mask_chooses() -> None:
    def chosen(documents: Any) -> str:
        lengths: dict[str, Any] = {"batch": 1, "q_len": 64, "q_heads": 8, "head_dim": 8}
        options: dict[str, Any] = {"ranks": 4, "layout": "contiguous", "strategy": "auto"}
        with annulus.Attention().plan(**lengths, **options, documents=documents) as plan:
            return plan.strategy

    assert chosen(None) == "heads:4"
    assert chosen({"cum_seqlens_q": range(0, 65, 16)}) == "ring"
    assert chosen({"q_segment_ids": np.arange(64)[None] // 16}) == "ring"


def test_documents_choose_the_strategy_of_a_call() -> None:
    x, starts = random(1, 64, 8, 8, dtype="f8"), range(0, 65, 16)
    ids = np.arange(64)[None] // 16
    options: dict[str, Any] = {"ranks": 4, "layout": "contiguous", "strategy": "auto"}
    batches: list[dict[str, Any]] = [{"cum_seqlens_q": starts}, {"q_segment_ids": ids}]
    for batch in batches:
        want = annulus.flash_attention(x, x, x, **batch)
        with chosen_strategies() as strategies:
            for documents in (None, batch):
                got = annulus.ring_attention(x, x, x, **options, **batch, documents=documents)
                assert abs(got - want).max() < 1e-13
        assert strategies == ["heads:4", "ring"]
    # the choice alone depends on them
    with chosen_strategies() as strategies:
        got = annulus.ring_attention(x, x, x, **options, documents={"cum_seqlens_q": starts})
    assert abs(got - annulus.flash_attention(x, x, x)).max() < 1e-13 and strategies == ["ring"]


def test_documents_as_text_are_those_of_the_call() -> None:
    def spelled(documents: Any) -> str:
        return _options.spelled(Call(annulus.Attention(), strategy="auto", documents=documents))

    given: dict[str, Any] = {
        "cum_seqlens_q": [0, 3, 3, 2**40],
        "cum_seqlens_k": np.zeros(0, int),
        "kv_segment_ids": -np.arange(6).reshape(2, 3),
    }
    text = spelled(given)
    read = _options.read(text, None).documents
    assert read is not None and read.keys() == given.keys() and spelled(read) == text
    assert all(np.array_equal(read[name], given[name]) for name in given)
    assert spelled({**given, "cum_seqlens_q": [0, 3, 4, 2**40]}) != text != spelled(None)
    # of another shape, with the same numbers
    assert spelled({**given, "kv_segment_ids": -np.arange(6).reshape(3, 2)}) != text
    with pytest.raises(annulus.InvalidArgument, match="^documents: got 'lengths'"):
        spelled({"lengths": [3]})


@pytest.mark.parametrize(
    ("documents", "options", "text"),
    [
        ({"cum_seqlens_q": [0, 7]}, {"strategy": "ring"}, "documents: got a batch, for "),
        ({"cum_seqlens_q": [0, 8]}, {}, "cum_seqlens_q: got 8 as the last number, want at most 7"),
        ({"cum_seqlens_q": [0, 5, 3, 7]}, {}, "cum_seqlens_q: got 3 after 5"),
        ({"cum_seqlens_q": [1, 7]}, {}, "cum_seqlens_q: got 1 as the first number"),
        ({"cum_seqlens_q": [0, -1]}, {}, "cum_seqlens_q: got -1 after 0"),
        ({"cum_seqlens_q": np.zeros(0, int)}, {}, "cum_seqlens_q: got an empty list"),
        ({"cum_seqlens_q": [0.0, 7.0]}, {}, "cum_seqlens_q: got elements float64"),
        ({"cum_seqlens_q": [[0, 7]]}, {}, "cum_seqlens_q: got 2 axes"),
        ({"q_segment_ids": np.zeros((1, 6), int)}, {}, "q_segment_ids: got"),
        ({"kv_segment_ids": np.zeros((1, 6), int)}, {}, "kv_segment_ids: got"),
        ({"kv_positions": np.zeros((2, 7), int)}, {}, "kv_positions: got"),
        ({"attention_mask": np.ones((1, 1, 7, 7))}, {}, "documents: got 'attention_mask'"),
        ({"lengths": [3, 4]}, {}, "documents: got 'lengths', want arrays of the names cum_seq"),
        ([3, 4], {}, r"documents: got \[3, 4\], want a dict of cum_seqlens_q"),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_wrong_documents_are_named(
    documents: Any, options: dict[str, Any], text: str, ranks: int
) -> None:
    arguments = {"strategy": "auto", **options, "documents": documents, "ranks": ranks}
    with pytest.raises(annulus.InvalidArgument, match=f"^{text}"):
        annulus.Attention().plan(batch=1, q_len=7, q_heads=2, head_dim=4, **arguments)
    x = random(1, 7, 2, 4)
    with pytest.raises(annulus.InvalidArgument, match=f"^{text}"):
        annulus.ring_attention(x, x, x, **arguments)


@pytest.mark.parametrize("ranks", [1, 2])
def test_ids_of_one_side_are_refused_by_the_name_that_was_given(ranks: int) -> None:
    q, k = random(1, 7, 2, 4), random(1, 9, 2, 4)
    for name, other, rows in (("q", "kv", 7), ("kv", "q", 9)):
        ids = {f"{name}_segment_ids": np.zeros((1, rows), int)}
        want = f"^{name}_segment_ids: got alone, .*, want {other}_segment_ids as well"
        with pytest.raises(annulus.InvalidArgument, match=want):
            annulus.ring_attention(q, k, k, ranks=ranks, strategy="auto", documents=ids)
        with pytest.raises(annulus.InvalidArgument, match=want):
            annulus.ring_attention(q, k, k, ranks=ranks, **ids)


def test_documents_may_be_empty_and_need_not_fill_the_sequence() -> None:
    documents = {"cum_seqlens_q": [0, 3, 3, 6]}
    annulus.Attention().plan(
        batch=1, q_len=7, q_heads=2, head_dim=4, ranks=2, strategy="auto", documents=documents
    ).close()


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"ranks": 2, "rank": 0, "cum_seqlens_q": [0, 9]}, "cum_seqlens_q"),
        ({"ranks": 2, "rank": 0, "cum_seqlens_q": [0, 5, 3]}, "cum_seqlens_q"),
        ({"ranks": 0, "rank": 0}, "ranks"),
        ({"ranks": 2, "rank": 2}, "rank"),
        ({"ranks": 2}, "rank"),
        ({"rank": 0}, "ranks"),
        ({"ranks": 2, "rank": 0, "layout": "odd"}, "layout"),
        ({"ranks": 3, "rank": 0, "layout": CUSTOM}, "layout"),
        ({"ranks": 2, "rank": 0, "kv_len": -1}, "kv_len"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], argument: str) -> None:
    with pytest.raises(annulus.InvalidArgument) as caught:
        annulus.Attention().shard(7, **options)
    assert caught.value.argument == argument


def test_the_size_of_messages_changes_their_number_only() -> None:
    x = random(1, 700, 2, 8, dtype="f8")
    reports, outs = [], []
    for rows in (None, 64, 10**6):
        with annulus.Attention(causal=True).plan(
            batch=1,
            q_len=700,
            q_heads=2,
            head_dim=8,
            dtype="float64",
            ranks=2,
            threads=1,
            kv_block_size=rows,
            layout="contiguous",
        ) as plan:
            forward = plan.forward(x, x, x)
        outs.append(forward.out)
        reports.append([report.bytes_sent for report in forward.reports])
    assert (outs[0] == outs[1]).all()
    assert abs(outs[0] - outs[2]).max() < 1e-14
    assert reports[0] == reports[1] == reports[2]
    ring = annulus.ring_attention(x, x, x, causal=True, ranks=2, threads=1, kv_block_size=10**6)
    assert abs(ring - outs[0]).max() < 1e-14
    for wrong in (0, 1.5, "64", -1):
        with pytest.raises(annulus.InvalidArgument, match="kv_block_size"):
            annulus.ring_attention(x, x, x, ranks=2, kv_block_size=wrong)
    with pytest.raises(annulus.Unsupported, match="key_chunk_size.*kv_block_size"):
        annulus.ring_attention(x, x, x, ranks=2, key_chunk_size=64)
