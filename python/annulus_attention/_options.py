"""The options of a call as text, for operators whose arguments have simple types only.

Masks, bias functions and communicators are objects. The text has their keys, and a table of weak
references finds them again, so that it keeps nothing alive: the caller does, or a cached plan.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import weakref
import zlib
from typing import Any

import numpy as np

from . import _check
from ._attention import Attention
from ._calls import Call
from ._errors import invalid

_objects: dict[str, list[weakref.ref[Any]]] = {}
"""Living objects of each key. Any of them serves for all."""


def spelled(call: Call) -> str:
    """Returns the checked options of a call as text. Equal texts are the same options.

    The seed of dropout is left out: it may change in every call, and is an argument of its own.
    """
    checked = call.attention.checked()
    left, right = checked.pop("window_left"), checked.pop("window_right")
    attention = {**checked, "sliding_window": (left, right)}
    del attention["dropout_seed"]
    for name in ("mask", "bias_function"):
        given = attention[name]
        if given is not None:
            attention[name] = _key(f"{name} {given.key}", given)
    one_pass = call.fused_backward
    options = call.checked()
    documents = options["documents"]
    own = {
        "ranks": _check.integer_or_none("ranks", call.ranks, least=1),
        "comm": None if call.comm is None else _key(f"comm {id(call.comm)}", call.comm),
        "documents": None if documents is None else _spelled_arrays(documents),
        "stream": _check.integer_or_none("stream", call.stream),
        "fused_backward": None if one_pass is None else _check.boolean("fused_backward", one_pass),
    }
    options = {**options, **own}
    assert options.keys() | {"attention"} == {field.name for field in dataclasses.fields(Call)}
    return json.dumps({"attention": attention, **options})


def read(text: str, dropout_seed: int | None) -> Call:
    """Returns the call of a text."""
    options = json.loads(text)
    attention = options.pop("attention")
    for name in ("mask", "bias_function"):
        attention[name] = _found(name, attention[name])
    options["comm"] = _found("comm", options["comm"])
    if options["documents"] is not None:
        options["documents"] = _read_arrays(options["documents"])
    return Call(Attention(**attention, dropout_seed=dropout_seed), **options)


def _spelled_arrays(arrays: dict[str, np.ndarray[Any, Any]]) -> dict[str, Any]:
    """Returns arrays as text, compressed: segment ids are one number a row."""
    return {
        name: (
            array.dtype.name,
            array.shape,
            base64.b64encode(zlib.compress(array.tobytes())).decode(),
        )
        for name, array in arrays.items()
    }


def _read_arrays(spelled: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Returns the arrays of a text."""
    return {
        name: np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype).reshape(shape)
        for name, (dtype, shape, text) in spelled.items()
    }


def _key(key: str, value: Any) -> str:
    living = _objects.setdefault(key, [])
    if all(reference() is not value for reference in living):
        living.append(weakref.ref(value, lambda reference: _forget(key, reference)))
    return key


def _forget(key: str, reference: weakref.ref[Any]) -> None:
    living = _objects[key]
    living.remove(reference)
    if not living:
        del _objects[key]


def _found(name: str, key: str | None) -> Any:
    if key is None:
        return None
    for reference in _objects.get(key, []):
        value = reference()
        if value is not None:
            return value
    want = "one that lives until the backward pass"
    raise invalid(name, "an object that was freed since the call", want)
