"""Every golden case: through the calls, and forward and backward through plans."""

from __future__ import annotations

from typing import Any

import pytest
from helpers import Case, batch, check, floats, plan

import annulus

RINGS: list[dict[str, Any]] = [
    {"ranks": 1},
    {"ranks": 2, "layout": "zigzag"},
    {"ranks": 3, "layout": "striped"},
    {"ranks": 4, "layout": "contiguous"},
]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_flash_attention(golden: Case, dtype: str) -> None:
    given = floats(golden, dtype)
    for name in ("dout", "dlse"):
        given.pop(name, None)
    out, lse = annulus.flash_attention(
        **given, **batch(golden), **golden.arguments, return_lse=True
    )
    assert out.dtype == lse.dtype == dtype
    check(golden, dtype, {"out": out, "lse": lse})


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("ring", RINGS[1:], ids=lambda ring: ring["layout"])
def test_ring_attention(golden: Case, dtype: str, ring: dict[str, Any]) -> None:
    given = floats(golden, dtype)
    for name in ("dout", "dlse"):
        given.pop(name, None)
    out, lse = annulus.ring_attention(
        **given, **batch(golden), **golden.arguments, **ring, return_lse=True
    )
    check(golden, dtype, {"out": out, "lse": lse})


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("ring", RINGS, ids=lambda ring: ring.get("layout", "single"))
def test_gradients(golden: Case, dtype: str, ring: dict[str, Any]) -> None:
    given = floats(golden, dtype)
    dout, dlse = given.pop("dout"), given.pop("dlse", None)
    with plan(golden, dtype, **ring) as planned:
        if batch(golden):
            planned.update(**batch(golden))
        forward = planned.forward(**given)
        gradients = planned.backward(**given, forward=forward, dout=dout, dlse=dlse)
    names = [name for name in golden.expected if name.startswith("d")]
    assert {"dq", "dk", "dv"} <= set(names)
    results = {name: getattr(gradients, name) for name in names}
    assert all(array.dtype == dtype for array in results.values())
    check(golden, dtype, {"out": forward.out, "lse": forward.lse, **results})
