"""Attention for models of Hugging Face's transformers, as its ``AttentionInterface`` calls it.

Source: transformers 5, ``integrations/sdpa_attention.py`` (the arguments of an attention interface,
and what a mask means).
"""

from __future__ import annotations

import inspect
import sys
import warnings
from typing import Any

from .._errors import unsupported
from ._layer_mask import LayerMask, mask_options, with_sinks
from ._mask_pattern import is_sharded, mask_pattern
from ._parallel import collective, dropout_options, sharded_or_not

WITHOUT_EFFECT = frozenset(
    (
        "cache_position",
        "labels",
        "layer_idx",
        "logits_to_keep",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "return_dict",
        "token_type_ids",
        "use_cache",
    )
)
"""Arguments that models pass on to their attention, and that concern others: the cache of keys was
updated before, and a mask has what it needs of token types.
"""

OF_ATTENTION = frozenset(
    (
        "alibi",
        "attn_bias",
        "attn_mask",
        "bias",
        "block_indices",
        "block_mask",
        "block_table",
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "cu_seqlens",
        "head_mask",
        "k_cache",
        "layer_head_mask",
        "output_attentions",
        "score_mod",
        "v_cache",
    )
)
"""Arguments of other implementations that change what attention computes."""

_warned: set[type] = set()
"""Classes of models that compute their attention themselves, and were warned of."""


def register(name: str = "annulus") -> None:
    """Registers this package with transformers, for ``attn_implementation=name``.

    A class of models that does not call an attention interface runs its own ``eager`` attention
    under that name. It is warned of, once.
    """
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, mask_pattern)
    correct = PreTrainedModel.get_correct_attn_implementation
    names = getattr(correct, "annulus_names", None)
    if names is not None:
        names.add(name)
        return
    names = {name}
    set_implementation = PreTrainedModel.set_attn_implementation

    def get_correct_attn_implementation(
        self: Any, requested_attention: Any, *args: Any, **options: Any
    ) -> Any:
        if requested_attention in names and not _calls_interface(type(self)):
            requested_attention = "eager"
        return correct(self, requested_attention, *args, **options)

    def set_attn_implementation(
        self: Any, attn_implementation: Any, *args: Any, **options: Any
    ) -> None:
        if isinstance(attn_implementation, str) and attn_implementation in names:
            for module in self.modules():
                if isinstance(module, PreTrainedModel):
                    _calls_interface(type(module))
        set_implementation(self, attn_implementation, *args, **options)

    get_correct_attn_implementation.annulus_names = names  # type: ignore[attr-defined]
    PreTrainedModel.get_correct_attn_implementation = get_correct_attn_implementation
    PreTrainedModel.set_attn_implementation = set_attn_implementation


def _calls_interface(model: Any) -> bool:
    """Returns False for a class of transformers that calls no attention interface; warns once.

    transformers decides by the source of a class, which a program's own classes need not have.
    """
    is_known = model.__module__.startswith("transformers.")
    calls = not is_known or bool(model._can_set_attn_implementation())
    if not calls and model not in _warned:
        _warned.add(model)
        warnings.warn(
            f"{model.__name__} does not call the attention interface of transformers: it computes"
            " its attention itself, without annulus",
            stacklevel=3,
        )
    return calls


def _concerns_attention(module: Any, name: str) -> bool:
    """Returns True if an argument may change what attention computes.

    A model passes all keywords that it was given to its attention. Those of attention are
    parameters of its own ``eager`` function, or of other implementations.
    """
    if name in WITHOUT_EFFECT or name in OF_ATTENTION:
        return name in OF_ATTENTION
    model = sys.modules.get(type(module).__module__)
    eager = getattr(model, "eager_attention_forward", None)
    return eager is None or name in inspect.signature(eager).parameters


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
    position_bias: Any = None,
    indices: Any = None,
    sinks: Any = None,
    **others: Any,
) -> tuple[Any, None]:
    """Computes the attention of a layer; an attention interface of transformers.

    Inside ``context_parallel`` it is collective, and position_ids have to be the positions of this
    rank's rows (``shard.q_positions``), unless segment_ids are given there.

    Args:
        module: The layer. Its ``is_causal`` counts where neither a mask nor is_causal is given.
        query: ``[batch, q_heads, q_len, head_dim]``.
        key: ``[batch, kv_heads, kv_len, head_dim]``. Without a mask, and with more keys than
            queries, the queries are the last tokens.
        value: ``[batch, kv_heads, kv_len, value_dim]``.
        attention_mask: The whole mask, as for ``sdpa``: a ``MaskPattern``; bools, or floats that
            are added to the scores, of a shape that broadcasts to ``[batch, q_heads, q_len,
            kv_len]``, inside ``context_parallel`` this rank's queries × all keys. Or padding of the
            keys, ``[batch, kv_len]``, not zero for tokens, beside is_causal and sliding_window.
        scaling: Factor of the scores. Default: 1/√head_dim.
        dropout: Probability of dropout, see ``scaled_dot_product_attention``.
        sliding_window: Number of last tokens that a query attends to, itself included. A
            MaskPattern or a tensor of pairs has its own.
        softcap: Soft cap of the scores.
        s_aux: One sink for each query head.
        is_causal: Overrides that of the module. A MaskPattern or a tensor of pairs has its own.
        position_ids: ``[batch or 1, q_len]``, checked.
        position_bias: Floats that are added to the scores, of a shape as attention_mask.
        indices: ``[batch, q_len, n]`` keys that each query is limited to, beside its mask; negative
            ones are none.
        sinks: ``[batch, q_heads, q_len, 1]``, one sink for each query; beside a mask of pairs, and
            not over ranks.
        others: Refused, unless None, False, or without effect on attention, as those that the
            model's own ``eager`` attention ignores.

    Returns:
        out, ``[batch, q_len, q_heads, value_dim]``, and None for the attention weights. A query
        without a visible key has 0.
    """

    def check() -> None:
        for name, given in others.items():
            if given is not None and given is not False and _concerns_attention(module, name):
                raise unsupported(name, "this attention has no such argument")
        if sinks is not None and is_sharded():
            raise unsupported("sinks", "sinks of each query, over ranks")

    layer = LayerMask(
        module,
        query,
        key,
        attention_mask,
        is_causal,
        sliding_window,
        position_ids,
        position_bias,
        indices,
    )
    if sinks is not None and not is_sharded():
        layer, value = with_sinks(layer, value, sinks)
    out = sharded_or_not(
        query.transpose(1, 2),
        layer.key.transpose(1, 2),
        value.transpose(1, 2),
        softmax_scale=scaling,
        logits_soft_cap=softcap,
        softmax_aux=None if s_aux is None else s_aux.reshape(query.shape[1], 1),
        **mask_options(layer, check),
        **dropout_options("dropout", dropout),
    )
    return out, None
