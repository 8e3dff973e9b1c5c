"""``scaled_dot_product_attention`` in the layout of torch, and models whose attention is sharded by
the sequence.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch.autograd.function import BackwardCFunction
from torch.nn.attention.bias import CausalBias, CausalVariant
from torch.overrides import TorchFunctionMode

from .._agreement import channel_of, check_communicator, one_call
from .._attention import Shard
from .._check import Documents, Machine
from .._errors import invalid, unsupported
from ._calls import attend, bound, check_plain, flash_attention, four_axes

OWN = __name__.partition(".")[0] + "."

UNSHARDED = frozenset(
    (
        "_native_multi_head_attention",
        "_transformer_encoder_layer_fwd",
        "flex_attention",
    )
)
"""Functions of torch with an attention inside that nothing can shard."""


@dataclass(frozen=True, eq=False)
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
    the context, and what it recomputes, as activation checkpointing does, is sharded too.

    Collective: all ranks run the same model, and if one raises in the context, all do. Each rank
    has its own part of the gradient of a parameter; the program sums them. Attention of torch that
    is computed otherwise (``flex_attention``, attention weights of ``nn.MultiheadAttention``) is
    refused. So are other implementations of transformers, and a context without any call of
    attention.

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
    channel_of(comm).enter(deadline)
    try:
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
        with _resumed(sharding), _other_implementations_refused():
            yield
        if not sharding.calls:
            why = "no attention in the context was called through torch or this package"
            raise unsupported("context_parallel", why)
    except BaseException as error:
        channel_of(comm).abandon(error)
        raise
    channel_of(comm).leave(deadline)


@contextmanager
def _resumed(sharding: Sharding) -> Iterator[None]:
    """Shards the attention of this thread, in a context or in what is recomputed of it."""
    token = _active.set(sharding)
    try:
        with _Intercept(), _recomputation_carried():
            yield
    finally:
        _active.reset(token)


@contextmanager
def _recomputation_carried() -> Iterator[None]:
    """Lets a backward pass recompute with the sharding of its forward pass, also after the context.

    Activation checkpointing recomputes in the backward method of an ``autograd.Function``, or in
    the unpack hook of saved tensors. The intercepting mode is off there.
    """
    hooks = torch.autograd.graph.saved_tensors_hooks
    make_hooks = hooks.__init__

    def make_carrying_hooks(self: Any, pack: Any, unpack: Any) -> None:
        make_hooks(self, pack, _carrying(active(), unpack))

    def make_carrying_node(node: Any, *_: Any) -> None:
        sharding, own = active(), weakref.ref(node)
        # those of compilers and this package recompute no attention
        if sharding is None or node._forward_cls.__module__.startswith((OWN, "torch._")):
            return
        for name in ("apply", "apply_boxed"):
            if hasattr(node, name):
                setattr(node, name, _carrying(sharding, partial(_backward_of, own, name)))

    with (
        mock.patch.object(hooks, "__init__", make_carrying_hooks),
        mock.patch.object(BackwardCFunction, "__init__", make_carrying_node),
    ):
        yield


def _backward_of(own: Any, name: str, *gradients: Any) -> Any:
    """Runs the backward method of a node of autograd's graph."""
    node = own()
    return getattr(type(node), name)(node, *gradients)


def _carrying(sharding: Sharding | None, function: Any) -> Any:
    """Returns a function that runs with a sharding."""
    if sharding is None:
        return function

    def run(*args: Any, **kwargs: Any) -> Any:
        with _resumed(sharding):
            return function(*args, **kwargs)

    return run


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
        raise unsupported("attn_implementation", "want that of annulus_attention.torch.register")

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


def collective(function: Any) -> Any:
    """Lets the other ranks of a sharded call raise an error if this rank refuses its arguments."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        sharding = active()
        if sharding is None:
            return function(*args, **kwargs)
        with one_call(sharding.options["comm"]):
            return function(*args, **kwargs)

    return call


@collective
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

    Inside ``context_parallel`` it is collective. Inside autocast, query, key, value and a float
    mask are cast as torch does.

    Args:
        query: ``[batch, q_heads, q_len, head_dim]``. All axes before the last two broadcast, and
            there may be fewer or more of them, as in torch.
        key: ``[batch, kv_heads, kv_len, head_dim]``.
        value: ``[batch, kv_heads, kv_len, value_dim]``.
        attn_mask: Bools, visible where true, or floats, which are added to the scores and have a
            gradient; broadcast to ``[batch, q_heads, q_len, kv_len]``. Inside ``context_parallel``
            this rank's queries × all keys, in the order of the whole sequence. Or a ``CausalBias``
            of ``torch.nn.attention.bias``, there of the whole sequence.
        dropout_p: Probability of dropout. The seed comes from torch's generator; over ranks, from
            that of rank 0.
        is_causal: Key j is visible to query i if j ≤ i. Not with attn_mask.
        scale: Factor of the scores. Default: 1/√head_dim.
        enable_gqa: Permits fewer heads of key and value than of query.

    Returns:
        out, ``[batch, q_heads, q_len, value_dim]``. A query without a visible key has 0.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, torch.Tensor):
            raise invalid(name, f"a {type(tensor).__name__}", "a torch tensor")
        check_plain(name, tensor)
        if tensor.ndim < 2:
            raise invalid(name, f"{tensor.ndim} axes", "at least 2: [..., seq, dim]")
    for name, given in (("is_causal", is_causal), ("enable_gqa", enable_gqa)):
        if given is not True and given is not False:
            raise invalid(name, repr(given), "True or False")
    if attn_mask is not None and is_causal:
        raise invalid("is_causal", True, "False, since attn_mask is given")
    options = {"softmax_scale": scale, **dropout_options("dropout_p", dropout_p)}
    if isinstance(attn_mask, CausalBias):
        options |= _causal_bias(query, key, attn_mask)
        attn_mask = None
    elif is_causal:
        options["causal"] = True
    kv_len = _whole_lengths(query, key)[1]
    query, key, value, mask, axes = four_axes(
        query, key, value, attn_mask, kv_len, enable_gqa=enable_gqa
    )
    if mask is not None:
        name = "attention_mask" if mask.dtype == torch.bool else "bias"
        options[name] = mask
    out = sharded_or_not(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), **options
    )
    out = out.transpose(1, 2)
    return out if len(axes) == 2 else out.reshape(*axes, *out.shape[2:])


def _whole_lengths(query: Any, key: Any) -> tuple[int, int]:
    """Returns the lengths of the sequences that ``attn_mask`` and ``CausalBias`` are about."""
    sharding = active()
    if sharding is None:
        return query.shape[-2], key.shape[-2]
    return sharding.shard.q_len, sharding.shard.kv_len


def _causal_bias(query: Any, key: Any, bias: Any) -> dict[str, Any]:
    """Returns the options of a ``CausalBias``."""
    lengths = _whole_lengths(query, key)
    if (bias.seq_len_q, bias.seq_len_kv) != lengths:
        got = f"a CausalBias of lengths {(bias.seq_len_q, bias.seq_len_kv)}"
        raise invalid("attn_mask", got, f"one of {lengths}")
    is_lower_right = bias.variant == CausalVariant.LOWER_RIGHT
    return {"causal": True, "alignment": "bottom_right" if is_lower_right else "top_left"}


def sharded_or_not(query: Any, key: Any, value: Any, **options: Any) -> Any:
    """Computes ``ring_attention`` inside ``context_parallel``, else ``flash_attention``.

    Inside autocast, tensors are cast as for torch's attention. A dropout_prob of 1 drops all pairs.
    """
    query, key, value, bias = _autocast(query, key, value, options.get("bias"))
    if bias is not None:
        options["bias"] = bias
    drops_all = options.get("dropout_prob") == 1
    sharding = active()
    if sharding is None:
        if drops_all or 0 in (query.shape[0], query.shape[2], value.shape[3]):
            return _zeros(query, key, value, bias)
        return flash_attention(query, key, value, **options)
    sharding.calls.append(None)
    rows = len(sharding.shard.q_rows)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.shape[1] != rows:
            raise invalid(name, f"{tensor.shape[1]} rows", f"{rows}, those of the shard")
    if sharding.segment_ids is not None and "q_segment_ids" not in options:
        options["q_segment_ids"] = sharding.segment_ids
    if drops_all:
        options |= {"dropout_prob": 0.0, "dropout_seed": None}
    given = bound("ring_attention", (query, key, value), {**options, **sharding.options})
    out = attend(given, draws_seed=True)
    return out * 0 if drops_all else out


def _zeros(query: Any, key: Any, value: Any, bias: Any) -> Any:
    """Returns an output of zeros, whose gradients are zeros."""
    given = [tensor for tensor in (query, key, value, bias) if tensor is not None]
    zero = sum(tensor.flatten()[:0].sum().to(query.dtype) for tensor in given)
    return query.new_zeros((*query.shape[:3], value.shape[3])) + zero


def _autocast(query: Any, *others: Any) -> tuple[Any, ...]:
    """Returns tensors in the type in which torch's attention has them inside autocast."""
    kind, tensors = query.device.type, (query, *others)
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(
        tensor.to(dtype)
        if tensor is not None
        and tensor.device.type == kind
        and tensor.is_floating_point()
        and tensor.dtype != torch.float64
        else tensor
        for tensor in tensors
    )


def dropout_options(name: str, probability: float) -> dict[str, Any]:
    """Returns the options of dropout, with a seed of torch's generator: over ranks, each its own,
    of which ``sharded_or_not`` uses that of rank 0.
    """
    is_number = isinstance(probability, (int, float)) and not isinstance(probability, bool)
    if not is_number or not 0 <= probability <= 1:
        raise invalid(name, repr(probability), "a probability, from 0 to 1")
    if probability == 0:
        return {}
    seed = torch.randint(2**63 - 1, (), dtype=torch.int64)
    return {"dropout_prob": probability, "dropout_seed": seed}
