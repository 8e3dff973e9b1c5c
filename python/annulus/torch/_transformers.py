"""Attention for models of Hugging Face's transformers, as its ``AttentionInterface`` calls it.

transformers describes the mask of a layer by a predicate, composed of known parts. ``mask_pattern``
reads the parts, so that no part of a mask is lost: one that it does not know is refused.

Source: transformers 5, ``masking_utils.py`` (the parts, and the arguments of a mask interface) and
``integrations/sdpa_attention.py`` (those of an attention interface).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .._errors import invalid, unsupported
from ._parallel import Sharding, active, collective, dropout_options, sharded_or_not

WITHOUT_EFFECT = frozenset(("cache_position", "past_key_values", "use_cache"))
"""Arguments that models pass on to their attention, and that concern others: the cache of keys was
updated before.
"""


@dataclass(frozen=True)
class MaskPattern:
    """The mask of a layer, which takes the place of a mask tensor.

    Attributes:
        causal, window, chunk: Conditions on positions. A window of w: the last w tokens.
        documents, positions: ``[batch, rows]`` ids of packed sequences that transformers found, and
            the positions in them; or None.
        padding: ``[batch, kv_len]``, true for tokens, or None.
    """

    causal: bool
    window: int | None = None
    chunk: int | None = None
    documents: Any = None
    positions: Any = None
    padding: Any = None


def register(name: str = "annulus") -> None:
    """Registers this package with transformers, for ``attn_implementation=name``."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, mask_pattern)


def mask_pattern(
    *,
    mask_function: Any,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    attention_mask: Any = None,
    **_: Any,
) -> MaskPattern:
    """Returns the mask of a layer; a mask interface of transformers.

    Arguments that say which tensor a mask interface may leave out have no effect: none is made.
    """
    if q_offset + q_length != kv_offset + kv_length:
        got = f"queries to {q_offset + q_length}, keys to {kv_offset + kv_length}"
        raise unsupported("past_key_values", f"{got}; want a cache without unused rows")
    padding = attention_mask
    if padding is not None:
        padding = padding[:, -kv_length:].bool()
        padding = None if bool(padding.all()) else padding
    found: dict[str, Any] = {"causal": False}
    for part in _parts(mask_function):
        name = part.__qualname__.partition(".")[0]
        if name == "causal_mask_function":
            found["causal"] = True
        elif name == "sliding_window_overlay":
            found["window"] = int(_captured(part, "sliding_window"))
        elif name == "chunked_overlay":
            found["chunk"] = int(_captured(part, "chunk_size"))
            if bool(_captured(part, "left_padding").any()):
                raise unsupported("attention_mask", "left padding of a chunked mask")
        elif name == "packed_sequence_mask_function":
            found["documents"] = _captured(part, "packed_sequence_mask")
        elif name == "remap_positions_for_packed_sequence":
            found["positions"] = _captured(part, "position_ids")
        elif name != "bidirectional_mask_function":
            raise unsupported("mask_function", f"{part.__qualname__} of the model's mask")
    if not found["causal"] and found.keys() & {"window", "chunk"}:
        raise unsupported("mask_function", "a window or chunk that is not causal")
    return MaskPattern(**found, padding=padding)


def _parts(function: Any) -> Iterator[Any]:
    """Yields the predicates of which all have to hold."""
    if function.__qualname__ == "and_masks.<locals>.and_mask":
        for part in _captured(function, "mask_functions"):
            yield from _parts(part)
        return
    yield function
    if function.__qualname__ == "remap_positions_for_packed_sequence.<locals>.inner_mask":
        yield from _parts(_captured(function, "mask_function"))


def _captured(function: Any, name: str) -> Any:
    names, cells = function.__code__.co_freevars, function.__closure__ or ()
    values = {free: cell.cell_contents for free, cell in zip(names, cells, strict=True)}
    if name not in values:
        raise unsupported("mask_function", f"{function.__qualname__} without {name}")
    return values[name]


@collective
def attention_forward(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Any = None,
    is_causal: bool | None = None,
    position_ids: Any = None,
    **others: Any,
) -> tuple[Any, None]:
    """Computes the attention of a layer; an attention interface of transformers.

    Inside ``context_parallel`` it is collective, and position_ids have to be the positions of this
    rank's rows (``shard.q_positions``), unless segment_ids are given there.

    Args:
        module: The layer. Its ``is_causal`` counts where neither a mask nor is_causal is given.
        query: ``[batch, q_heads, q_len, head_dim]``.
        key: ``[batch, kv_heads, kv_len, head_dim]``. With more keys than queries, a cache, the
            queries are the last tokens.
        value: ``[batch, kv_heads, kv_len, value_dim]``.
        attention_mask: A ``MaskPattern``; a tensor ``[batch, kv_len]``, not zero for tokens; or
            None. Masks of four axes are refused: ``register`` asks models for patterns.
        scaling: Factor of the scores. Default: 1/√head_dim.
        dropout: Probability of dropout, see ``scaled_dot_product_attention``.
        sliding_window: Number of last tokens that a query attends to, itself included.
        softcap: Soft cap of the scores.
        s_aux: One sink for each query head.
        is_causal: Overrides that of the module.
        position_ids: ``[batch or 1, q_len]``, checked.
        others: Refused, unless None, False or without effect on attention.

    Returns:
        out, ``[batch, q_len, q_heads, value_dim]``, and None for the attention weights.
    """
    for name, given in others.items():
        if given is not None and given is not False and name not in WITHOUT_EFFECT:
            raise unsupported(name, "this attention has no such argument")
    pattern = _pattern(module, attention_mask, is_causal, sliding_window)
    options = _of_pattern(pattern, query.shape[2], key.shape[2])
    knows_documents = attention_mask is pattern
    options |= _of_rows(pattern, query, key, position_ids, knows_documents=knows_documents)
    out = sharded_or_not(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        softmax_scale=scaling,
        logits_soft_cap=softcap,
        softmax_aux=None if s_aux is None else s_aux.reshape(query.shape[1], 1),
        **options,
        **dropout_options("dropout", dropout),
    )
    return out, None


def _pattern(module: Any, mask: Any, is_causal: Any, window: int | None) -> MaskPattern:
    """Returns the mask of a layer, of which a part may be said twice, but not differently."""
    if isinstance(mask, MaskPattern):
        if is_causal is not None and bool(is_causal) != mask.causal:
            raise invalid("is_causal", is_causal, f"{mask.causal}, as the mask")
        if window is not None and window != mask.window:
            raise invalid("sliding_window", window, f"{mask.window}, as the mask")
        return mask
    if mask is not None and mask.ndim != 2:
        why = f"a tensor of {mask.ndim} axes; annulus.torch.register makes models pass a pattern"
        raise unsupported("attention_mask", why)
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if window is not None and not causal:
        raise unsupported("sliding_window", "of attention that is not causal")
    kinds = getattr(getattr(module, "config", None), "layer_types", None)
    if kinds is not None and "chunk" in kinds[module.layer_idx]:
        raise unsupported("attention_mask", "a chunked layer without its mask; see register")
    return MaskPattern(causal, window, padding=None if mask is None else mask.bool())


def _of_pattern(pattern: MaskPattern, q_len: int, kv_len: int) -> dict[str, Any]:
    options: dict[str, Any] = {"causal": pattern.causal, "chunk_size": pattern.chunk}
    if pattern.window is not None:
        options["sliding_window"] = (pattern.window - 1, 0)
    if q_len != kv_len:
        options["alignment"] = "bottom_right"
    return options


def _of_rows(
    pattern: MaskPattern, query: Any, key: Any, position_ids: Any, *, knows_documents: bool
) -> dict[str, Any]:
    """Returns segment ids and positions, after a check of the positions.

    ``knows_documents`` is true of a pattern that transformers described.
    """
    sharding = active()
    batch, kv_len = query.shape[0], key.shape[2]
    documents = pattern.documents if sharding is None else sharding.segment_ids
    options: dict[str, Any] = {}
    if documents is not None or pattern.padding is not None:
        ids = torch.zeros(batch, kv_len, dtype=torch.int64)
        if documents is not None:
            ids = ids + torch.as_tensor(documents)
        if pattern.padding is not None:
            ids = ids.masked_fill(~pattern.padding, -1)
        options["kv_segment_ids"] = ids
        options["q_segment_ids"] = ids[:, -query.shape[2] :]
    if sharding is not None:
        positions = _sharded_positions(pattern, position_ids, sharding)
    else:
        positions = pattern.positions
        if position_ids is not None and not knows_documents:
            _check_consecutive(position_ids)
    if positions is not None:
        positions = positions.expand(batch, -1)
        options |= {"q_positions": positions, "kv_positions": positions}
    return options


def _check_consecutive(position_ids: Any) -> None:
    """Refuses positions that restart."""
    if bool((torch.diff(position_ids, dim=-1) != 1).any()):
        why = "packed sequences without their mask; annulus.torch.register passes it"
        raise unsupported("position_ids", why)


def _sharded_positions(pattern: MaskPattern, position_ids: Any, sharding: Sharding) -> Any:
    """Returns the positions that masks compare, or None for row numbers.

    Without segment ids, positions other than those of the rank's rows are refused.
    """
    if sharding.segment_ids is not None:
        return position_ids
    if position_ids is None:
        # a zigzag shard has a gap, which transformers takes for a new document
        if pattern.documents is not None:
            raise unsupported("position_ids", "packed documents without segment_ids")
        return None
    rows = torch.from_numpy(sharding.shard.q_positions)
    differs = position_ids != rows if len(rows) == position_ids.shape[-1] else torch.tensor(True)
    if pattern.padding is not None:
        differs = differs & pattern.padding
    if bool(differs.any()):
        want = "shard.q_positions, or segment_ids of context_parallel for packed documents"
        raise invalid("position_ids", "other positions than those of this rank's rows", want)
    return None
