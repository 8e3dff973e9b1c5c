"""The definition of an attention, and the rows of its ranks."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from . import _annulus, _arrays, _check
from ._annulus import BiasFunction, Mask
from ._errors import invalid

if TYPE_CHECKING:
    from ._plan import Plan

Rows = Sequence[Sequence[int | tuple[int, int, int]]]
"""Rows of every rank: row numbers, or runs of them as (first, step, count)."""
Numbers = npt.NDArray[np.int64]
Machine = str | os.PathLike[str] | Mapping[str, Any]
"""A machine: the path of a machine file, or its fields."""
Documents = Mapping[str, Any]
"""Arrays of a whole batch, under the names of ``Plan.update``."""
ALIGNMENTS = ("top_left", "bottom_right")
BIAS_ORDERS = ("after_soft_cap", "before_soft_cap")
PRECISIONS = ("highest", "high", "default")
LAYOUTS = ("contiguous", "zigzag", "striped")
DOCUMENTS = {
    "cum_seqlens_q": ("int64", 1),
    "cum_seqlens_k": ("int64", 1),
    "q_segment_ids": ("int32", 2),
    "kv_segment_ids": ("int32", 2),
    "q_positions": ("int64", 2),
    "kv_positions": ("int64", 2),
}
"""Element type and axes of the arrays of a batch by which a layout or a strategy is chosen."""
PLACES = ("q_rows", "kv_rows", "q_positions", "kv_positions")
ROUTES = ("relay_up", "relay_down", "direct", "rails_up", "rails_down", "once_per_node")
_COUNT = "[1-9][0-9]{0,8}"
STRATEGIES = re.compile(
    f"ring|auto|heads:{_COUNT}|grid:{_COUNT}(x{_COUNT}){{1,2}}|once-per-node(:{_COUNT})?"
    "|all-gather|all-to-all|pass-q"
)
BACKWARD_MODES = ("one_pass", "two_pass")


@dataclass(frozen=True, kw_only=True)
class Attention:
    """The definition of one attention, without its tensors: full attention, then one parameter a
    field. i' and j' are the positions of a query and a key.

    Attributes:
        causal: Visible only if j' ≤ i'.
        sliding_window: (left, right): visible only if i' − left ≤ j' ≤ i' + right. None opens a
            side; one integer stands for both sides.
        attention_sink_size: Number of first keys that are exempt from the sliding window.
        chunk_size: Chunked causal attention: visible only if ⌊i'/size⌋ = ⌊j'/size⌋ and j' ≤ i'.
        prefix_len: Prefix-LM: visible only if j' < prefix_len or j' ≤ i'.
        mask: One more condition, of ``annulus.masks``.
        alignment: ``top_left``: query i has position i. ``bottom_right``: i + kv_len − q_len.
        softmax_scale: Factor of ⟨q, k⟩. Default: 1/√head_dim.
        logits_soft_cap: cap · tanh(x / cap), with cap above 0.
        bias_function: A bias of ``annulus.biases``.
        bias_order: ``after_soft_cap`` or ``before_soft_cap``: the order of bias and soft cap.
        normalize_output: False leaves out the division by the sum, and returns max and sum too.
        dropout_prob: Probability with which an attention probability is dropped, below 1.
        dropout_seed: Seed of dropout, an unsigned 64-bit number. Default: 0.
        logits_dtype: ⟨q, k⟩ is rounded to it before scale, bias and cap. Default: none.
        precision: ``highest``, ``high`` or ``default``: rounding of products that is permitted.
            Default: ``highest``, which permits none.
        reproducible: Results have the same bits for any number of ranks, layout and threads, on
            machines of the same arithmetic (``annulus doctor``: numerics). A backward pass takes
            two passes around the ring, about 1.4 times the time.
    """

    causal: bool = False
    sliding_window: int | tuple[int | None, int | None] | None = None
    attention_sink_size: int = 0
    chunk_size: int | None = None
    prefix_len: int | None = None
    mask: Mask | None = None
    alignment: str = "top_left"
    softmax_scale: float | None = None
    logits_soft_cap: float | None = None
    bias_function: BiasFunction | None = None
    bias_order: str = "after_soft_cap"
    normalize_output: bool = True
    dropout_prob: float = 0.0
    dropout_seed: int | None = None
    logits_dtype: Any = None
    precision: Any = None
    reproducible: bool = False

    def __post_init__(self) -> None:
        self._config()

    def plan(self, **arguments: Any) -> Plan:
        """Plans this attention: ``Plan(self, **arguments)``."""
        # that module imports this one
        from ._plan import Plan

        return Plan(self, **arguments)

    def shard(
        self,
        q_len: int,
        *,
        ranks: int | None = None,
        rank: int | None = None,
        comm: Any = None,
        kv_len: int | None = None,
        batch: int = 1,
        q_heads: int = 1,
        layout: str | tuple[Rows, Rows] | None = None,
        cum_seqlens_q: Any = None,
        cum_seqlens_k: Any = None,
        q_segment_ids: Any = None,
        kv_segment_ids: Any = None,
    ) -> Shard:
        """Returns the rows of one rank, before there are tensors or a plan. Local: no rank waits.

        The layout of the result is given to ``ring_attention`` or ``Plan``, which then use the same
        rows.

        Args:
            q_len, kv_len: Rows of the whole sequence. Default of kv_len: q_len.
            ranks, rank: Number of ranks, and the one whose rows are returned.
            comm: An mpi4py communicator, in place of ranks and rank.
            batch, q_heads: Lengths that a mask of each batch row or head is made for.
            layout: ``contiguous``, ``zigzag``, ``striped``, or the rows of every rank as (query
                rows, key rows). ``balanced``: equal rows and work on every rank, for the documents
                of the batch; all ranks pass the same ones. Default: chosen by the mask.
            cum_seqlens_q, cum_seqlens_k: ``[sequences + 1]``: packed documents, in which positions
                restart.
            q_segment_ids, kv_segment_ids: ``[batch, q_len]`` and ``[batch, kv_len]`` of the whole
                sequence, for ``balanced``.
        """
        if comm is not None:
            for name, value in (("ranks", ranks), ("rank", rank)):
                if value is not None:
                    raise invalid(name, value, "None, since comm has its own")
            ranks, rank = comm.size, comm.rank
        ranks = _check.integer("ranks", ranks, least=1)
        rank = _check.integer("rank", rank)
        if rank >= ranks:
            raise invalid("rank", rank, f"a rank below {ranks}")
        rows = lengths(
            batch=batch,
            q_len=q_len,
            kv_len=kv_len,
            q_heads=q_heads,
            kv_heads=None,
            head_dim=1,
            value_dim=None,
        )
        given = {
            "cum_seqlens_q": cum_seqlens_q,
            "cum_seqlens_k": cum_seqlens_k,
            "q_segment_ids": q_segment_ids,
            "kv_segment_ids": kv_segment_ids,
        }
        documents = checked_documents(given)
        balanced = isinstance(layout, str) and layout == "balanced"
        checked = config(self, rows, layout=None if balanced else layout)
        found = _annulus.shard(checked, rows, ranks, rank, documents, balanced)
        if layout is None or isinstance(layout, str):
            layout = found["rows"] if balanced else found["layout"]
        return Shard(
            layout=layout,
            rank=rank,
            ranks=ranks,
            q_len=rows["q_len"],
            kv_len=rows["kv_len"],
            route=found["route"],
            documents=documents or None,
            **{name: spelled_runs(found[name]) for name in PLACES},
        )

    def _config(self) -> dict[str, Any]:
        """Returns the checked parameters, as the extension module reads them."""
        left, right = _check.window(self.sliding_window)
        for name, value, kind, module in (
            ("mask", self.mask, Mask, "masks"),
            ("bias_function", self.bias_function, BiasFunction, "biases"),
        ):
            if value is not None and not isinstance(value, kind):
                raise invalid(name, repr(value), f"an object of annulus.{module}")
        logits = self.logits_dtype
        # names of NumPy, members of jax.lax.Precision
        precision = getattr(self.precision, "name", self.precision)
        precision = "highest" if precision is None else str(precision).lower()
        return {
            "causal": _check.boolean("causal", self.causal),
            "window_left": left,
            "window_right": right,
            "attention_sink_size": _check.integer("attention_sink_size", self.attention_sink_size),
            "chunk_size": _check.integer_or_none("chunk_size", self.chunk_size, least=1),
            "prefix_len": _check.integer_or_none("prefix_len", self.prefix_len),
            "mask": self.mask,
            "alignment": _check.choice("alignment", self.alignment, ALIGNMENTS),
            "softmax_scale": _check.number_or_none("softmax_scale", self.softmax_scale),
            "logits_soft_cap": _check.number_or_none("logits_soft_cap", self.logits_soft_cap),
            "bias_function": self.bias_function,
            "bias_order": _check.choice("bias_order", self.bias_order, BIAS_ORDERS),
            "normalize_output": _check.boolean("normalize_output", self.normalize_output),
            "dropout_prob": _check.number("dropout_prob", self.dropout_prob),
            "dropout_seed": _check.integer_or_none("dropout_seed", self.dropout_seed) or 0,
            "logits_dtype": None if logits is None else _arrays.dtype_name("logits_dtype", logits),
            "precision": _check.choice("precision", precision, PRECISIONS),
            "reproducible": _check.boolean("reproducible", self.reproducible),
        }


@dataclass(frozen=True, eq=False)
class Shard:
    """Rows of one rank, as ``Attention.shard`` returns them.

    Attributes:
        layout: Layout that assigns these rows, for ``layout=`` of ``ring_attention`` and ``Plan``.
        rank, ranks: The rank, and the number of ranks.
        q_len, kv_len: Rows of the whole sequence.
        q_rows, kv_rows: Row numbers in the whole sequence, in the order of the rank's tensors.
        q_positions, kv_positions: Positions of these rows, for rotary embeddings: what masks
            compare, unless explicit positions say otherwise. In a packed document they start at 0.
        route: Route on which rows are sent only to ranks that need them, for ``route=`` of
            ``ring_attention`` and ``Plan``. None, except for ``balanced``.
        documents: The packed lengths and segment ids that were given, for ``documents=`` of
            ``ring_attention`` and ``Plan``. None without any.
    """

    layout: str | tuple[Rows, Rows]
    rank: int
    ranks: int
    q_len: int
    kv_len: int
    q_rows: Numbers
    kv_rows: Numbers
    q_positions: Numbers
    kv_positions: Numbers
    route: str | None = None
    documents: Documents | None = None


def lengths(
    *,
    batch: int,
    q_len: int,
    q_heads: int,
    head_dim: int,
    kv_len: int | None,
    kv_heads: int | None,
    value_dim: int | None,
) -> dict[str, int]:
    """Returns the checked lengths of the whole tensors, as the extension module reads them."""
    given = {
        "batch": batch,
        "q_len": q_len,
        "kv_len": q_len if kv_len is None else kv_len,
        "q_heads": q_heads,
        "kv_heads": q_heads if kv_heads is None else kv_heads,
        "head_dim": head_dim,
        "value_dim": head_dim if value_dim is None else value_dim,
    }
    return {name: _check.integer(name, value) for name, value in given.items()}


def config(
    attention: Attention,
    lengths: dict[str, int],
    *,
    dtype: str = "float32",
    bias_shape: Sequence[int] | None = None,
    softmax_aux_shape: Sequence[int] | None = None,
    layout: str | tuple[Rows, Rows] | None = None,
    route: str | None = None,
    strategy: str = "ring",
    machine: Machine | None = None,
    documents: Documents | None = None,
    kv_block_size: int | None = None,
    receive_ahead: int | None = None,
    deadline: float | None = None,
    arrival_deadline: float | None = None,
    backward_mode: str = "one_pass",
    forward_only: bool = False,
    local_gradients: bool = False,
) -> dict[str, Any]:
    """Returns the checked parameters of a plan, as the extension module reads them."""
    strategy = checked_strategy(strategy)
    figures = checked_machine(machine, strategy)
    is_path = isinstance(figures, str)
    return {
        **attention._config(),
        "dtype": dtype,
        "bias": _bias_shape(bias_shape),
        "softmax_aux": _sinks(softmax_aux_shape, lengths["q_heads"]),
        "layout": checked_layout(layout),
        "route": None if route is None else _check.choice("route", route, ROUTES),
        "strategy": strategy,
        "machine_path": figures if is_path else None,
        "machine_text": None if figures is None or is_path else json.dumps(figures),
        "documents": checked_documents_of_auto(documents, strategy),
        "kv_block_size": _check.integer_or_none("kv_block_size", kv_block_size, least=1),
        "receive_ahead": _check.integer_or_none("receive_ahead", receive_ahead, least=1),
        "deadline": _check.number_or_none("deadline", deadline),
        "arrival_deadline": _check.number_or_none("arrival_deadline", arrival_deadline),
        "backward_mode": _check.choice("backward_mode", backward_mode, BACKWARD_MODES),
        "forward_only": _check.boolean("forward_only", forward_only),
        "local_gradients": _check.boolean("local_gradients", local_gradients),
    }


def spelled_runs(runs: list[tuple[int, int, int]]) -> Numbers:
    parts = [start + step * np.arange(count, dtype=np.int64) for start, step, count in runs]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _bias_shape(shape: Sequence[int] | None) -> list[int] | None:
    if shape is None:
        return None
    if len(shape) != 4:
        want = "4: [batch or 1, q_heads or 1, q_len or 1, kv_len or 1]"
        raise invalid("bias", f"{len(shape)} axes", want)
    return [_check.integer("bias", length) for length in shape]


def _sinks(shape: Sequence[int] | None, q_heads: int) -> tuple[bool, int] | None:
    if shape is None:
        return None
    if len(shape) not in (1, 2):
        want = "[sinks] shared by all heads, or [q_heads, sinks]"
        raise invalid("softmax_aux", f"{len(shape)} axes", want)
    if len(shape) == 2 and shape[0] != q_heads:
        raise invalid("softmax_aux", f"{shape[0]} rows", f"{q_heads}, one for each query head")
    return len(shape) == 2, _check.integer("softmax_aux", shape[-1])


def checked_strategy(strategy: Any) -> str:
    if not isinstance(strategy, str) or not STRATEGIES.fullmatch(strategy):
        want = (
            "ring, heads:H, grid:QxK, grid:HxQxK, once-per-node:N with numbers from 1, "
            "once-per-node, all-gather, all-to-all, pass-q, or auto"
        )
        raise invalid("strategy", repr(strategy), want)
    return strategy


def checked_machine(machine: Any, strategy: str) -> str | dict[str, Any] | None:
    """Returns the path of a machine file, or its fields."""
    if machine is None:
        return None
    if strategy != "auto":
        raise invalid("machine", repr(machine), 'None, or strategy="auto"')
    if isinstance(machine, (str, os.PathLike)):
        return os.fsdecode(machine)
    if not isinstance(machine, Mapping):
        raise invalid("machine", repr(machine), "the path of a machine file, or its fields")
    try:
        fields: dict[str, Any] = json.loads(json.dumps(dict(machine), allow_nan=False))
    except (TypeError, ValueError) as error:
        want = "numbers that are finite, strings, lists and dicts"
        raise invalid("machine", str(error), want) from None
    return fields


def checked_documents(given: Documents) -> dict[str, np.ndarray[Any, Any]]:
    """Returns the arrays of documents that are given, in the element types of the module."""
    return {
        name: _arrays.integers(name, value, *DOCUMENTS[name])
        for name, value in given.items()
        if value is not None
    }


def checked_documents_of_auto(
    documents: Any, strategy: str
) -> dict[str, np.ndarray[Any, Any]] | None:
    """Returns the checked documents for which ``auto`` chooses."""
    if documents is None:
        return None
    names = ", ".join(DOCUMENTS)
    if not isinstance(documents, Mapping):
        raise invalid("documents", repr(documents), f"a dict of {names}")
    if strategy != "auto":
        raise invalid("documents", f"a batch, for the strategy {strategy}", 'None, or "auto"')
    for name in documents:
        if name not in DOCUMENTS:
            raise invalid("documents", repr(name), f"arrays of the names {names}")
    return checked_documents(documents)


def checked_layout(layout: Any) -> Any:
    if layout is None or isinstance(layout, str):
        return None if layout is None else _check.choice("layout", layout, LAYOUTS)
    want = "a name, or (query rows, key rows) of every rank"
    if not isinstance(layout, (tuple, list)) or len(layout) != 2:
        raise invalid("layout", repr(layout), want)
    try:
        sides = [[[_checked_row(row) for row in rows] for rows in side] for side in layout]
    except TypeError:
        raise invalid("layout", repr(layout), want) from None
    if any(isinstance(row, tuple) for side in sides for rows in side for row in rows):
        # the extension module reads either numbers or runs
        run = [
            [[r if isinstance(r, tuple) else (r, 1, 1) for r in rows] for rows in side]
            for side in sides
        ]
        return tuple(run)
    return tuple(sides)


def _checked_row(row: Any) -> int | tuple[int, ...]:
    """Returns a row number, or a run of them as (first, step, count)."""
    if isinstance(row, (tuple, list)) and len(row) == 3:
        first, step, count = row
        numbers = [_check.integer("layout", number, least=None) for number in (first, step)]
        return (*numbers, _check.integer("layout", count))
    return _check.integer("layout", row, least=None)
