"""One rank of an MPI program: every golden case over mpi4py's communicator, a communicator of some
of the ranks, calls that are refused on one rank, and the ring in one call.

    mpirun -n 3 python tests/mpi_program.py
"""

from __future__ import annotations

import os
import signal
import time
import traceback
from typing import Any

import numpy as np
from helpers import (
    Case,
    batch,
    check,
    chosen_strategies,
    floats,
    folder,
    naive,
    plan,
    random,
    read,
    run_rank,
)
from mpi4py import MPI

import annulus_attention as annulus

WORLD = MPI.COMM_WORLD
RANK, RANKS = WORLD.rank, WORLD.size


def whole(parts: Any, rows: Any, axis: int, length: int) -> Any:
    """Puts the rows of all ranks together; None on other ranks than 0."""
    told = WORLD.gather((np.asarray(parts), np.asarray(rows)))
    if told is None:
        return None
    first = np.moveaxis(told[0][0], axis, 0)
    result = np.full((length, *first.shape[1:]), np.nan, first.dtype)
    for part, own in told:
        result[own] = np.moveaxis(part, axis, 0)
    assert not np.isnan(result).any() or length == 0
    return np.moveaxis(result, 0, axis)


def golden(case: Case, layout: str) -> None:
    """A case over the world, against what is expected and against the bits of a ring of threads."""
    given = floats(case, "float64")
    with plan(case, "float64", comm=WORLD, layout=layout) as ring:
        q_rows, kv_rows = ring.q_rows, ring.kv_rows
        mine = dict(given)
        for name in ("query", "dout"):
            mine[name] = given[name][:, q_rows]
        for name in ("key", "value"):
            mine[name] = given[name][:, kv_rows]
        if "bias" in given and given["bias"].shape[2] > 1:
            mine["bias"] = given["bias"][:, :, q_rows]
        if "dlse" in given:
            mine["dlse"] = given["dlse"][:, :, q_rows]
        brought = batch(case)
        for name in ("q_segment_ids", "q_positions"):
            if name in brought:
                brought[name] = brought[name][:, q_rows]
        for name in ("kv_segment_ids", "kv_positions"):
            if name in brought:
                brought[name] = brought[name][:, kv_rows]
        if "attention_mask" in brought:
            brought["attention_mask"] = brought["attention_mask"][:, :, q_rows]
        if brought:
            ring.update(**brought)
        dout, dlse = mine.pop("dout"), mine.pop("dlse", None)
        forward = ring.forward(**mine)
        gradients = ring.backward(**mine, forward=forward, dout=dout, dlse=dlse)
    q_len, kv_len = given["query"].shape[1], given["key"].shape[1]
    got = {
        "out": whole(forward.out, q_rows, 1, q_len),
        "lse": whole(forward.lse, q_rows, 2, q_len),
        "dq": whole(gradients.dq, q_rows, 1, q_len),
        "dk": whole(gradients.dk, kv_rows, 1, kv_len),
        "dv": whole(gradients.dv, kv_rows, 1, kv_len),
    }
    if gradients.dbias is not None:
        by_row = given["bias"].shape[2] > 1
        got["dbias"] = whole(gradients.dbias, q_rows, 2, q_len) if by_row else gradients.dbias
    if gradients.dsoftmax_aux is not None:
        got["dsoftmax_aux"] = gradients.dsoftmax_aux
    if RANK > 0:
        return
    assert set(got) == set(case.expected)
    check(case, "float64", got)
    dout, dlse = given.pop("dout"), given.pop("dlse", None)
    with plan(case, "float64", ranks=RANKS, layout=layout) as threads:
        if batch(case):
            threads.update(**batch(case))
        forward = threads.forward(**given)
        gradients = threads.backward(**given, forward=forward, dout=dout, dlse=dlse)
    for name, array in got.items():
        same = getattr(forward if name in ("out", "lse") else gradients, name)
        assert np.array_equal(same, array), f"{name} has other bits than a ring of threads"


def sub_communicator() -> None:
    """Two rings at once, of the even and of the odd ranks."""
    part = WORLD.Split(RANK % 2, RANK)
    x = random(1, 40, 2, 8, seed=RANK % 2)
    ring = annulus.Attention(causal=True).plan(
        batch=1, q_len=40, q_heads=2, head_dim=8, comm=part, threads=1
    )
    assert (ring.rank, ring.ranks) == (part.rank, part.size)
    # the plan has a duplicate
    part.Free()
    rows = ring.q_rows
    forward = ring.forward(*[x[:, rows]] * 3)
    want, _ = naive(x, x, x, np.tri(40, dtype=bool))
    assert abs(forward.out - want[:, rows]).max() < 2e-6
    ring.close()


def decoding() -> None:
    """A KV cache over the world: the bits of one over threads, and refusals."""
    q, k, v = random(2, 30, 4, 8), random(2, 30, 2, 8, seed=1), random(2, 30, 2, 8, seed=2)
    lengths: dict[str, Any] = {"batch": 2, "q_heads": 4, "kv_heads": 2, "head_dim": 8}
    options: dict[str, Any] = {**lengths, "page_rows": 4, "threads": 1}
    attention = annulus.Attention(causal=True)

    def results(cache: annulus.Cache) -> Any:
        """Outputs of a prefill whose rows are sharded, and of tokens."""
        own = cache.own_rows(20)
        cache.append_own(20, k[:, own], v[:, own])
        outs = [cache.attend(q[:, :20])]
        for row in range(20, 30):
            cache.append(k[:, row : row + 1], v[:, row : row + 1])
            outs.append(cache.attend(q[:, row : row + 1]))
        assert all(of.reports[0].bytes_sent > 0 or RANKS == 1 for of in outs)
        return np.concatenate([of.out for of in outs], 1)

    with annulus.Cache(attention, **options, ranks=RANKS) as threads:
        want = results(threads)
    with annulus.Cache(attention, **options, comm=WORLD) as cache:
        assert (cache.rank, cache.ranks) == (RANK, RANKS)
        assert (results(cache) == want).all()
        assert len(cache) == 30 and sum(WORLD.allgather(cache.local_len)) == 30
        assert abs(want - annulus.flash_attention(q, k, v, causal=True)).max() < 2e-6
        if RANKS == 1:
            return
        for code, other, text, work in (
            (1, 4, "query", lambda: cache.attend(q[:1] if RANK == 1 else q)),
            (1, 4, "query", lambda: cache.attend("rows" if RANK == 1 else q)),
            (3, 3, "queries", lambda: cache.attend(q[:, RANK == 1 :])),
        ):
            try:
                work()
            except annulus.Error as error:
                assert error.code == (code if RANK == 1 else other), (RANK, error)
                assert text in str(error), (RANK, error)
            else:
                raise AssertionError(f"no error: {text}")
        cache.truncate(30 - (RANK == 1))
        try:
            cache.attend(q[:, :2])
        except annulus.Error as error:
            assert error.code == 3 and "cached rows" in str(error), error
        else:
            raise AssertionError("ranks with other numbers of rows")
        cache.truncate(29)
        cache.append(k[:, 29:], v[:, 29:])
        assert (cache.attend(q[:, 29:]).out == want[:, 29:]).all()


def refusals() -> None:
    """What one rank refuses is an error on all, at once, and the plan goes on."""
    lengths: dict[str, Any] = {"batch": 1, "q_len": 30, "q_heads": 2, "head_dim": 8, "threads": 1}
    x = random(1, 30, 2, 8)

    def fails(code: int, other: int, text: str, work: Any) -> None:
        """Fails with a code on rank 1, and with the other one elsewhere."""
        began = MPI.Wtime()
        try:
            work()
        except annulus.Error as error:
            assert error.code == (code if RANK == 1 else other), (RANK, error)
            assert text in str(error), (RANK, error)
        else:
            raise AssertionError(f"no error: {text}")
        assert MPI.Wtime() - began < 10

    def planned(causal: Any = False, **options: Any) -> annulus.Plan:
        return annulus.Attention(causal=causal).plan(**lengths, **options, comm=WORLD)

    fails(3, 3, "differs between ranks", lambda: planned(causal=RANK == 1))
    fails(1, 4, "layout", lambda: planned(layout="odd" if RANK == 1 else None))
    for name in ("deadline", "arrival_deadline"):
        fails(1, 4, name, lambda name=name: planned(**{name: 0.5 if RANK == 1 else None}))
    with planned() as ring:
        rows = ring.q_rows
        q = x[:, rows]
        good = ring.forward(q, q, q).out
        wrong = q.astype("f8") if RANK == 1 else q
        fails(1, 4, "key", lambda: ring.forward(q, wrong, q))
        short = q[:, 1:] if RANK == 1 else q
        fails(1, 4, "", lambda: ring.forward(q, short, q))
        ids = np.zeros((1, len(rows) + RANK % 2), int)
        fails(1, 4, "q_segment_ids", lambda: ring.update(q_segment_ids=ids))
        mask = np.zeros((1, 1, len(rows), 30), "f4" if RANK == 1 else "i4")
        fails(1, 4, "attention_mask", lambda: ring.update(attention_mask=mask))
        assert (ring.forward(q, q, q).out == good).all()
    contiguous = np.array_split(np.arange(30), RANKS)
    q = x[:, contiguous[RANK]]
    wrong = "yes" if RANK == 1 else True
    fails(1, 4, "causal", lambda: annulus.ring_attention(q, q, q, causal=wrong, comm=WORLD))
    wrong = q[0] if RANK == 1 else q
    fails(1, 4, "query", lambda: annulus.ring_attention(wrong, q, q, comm=WORLD))


def late() -> None:
    """The last rank makes a call late: the others make theirs again."""
    x = random(1, 30, 2, 8)
    attention = annulus.Attention(causal=True)
    lengths: dict[str, Any] = {"batch": 1, "q_len": 30, "q_heads": 2, "head_dim": 8, "threads": 1}
    with attention.plan(**lengths, comm=WORLD, arrival_deadline=1) as ring:
        q = x[:, ring.q_rows]
        first = ring.forward(q, q, q).out
        if RANK == RANKS - 1:
            time.sleep(1.5)
        timeouts = 0
        while True:
            try:
                again = ring.forward(q, q, q).out
                break
            except annulus.ArrivalTimeout as error:
                assert error.code == 22 and not error.is_fatal, error
                timeouts += 1
        assert (again == first).all() and timeouts == int(RANK < RANKS - 1), timeouts


def started() -> None:
    """Ranks that start a pass meet ranks that call it; a pass that is dropped ends on all."""
    x = random(1, 40, 2, 8)
    attention = annulus.Attention(causal=True)
    lengths: dict[str, Any] = {"batch": 1, "q_len": 40, "q_heads": 2, "head_dim": 8, "threads": 1}
    with attention.plan(**lengths, comm=WORLD) as ring:
        q = x[:, ring.q_rows]
        forward = ring.forward(q, q, q)
        gradients = ring.backward(q, q, q, forward, q)
        again = ring.forward_start(q, q, q).wait() if RANK != 1 else ring.forward(q, q, q)
        assert (again.out == forward.out).all()
        of_started = ring.backward_start(q, q, q, forward, q)
        while not of_started.test():
            time.sleep(0.001)
        assert (of_started.wait().dk == gradients.dk).all()
        if RANKS == 1:
            return
        # rank 1 drops the pass before the others make the call
        if RANK == 1:
            of_dropped = ring.forward_start(q, q, q)
            time.sleep(0.2)
            assert not of_dropped.test()
            del of_dropped
        WORLD.Barrier()
        began = MPI.Wtime()
        try:
            ring.forward(q, q, q)
        except annulus.Error as error:
            assert error.code == (45 if RANK == 1 else 44), (RANK, error)
        else:
            raise AssertionError("a pass that one rank dropped")
        assert MPI.Wtime() - began < 10


def shared() -> None:
    """Plans and a cache over one endpoint, closed in another order on each rank."""
    x = random(1, 40, 2, 8)
    attention = annulus.Attention(causal=True)
    of_cache: dict[str, Any] = {"batch": 1, "q_heads": 2, "head_dim": 8, "threads": 1}
    lengths = {**of_cache, "q_len": 40}
    part = WORLD.Dup()
    with annulus.Endpoint(part) as endpoint:
        plans = [attention.plan(**lengths, comm=endpoint) for _ in range(2)]
        cache = annulus.Cache(attention, **of_cache, comm=endpoint)
        brief = [attention.plan(**lengths, comm=endpoint) for _ in range(3)]
    part.Free()
    for each in brief:
        each.close()
    want, _ = naive(x, x, x, np.tri(40, dtype=bool))
    cache.append(x, x)
    assert abs(cache.attend(x).out - want).max() < 2e-6 and cache.ranks == RANKS
    rows = [x[:, plan.q_rows] for plan in plans]
    # at a time, and in another order on each rank
    order = [RANK % 2, 1 - RANK % 2]
    passes = {at: plans[at].forward_start(*[rows[at]] * 3) for at in order}
    outs = [passes[at].wait().out for at in (0, 1)]
    assert (outs[0] == outs[1]).all()
    assert abs(outs[0] - want[:, plans[0].q_rows]).max() < 2e-6
    for at in order:
        plans[at].close()
    cache.close()
    endpoint = annulus.Endpoint(WORLD)
    endpoint.close()
    try:
        attention.plan(**lengths, comm=endpoint)
    except RuntimeError as error:
        assert "the endpoint is closed" in str(error), error
    else:
        raise AssertionError("an endpoint that is closed")


def forked(before_use: bool = False) -> None:
    """A forked child, which must neither call MPI nor disturb the plan of its parent."""
    lengths: dict[str, Any] = {"batch": 1, "q_len": 40, "q_heads": 2, "head_dim": 8, "threads": 1}
    endpoint = None if before_use else annulus.Endpoint(WORLD)
    made = None if endpoint is None else annulus.Attention().plan(**lengths, comm=endpoint)
    x = random(1, 40 if made is None else len(made.q_rows), 2, 8)
    want = None if made is None else made.forward(x, x, x).out

    def in_child() -> None:
        def fails(kind: type[Exception], text: str, work: Any) -> None:
            try:
                work()
            except kind as error:
                assert text in str(error), error
            else:
                raise AssertionError(f"{text}: no error")

        text = "MPI is not supported by a forked process"
        attention = annulus.Attention()
        fails(annulus.Unsupported, text, lambda: annulus.Endpoint(WORLD))
        fails(annulus.Unsupported, text, lambda: attention.plan(**lengths, comm=WORLD))
        fails(annulus.Unsupported, text, lambda: annulus.ring_attention(x, x, x, comm=WORLD))
        if endpoint is not None:
            fails(annulus.Unsupported, text, lambda: attention.plan(**lengths, comm=endpoint))
        if made is not None and endpoint is not None:
            refused = "plan: got one of process "
            fails(annulus.InvalidArgument, refused, lambda: made.forward(x, x, x))
            fails(annulus.InvalidArgument, refused, lambda: made.update())
            made.close()
            endpoint.close()
        annulus.flash_attention(x, x, x, threads=2)

    child = os.fork()
    if child == 0:
        try:
            signal.alarm(15)
            in_child()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    if made is not None and endpoint is not None:
        assert (made.forward(x, x, x).out == want).all()
        made.close()
        endpoint.close()


def packed_documents() -> None:
    """Each rank asks for its rows of packed documents, loads them alone, and the strategy is chosen
    for the documents.
    """
    length, starts = 160, np.array([0, 80, 85, 85, 120, 160])
    attention = annulus.Attention(causal=True)
    q, dout = random(1, length, 4, 8), random(1, length, 4, 8, seed=3)
    k, v = random(1, length, 2, 8, seed=1), random(1, length, 2, 8, seed=2)
    lengths: dict[str, Any] = {"batch": 1, "q_heads": 4, "kv_heads": 2, "head_dim": 8}
    lengths.update(q_len=length, threads=1)
    with attention.plan(**lengths) as one:
        one.update(cum_seqlens_q=starts)
        want = one.forward(q, k, v)
        of_one = one.backward(q, k, v, want, dout)
    for layout in ("balanced", "contiguous"):
        shard = attention.shard(length, comm=WORLD, layout=layout, cum_seqlens_q=starts)
        rows = shard.q_rows
        assert sum(WORLD.allgather(len(rows))) == length and (rows == shard.kv_rows).all()
        given = {"layout": shard.layout, "route": shard.route, "documents": shard.documents}
        with attention.plan(**lengths, comm=WORLD, strategy="auto", **given) as plan:
            assert (plan.q_rows == rows).all() and (plan.kv_rows == rows).all()
            plan.update(cum_seqlens_q=starts)
            own = [x[:, rows] for x in (q, k, v)]
            forward = plan.forward(*own)
            gradients = plan.backward(*own, forward, dout[:, rows])
        assert abs(forward.out - want.out[:, rows]).max() < 2e-6
        for name in ("dq", "dk", "dv"):
            assert abs(getattr(gradients, name) - getattr(of_one, name)[:, rows]).max() < 1e-5
    if RANKS == 1:
        return
    # documents of one rank that are wrong are refused on all
    wrong = {"cum_seqlens_q": [0, length + (RANK == 1)]}
    rows = slice(length * RANK // RANKS, length * (RANK + 1) // RANKS)
    own = [x[:, rows] for x in (q, k, v)]
    for call in (
        lambda: attention.plan(**lengths, comm=WORLD, strategy="auto", documents=wrong),
        lambda: annulus.ring_attention(*own, comm=WORLD, strategy="auto", documents=wrong),
    ):
        try:
            call()
        except annulus.Error as error:
            assert error.code == (1 if RANK == 1 else 4), error
            assert "cum_seqlens_q" in str(error), error
        else:
            raise AssertionError("documents that do not fit")


def packed_documents_in_one_call() -> None:
    """The strategy of a call is chosen for the documents of all rows, of which segment ids of the
    call have those of a rank.
    """
    q_len, kv_len = 12 * RANKS, 120 * RANKS
    q_ids, kv_ids = np.arange(q_len)[None] // 6, np.arange(kv_len)[None] // 60
    q, k = random(1, q_len, 2, 8), random(1, kv_len, 2, 8, seed=1)
    want = annulus.flash_attention(q, k, k, q_segment_ids=q_ids, kv_segment_ids=kv_ids)
    documents = {"q_segment_ids": q_ids, "kv_segment_ids": kv_ids}
    for layout in ("contiguous", "balanced"):
        shard = annulus.Attention().shard(
            q_len, kv_len=kv_len, comm=WORLD, layout=layout, **documents
        )
        own_q, own_k = q[:, shard.q_rows], k[:, shard.kv_rows]
        options: dict[str, Any] = {
            "layout": shard.layout,
            "route": shard.route,
            "q_segment_ids": q_ids[:, shard.q_rows],
            "kv_segment_ids": kv_ids[:, shard.kv_rows],
            "strategy": "auto",
            "comm": WORLD,
            "threads": 1,
        }
        with chosen_strategies() as strategies:
            for given in (None, shard.documents):
                out = annulus.ring_attention(own_q, own_k, own_k, **options, documents=given)
                assert abs(out - want[:, shard.q_rows]).max() < 2e-6
        if layout == "contiguous":
            # no document is on two ranks; by the mask alone, moving queries is cheaper than keys
            by_mask = "ring" if RANKS == 1 else f"grid:1x{RANKS}"
            assert strategies == [by_mask, "ring"], strategies


def one_call(length: int) -> None:
    """Rows that are dealt contiguously, with a bias of own queries × all keys."""
    x, bias = random(2, length, 4, 8), random(1, 1, length, length, seed=1)
    edges = [length * rank // RANKS for rank in range(RANKS + 1)]
    own = slice(edges[RANK], edges[RANK + 1])
    q = x[:, own]
    options: dict[str, Any] = {"causal": True, "sliding_window": (9, 0), "threads": 1}
    for given, local in ((bias, bias[:, :, own]), (bias[:, :, :1], bias[:, :, :1])):
        out, lse = annulus.ring_attention(
            q, q, q, bias=local, **options, comm=WORLD, return_lse=True
        )
        want, want_lse = annulus.flash_attention(x, x, x, bias=given, **options, return_lse=True)
        assert abs(out - want[:, own]).max() < 2e-6 and abs(lse - want_lse[:, :, own]).max() < 2e-6
    if RANKS > 1:
        try:
            annulus.ring_attention(*[x[:, :1]] * 3, bias=bias[:, :, :1, :RANKS], comm=WORLD)
        except annulus.InvalidArgument as error:
            assert error.argument == "bias" and "a Plan" in str(error), error
        else:
            raise AssertionError("one row may be a rank's own, or that of all")


def main() -> str:
    forked(before_use=True)
    found = folder()
    cases = [] if found is None else read(found)
    for index, case in enumerate(cases):
        golden(case, ("contiguous", "zigzag", "striped")[index % 3])
    sub_communicator()
    packed_documents()
    packed_documents_in_one_call()
    decoding()
    one_call(30)
    # some ranks have one row
    one_call(RANKS + 1)
    started()
    shared()
    forked()
    if RANKS > 1:
        refusals()
        late()
    return f": {len(cases)} golden cases"


if __name__ == "__main__":
    run_rank(main, WORLD)
