"""Attention in one call, with the parameter names of other libraries."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from . import _arrays, _check, _key_lists
from ._agreement import DEADLINE, agreed, check_communicator, gathered
from ._annulus import BiasFunction, Mask
from ._arrays import Place, current_stream
from ._attention import Attention
from ._check import Documents, Machine, Rows
from ._errors import invalid, unsupported
from ._option_fields import PlanOptions
from ._plan import TENSOR_NAMES, Plan
from ._results import Forward, Statistics

Arguments = dict[str, Any]
"""Arguments of ``flash_attention`` or ``ring_attention``, by name."""

Tensors = tuple[Any, Any, Any, Any, Any]
"""query, key, value, bias or None, softmax_aux or None."""

TENSORS = TENSOR_NAMES
BATCH = (
    "q_segment_ids",
    "kv_segment_ids",
    "q_positions",
    "kv_positions",
    "attention_mask",
    "cum_seqlens_q",
    "cum_seqlens_k",
    *_key_lists.NAMES,
)
FOREIGN = {
    "axis_name": "the ring is given by ranks= or comm=",
    "query_chunk_size": "kernels choose their tile sizes",
    "key_chunk_size": "kernels choose their tile sizes; the size of messages is kv_block_size",
    "causal_block_size": "kernels choose their tile sizes",
    "fwd_params": "kernels choose their tile sizes",
    "bwd_params": "kernels choose their tile sizes",
    "policy": "a backward pass keeps query, key, value, out and lse",
    "prevent_cse": "nothing is recomputed by the compiler",
}
"""Parameters of other libraries that have no meaning here, and why."""


@dataclass(frozen=True)
class RankRows:
    """Rows that one rank passes: queries, keys, and query rows of the bias if there is one."""

    q: int
    kv: int
    bias: int | None


@dataclass(frozen=True)
class Shapes:
    """Shapes of the tensors of a call, and their element type."""

    query: tuple[int, ...]
    value: tuple[int, ...]
    bias: tuple[int, ...] | None
    softmax_aux: tuple[int, ...] | None
    dtype: str

    @property
    def rows(self) -> RankRows:
        """Rows of these tensors."""
        bias = self.bias if self.bias is not None and len(self.bias) == 4 else None
        return RankRows(self.query[1], self.value[1], None if bias is None else bias[2])

    @staticmethod
    def of(query: Any, key: Any, value: Any, bias: Any, softmax_aux: Any) -> Shapes:
        """Reads and compares the shapes of tensors."""
        given = {"query": query, "key": key, "value": value}
        described = {name: _arrays.described(name, array) for name, array in given.items()}
        shapes = {name: shape for name, (shape, _) in described.items()}
        for name, shape in shapes.items():
            if len(shape) != 4:
                raise invalid(name, f"{len(shape)} axes", "4: [batch, seq, heads, dim]")
        want = (shapes["query"][0], *shapes["key"][1:3], shapes["query"][3])
        if shapes["key"] != want:
            raise invalid("key", f"shape {shapes['key']}", f"{want}, as query")
        if shapes["value"][:3] != want[:3]:
            raise invalid("value", f"shape {shapes['value']}", f"{want[:3]} and any dim, as key")
        dtype = described["query"][1]
        for name, (_, found) in described.items():
            if found != dtype:
                raise invalid(name, f"elements {found}", f"{dtype}, as query")
        sinks = None if softmax_aux is None else _arrays.described("softmax_aux", softmax_aux)[0]
        return Shapes(
            query=shapes["query"],
            value=shapes["value"],
            bias=None if bias is None else _arrays.described("bias", bias)[0],
            softmax_aux=sinks,
            dtype=dtype,
        )


@dataclass(frozen=True, eq=False)
class Call(PlanOptions):
    """The options of a call: all but its tensors."""

    attention: Attention
    ranks: int | None = None
    comm: Any = None
    stream: int | None = None
    fused_backward: bool | None = None

    @staticmethod
    def of(given: Arguments, query_dtype: Callable[[], str]) -> Call:
        """Reads the options among the arguments of a one-call function."""
        for name, why in FOREIGN.items():
            if given.get(name) is not None:
                raise unsupported(name, why)
        logits_dtype, in_f32 = given["logits_dtype"], given.get("float32_logits")
        if in_f32 is not None:
            if logits_dtype is not None:
                raise invalid("float32_logits", in_f32, "None, since logits_dtype is given")
            in_f32 = _check.boolean("float32_logits", in_f32)
            logits_dtype = "float32" if in_f32 else query_dtype()
        named = {**given, "mask": given["mask_builder"], "logits_dtype": logits_dtype}
        attention = Attention(**{field.name: named[field.name] for field in fields(Attention)})
        options = {field.name for field in fields(Call)} - {"attention"}
        return Call(attention, **{name: given[name] for name in options & given.keys()})

    def _arrival_deadline(self) -> float | None:
        """Returns the arrival deadline, so that no rank waits without bound."""
        if self.comm is None:
            return None
        return DEADLINE if self.deadline is None else self.deadline

    def place(self, query: Any) -> Place | None:
        """Returns the GPU whose memory the tensors are in, with the stream; None for the host's."""
        number = _arrays.device_of(query)
        if number is None:
            if self.stream is not None:
                raise invalid("stream", self.stream, "None, since query is in host memory")
            return None
        if self.backend not in (None, "cuda"):
            why = f"query is in the memory of GPU {number}, which cuda computes on"
            raise unsupported("backend", why)
        if self.device not in (None, number):
            raise invalid("device", self.device, f"{number}, in whose memory query is")
        stream = current_stream(query, number) if self.stream is None else self.stream
        return Place(number, stream)

    def plan(
        self,
        shapes: Shapes,
        place: Place | None,
        told: list[RankRows],
        *,
        forward_only: bool,
        second_derivatives: bool = False,
    ) -> Plan:
        """Plans for the tensors of all ranks; with a communicator, collectively."""
        batch, _, q_heads, head_dim = shapes.query
        _, _, kv_heads, value_dim = shapes.value
        bias_shape, layout = shapes.bias, self.layout
        if self.comm is not None:
            # the caller has distributed the rows already
            layout = "contiguous" if layout is None else layout
            if bias_shape is not None and len(bias_shape) == 4:
                bias_shape = (*bias_shape[:2], _global_bias_rows(told), bias_shape[3])
        options = {field.name: getattr(self, field.name) for field in fields(PlanOptions)}
        own = {
            "layout": layout,
            "backend": self.backend or ("cpu" if place is None else "cuda"),
            "device": self.device if place is None else place.device,
            "arrival_deadline": self._arrival_deadline(),
            # the program sums the gradients of its parameters over the ranks
            "local_gradients": self.comm is not None,
            # second derivatives have one form
            "backward_mode": (
                "two_pass"
                if self.fused_backward is False and not second_derivatives
                else "one_pass"
            ),
            "forward_only": forward_only and not second_derivatives,
            "second_derivatives": second_derivatives,
        }
        return Plan(
            self.attention,
            batch=batch,
            q_len=sum(rows.q for rows in told),
            kv_len=sum(rows.kv for rows in told),
            q_heads=q_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            value_dim=value_dim,
            dtype=shapes.dtype,
            bias_shape=bias_shape,
            softmax_aux_shape=shapes.softmax_aux,
            ranks=self.ranks,
            comm=self.comm,
            stream=None if place is None else place.stream,
            **{**options, **own},
        )


def _global_bias_rows(told: list[RankRows]) -> int:
    """Returns the query rows of the whole bias, from the rows that every rank passes of it."""
    q_lens = [rows.q for rows in told]
    if any(rows.bias != 1 for rows in told):
        return sum(q_lens)
    if max(q_lens) == 1 < sum(q_lens):
        got = "one row on every rank, of one query each"
        raise invalid("bias", got, "a Plan, whose bias_shape says if it is broadcast")
    return 1


def flash_attention(
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any = None,
    bias: Any = None,
    softmax_scale: float | None = None,
    dropout_prob: float = 0.0,
    causal: bool = False,
    dropout_seed: int | None = None,
    cum_seqlens_q: Any = None,
    cum_seqlens_k: Any = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    softmax_aux: Any = None,
    normalize_output: bool = True,
    precision: Any = None,
    logits_dtype: Any = None,
    *,
    q_segment_ids: Any = None,
    kv_segment_ids: Any = None,
    q_positions: Any = None,
    kv_positions: Any = None,
    key_lists: Any = None,
    list_bias: Any = False,
    mask_builder: Mask | None = None,
    # options.toml: flash_attention
    attention_sink_size: int = 0,
    chunk_size: int | None = None,
    prefix_len: int | None = None,
    alignment: str = "top_left",
    bias_order: str = "after_soft_cap",
    bias_function: BiasFunction | None = None,
    threads: int | None = None,
    reproducible: bool = False,
    backend: str | None = None,
    device: int | None = None,
    return_statistics: bool = False,
    bias_table: str | None = None,
    # options.toml: end
    stream: int | None = None,
    fwd_params: None = None,
    bwd_params: None = None,
    return_lse: bool = False,
    return_max_sum: bool = False,
) -> Any:
    """Computes attention over whole arrays.

    Arrays of NumPy, torch, JAX and anything with DLPack or the buffer protocol, in float64,
    float32, bfloat16 or float16, with any strides, are read in place; outputs are arrays of query's
    library. Arrays in the memory of an NVIDIA GPU are computed there, and outputs are there too; of
    a library without DLPack, a ``DeviceArray``. Torch tensors and traced JAX arrays go through
    ``annulus.torch`` and ``annulus.jax``, so that the call has a gradient.

    Parameters that are not listed are those of ``Attention``, which defines them; mask_builder is
    its mask. Calls of torch reuse plans. Others plan anew: programs with many passes keep a
    ``Plan``.

    Args:
        query: ``[batch, q_len, q_heads, head_dim]``.
        key: ``[batch, kv_len, kv_heads, head_dim]``; q_heads is a multiple of kv_heads.
        value: ``[batch, kv_len, kv_heads, value_dim]``.
        attention_mask: ``[batch or 1, q_heads or 1, q_len, kv_len]``, bools or integers: visible
            only if not zero. Floats are refused.
        bias: ``[batch or 1, q_heads or 1, q_len or 1, kv_len or 1]``, floats; −∞ masks its pair.
            With bias_table the table, ``[q_heads or 1, entries]``, whose gradient is a sum over
            all pairs.
        softmax_aux: Learnable sinks, ``[sinks]`` shared by all heads or ``[q_heads, sinks]``.
        q_segment_ids, kv_segment_ids: ``[batch, len]``, integers that fit 32 bits: visible only if
            equal and not negative. One given serves for both.
        q_positions, kv_positions: ``[batch, len]``, explicit positions.
        cum_seqlens_q, cum_seqlens_k: ``[sequences + 1]``, ascending from 0: packed sequences, in
            which positions restart at 0. One given serves for both.
        key_lists: Keys of each query, at most: a CSR or BSR array of SciPy or torch, ``[q_len,
            kv_len]``, whose stored entries are visible whatever their values, (indptr, indices), or
            (indptr, starts, ends) of ranges of keys, as ``masks.key_blocks`` makes. With
            ``groups · q_len`` rows, the lists of each group of query heads.
        list_bias: True to add the values of a CSR array to the scores; or an array of these
            numbers, one for each listed pair.
        threads: CPU threads that compute. Default: the cores of the machine.
        backend, device: What computes (``cpu``, ``wgpu``, ``cuda`` or ``hip``), and the number of
            the GPU, see ``Plan``. Default: ``cpu``; for arrays in the memory of an NVIDIA GPU,
            ``cuda`` on this GPU.
        stream: Stream of the pass, for arrays in the memory of a GPU, see ``Plan``. Default:
            torch's current stream, or the default stream.
        fwd_params, bwd_params: Tile sizes of other libraries; refused, since kernels choose theirs.
        return_lse: Returns (out, lse), with lse ``[batch, q_heads, q_len]``.
        return_max_sum: Appends max and sum, shape of lse. Only with ``normalize_output=False``.
        return_statistics: Appends ``Statistics`` of the scores, which have no gradient.

    Returns:
        out, ``[batch, q_len, q_heads, value_dim]``; or a tuple, see ``return_lse``,
        ``return_max_sum`` and ``return_statistics``.

    Raises:
        ValueError: An argument has no meaning; the message and ``.argument`` name it.
        NotImplementedError: An argument is not supported.
        MemoryError: Memory could not be had.
        annulus.Error: Anything else. All of these are ``annulus.Error``.
    """
    return attend(locals())


def ring_attention(
    query: Any,
    key: Any,
    value: Any,
    q_segment_ids: Any = None,
    kv_segment_ids: Any = None,
    softmax_aux: Any = None,
    bias: Any = None,
    mask_builder: Mask | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    chunk_size: int | None = None,
    causal: bool = False,
    logits_soft_cap: float | None = None,
    softmax_scale: float | None = None,
    *,
    ranks: int | None = None,
    layout: str | tuple[Rows, Rows] | None = None,
    comm: Any = None,
    return_lse: bool = False,
    return_max_sum: bool = False,
    attention_mask: Any = None,
    cum_seqlens_q: Any = None,
    cum_seqlens_k: Any = None,
    q_positions: Any = None,
    kv_positions: Any = None,
    key_lists: Any = None,
    list_bias: Any = False,
    # options.toml: ring_attention
    attention_sink_size: int = 0,
    prefix_len: int | None = None,
    alignment: str = "top_left",
    bias_order: str = "after_soft_cap",
    normalize_output: bool = True,
    bias_function: BiasFunction | None = None,
    logits_dtype: Any = None,
    dropout_prob: float = 0.0,
    dropout_seed: int | None = None,
    precision: Any = None,
    route: str | None = None,
    deadline: float | None = None,
    threads: int | None = None,
    kv_block_size: int | None = None,
    reproducible: bool = False,
    strategy: str = "ring",
    machine: Machine | None = None,
    documents: Documents | None = None,
    backend: str | None = None,
    device: int | None = None,
    receive_ahead: int | None = None,
    return_statistics: bool = False,
    bias_table: str | None = None,
    # options.toml: end
    float32_logits: bool | None = None,
    fused_backward: bool | None = None,
    stream: int | None = None,
    axis_name: None = None,
    query_chunk_size: None = None,
    key_chunk_size: None = None,
    causal_block_size: None = None,
    fwd_params: None = None,
    bwd_params: None = None,
    policy: None = None,
    prevent_cse: None = None,
) -> Any:
    """Computes attention over a ring of ranks: of this process, or of an mpi4py communicator.

    The result is that of ``flash_attention``, whose documentation defines the parameters that both
    have, up to the order of rounding.

    With ``comm`` every rank passes its own rows and calls with the same parameters; the arrays of
    all ranks are one sequence, distributed by ``layout``. bias has this rank's queries × all keys,
    as has attention_mask, and key_lists, of which only the listed rows of other ranks are received;
    cum_seqlens are whole. A ring over many calls keeps a ``Plan``.

    Args:
        query: ``[batch, q_len, q_heads, head_dim]``; with comm, q_len counts this rank's rows.
        key: ``[batch, kv_len, kv_heads, head_dim]``.
        value: ``[batch, kv_len, kv_heads, value_dim]``.
        chunk_size: Chunked causal attention (a mask, not a tile size).
        ranks: Ranks in this process. Default: 1.
        layout: ``contiguous``, ``zigzag``, ``striped``, or the rows of every rank as (query rows,
            key rows). Default: chosen by the mask; with comm, contiguous.
        comm: An mpi4py communicator.
        float32_logits: True is ``logits_dtype=float32``; False is query's element type.
        fused_backward: Form of the backward pass, of torch and JAX calls: True for one pass (keys,
            values and their gradients travel), False for two. Default: one pass. Refused for other
            arrays, whose call has no backward pass.
        route: ``relay_up``, ``relay_down``, ``direct``, or, over nodes with as many ranks each,
            ``rails_up``, ``rails_down`` or ``once_per_node``. Default: chosen by the mask and the
            nodes.
        strategy: ``ring``, ``heads:H``, ``grid:QxK``, ``grid:HxQxK``, ``auto`` or a published
            name: the division of the attention among ranks, see ``Plan``.
        machine: Path of a machine file, or a dict of its fields, with which ``auto`` takes the
            strategy of the least predicted time, see ``Plan``.
        documents: Packed documents for which ``auto`` chooses: a dict of arrays of all rows, also
            with comm, such as ``{"cum_seqlens_q": starts}`` or ``Shard.documents``, see ``Plan``.
            Only the choice depends on them: segment ids, positions and cum_seqlens of the call are
            given too. Default: chosen by the mask alone.
        kv_block_size: Hint: a KV block is split into messages at multiples of this many rows, see
            ``Plan``.
        receive_ahead: Ring steps by which receives of blocks are posted ahead, see ``Plan``.
        threads: CPU threads of each rank. Default: the cores, divided by the ranks on the machine.
        backend, device: What computes (``cpu``, ``wgpu``, ``cuda`` or ``hip``), and the number of
            the GPU, see ``Plan``. Default: ``cpu``; for arrays in the memory of an NVIDIA GPU,
            ``cuda`` on this GPU.
        stream: Stream of the pass, for arrays in the memory of a GPU, see ``Plan``. Default:
            torch's current stream, or the default stream.
        deadline: Seconds of silence of the ring after which a call fails, and for which it waits
            for ranks that have not made it. Default: 120.
        axis_name, query_chunk_size, key_chunk_size, causal_block_size, fwd_params, bwd_params,
            policy, prevent_cse: Parameters of other libraries that mean nothing here; refused.

    Returns:
        out, ``[batch, q_len, q_heads, value_dim]``; or a tuple, see ``flash_attention``.

    Raises:
        annulus.Error: As ``flash_attention``.
    """
    return attend(locals())


def attend(given: Arguments) -> Any:
    """Computes a call, with a gradient where the arrays are of a library that has some."""
    given = with_table(given)
    tensors: Tensors = tuple(given[name] for name in TENSORS)
    if _arrays.library(given["query"]) == "torch" or _requires_grad(*tensors):
        from .torch import attend as attend_with_torch

        return attend_with_torch(given)
    comm = given.get("comm")
    if comm is not None:
        check_communicator(comm)
    traced = _is_traced(*tensors, *(given.get(name) for name in BATCH))
    batch: Arguments = {}

    def build() -> Call:
        check_returns(given)
        batch.update((name, array) for name, array in with_lists(given).items() if name in BATCH)
        if traced and comm is not None:
            raise unsupported(
                "comm", "in a traced JAX call, whose order is the compiler's; use Plan"
            )
        if traced and given["return_max_sum"]:
            raise unsupported("return_max_sum", "max and sum have no gradient in JAX")
        return Call.of(given, lambda: _arrays.described("query", given["query"])[1])

    call = agreed(comm, "attention", build, given.get("deadline"))
    results: tuple[Any, ...]
    if traced:
        from .jax import attend as attend_traced

        results = attend_traced(call, tensors, batch)
    else:
        if call.fused_backward is not None and _arrays.library(tensors[0]) == "numpy":
            want = "None: a call on these arrays has no backward pass, see Plan"
            raise invalid("fused_backward", call.fused_backward, want)
        with plan_of(call, tensors, batch, forward_only=True) as plan:
            forward = pass_forward(plan, tensors)
        results = (forward.out, forward.lse, forward.max, forward.sum)
        if forward.statistics is not None:
            results += (forward.statistics.rows, forward.statistics.heads)
    return chosen(given, results)


def with_lists(given: Arguments) -> Arguments:
    """Returns the arguments with the arrays of a batch in the place of ``key_lists``."""
    if "key_lists" not in given:
        return given
    given = dict(given)
    value, bias = given.pop("key_lists"), given.pop("list_bias")
    if value is None:
        return {**given, **_key_lists.split(None, 0, list_bias=bias)}
    shape = getattr(given["query"], "shape", (0, 0))
    keys = getattr(given["key"], "shape", (0, 0))
    columns = _key_lists.columns(value)
    if columns is not None and given.get("comm") is None and columns != keys[1]:
        raise invalid("key_lists", f"{columns} columns", f"{keys[1]}, as key has rows")
    return {**given, **_key_lists.split(value, int(shape[1]), list_bias=bias)}


def with_table(given: Arguments) -> Arguments:
    """Returns the arguments with a table of two axes as a bias of four."""
    bias = given["bias"]
    if given["bias_table"] is None or bias is None or getattr(bias, "ndim", None) != 2:
        return given
    return {**given, "bias": bias[None, :, None, :]}


def check_returns(given: Arguments) -> None:
    """Checks ``return_lse`` and ``return_max_sum``."""
    _check.boolean("return_lse", given["return_lse"])
    if _check.boolean("return_max_sum", given["return_max_sum"]) and given["normalize_output"]:
        raise invalid("return_max_sum", True, "False, since normalize_output is true")


def chosen(given: Arguments, results: tuple[Any, ...]) -> Any:
    """Returns out, or a tuple of it and what else was asked for of lse, max, sum and statistics,
    which are the last two results.
    """
    wanted: tuple[Any, ...] = (results[0],)
    if given["return_lse"]:
        wanted += (results[1],)
    if given["return_max_sum"]:
        wanted += results[2:4]
    if given["return_statistics"]:
        # of torch: without a gradient, as maxima of a program that logs them
        of_scores = (of.detach() if hasattr(of, "detach") else of for of in results[-2:])
        wanted += (Statistics(*of_scores),)
    return wanted[0] if len(wanted) == 1 else wanted


def plan_of(call: Call, tensors: Tensors, batch: dict[str, Any], *, forward_only: bool) -> Plan:
    """Plans a call and adapts the plan to its batch."""
    found: list[tuple[Shapes, Place | None]] = []

    def rows() -> RankRows:
        found.append((Shapes.of(*tensors), call.place(tensors[0])))
        return found[0][0].rows

    told = gathered(call.comm, "rows", rows, call.deadline)
    plan = call.plan(*found[0], told, forward_only=forward_only)
    if any(value is not None for value in batch.values()):
        plan.adapt(batch)
    return plan


def pass_forward(plan: Plan, tensors: Tensors) -> Forward:
    """Runs a forward pass."""
    query, key, value, bias, softmax_aux = tensors
    return plan.forward(query, key, value, bias=bias, softmax_aux=softmax_aux)


def keeps_out_residual(dtype: str, backend: str | None, *, forward_only: bool) -> bool:
    """Returns true if a call keeps the rounding residual of out for its backward pass."""
    is_on_cpu = backend in (None, "cpu")
    return is_on_cpu and dtype in ("bfloat16", "float16") and not forward_only


def _is_traced(*values: Any) -> bool:
    jax = sys.modules.get("jax")
    return jax is not None and any(isinstance(value, jax.core.Tracer) for value in values)


def _requires_grad(*values: Any) -> bool:
    torch = sys.modules.get("torch")
    if torch is None or not torch.is_grad_enabled():
        return False
    return any(isinstance(value, torch.Tensor) and value.requires_grad for value in values)
