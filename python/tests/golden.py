"""Reader of cases of the format annulus-cases-1: inputs, parameters and expected arrays, which this
project did not compute. Needs NumPy only.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

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
