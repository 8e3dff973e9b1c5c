"""``scaled_dot_product_attention`` in the layout of torch, and models whose attention is sharded by
the sequence.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from .._attention import Documents, Machine, Shard
from .._endpoint import check_communicator
from .._errors import invalid, unsupported
from ._calls import flash_attention, ring_attention

OWN = __name__.partition(".")[0] + "."

UNSHARDED = frozenset(
    (
        "_native_multi_head_attention",
        "_transformer_encoder_layer_fwd",
        "flex_attention",
    )
)
"""Functions of torch with an attention inside that nothing can shard."""


@dataclass(frozen=True)
class Sharding:
    """Arguments of ``context_parallel``."""

    shard: Shard
    segment_ids: Any
    options: dict[str, Any]
    """Options of ``ring_attention``: comm, layout and others."""
    calls: list[None] = field(default_factory=list)
    """One element for each call of attention."""


_active: ContextVar[Sharding | None] = ContextVar("annulus sharding", default=None)


def active() -> Sharding | None:
    """Returns the sharding of the innermost ``context_parallel``."""
    return _active.get()


@contextmanager
def context_parallel(
    shard: Shard,
    comm: Any,
    *,
    segment_ids: Any = None,
    route: str | None = None,
    strategy: str = "ring",
    machine: Machine | None = None,
    documents: Documents | None = None,
    kv_block_size: int | None = None,
    receive_ahead: int | None = None,
    threads: int | None = None,
    backend: str | None = None,
    device: int | None = None,
    stream: int | None = None,
    deadline: float | None = None,
    fused_backward: bool | None = None,
) -> Iterator[None]:
    """Shards the attention of models by the sequence, over the ranks of a communicator.

    Inside, ``torch.nn.functional.scaled_dot_product_attention``, ``attention_forward`` and
    ``annulus.torch.scaled_dot_product_attention`` are collective: each rank passes the rows
    ``shard.q_rows``, and attends to the keys of all ranks. Every other operation stays local, so a
    model is given the token ids and the positions of these rows. The backward pass may run after
    the context.

    Collective: all ranks run the same model. Attention of torch that is computed otherwise
    (``flex_attention``, attention weights of ``nn.MultiheadAttention``) is refused. So are other
    implementations of transformers, and a context without any call of attention.

    Args:
        shard: Rows of this rank: ``Attention.shard``. Queries and keys have the same rows.
        comm: An mpi4py communicator of ``shard.ranks`` ranks.
        segment_ids: ``[batch, rows]`` of this rank's rows, integers that fit 32 bits: packed
            documents. A token attends to tokens of equal ids only, and to none if its id is
            negative.
        route, strategy, machine, documents, kv_block_size, receive_ahead, threads, backend, device,
            stream, deadline, fused_backward: As for ``ring_attention``. Default of route: that of
            the shard. Default of documents, with the strategy ``auto``: those of the shard.
    """
    check_communicator(comm)
    if (shard.rank, shard.ranks) != (comm.rank, comm.size):
        got = f"the rows of rank {shard.rank} of {shard.ranks}"
        raise invalid("shard", got, f"those of rank {comm.rank} of {comm.size}, as comm")
    if not np.array_equal(shard.q_rows, shard.kv_rows):
        raise invalid("shard", "other rows of keys than of queries", "the same rows")
    if documents is None and strategy == "auto":
        documents = shard.documents
    options = {
        "comm": comm,
        "layout": shard.layout,
        "route": shard.route if route is None else route,
        "strategy": strategy,
        "machine": machine,
        "documents": documents,
        "kv_block_size": kv_block_size,
        "receive_ahead": receive_ahead,
        "threads": threads,
        "backend": backend,
        "device": device,
        "stream": stream,
        "deadline": deadline,
        "fused_backward": fused_backward,
    }
    sharding = Sharding(shard, segment_ids, options)
    token = _active.set(sharding)
    try:
        with _Intercept(), _other_implementations_refused():
            yield
    finally:
        _active.reset(token)
    if not sharding.calls:
        why = "no attention in the context was called through torch or this package"
        raise unsupported("context_parallel", why)


@contextmanager
def _other_implementations_refused() -> Iterator[None]:
    """Refuses what transformers registers itself: some of it drops the window of a short sequence,
    and some stays on this rank.
    """
    transformers = sys.modules.get("transformers")
    if transformers is None:
        yield
        return
    registered = transformers.AttentionInterface._global_mapping

    def refuse(*_: Any, **__: Any) -> Any:
        raise unsupported("attn_implementation", "want that of annulus.torch.register")

    others = [
        name for name, function in registered.items() if not function.__module__.startswith(OWN)
    ]
    # models bring this one themselves, where none is registered
    others.append("eager")
    with mock.patch.dict(registered, dict.fromkeys(others, refuse)):
        yield


class _Intercept(TorchFunctionMode):
    """Routes the attention of torch to this package, however a model has imported it."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention:
            return scaled_dot_product_attention(*args, **kwargs)
        name = getattr(function, "__name__", "")
        if name in UNSHARDED:
            raise unsupported(name, "its attention would stay on this rank")
        if name == "multi_head_attention_forward":
            if kwargs.get("need_weights", True):
                raise unsupported("need_weights", "the weights of all ranks do not exist")
            # the mode is off in here, and the function looks up its attention by name
            ours = scaled_dot_product_attention
            with mock.patch.object(F, "scaled_dot_product_attention", ours):
                return function(*args, **kwargs)
        return function(*args, **kwargs)


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Computes ``torch.nn.functional.scaled_dot_product_attention``, with gradients.

    Inside ``context_parallel`` it is collective.

    Args:
        query: ``[batch, q_heads, q_len, head_dim]``.
        key: ``[batch, kv_heads, kv_len, head_dim]``.
        value: ``[batch, kv_heads, kv_len, value_dim]``.
        attn_mask: Bools, visible where true, or floats, which are added to the scores and have a
            gradient; broadcast to ``[batch, q_heads, q_len, kv_len]``. Inside ``context_parallel``
            this rank's queries × all keys, in the order of the whole sequence.
        dropout_p: Probability of dropout, below 1. The seed comes from torch's generator; over
            ranks, from that of rank 0.
        is_causal: Key j is visible to query i if j ≤ i. Not with attn_mask.
        scale: Factor of the scores. Default: 1/√head_dim.
        enable_gqa: Permits fewer heads of key and value than of query.

    Returns:
        out, ``[batch, q_heads, q_len, value_dim]``. A query without a visible key has 0.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.ndim != 4:
            raise unsupported(name, f"{tensor.ndim} axes; want [batch, heads, seq, dim]")
    for name, given in (("is_causal", is_causal), ("enable_gqa", enable_gqa)):
        if given is not True and given is not False:
            raise invalid(name, repr(given), "True or False")
    if not enable_gqa and key.shape[1] != query.shape[1]:
        got = f"False, with {key.shape[1]} heads of key and {query.shape[1]} of query"
        raise invalid("enable_gqa", got, "True, or as many heads")
    if attn_mask is not None and is_causal:
        raise invalid("is_causal", True, "False, since attn_mask is given")
    options = {
        "causal": is_causal,
        "softmax_scale": scale,
        **dropout_options("dropout_p", dropout_p),
    }
    if attn_mask is not None:
        options |= _mask(query, key, attn_mask)
    out = sharded_or_not(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), **options
    )
    return out.transpose(1, 2)


def sharded_or_not(query: Any, key: Any, value: Any, **options: Any) -> Any:
    """Computes ``ring_attention`` inside ``context_parallel``, else ``flash_attention``."""
    sharding = active()
    if sharding is None:
        return flash_attention(query, key, value, **options)
    sharding.calls.append(None)
    rows = len(sharding.shard.q_rows)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.shape[1] != rows:
            raise invalid(name, f"{tensor.shape[1]} rows", f"{rows}, those of the shard")
    if sharding.segment_ids is not None and "q_segment_ids" not in options:
        options["q_segment_ids"] = sharding.segment_ids
    return ring_attention(query, key, value, **options, **sharding.options)


def dropout_options(name: str, probability: float) -> dict[str, Any]:
    """Returns the options of dropout, with a seed of torch's generator."""
    if not 0 <= probability < 1:
        raise invalid(name, probability, "at least 0, and below 1")
    if probability == 0:
        return {}
    seed = torch.randint(2**63 - 1, (), dtype=torch.int64)
    sharding = active()
    if sharding is not None:
        # outside of attention the ranks may draw other numbers
        seed = torch.tensor(sharding.options["comm"].bcast(seed.item()))
    return {"dropout_prob": probability, "dropout_seed": seed}


def _mask(query: Any, key: Any, attn_mask: Any) -> dict[str, Any]:
    """Returns attn_mask as attention_mask or bias of ``ring_attention``."""
    sharding = active()
    kv_len = key.shape[2] if sharding is None else sharding.shard.kv_len
    shape = (query.shape[0], query.shape[1], query.shape[2], kv_len)
    fits = attn_mask.ndim <= 4 and all(
        got in (1, want) for got, want in zip(attn_mask.shape[::-1], shape[::-1], strict=False)
    )
    if not fits:
        raise invalid("attn_mask", f"shape {tuple(attn_mask.shape)}", f"one that fits {shape}")
    mask = attn_mask[(None,) * (4 - attn_mask.ndim)]
    if mask.dtype == torch.bool:
        return {"attention_mask": mask.expand(*mask.shape[:2], *shape[2:])}
    if not mask.dtype.is_floating_point:
        raise invalid("attn_mask", f"elements {mask.dtype}", "bools or floats")
    return {"bias": mask}
