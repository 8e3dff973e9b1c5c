"""Golden cases, their arguments and comparison; a naive attention in float64; ranks of programs.

Golden cases have the format annulus-cases-1: inputs, parameters and expected arrays, which this
project did not compute.
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import annulus_attention as annulus
from annulus_attention._calls import Call

BATCH = (
    "attention_mask",
    "q_segment_ids",
    "kv_segment_ids",
    "cum_seqlens_q",
    "cum_seqlens_k",
    "q_positions",
    "kv_positions",
)
ATTENTION = (
    "causal",
    "sliding_window",
    "attention_sink_size",
    "chunk_size",
    "logits_soft_cap",
    "softmax_scale",
    "normalize_output",
    "bias_order",
    "alignment",
    "dropout_prob",
    "dropout_seed",
)

TYPES = {"F32": "<f4", "F64": "<f8", "U8": "u1", "BOOL": "?", "I32": "<i4", "I64": "<i8"}


@dataclass(frozen=True)
class Case:
    """A case: parameters of ``ring_attention``, tensors, and what is expected."""

    name: str
    arguments: dict[str, Any]
    tensors: dict[str, np.ndarray[Any, Any]]
    expected: dict[str, np.ndarray[Any, Any]]
    tolerance: dict[str, dict[str, float]]


def folder() -> Path | None:
    """The folder of cases: ``ANNULUS_GOLDEN``, else ``shared/golden`` beside the repository."""
    given = os.environ.get("ANNULUS_GOLDEN")
    if given == "skip":
        return None
    repository = Path(__file__).resolve().parents[2]
    found = repository / (given or "../shared/golden")
    if not (found / "index.json").is_file():
        raise FileNotFoundError(f"no index.json in {found}; ANNULUS_GOLDEN=skip does without")
    return found


def read(path: Path) -> list[Case]:
    """Reads every case of a folder."""
    index = json.loads((path / "index.json").read_text())
    assert index["format"] == "annulus-cases-1"
    return [_case(path, entry) for entry in index["cases"]]


def safetensors(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Reads the tensors of a file."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    tensors = {}
    for name, about in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__":
            first, last = about["data_offsets"]
            part = data[8 + length + first : 8 + length + last]
            array = np.frombuffer(part, TYPES[about["dtype"]])
            tensors[name] = array.reshape(about["shape"])
    return tensors


def _case(path: Path, entry: dict[str, Any]) -> Case:
    params = dict(entry["params"])
    tensors = safetensors(path / entry["file"])
    expected = {name: tensors.pop(name) for name in entry["tolerance"]["f64"]}
    window = params.pop("sliding_window")
    sinks = params.pop("softmax_aux")
    # the form of the sinks is their number of axes
    assert {None: 0, "shared": 1, "per_head": 2}[sinks] == getattr(
        tensors.get("softmax_aux"), "ndim", 0
    )
    arguments = {**params, "sliding_window": None if window is None else tuple(window)}
    return Case(entry["id"], arguments, tensors, expected, entry["tolerance"])


def floats(case: Case, dtype: str) -> dict[str, np.ndarray[Any, Any]]:
    """The float tensors of a case in an element type."""
    names = ("query", "key", "value", "dout", "dlse", "bias", "softmax_aux")
    return {name: case.tensors[name].astype(dtype) for name in names if name in case.tensors}


def batch(case: Case) -> dict[str, np.ndarray[Any, Any]]:
    """The tensors of a case's batch."""
    return {name: case.tensors[name] for name in BATCH if name in case.tensors}


def plan(case: Case, dtype: str, **options: Any) -> annulus.Plan:
    """A plan of a case."""
    batch_, q_len, q_heads, head_dim = case.tensors["query"].shape
    _, kv_len, kv_heads, value_dim = case.tensors["value"].shape
    shapes = {
        f"{name}_shape": case.tensors[name].shape
        for name in ("bias", "softmax_aux")
        if name in case.tensors
    }
    return annulus.Attention(**case.arguments).plan(
        batch=batch_,
        q_len=q_len,
        q_heads=q_heads,
        head_dim=head_dim,
        kv_len=kv_len,
        kv_heads=kv_heads,
        value_dim=value_dim,
        dtype=dtype,
        threads=1,
        **shapes,
        **options,
    )


def check(case: Case, dtype: str, got: dict[str, Any]) -> None:
    """Asserts that results are as expected: within the case's tolerance, −∞ where −∞ is."""
    bounds = case.tolerance["f32" if dtype == "float32" else "f64"]
    for name, result in got.items():
        want = case.expected[name]
        result = np.asarray(result, dtype=np.float64)
        assert result.shape == want.shape, f"{name}: {result.shape}, want {want.shape}"
        with np.errstate(invalid="ignore"):
            apart = np.where(result == want, 0.0, abs(result - want))
        most = apart.max(initial=0.0)
        assert most <= bounds[name], f"{name} is off by {most}, at most {bounds[name]}"
        assert not np.isnan(apart).any(), f"{name} has a NaN"


def naive(
    query: Any, key: Any, value: Any, visible: Any, scale: float | None = None
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """out and lse in float64, of a mask that broadcasts to [batch, heads, q_len, kv_len]."""
    q, k, v = (np.asarray(array).astype(np.float64) for array in (query, key, value))
    group = q.shape[2] // k.shape[2]
    k, v = np.repeat(k, group, 2), np.repeat(v, group, 2)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    scores = np.where(visible, np.einsum("bihd,bjhd->bhij", q, k) * scale, -np.inf)
    most = scores.max(-1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        weights = np.nan_to_num(np.exp(scores - most))
        total = weights.sum(-1, keepdims=True)
        lse = np.where(total > 0, most + np.log(total), -np.inf)[..., 0]
    out = np.einsum("bhij,bjhd->bihd", weights / np.where(total > 0, total, 1), v)
    return out, lse


@contextmanager
def chosen_strategies() -> Iterator[list[str]]:
    """Records the strategies of the plans that one-call functions make."""
    strategies: list[str] = []
    plan_of_call = Call.plan

    def recorded(call: Call, *args: Any, **options: Any) -> annulus.Plan:
        made = plan_of_call(call, *args, **options)
        strategies.append(made.strategy)
        return made

    with mock.patch.object(Call, "plan", recorded):
        yield strategies


def random(*shape: int, seed: int = 0, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    """Normally distributed numbers."""
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def run_rank(main: Callable[[], str | None], world: Any) -> None:
    """Runs the program of one rank of mpi4py's communicator. If it fails, all ranks end; if it
    does not, rank 0 prints so with what ``main`` returns.
    """
    try:
        told = main()
        world.Barrier()
        if world.rank == 0:
            print(f"passed on {world.size} ranks{told or ''}", flush=True)
    except BaseException as error:
        print(f"rank {world.rank}: {error!r}", flush=True)
        traceback.print_exc()
        world.Abort(1)
