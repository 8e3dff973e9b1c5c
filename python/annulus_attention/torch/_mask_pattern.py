"""Masks of models of Hugging Face's transformers, as patterns without a tensor of all pairs.

transformers describes the mask of a layer by a predicate, composed of known parts. ``mask_pattern``
reads the parts, so that no part of a mask is lost. A mask with a part that is no pattern here is
evaluated to the tensor that ``sdpa`` would be given.

Source: transformers 5, ``masking_utils.py`` (the parts, and the arguments of a mask interface).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map

from .._errors import Unsupported, unsupported
from ._parallel import active

ADDITIONS = frozenset(("add", "add_", "__add__", "__radd__", "__iadd__"))
"""Functions that add a mask to scores: they take 0 where it is true, and the lowest number else."""


@dataclass(frozen=True, eq=False)
class MaskPattern:
    """The mask of a layer, which takes the place of a mask tensor.

    A model that reads elements of its mask reads those of ``tensor``.

    Attributes:
        causal, window, distance, chunk: Conditions on positions. A window of w: the last w tokens.
            A distance of d: up to d tokens on either side.
        documents, positions: ``[batch, rows]`` ids of packed sequences that transformers found, and
            the positions in them; or None.
        padding: ``[batch, kv_len]``, true for tokens, or None. It masks keys only.
        left_padding: ``[batch]`` rows of padding before the first token, from which chunks count;
            or None.
        q_length, kv_length: Lengths of the tensors that the mask is for, or None.
        q_offset, kv_offset: Row numbers of the first query and of the first key: those of a cache.
        refusal: The part that is no pattern, as an error; or None. Attention reads ``tensor`` then,
            and on several ranks raises.
        arguments: Those of a mask interface, or None.
    """

    causal: bool
    window: int | None = None
    chunk: int | None = None
    documents: Any = None
    positions: Any = None
    padding: Any = None
    distance: int | None = None
    left_padding: Any = None
    q_length: int | None = None
    kv_length: int | None = None
    q_offset: int = 0
    kv_offset: int = 0
    refusal: Unsupported | None = field(default=None, repr=False)
    arguments: dict[str, Any] | None = field(default=None, repr=False)

    @property
    def compares_positions(self) -> bool:
        """True if the mask has a condition on positions."""
        return self.causal or any(
            given is not None for given in (self.window, self.distance, self.chunk)
        )

    @cached_property
    def tensor(self) -> Any:
        """The mask as bools ``[batch, 1, q_len, kv_len]``, true where visible."""
        if self.arguments is None:
            raise unsupported("attention_mask", "elements of a MaskPattern without arguments")
        if is_sharded():
            why = "the model reads elements of its mask, which has the rows of all ranks"
            raise unsupported("attention_mask", why)
        return _tensor({"batch_size": 1, **self.arguments})

    def pairs(self, batch: int) -> Any:
        """Returns ``tensor``, of a batch whose size transformers did not say if need be."""
        if self.arguments is None or "batch_size" in self.arguments:
            return self.tensor
        return replace(self, arguments={**self.arguments, "batch_size": batch}).tensor

    @property
    def shape(self) -> Any:
        """Shape of ``tensor``."""
        if self.arguments is None:
            raise AttributeError("shape")
        batch = self.arguments.get("batch_size", 1)
        return torch.Size((batch, 1, self.q_length, self.kv_length))

    @property
    def ndim(self) -> int:
        """Number of axes of ``tensor``."""
        return 4

    @property
    def dtype(self) -> Any:
        """Type of the elements of ``tensor``."""
        return torch.bool

    @property
    def device(self) -> Any:
        """Device of ``tensor``."""
        return torch.device((self.arguments or {}).get("device", "cpu"))

    def __getattr__(self, name: str) -> Any:
        # all else of a tensor, for models that read their mask
        if name.startswith("__") or name == "tensor" or self.arguments is None:
            raise AttributeError(name)
        return getattr(self.tensor, name)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Calls a function of torch with the tensor of a pattern."""
        adds = getattr(function, "__name__", "") in ADDITIONS
        others = [one for one in args if isinstance(one, torch.Tensor) and one.is_floating_point()]

        def read(value: Any) -> Any:
            if not isinstance(value, MaskPattern):
                return value
            if not (adds and others):
                return value.tensor
            zero = torch.zeros((), dtype=others[0].dtype, device=others[0].device)
            return torch.where(value.tensor, zero, torch.finfo(zero.dtype).min)

        return function(*tree_map(read, args), **tree_map(read, kwargs or {}))


def is_sharded() -> bool:
    """Returns True inside ``context_parallel`` if this rank's rows are not the whole sequence, in
    order.
    """
    sharding = active()
    if sharding is None:
        return False
    return not np.array_equal(sharding.shard.q_rows, np.arange(sharding.shard.kv_len))


OPERATORS = (
    "add and eq ge getitem gt invert le lt mul ne neg or radd rand rmul ror rsub sub truediv xor"
)
"""Operators that read elements of a mask."""


def _operator(name: str) -> Any:
    function = getattr(torch.Tensor, name)

    def apply(self: MaskPattern, *others: Any) -> Any:
        return MaskPattern.__torch_function__(function, (), (self, *others))

    return apply


for _operation in OPERATORS.split():
    setattr(MaskPattern, f"__{_operation}__", _operator(f"__{_operation}__"))
MaskPattern.__hash__ = object.__hash__  # type: ignore[method-assign]


def mask_pattern(
    *,
    mask_function: Any,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    attention_mask: Any = None,
    **others: Any,
) -> Any:
    """Returns the mask of a layer; a mask interface of transformers.

    Arguments that say which tensor a mask interface may leave out have no effect.

    Returns:
        A ``MaskPattern``; or the tensor of ``eager``, for a model that asks if its mask is one.
    """
    if isinstance(attention_mask, MaskPattern):
        # generate makes masks in advance
        return attention_mask
    # a static cache counts its tokens in place, and a pattern may be read later
    q_offset, kv_offset = int(q_offset), int(kv_offset)
    arguments: dict[str, Any] = {
        "mask_function": mask_function,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "attention_mask": attention_mask,
        **{name: others[name] for name in ("batch_size", "use_vmap", "device") if name in others},
    }
    if _asks_for_tensor(type(others.get("config")).__module__):
        from transformers.masking_utils import eager_mask

        return eager_mask(**arguments, dtype=others["dtype"])
    try:
        found = _conditions(mask_function)
    except Unsupported as error:
        found = {"causal": False, "refusal": error}
    return MaskPattern(
        **found,
        padding=_padding(attention_mask, kv_length, kv_offset),
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        arguments=arguments,
    )


@cache
def _asks_for_tensor(configuration: str) -> bool:
    """Returns True if a model reads the type of its mask, by the module of its configuration.

    DeepSeek-V4 appends keys, and extends its mask if that is a tensor.
    """
    module = sys.modules.get(configuration.replace(".configuration_", ".modeling_"))
    if module is None or not configuration.startswith("transformers.models."):
        return False
    return "isinstance(attention_mask, torch.Tensor)" in inspect.getsource(module)


def _tensor(arguments: dict[str, Any]) -> Any:
    """Returns the mask of all pairs."""
    from transformers.masking_utils import sdpa_mask

    return sdpa_mask(**arguments, allow_is_causal_skip=False, allow_is_bidirectional_skip=False)


def _padding(attention_mask: Any, kv_length: int, kv_offset: int) -> Any:
    """Returns the part of a padding mask that is for the keys, or None if all are tokens.

    Keys after the end of the mask are unused rows of a static cache.
    """
    if attention_mask is None:
        return None
    missing = kv_offset + kv_length - attention_mask.shape[-1]
    padding = torch.nn.functional.pad(attention_mask.bool(), (0, max(missing, 0)))
    padding = padding[:, kv_offset : kv_offset + kv_length]
    return None if bool(padding.all()) else padding


def _conditions(mask_function: Any) -> dict[str, Any]:
    """Returns the fields of a ``MaskPattern`` for a predicate, or raises if it has another part."""
    found: dict[str, Any] = {"causal": False}
    for part in _parts(mask_function):
        name = _name(part).partition(".")[0]
        if name == "causal_mask_function":
            found["causal"] = True
        elif name == "sliding_window_overlay":
            found["window"] = int(_captured(part, "sliding_window"))
        elif name == "sliding_window_bidirectional_overlay":
            found["distance"] = int(_captured(part, "sliding_window"))
        elif name == "chunked_overlay":
            found["chunk"] = int(_captured(part, "chunk_size"))
            left_padding = _captured(part, "left_padding")
            found["left_padding"] = left_padding if bool(left_padding.any()) else None
        elif name == "packed_sequence_mask_function":
            found["documents"] = _captured(part, "packed_sequence_mask")
        elif name == "remap_positions_for_packed_sequence":
            found["positions"] = _captured(part, "position_ids")
        elif name != "bidirectional_mask_function":
            raise unsupported("mask_function", f"{name or part} of the model's mask")
    if not found["causal"] and found.keys() & {"window", "chunk"}:
        raise unsupported("mask_function", "a window or chunk that is not causal")
    return found


def _parts(function: Any) -> Iterator[Any]:
    """Yields the predicates of which all have to hold."""
    if _name(function) == "and_masks.<locals>.and_mask":
        for part in _captured(function, "mask_functions"):
            yield from _parts(part)
        return
    yield function
    if _name(function) == "remap_positions_for_packed_sequence.<locals>.inner_mask":
        yield from _parts(_captured(function, "mask_function"))


def _name(function: Any) -> str:
    """Returns the name of a predicate of transformers, or "" for one of a model or of a user."""
    is_known = getattr(function, "__module__", None) == "transformers.masking_utils"
    return getattr(function, "__qualname__", "") if is_known else ""


def _captured(function: Any, name: str) -> Any:
    names, cells = function.__code__.co_freevars, function.__closure__ or ()
    values = {free: cell.cell_contents for free, cell in zip(names, cells, strict=True)}
    if name not in values:
        raise unsupported("mask_function", f"{function.__qualname__} without {name}")
    return values[name]
