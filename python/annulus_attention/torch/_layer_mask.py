"""The mask of a layer of Hugging Face's transformers as options of ``flash_attention``.

    MaskPattern   causal, window, chunk; segment ids of documents and padding; positions
    bools         attention_mask
    floats        bias

A padded key has the segment id −1, and queries never do: as with ``sdpa``, a padded query attends
to the tokens that its mask lets it attend to.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from .._agreement import gathered
from .._errors import invalid, unsupported
from ._mask_pattern import MaskPattern, is_sharded
from ._parallel import Sharding, active


@dataclass(frozen=True)
class LayerMask:
    """Mask and bias of one call of an attention interface."""

    module: Any
    query: Any
    key: Any
    mask: Any
    is_causal: bool | None
    sliding_window: int | None
    position_ids: Any
    position_bias: Any
    indices: Any

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Batch, query heads, queries of this rank, and keys of all ranks."""
        sharding = active()
        kv_len = self.key.shape[2] if sharding is None else sharding.shard.kv_len
        return self.query.shape[0], self.query.shape[1], self.query.shape[2], kv_len

    def pattern(self) -> MaskPattern | None:
        """Returns the pattern of the mask, or None for a tensor of pairs."""
        mask, window = self.mask, self.sliding_window
        if isinstance(mask, MaskPattern):
            if mask.refusal is not None:
                if not is_sharded():
                    return None
                raise mask.refusal
            if mask.arguments is None:
                self._check_repeated(mask)
            return mask
        if mask is not None and mask.ndim != 2:
            return None
        module = self.module
        is_causal = getattr(module, "is_causal", True) if self.is_causal is None else self.is_causal
        if window is not None and not is_causal:
            raise unsupported("sliding_window", "of attention that is not causal")
        kinds = getattr(getattr(module, "config", None), "layer_types", None)
        layer = getattr(module, "layer_idx", None)
        if kinds is not None and layer is not None and "chunk" in kinds[layer]:
            raise unsupported("attention_mask", "a chunked layer without its mask; see register")
        if mask is None and is_causal:
            _check_consecutive(self.position_ids)
        return MaskPattern(bool(is_causal), window, padding=None if mask is None else mask.bool())

    def _check_repeated(self, mask: MaskPattern) -> None:
        """Refuses arguments that repeat a part of a program's own pattern differently. The masks of
        transformers are whole, and its models pass such arguments for other implementations.
        """
        if self.is_causal not in (None, mask.causal):
            raise invalid("is_causal", self.is_causal, f"{mask.causal}, as the mask")
        if self.sliding_window not in (None, mask.window):
            raise invalid("sliding_window", self.sliding_window, f"{mask.window}, as the mask")

    def options(self, pattern: MaskPattern | None, left_padding: Any) -> dict[str, Any]:
        """Returns the options of the mask.

        ``left_padding``, ``[batch]``, has the rows before the first token, from which chunks count.
        """
        options: dict[str, Any] = {}
        biases = []
        if pattern is None:
            mask = self.mask
            mask = mask.pairs(self.shape[0]) if isinstance(mask, MaskPattern) else mask
            mask = self._broadcast("attention_mask", mask)
            if mask.dtype == torch.bool:
                options["attention_mask"] = mask
            else:
                biases.append(mask)
        else:
            self._check_lengths(pattern)
            options["causal"] = pattern.causal
            options["chunk_size"] = pattern.chunk
            if pattern.window is not None:
                options["sliding_window"] = (pattern.window - 1, 0)
            elif pattern.distance is not None:
                options["sliding_window"] = (pattern.distance, pattern.distance)
            options |= self._segment_ids(pattern)
            options |= self._positions(pattern, left_padding)
        if self.position_bias is not None:
            biases.append(self._broadcast("position_bias", self.position_bias))
        if self.indices is not None:
            selected = self._selected()
            known = options.get("attention_mask")
            options["attention_mask"] = selected if known is None else known & selected
        if biases:
            options["bias"] = sum(biases[1:], biases[0])
        return options

    def _selected(self) -> Any:
        """Returns the pairs of ``indices``."""
        if is_sharded():
            raise unsupported("indices", "they count the keys of one rank")
        batch, _, q_len, kv_len = self.shape
        if self.indices.ndim != 3 or self.indices.shape[:2] != (batch, q_len):
            got = f"shape {tuple(self.indices.shape)}"
            raise invalid("indices", got, f"[{batch}, {q_len}, n]")
        indices = self.indices.long()
        # negative indices select a key after the last, which is left out
        selected = indices.new_zeros((batch, q_len, kv_len + 1), dtype=torch.bool)
        selected.scatter_(-1, torch.where(indices < 0, kv_len, indices), True)
        return selected[:, None, :, :kv_len]

    def _broadcast(self, name: str, given: Any) -> Any:
        """Returns a tensor of pairs with all queries and keys."""
        shape = self.shape
        fits = given.ndim == 4 and all(
            got in (1, want) for got, want in zip(given.shape, shape, strict=True)
        )
        if not fits:
            raise invalid(name, f"shape {tuple(given.shape)}", f"one that fits {shape}")
        if given.dtype != torch.bool and not given.is_floating_point():
            raise invalid(name, f"elements {given.dtype}", "bools or floats")
        if name == "position_bias" and given.dtype == torch.bool:
            raise invalid(name, f"elements {given.dtype}", "floats")
        return given.expand(*given.shape[:2], *shape[2:])

    def _check_lengths(self, pattern: MaskPattern) -> None:
        """Refuses a pattern of other lengths than those of the tensors, where they matter."""
        q_len, kv_len = self.query.shape[2], self.key.shape[2]
        want = f"{q_len} queries and {kv_len} keys, as query and key"
        got = f"a mask of {pattern.q_length} queries and {pattern.kv_length} keys"
        if pattern.compares_positions and pattern.q_length is not None:
            if (pattern.q_length, pattern.kv_length) != (q_len, kv_len):
                raise invalid("attention_mask", got, want)
        batch = self.query.shape[0]
        for name, rows in (
            ("padding", pattern.padding),
            ("documents", pattern.documents),
            ("positions", pattern.positions),
        ):
            if rows is None:
                continue
            if rows.shape[-1] != kv_len or rows.shape[0] not in (1, batch):
                raise invalid("attention_mask", f"{name} of shape {tuple(rows.shape)}", want)
            if name != "padding" and q_len != kv_len:
                raise invalid("attention_mask", f"{got}, of packed documents", want)

    def _segment_ids(self, pattern: MaskPattern) -> dict[str, Any]:
        """Returns segment ids of documents and of padding."""
        sharding = active()
        documents = pattern.documents if sharding is None else sharding.segment_ids
        if documents is None and pattern.padding is None:
            return {}
        batch, q_len, kv_len = self.query.shape[0], self.query.shape[2], self.key.shape[2]
        if documents is None:
            q_ids = torch.zeros(batch, q_len, dtype=torch.int64)
            kv_ids = torch.zeros(batch, kv_len, dtype=torch.int64)
        else:
            q_ids = kv_ids = torch.as_tensor(documents).expand(batch, -1)
        if pattern.padding is not None:
            kv_ids = kv_ids.to(pattern.padding.device).masked_fill(~pattern.padding, -1)
        return {"q_segment_ids": q_ids, "kv_segment_ids": kv_ids}

    def _positions(self, pattern: MaskPattern, left_padding: Any) -> dict[str, Any]:
        """Returns the coordinates that the mask compares."""
        q_len, kv_len = self.query.shape[2], self.key.shape[2]
        sharding = active()
        if sharding is not None:
            positions = self._sharded_positions(pattern, sharding)
            if left_padding is not None and positions is None:
                positions = torch.from_numpy(sharding.shard.q_positions)[None]
            return self.explicit(positions, positions, left_padding)
        if pattern.positions is not None:
            return self.explicit(pattern.positions, pattern.positions, left_padding)
        if not pattern.compares_positions:
            return {}
        if pattern.q_length is None:
            if kv_len < q_len:
                got = f"{kv_len} keys for {q_len} queries without a mask"
                raise invalid("key", got, "at least as many keys as queries, or a mask")
            shift = kv_len - q_len
        else:
            shift = pattern.q_offset - pattern.kv_offset
        counts_from_start = pattern.chunk is not None and (
            pattern.kv_offset != 0 or left_padding is not None
        )
        if not counts_from_start and shift == 0:
            return {}
        if not counts_from_start and shift == kv_len - q_len:
            return {"alignment": "bottom_right"}
        return self.explicit(
            torch.arange(q_len)[None] + pattern.q_offset,
            torch.arange(kv_len)[None] + pattern.kv_offset,
            left_padding,
        )

    def explicit(self, q_positions: Any, kv_positions: Any, left_padding: Any) -> dict[str, Any]:
        """Returns positions as options, counted from the first token."""
        if q_positions is None:
            return {}
        options = {"q_positions": q_positions, "kv_positions": kv_positions}
        if left_padding is not None:
            shift = torch.as_tensor(left_padding)[:, None]
            options = {name: rows.to(shift.device) - shift for name, rows in options.items()}
        return {name: rows.expand(self.query.shape[0], -1) for name, rows in options.items()}

    def _sharded_positions(self, pattern: MaskPattern, sharding: Sharding) -> Any:
        """Returns the positions that masks compare, or None for row numbers.

        Without segment ids, positions other than those of the rank's rows are refused.
        """
        given = pattern.positions if self.position_ids is None else self.position_ids
        if sharding.segment_ids is not None:
            return given
        if given is None:
            # a zigzag shard has a gap, which transformers takes for a new document
            if pattern.documents is not None:
                raise unsupported("position_ids", "packed documents without segment_ids")
            return None
        rows = torch.from_numpy(sharding.shard.q_positions).to(given.device)
        differs = given != rows if len(rows) == given.shape[-1] else torch.tensor(True)
        if pattern.padding is not None:
            differs = differs & pattern.padding
        if bool(differs.any()):
            want = "shard.q_positions, or segment_ids of context_parallel for packed documents"
            raise invalid("position_ids", "other positions than those of this rank's rows", want)
        return None


def with_sinks(layer: LayerMask, value: Any, sinks: Any) -> tuple[LayerMask, Any]:
    """Returns a layer and its values with one more key, of the scores ``sinks`` and the value 0."""
    batch, heads, q_len, kv_len = layer.shape
    if tuple(sinks.shape) != (batch, heads, q_len, 1):
        raise invalid("sinks", f"shape {tuple(sinks.shape)}", f"({batch}, {heads}, {q_len}, 1)")
    mask = layer.mask.pairs(batch) if isinstance(layer.mask, MaskPattern) else layer.mask
    if mask is None or mask.ndim != 4:
        raise unsupported("sinks", "sinks of each query, without a mask of pairs")
    bias = torch.zeros((), dtype=sinks.dtype, device=sinks.device)
    if layer.position_bias is not None:
        bias = layer.position_bias
    row = (0, 0, 0, 1)
    longer = replace(
        layer,
        key=F.pad(layer.key, row),
        mask=F.pad(mask, (0, 1), value=float(mask.dtype == torch.bool)),
        position_bias=torch.cat([bias.expand(batch, heads, q_len, kv_len), sinks], -1),
    )
    return longer, F.pad(value, row)


def mask_options(layer: LayerMask, check: Any) -> dict[str, Any]:
    """Returns the options of a layer's mask, after ``check``. Inside ``context_parallel`` all ranks
    raise if one does.
    """
    sharding = active()
    if sharding is not None:
        options: dict[str, Any] = _agreed_options(layer, check, sharding)
        return options
    check()
    pattern = layer.pattern()
    return layer.options(pattern, None if pattern is None else pattern.left_padding)


@torch.compiler.disable
def _agreed_options(layer: LayerMask, check: Any, sharding: Sharding) -> dict[str, Any]:
    own: list[dict[str, Any]] = []

    def work() -> tuple[Any, bool]:
        check()
        pattern = layer.pattern()
        if pattern is not None and pattern.q_offset != 0:
            raise unsupported("past_key_values", "a cache of keys inside context_parallel")
        rows = len(sharding.shard.q_rows)
        for name, tensor in (("query", layer.query), ("key", layer.key)):
            if tensor.shape[2] != rows:
                raise invalid(name, f"{tensor.shape[2]} rows", f"{rows}, those of the shard")
        first = None
        if pattern is not None and pattern.chunk is not None and sharding.segment_ids is None:
            first = _first_tokens(pattern, layer.query.shape[0], sharding)
        own.append(layer.options(pattern, None))
        return first, "kv_segment_ids" in own[0]

    comm, deadline = (sharding.options[name] for name in ("comm", "deadline"))
    told = gathered(comm, "attention of transformers", work, deadline)
    options = own[0]
    if any(has_ids for _, has_ids in told) and "kv_segment_ids" not in options:
        # padding is on other ranks
        ids = torch.zeros(layer.query.shape[0], layer.query.shape[2], dtype=torch.int64)
        options |= {"q_segment_ids": ids, "kv_segment_ids": ids}
    firsts = [first for first, _ in told if first is not None]
    if firsts and (left_padding := np.min(firsts, axis=0)).any():
        # transformers has counted the padding of this rank's rows
        positions = torch.from_numpy(sharding.shard.q_positions)[None]
        options |= layer.explicit(positions, positions, left_padding)
    return options


def _first_tokens(pattern: MaskPattern, batch: int, sharding: Sharding) -> Any:
    """Returns the row numbers of this rank's first tokens, ``[batch]``: the sequence's length if it
    has none.
    """
    rows = np.broadcast_to(sharding.shard.q_rows, (batch, len(sharding.shard.q_rows)))
    if pattern.padding is not None:
        rows = np.where(pattern.padding.cpu().numpy(), rows, sharding.shard.kv_len)
    return rows.min(axis=1, initial=sharding.shard.kv_len)


def _check_consecutive(position_ids: Any) -> None:
    """Refuses positions that restart."""
    if position_ids is not None and bool((torch.diff(position_ids, dim=-1) != 1).any()):
        why = "packed sequences without their mask; annulus_attention.torch.register passes it"
        raise unsupported("position_ids", why)
