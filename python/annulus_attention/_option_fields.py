"""The options of an attention and a plan.

Written from options.toml by `cargo xtask options`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from . import _check
from ._annulus import BiasFunction, Mask
from ._check import Documents, Machine, Rows

ALIGNMENTS = ("top_left", "bottom_right")
BIAS_ORDERS = ("after_soft_cap", "before_soft_cap")
PRECISIONS = ("highest", "high", "default")
BACKWARD_MODES = ("one_pass", "two_pass")


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """The options of ``Attention``."""

    causal: bool = False
    sliding_window: int | tuple[int | None, int | None] | None = None
    attention_sink_size: int = 0
    chunk_size: int | None = None
    prefix_len: int | None = None
    mask: Mask | None = None
    alignment: str = "top_left"
    bias_order: str = "after_soft_cap"
    normalize_output: bool = True
    softmax_scale: float | None = None
    logits_soft_cap: float | None = None
    bias_function: BiasFunction | None = None
    logits_dtype: Any = None
    dropout_prob: float = 0.0
    dropout_seed: int | None = None
    precision: Any = None
    reproducible: bool = False
    return_statistics: bool = False
    bias_table: str | None = None

    def checked(self) -> dict[str, Any]:
        """Returns the checked options, by the names of the extension module."""
        return {
            "causal": _check.boolean("causal", self.causal),
            "window_left": _check.window(self.sliding_window)[0],
            "window_right": _check.window(self.sliding_window)[1],
            "attention_sink_size": _check.integer("attention_sink_size", self.attention_sink_size),
            "chunk_size": _check.integer_or_none("chunk_size", self.chunk_size, least=1),
            "prefix_len": _check.integer_or_none("prefix_len", self.prefix_len),
            "mask": _check.instance("mask", self.mask, Mask, "masks"),
            "alignment": _check.choice("alignment", self.alignment, ALIGNMENTS),
            "bias_order": _check.choice("bias_order", self.bias_order, BIAS_ORDERS),
            "normalize_output": _check.boolean("normalize_output", self.normalize_output),
            "softmax_scale": _check.number_or_none("softmax_scale", self.softmax_scale),
            "logits_soft_cap": _check.number_or_none("logits_soft_cap", self.logits_soft_cap),
            "bias_function": (
                _check.instance("bias_function", self.bias_function, BiasFunction, "biases")
            ),
            "logits_dtype": _check.dtype_or_none("logits_dtype", self.logits_dtype),
            "dropout_prob": _check.number("dropout_prob", self.dropout_prob),
            "dropout_seed": _check.integer_or_none("dropout_seed", self.dropout_seed) or 0,
            "precision": _check.choice("precision", _check.precision(self.precision), PRECISIONS),
            "reproducible": _check.boolean("reproducible", self.reproducible),
            "return_statistics": _check.boolean("return_statistics", self.return_statistics),
            "bias_table": _check.bias_table(self.bias_table),
        }


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The options of ``Plan``: the division among ranks, and the run."""

    backward_mode: str = "one_pass"
    forward_only: bool = False
    local_gradients: bool = False
    layout: str | tuple[Rows, Rows] | None = None
    route: str | None = None
    deadline: float | None = None
    threads: int | None = None
    kv_block_size: int | None = None
    arrival_deadline: float | None = None
    strategy: str = "ring"
    machine: Machine | None = None
    documents: Documents | None = None
    backend: str | None = None
    device: int | None = None
    receive_ahead: int | None = None
    second_derivatives: bool = False

    def checked(self) -> dict[str, Any]:
        """Returns the checked options, by the names of the extension module."""
        return {
            "backward_mode": _check.choice("backward_mode", self.backward_mode, BACKWARD_MODES),
            "forward_only": _check.boolean("forward_only", self.forward_only),
            "local_gradients": _check.boolean("local_gradients", self.local_gradients),
            "layout": _check.layout(self.layout),
            "route": _check.choice_or_none("route", self.route, _check.ROUTES),
            "deadline": _check.number_or_none("deadline", self.deadline),
            "threads": _check.integer_or_none("threads", self.threads, least=1),
            "kv_block_size": _check.integer_or_none("kv_block_size", self.kv_block_size, least=1),
            "arrival_deadline": _check.number_or_none("arrival_deadline", self.arrival_deadline),
            "strategy": _check.strategy(self.strategy),
            "machine": _check.machine(self.machine, self.strategy),
            "documents": _check.documents_of_auto(self.documents, self.strategy),
            "backend": _check.choice_or_none("backend", self.backend, _check.BACKEND_NAMES),
            "device": _check.integer_or_none("device", self.device),
            "receive_ahead": _check.integer_or_none("receive_ahead", self.receive_ahead, least=1),
            "second_derivatives": _check.boolean("second_derivatives", self.second_derivatives),
        }
