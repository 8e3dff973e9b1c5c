"""The definition of an attention, and the rows of its ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from . import _annulus, _check
from ._check import Documents, Rows
from ._errors import invalid
from ._option_fields import AttentionOptions, PlanOptions

if TYPE_CHECKING:
    from ._plan import Plan

Numbers = npt.NDArray[np.int64]
PLACES = ("q_rows", "kv_rows", "q_positions", "kv_positions")


@dataclass(frozen=True, kw_only=True)
class Attention(AttentionOptions):
    """The definition of one attention, without its tensors: full attention, then one parameter a
    field. i' and j' are the positions of a query and a key.

    Attributes:
        causal: Visible only if j' ≤ i'.
        sliding_window: (left, right): visible only if i' − left ≤ j' ≤ i' + right. None opens a
            side; one integer stands for both sides.
        attention_sink_size: Keys with j' below this number are exempt from the window, and from
            nothing else. Without a window it must be 0.
        chunk_size: Visible only if i' and j' are in the same chunk of this many positions and j' ≤
            i'. Default: no chunks.
        prefix_len: Prefix-LM: visible only if j' < prefix_len or j' ≤ i'. Default: no such
            condition.
        mask: One more condition, of ``annulus.masks``.
        alignment: Positions of queries among the keys. ``top_left`` (default): query i has position
            i. ``bottom_right``: query i has position i + kv_len − q_len.
        bias_order: Order of bias and soft cap. ``after_soft_cap`` (default): cap · tanh(x / cap) +
            bias. ``before_soft_cap``: cap · tanh((x + bias) / cap).
        normalize_output: False leaves out the division by the sum, and returns max and sum too.
        softmax_scale: Factor of q · k, any finite number. Default: 1/√head_dim.
        logits_soft_cap: cap in cap · tanh(x / cap), finite and above 0. Default: no cap.
        bias_function: A bias of ``annulus.biases``.
        logits_dtype: Type to which q · k is rounded before scale, bias and cap. Default: the
            accumulator's.
        dropout_prob: Probability with which a pair is dropped, 0 ≤ p < 1. Default: 0.
        dropout_seed: Seed of dropout, an unsigned 64-bit number. Default: 0.
        precision: Rounding of products that is permitted. ``highest`` (default): no product is
            rounded, except on matrix units of GPUs: 16-bit probabilities. ``high``: products may be
            split in three terms. ``default``: probabilities of bf16 inputs may be rounded to bf16
            before they are multiplied.
        reproducible: Results have the same bits for any number of ranks, layout, transport and
            threads, on machines of the same arithmetic (numerics of the command ``annulus
            doctor``). A backward pass takes two passes around the ring, about 1.4 times the time.
        return_statistics: Returns statistics of the scores, by row, and by head over all ranks: see
            ``Statistics``.
        bias_table: The bias is a learned table `[q_heads or 1, entries]` by relative positions:
            ``clipped:LEFT,RIGHT``, ``t5:BUCKETS,DISTANCE``, ``t5-causal:BUCKETS,DISTANCE``,
            ``grid:8x8`` or ``grid:LENGTHS,WINDOWS``.
    """

    def __post_init__(self) -> None:
        self.checked()

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
        documents = _check.documents(given)
        balanced = isinstance(layout, str) and layout == "balanced"
        checked = config(self, rows, PlanOptions(layout=None if balanced else layout))
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


def options_of(given: Mapping[str, Any]) -> PlanOptions:
    """Returns the options among the arguments of a call."""
    names = {field.name for field in fields(PlanOptions)}
    return PlanOptions(**{name: given[name] for name in names & given.keys()})


def config(
    attention: Attention,
    lengths: dict[str, int],
    options: PlanOptions,
    *,
    dtype: str = "float32",
    bias_shape: Sequence[int] | None = None,
    softmax_aux_shape: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Returns the checked parameters of a plan, as the extension module reads them."""
    checked = {**attention.checked(), **options.checked()}
    machine = checked["machine"]
    is_path = isinstance(machine, str)
    return {
        **checked,
        "dtype": dtype,
        "bias": _bias_shape(bias_shape),
        "softmax_aux": _sinks(softmax_aux_shape, lengths["q_heads"]),
        # a path, or the text of a file
        "machine": (
            None if machine is None else (is_path, machine if is_path else json.dumps(machine))
        ),
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
