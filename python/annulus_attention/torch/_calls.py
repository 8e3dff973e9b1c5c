"""``flash_attention`` and ``ring_attention`` of torch tensors, in a form that ``torch.compile`` can
trace.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from .. import _calls, _check, _options, _plan_cache
from .._agreement import check_communicator, check_equal, gathered
from .._arrays import check_memory
from .._calls import BATCH, TENSORS, Arguments, Call
from .._errors import invalid, unsupported
from . import _derivatives

_FLASH = inspect.signature(_calls.flash_attention).parameters
_RING = inspect.signature(_calls.ring_attention).parameters
_DEFAULTS = {
    function: {name: parameter.default for name, parameter in parameters.items()}
    for function, parameters in (("flash_attention", _FLASH), ("ring_attention", _RING))
}
_POSITIONAL = {
    function: tuple(
        name
        for name, parameter in parameters.items()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    )
    for function, parameters in (("flash_attention", _FLASH), ("ring_attention", _RING))
}


def flash_attention(query: Any, key: Any, value: Any, *args: Any, **options: Any) -> Any:
    """Computes ``annulus.flash_attention``, which defines the parameters, on torch tensors.

    Args:
        query: ``[batch, q_len, q_heads, head_dim]``.
        key: ``[batch, kv_len, kv_heads, head_dim]``.
        value: ``[batch, kv_len, kv_heads, value_dim]``.
        dropout_seed: As there, or a tensor of one integer.

    Returns:
        out, ``[batch, q_len, q_heads, value_dim]``, or a tuple, as ``annulus.flash_attention``.
    """
    return attend(bound("flash_attention", (query, key, value, *args), options))


def ring_attention(query: Any, key: Any, value: Any, *args: Any, **options: Any) -> Any:
    """Computes ``annulus.ring_attention``, which defines the parameters, on torch tensors.

    With ``comm`` every rank runs its backward pass too, in the same order.

    Args:
        query: ``[batch, q_len, q_heads, head_dim]``; with comm, q_len counts this rank's rows.
        key: ``[batch, kv_len, kv_heads, head_dim]``.
        value: ``[batch, kv_len, kv_heads, value_dim]``.
        dropout_seed: As there, or a tensor of one integer.

    Returns:
        out, ``[batch, q_len, q_heads, value_dim]``, or a tuple, as ``annulus.ring_attention``.
    """
    return attend(bound("ring_attention", (query, key, value, *args), options))


def clear_plans() -> None:
    """Frees the plans that calls of torch keep for later calls.

    With plans over a communicator it waits at most a second for the other ranks. Calls over a
    communicator that ended, since a rank did not make one in time, begin anew: all ranks clear.
    """
    _plan_cache.clear()


def attend(given: Arguments, *, draws_seed: bool = False) -> Any:
    """Computes a call from all arguments of ``flash_attention`` or ``ring_attention``.

    With ``draws_seed`` every rank has drawn a seed of dropout, and that of rank 0 counts.
    """
    given = _calls.with_table(given)
    if given.get("comm") is not None:
        return _attend_over_ranks(given, draws_seed=draws_seed)
    return _calls.chosen(given, _derivatives.apply(*_prepare(given)))


@torch.compiler.disable
def _attend_over_ranks(given: Arguments, *, draws_seed: bool) -> Any:
    # a compiler may change the order of calls, and not on all ranks alike
    comm = given["comm"]
    check_communicator(comm)
    prepared: list[tuple[Any, ...]] = []

    def prepare() -> tuple[dict[str, Any], int | None]:
        prepared.append(_prepare(given))
        *_, seed, _, forward_only = prepared[0]
        fields = {"requires_grad": not forward_only, "dropout_prob": float(given["dropout_prob"])}
        return fields, None if seed is None else int(seed)

    told = gathered(comm, "attention of torch", prepare, given["deadline"])
    check_equal([fields for fields, _ in told], comm.rank)
    *inputs, seed, options, forward_only = prepared[0]
    if draws_seed and seed is not None:
        seed = torch.tensor(told[0][1], dtype=torch.int64)
    return _calls.chosen(given, _derivatives.apply(*inputs, seed, options, forward_only))


def _prepare(given: Arguments) -> tuple[Any, ...]:
    """Returns the inputs of the operator."""
    given = _calls.with_lists(given)
    tensors = [_tensor(name, given[name]) for name in TENSORS]
    batch = [_on_host(name, given[name]) for name in BATCH]
    seed = _seed(given["dropout_seed"])
    names = [name for name in given if name not in TENSORS + BATCH and name != "dropout_seed"]
    options = {name: given[name] for name in names}
    if torch.compiler.is_compiling():
        options = _constant(options)
    text = _spelled(given["query"].dtype, **options)
    has_gradient = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (*tensors, *batch)
    )
    if given["return_max_sum"] and (has_gradient or _derivatives.hides_gradients()):
        raise unsupported("return_max_sum", "max and sum have no gradient in torch")
    # a seed without dropout is no reason for another plan
    return *tensors, *batch, seed if given["dropout_prob"] else None, text, not has_gradient


def bound(function: str, args: tuple[Any, ...], options: Arguments) -> Arguments:
    """Returns all arguments of a function by name, as Python binds them."""
    names = _POSITIONAL[function]
    if len(args) > len(names):
        message = f"{function}() takes {len(names)} positional arguments, got {len(args)}"
        raise TypeError(message)
    given = dict(zip(names[: len(args)], args, strict=True))
    for name in options:
        if name not in _DEFAULTS[function]:
            raise TypeError(f"{function}() got an unexpected keyword argument '{name}'")
        if name in given:
            raise TypeError(f"{function}() got multiple values for argument '{name}'")
    return {**_DEFAULTS[function], **given, **options}


def check_plain(name: str, value: Any) -> None:
    """Refuses tensors that are more than strided memory of a device, which is all that is read."""
    kind = type(value)
    if kind is not torch.Tensor and kind is not torch.nn.Parameter:
        function = getattr(kind.__torch_function__, "__func__", kind.__torch_function__)
        is_plain = kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__ and function in (
            torch.Tensor.__torch_function__.__func__,
            _DISABLED,
        )
        # a tracer stands for a plain tensor
        if not is_plain and not isinstance(value, (FakeTensor, FunctionalTensor)):
            raise unsupported(name, f"a tensor of the class {kind.__name__}; want a plain one")
    if value.is_nested:
        raise unsupported(name, "a nested tensor; want padding, or packed rows with cum_seqlens")
    check_memory(name, value, on_gpu=True)


_DISABLED = torch._C._disabled_torch_function_impl


def _tensor(name: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        check_plain(name, value)
        return value
    if name in ("query", "key", "value"):
        raise invalid(name, f"a {type(value).__name__}", "a torch tensor")
    return None if value is None else torch.as_tensor(value)


def _on_host(name: str, value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        check_plain(name, value)
    return torch.as_tensor(value).cpu()


def _seed(given: Any) -> Any:
    """Returns the seed of dropout as a tensor of int64, which has the bits of the seed."""
    if given is None:
        return None
    if isinstance(given, torch.Tensor):
        check_plain("dropout_seed", given)
        return given
    # an integer that the compiler traces is not checked further: it is one of 64 bits
    if isinstance(given, bool) or not isinstance(given, int):
        given = _check.integer("dropout_seed", given)
    if not 0 <= given <= _check.LARGEST:
        raise invalid("dropout_seed", given, "an integer of 64 bits, at least 0")
    return torch.full((), given - 2**64 if given >= 2**63 else given, dtype=torch.int64)


def _constant(value: Any) -> Any:
    """Returns a value without symbols: numbers that a compiler traces become those of this call.

    A string has no symbols, so that numbers are read from their strings.
    """
    if isinstance(value, dict):
        return {name: _constant(part) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple([_constant(part) for part in value])
    if isinstance(value, list):
        return [_constant(part) for part in value]
    if type(value) is int:
        return int(f"{value!r}")
    if type(value) is float:
        return float(f"{value!r}")
    return value


@torch.compiler.assume_constant_result
def _spelled(query_dtype: Any, **options: Any) -> str:
    """Checks the options of a call and returns them as text. A compiler calls it as it traces."""
    _calls.check_returns(options)
    dtype = str(query_dtype).removeprefix("torch.")
    return _options.spelled(Call.of({**options, "dropout_seed": None}, lambda: dtype))


def four_axes(
    query: Any, key: Any, value: Any, mask: Any, kv_len: int, *, enable_gqa: bool
) -> tuple[Any, ...]:
    """Returns query, key, value and mask of four axes, and the axes of the output before its last
    two, as torch broadcasts them. The last axis of the mask has ``kv_len`` keys.
    """
    q_axes, k_axes, v_axes = query.shape[:-2], key.shape[:-2], value.shape[:-2]
    kv_heads = None
    if enable_gqa:
        key, value, kv_heads = _grouped_heads(query, key, value)
        k_axes, v_axes = (*k_axes[:-1], q_axes[-1]), (*v_axes[:-1], q_axes[-1])
    axes = _broadcast("query", (), q_axes)
    axes = _broadcast("key", axes, k_axes)
    axes = _broadcast("value", axes, v_axes)
    if mask is not None:
        mask = _checked_mask(mask, axes, (query.shape[-2], kv_len))
    *batches, heads = axes if axes else (1,)
    batch = math.prod(batches)

    def whole(tensor: Any, heads: int) -> Any:
        if tensor.shape[:-2] == (batch, heads):
            return tensor
        shape = tensor.shape[-2:]
        return tensor.expand(*batches, heads, *shape).reshape(batch, heads, *shape)

    heads_of_kv = heads if kv_heads is None else kv_heads
    query, key, value = whole(query, heads), whole(key, heads_of_kv), whole(value, heads_of_kv)
    if mask is not None:
        *of_batch, of_heads, rows, keys = mask.shape
        if all(length == 1 for length in of_batch):
            mask = mask.reshape(1, of_heads, rows, keys)
        else:
            mask = mask.expand(*batches, -1, -1, -1).reshape(batch, of_heads, rows, keys)
    return query, key, value, mask, axes


def _grouped_heads(query: Any, key: Any, value: Any) -> tuple[Any, Any, int]:
    """Returns key and value with as many heads, and their number, a divisor of that of query."""
    heads = query.shape[-3] if query.ndim > 2 else None
    for name, tensor in (("key", key), ("value", value)):
        if heads is None or tensor.ndim < 3:
            raise invalid("enable_gqa", "True, for tensors without heads", "at least 3 axes")
        own = tensor.shape[-3]
        if heads != own and (own == 0 or heads % own):
            raise invalid(name, f"{own} heads", f"a divisor of {heads}, the heads of query")
    if key.shape[-3] != value.shape[-3]:
        key = key.repeat_interleave(heads // key.shape[-3], -3)
        value = value.repeat_interleave(heads // value.shape[-3], -3)
    return key, value, key.shape[-3]


def _broadcast(name: str, axes: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the axes to which both broadcast."""
    longer, shorter = (axes, other) if len(axes) >= len(other) else (other, axes)
    result = list(longer)
    for index, length in enumerate(shorter, len(longer) - len(shorter)):
        if result[index] == 1:
            result[index] = length
        elif length not in (1, result[index]):
            hint = "; enable_gqa permits fewer heads" if name in ("key", "value") else ""
            got = f"axes {tuple(other)} before the last two"
            raise invalid(name, got, f"axes that broadcast with {tuple(axes)}{hint}")
    return tuple(result)


def _checked_mask(mask: Any, axes: tuple[int, ...], pairs: tuple[int, int]) -> Any:
    """Returns attn_mask with the last two axes and one for each other of ``axes``, at least one."""
    if not isinstance(mask, torch.Tensor):
        raise invalid("attn_mask", f"a {type(mask).__name__}", "a torch tensor")
    check_plain("attn_mask", mask)
    if mask.dtype != torch.bool and not mask.dtype.is_floating_point:
        raise invalid("attn_mask", f"elements {mask.dtype}", "bools or floats")
    shape = (*(axes or (1,)), *pairs)
    # torch takes a mask of four axes for tensors of three
    extra = max(mask.ndim - len(shape), 0)
    fits = mask.ndim <= max(len(shape), 4) and all(length == 1 for length in mask.shape[:extra])
    for got, want in zip(mask.shape[::-1], shape[::-1], strict=False):
        fits = fits and got in (1, want)
    if not fits:
        raise invalid("attn_mask", f"shape {tuple(mask.shape)}", f"one that broadcasts to {shape}")
    mask = mask[(0,) * extra][(None,) * (len(shape) - mask.ndim)]
    return mask.expand(*mask.shape[:-2], *pairs) if mask.dtype == torch.bool else mask
