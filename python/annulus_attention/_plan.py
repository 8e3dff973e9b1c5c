"""Plans of an attention."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from . import _annulus, _arrays, _check, _key_lists
from ._agreement import agreed, carrier
from ._arrays import DeviceMemory, HostMemory, Place, Tensor, accumulator
from ._attention import Attention, Numbers, config, lengths, options_of, spelled_runs
from ._check import Documents, Machine, Rows
from ._errors import argument_got_want, invalid, unsupported
from ._results import (
    DoubleBackward,
    Forward,
    Gradients,
    Jvp,
    Pass,
    Report,
    StartedPass,
    Statistics,
)

T = TypeVar("T")

BACKENDS = tuple(_annulus.backends())
"""Names of the backends that the package was built with: ``cpu``, ``wgpu``, ``cuda``."""


TENSOR_NAMES = ("query", "key", "value", "bias", "softmax_aux")
"""Inputs of a pass, in the order of their parameters."""


class Plan:
    """A plan of an attention, made once and used for many passes.

    Without ``comm`` it is a whole ring in this process, of ``ranks`` ranks, over whole tensors.
    With ``comm``, an mpi4py communicator, this process is one rank: its tensors have the rows
    ``q_rows`` and ``kv_rows`` only, and every method but the properties is collective.

    A pass releases the GIL. An exception of a signal handler, such as KeyboardInterrupt, ends the
    pass within about 0.1 s, and the plan with it; over MPI, on all ranks. Two threads cannot use
    one plan at the same time. A forked child cannot use the plans of its parent: it makes its own.
    ``forward_start`` and ``backward_start`` run a pass on a thread of
    its own, while the program goes on.

    Args:
        attention: What is computed.
        batch, q_len, kv_len, q_heads, kv_heads, head_dim, value_dim: Lengths of the whole tensors:
            query ``[batch, q_len, q_heads, head_dim]``, key ``[batch, kv_len, kv_heads,
            head_dim]``, value ``[batch, kv_len, kv_heads, value_dim]``. Defaults: kv_len is q_len,
            kv_heads is q_heads, value_dim is head_dim.
        dtype: Element type of the tensors: float64, float32, bfloat16 or float16.
        bias_shape: Shape of the whole bias, ``[batch or 1, q_heads or 1, q_len or 1, kv_len or
            1]``, if passes are given one.
        softmax_aux_shape: Shape of the sinks, if passes are given some: ``[sinks]`` shared by all
            heads, or ``[q_heads, sinks]``.
        ranks: Ranks in this process. Default: 1.
        comm: An mpi4py communicator, which is duplicated and can be freed afterwards; or an
            ``Endpoint``, which several plans share.
        stream: With ``backend="cuda"`` and ``device``: the tensors are in the memory of this GPU,
            and a pass runs in this stream, a ``cudaStream_t`` as an integer (torch's
            ``torch.cuda.current_stream().cuda_stream``, CuPy's ``stream.ptr``; 0 is the default
            stream). A pass may return before its work is done: results are complete in the order
            of the stream, and memory of tensors is not reused before that. The plan is a rank over
            ``comm``, or alone, with the strategy ``ring``; blocks travel through host memory. bias,
            softmax_aux, lse and dlse have the element type of ``lse``: no array is converted. The
            batch of ``update`` stays in host memory.

    Keyword Args:
        backward_mode: Form of the backward pass. ``one_pass`` (default): keys and values travel
            again, their gradients one step behind. ``two_pass``: keys and values travel for dq,
            then queries for dk and dv.
        forward_only: No backward pass follows, which needs less memory.
        local_gradients: dsoftmax_aux, and dbias broadcast over queries, are each rank's own part
            instead of the sum over ranks.
        layout: ``contiguous``, ``zigzag``, ``striped``, or the rows of every rank as (query rows,
            key rows), two lists of lists. Default: chosen by the mask.
        route: ``relay_up``, ``relay_down``, ``direct``, or, over nodes with as many ranks each,
            ``rails_up``, ``rails_down`` or ``once_per_node``. Default: chosen by the mask and the
            nodes.
        deadline: Longest silence of a rank within a call before the call fails, in seconds, at
            least 1. ANNULUS_DEADLINE in the environment replaces it. A plan over several processes
            is made only if all ranks begin to make it within this time. Default: 120 s.
        threads: CPU threads of each rank. Default: the cores, divided by the ranks on the machine.
        kv_block_size: Hint: a KV block is split into messages at multiples of this many rows, so
            that computing on one part overlaps receiving the next. Larger parts are fewer and
            longer messages; results change by rounding at most, and not with one rank. Ranks may
            differ: all use the largest. Default: the KV tile of the backend, to multiples of which
            it is rounded up.
        arrival_deadline: Longest wait at the entry of a collective call (a plan, an update, a pass)
            for ranks that have not made it, in seconds, at least 1. Then the call fails with
            ANNULUS_ARRIVAL_TIMEOUT (``ArrivalTimeout`` in Python); an update or a pass has changed
            nothing and is made again with the same arguments, within the deadline of the other
            ranks. Default: no limit.
        strategy: Division of the attention among ranks. ``ring``: KV shards circulate. ``heads:H``:
            groups of H ranks divide the heads, over the groups there is a ring; H divides ranks and
            q_heads, and is a divisor or a multiple of kv_heads. ``grid:QxK``: Q query parts × K key
            columns, whose partial results are merged; ``grid:HxQxK`` divides the heads too.
            ``auto``: the one of these that sends the fewest bytes. Published names of their forms:
            ``all-gather`` and ``once-per-node``, a ring on another route; ``all-to-all``, which is
            ``heads:P``; ``pass-q``, which is ``grid:1xP``, of P ranks. Results differ by rounding
            at most. Default: ring.
        machine: Path of a machine file, as ``annulus measure`` writes it, or a dict of its fields:
            ``auto`` takes the strategy of the least predicted time whose buffers fit the memory of
            a rank. All ranks have the same machine. Only with ``auto``.
        documents: The packed documents for which ``auto`` chooses: a dict of arrays under the names
            of ``update``, without a mask, such as ``{"cum_seqlens_q": starts}`` or
            ``Shard.documents``. They have all rows, also with ``comm``, and all ranks pass the same
            ones: cum_seqlens ``[documents + 1]``, rows from 0, where rows after the last are
            padding and a document may be empty; segment ids and positions ``[batch, q_len]`` and
            ``[batch, kv_len]``. Only the choice depends on them: ``update`` is given this rank's
            part, and other batches are computed correctly. Only with ``auto``. Default: chosen by
            the mask alone.
        backend: What computes: ``cpu``, ``wgpu`` (a GPU through Vulkan, Metal or DX12; no float64),
            ``cuda`` (NVIDIA GPUs) or ``hip`` (AMD GPUs), if the package was built with it. Tensors
            are in host memory on each, unless ``stream`` is given. A GPU stays open until the
            process ends, and all plans share it. Default: cpu.
        device: Number of the GPU, as the command ``annulus doctor`` lists them. Default: the GPUs
            of a node, round robin over its ranks; with ``wgpu`` the first and those of its kind.
        receive_ahead: Ring steps by which a rank posts the receive of a block ahead of the step
            that computes on it, equal on all ranks. Each step but the first takes the memory of one
            more block, and in a backward pass of its gradients; with 2, a rank does not wait for a
            neighbour that is late by less than a step. On a direct route, as many receives are
            posted as fit into that memory. Results are the same, bit for bit. Default: 1, and 4 on
            a balanced layout.
        second_derivatives: The plan also has a JVP and a double backward: derivatives of the
            outputs along a direction, and gradients of gradients. On the CPU, with one key column
            (``ring``, ``heads:H``); not with ``reproducible``, nor of an output that is not
            normalised.
    """

    def __init__(
        self,
        attention: Attention,
        *,
        batch: int,
        q_len: int,
        q_heads: int,
        head_dim: int,
        kv_len: int | None = None,
        kv_heads: int | None = None,
        value_dim: int | None = None,
        dtype: Any = "float32",
        bias_shape: Sequence[int] | None = None,
        softmax_aux_shape: Sequence[int] | None = None,
        ranks: int | None = None,
        comm: Any = None,
        stream: int | None = None,
        # options.toml: Plan
        backward_mode: str = "one_pass",
        forward_only: bool = False,
        local_gradients: bool = False,
        layout: str | tuple[Rows, Rows] | None = None,
        route: str | None = None,
        deadline: float | None = None,
        threads: int | None = None,
        kv_block_size: int | None = None,
        arrival_deadline: float | None = None,
        strategy: str = "ring",
        machine: Machine | None = None,
        documents: Documents | None = None,
        backend: str | None = None,
        device: int | None = None,
        receive_ahead: int | None = None,
        second_derivatives: bool = False,
        # options.toml: end
    ) -> None:
        options = options_of(locals())

        def prepare() -> tuple[dict[str, Any], tuple[str, int | None], int | None, Place | None]:
            if not isinstance(attention, Attention):
                raise invalid("attention", repr(attention), "an annulus_attention.Attention")
            if ranks is not None and comm is not None:
                raise invalid("ranks", ranks, "None, since comm has its own ranks")
            self._lengths = lengths(
                batch=batch,
                q_len=q_len,
                kv_len=kv_len,
                q_heads=q_heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
                value_dim=value_dim,
            )
            self._dtype = _arrays.dtype_name("dtype", dtype)
            self._normalized = attention.normalize_output
            self._statistics = attention.return_statistics
            checked = config(
                attention,
                self._lengths,
                options,
                dtype=self._dtype,
                bias_shape=bias_shape,
                softmax_aux_shape=softmax_aux_shape,
            )
            name, number = checked["backend"] or "cpu", checked["device"]
            own_threads = checked["threads"]
            place = _place(name, number, stream, ranks, own_threads)
            return checked, (name, number), own_threads, place

        handle, ranks_of_comm = carrier(comm)
        checked, computes, own_threads, place = agreed(ranks_of_comm, "plan", prepare, deadline)
        self._memory = HostMemory() if place is None else DeviceMemory(place)
        if place is not None:
            on = (place.device, place.stream)
            if handle is None:
                self._plan = _annulus.Plan.local_on_device(checked, self._lengths, on)
            else:
                self._plan = _annulus.Plan.over_mpi_on_device(checked, self._lengths, handle, on)
        elif handle is None:
            count = 1 if ranks is None else _check.integer("ranks", ranks, least=1)
            self._plan = _annulus.Plan.local(checked, self._lengths, count, computes, own_threads)
        else:
            self._plan = _annulus.Plan.over_mpi(
                checked, self._lengths, handle, computes, own_threads
            )
        self._started: Pass[Any] | None = None
        self._has_out_residual = self._plan.has_out_residual()
        self._biased_pairs: int | None = None
        self._q_rows = spelled_runs(self._plan.q_rows())
        self._kv_rows = spelled_runs(self._plan.kv_rows())

    @property
    def q_rows(self) -> Numbers:
        """Global query rows of the tensors that this process passes, in their order."""
        rows: Numbers = self._q_rows.copy()
        return rows

    @property
    def kv_rows(self) -> Numbers:
        """Global key rows of the tensors that this process passes, in their order."""
        rows: Numbers = self._kv_rows.copy()
        return rows

    @property
    def rank(self) -> int:
        """This rank; 0 of a ring in this process."""
        return self._idle().ring()[0]

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self._idle().ring()[1]

    @property
    def layout(self) -> str:
        """Layout in force: ``contiguous``, ``zigzag``, ``striped``, ``balanced`` or ``custom``."""
        return self._idle().ring()[2]

    @property
    def strategy(self) -> str:
        """Strategy in force: ``ring``, ``heads:H``, ``grid:QxK`` or ``grid:HxQxK``."""
        return self._idle().ring()[3]

    @property
    def numerics(self) -> str:
        """Fingerprint of the arithmetic.

        With ``reproducible``, machines with the same fingerprint give the same bits.
        """
        return self._idle().numerics()

    @property
    def dtype(self) -> str:
        """Element type of query, key, value, out and their gradients."""
        return self._dtype

    def __str__(self) -> str:
        return self._idle().describe()

    def close(self) -> None:
        """Frees the plan. With ``comm`` it waits at most a second for the other ranks.

        A pass that was started is cancelled.
        """
        if self._started is not None:
            self._started.cancel()
            self._started = None
        self._plan.close()

    def __enter__(self) -> Plan:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def update(
        self,
        *,
        q_segment_ids: Any = None,
        kv_segment_ids: Any = None,
        q_positions: Any = None,
        kv_positions: Any = None,
        attention_mask: Any = None,
        cum_seqlens_q: Any = None,
        cum_seqlens_k: Any = None,
        key_lists: Any = None,
        list_bias: Any = False,
    ) -> None:
        """Adapts the plan to a batch. What is not given is removed; ``update()`` removes all.

        Args:
            q_segment_ids, kv_segment_ids: ``[batch, rows]``, integers that fit 32 bits. Visible
                only if equal and not negative. One given serves for both.
            q_positions, kv_positions: ``[batch, rows]``, explicit positions.
            attention_mask: ``[batch or 1, q_heads or 1, query rows, kv_len]``, bools or integers:
                visible only if not zero. All keys, also with ``comm``.
            cum_seqlens_q, cum_seqlens_k: ``[sequences + 1]``, ascending from 0: packed sequences,
                in which positions restart. Whole, also with ``comm``.
            key_lists: Keys of each query, at most: a CSR or BSR array of SciPy or torch, ``[query
                rows, kv_len]``, whose stored entries are visible whatever their values, (indptr,
                indices), or (indptr, starts, ends) of ranges of keys, as ``masks.key_blocks``
                makes. With ``comm`` the rows of this rank and all keys; it then receives the
                listed rows of other ranks and no others. With ``groups · rows`` rows, the lists of
                each group of query heads.
            list_bias: True to add the values of a CSR array to the scores; or an array of these
                numbers, one for each listed pair. Their gradient is ``Gradients.dlist_bias``.
        """
        with self._collective():
            columns, kv_len = _key_lists.columns(key_lists), self._lengths["kv_len"]
            if columns is not None and columns != kv_len:
                raise invalid("key_lists", f"{columns} columns", f"{kv_len}, the keys of all ranks")
            given = {
                "q_segment_ids": q_segment_ids,
                "kv_segment_ids": kv_segment_ids,
                "q_positions": q_positions,
                "kv_positions": kv_positions,
                "attention_mask": attention_mask,
                "cum_seqlens_q": cum_seqlens_q,
                "cum_seqlens_k": cum_seqlens_k,
                **_key_lists.split(key_lists, len(self._q_rows), list_bias=list_bias),
            }
            self._adapt(given)

    def adapt(self, given: dict[str, Any]) -> None:
        """Adapts the plan to the arrays of a batch by name, with key lists as their arrays."""
        with self._collective():
            self._adapt(given)

    def _adapt(self, given: dict[str, Any]) -> None:
        arrays = batch_arrays(given)
        self._plan.update(arrays)
        bias = arrays.get("key_list_bias")
        self._biased_pairs = None if bias is None else len(bias)

    def forward(
        self,
        query: Any,
        key: Any,
        value: Any,
        *,
        bias: Any = None,
        softmax_aux: Any = None,
        out: Any = None,
        lse: Any = None,
    ) -> Forward:
        """Computes out and lse.

        Args:
            query: ``[batch, q_rows, q_heads, head_dim]``. Any strides; not copied.
            key: ``[batch, kv_rows, kv_heads, head_dim]``.
            value: ``[batch, kv_rows, kv_heads, value_dim]``.
            bias: ``[batch or 1, q_heads or 1, q_rows or 1, kv_len or 1]``, as ``bias_shape``.
            softmax_aux: As ``softmax_aux_shape``.
            out, lse: Arrays to write instead of new ones. They overlap nothing.
        """
        with self._collective():
            inputs = self._inputs(query, key, value, bias, softmax_aux)
            acc = accumulator(self._dtype)
            whole, statistics = self._shapes_of_outputs()
            memory, like = self._memory, inputs.query.library
            arrays = {
                "out": memory.output("out", out, whole, self._dtype, like),
                "lse": memory.output("lse", lse, statistics, acc, like),
            }
            for name in ("max", "sum") if self._normalized else ("max", "sum", "ties"):
                arrays[name] = memory.empty(statistics, acc, like)
            if self._has_out_residual:
                arrays["out_residual"] = memory.empty(whole, self._dtype, like)
            if self._statistics:
                arrays["statistics"] = memory.empty((*statistics, 3), acc, like)
                arrays["head_statistics"] = memory.empty((statistics[1], 3, 2), acc, like)
            reports = self._plan.forward({**inputs.arrays, **arrays})
        of_out = ("out", "out_residual")
        results = {
            name: memory.given_back(array, self._dtype if name in of_out else acc, like)
            for name, array in arrays.items()
            if {"out": out, "lse": lse}.get(name) is None
        }
        if out is not None:
            results["out"] = out
        if lse is not None:
            results["lse"] = lse
        if self._statistics:
            results["statistics"] = Statistics(
                results.pop("statistics"), results.pop("head_statistics")
            )
        return Forward(**results, reports=reports_of(reports))

    def backward(
        self,
        query: Any,
        key: Any,
        value: Any,
        forward: Forward,
        dout: Any,
        dlse: Any = None,
        *,
        bias: Any = None,
        softmax_aux: Any = None,
    ) -> Gradients:
        """Computes the gradients from the result of ``forward``, ∂L/∂out and ∂L/∂lse.

        With ``comm``, dsoftmax_aux and a dbias that is broadcast over queries are summed over all
        ranks, unless ``local_gradients`` is set.

        Args:
            query, key, value, bias, softmax_aux: As in ``forward``.
            forward: What ``forward`` returned for them.
            dout: Shape and element type of out.
            dlse: Shape and element type of lse. Default: 0.
        """
        with self._collective():
            inputs = self._inputs(query, key, value, bias, softmax_aux)
            acc = accumulator(self._dtype)
            arrays = dict(inputs.arrays)
            memory, like = self._memory, inputs.query.library
            arrays["out"] = self._of_dtype("out", forward.out).array
            arrays["dout"] = self._of_dtype("dout", dout).array
            if forward.out_residual is not None:
                residual = self._of_dtype("out_residual", forward.out_residual)
                arrays["out_residual"] = residual.array
            given = {
                "lse": forward.lse,
                "max": forward.max,
                "sum": forward.sum,
                "ties": forward.ties,
            }
            for name, array in {**given, "dlse": dlse}.items():
                if array is not None:
                    arrays[name] = memory.converted(name, memory.tensor(name, array), acc)
            gradients = self._empty_gradients(arrays, like)
            reports = self._plan.backward({**arrays, **gradients})
            dlist_bias = self._list_bias_gradient()
        results = self._gradients(inputs, gradients, reports_of(reports))
        return replace(results, dlist_bias=dlist_bias)

    def _list_bias_gradient(self) -> Any:
        """Returns the gradient of the values of key_lists that the last pass has computed."""
        if self._biased_pairs is None:
            return None
        dlist_bias = np.empty(self._biased_pairs)
        self._plan.list_bias_gradient({"dlist_bias": dlist_bias})
        return dlist_bias

    def jvp(
        self,
        query: Any,
        key: Any,
        value: Any,
        query_tangent: Any,
        key_tangent: Any,
        value_tangent: Any,
        *,
        bias: Any = None,
        softmax_aux: Any = None,
        bias_tangent: Any = None,
        softmax_aux_tangent: Any = None,
        list_bias_tangent: Any = None,
    ) -> Jvp:
        """Computes out, lse and their derivatives along the tangents of the inputs.

        Of a plan with ``second_derivatives``.

        Args:
            query, key, value, bias, softmax_aux: As in ``forward``.
            query_tangent, key_tangent, value_tangent: Shape and element type of query, key, value.
            bias_tangent, softmax_aux_tangent: Shapes of bias and softmax_aux. Default: 0.
            list_bias_tangent: Of the values of key_lists, ``[listed pairs]``. Default: 0.
        """
        tangents = (query_tangent, key_tangent, value_tangent, bias_tangent, softmax_aux_tangent)
        with self._collective():
            inputs = self._inputs(query, key, value, bias, softmax_aux)
            direction = self._direction(tangents, "{}_tangent")
            acc = accumulator(self._dtype)
            memory, like = self._memory, inputs.query.library
            whole, statistics = self._shapes_of_outputs()
            outputs = {
                "out": memory.empty(whole, self._dtype, like),
                "lse": memory.empty(statistics, acc, like),
                "out_tangent": memory.empty(whole, self._dtype, like),
                "lse_tangent": memory.empty(statistics, acc, like),
            }
            direction |= _list_bias_direction("list_bias_tangent", list_bias_tangent)
            reports = self._plan.jvp({**inputs.arrays, **direction, **outputs})
        results = {
            name: memory.given_back(array, self._dtype if name.startswith("out") else acc, like)
            for name, array in outputs.items()
        }
        return Jvp(**results, reports=reports_of(reports))

    def double_backward(
        self,
        query: Any,
        key: Any,
        value: Any,
        dout: Any,
        dq_cotangent: Any,
        dk_cotangent: Any,
        dv_cotangent: Any,
        dlse: Any = None,
        *,
        bias: Any = None,
        softmax_aux: Any = None,
        dbias_cotangent: Any = None,
        dsoftmax_aux_cotangent: Any = None,
        dlist_bias_cotangent: Any = None,
    ) -> DoubleBackward:
        """Computes the gradients of ``backward``'s gradients: those of their product with the
        cotangents, with respect to the inputs, dout and dlse. It needs no result of ``forward``.

        Of a plan with ``second_derivatives``. Sums over ranks are those of ``backward``; the
        cotangents of what is summed are then the same on all ranks.

        Args:
            query, key, value, bias, softmax_aux: As in ``forward``.
            dout, dlse: As in ``backward``.
            dq_cotangent, dk_cotangent, dv_cotangent: Shape and element type of query, key, value.
            dbias_cotangent, dsoftmax_aux_cotangent: Shapes of bias and softmax_aux. Default: 0.
            dlist_bias_cotangent: Of the values of key_lists, ``[listed pairs]``. Default: 0.
        """
        cotangents = (dq_cotangent, dk_cotangent, dv_cotangent)
        with self._collective():
            inputs = self._inputs(query, key, value, bias, softmax_aux)
            given = (*cotangents, dbias_cotangent, dsoftmax_aux_cotangent)
            direction = self._direction(given, "d{}_cotangent")
            acc = accumulator(self._dtype)
            memory, like = self._memory, inputs.query.library
            arrays = {**inputs.arrays, **direction}
            arrays["dout"] = self._of_dtype("dout", dout).array
            if dlse is not None:
                arrays["dlse"] = memory.converted("dlse", memory.tensor("dlse", dlse), acc)
            gradients = self._empty_gradients(inputs.arrays, like)
            whole, statistics = self._shapes_of_outputs()
            ddout = memory.empty(whole, self._dtype, like)
            ddlse = memory.empty(statistics, acc, like)
            written = {**gradients, "ddout": ddout, "ddlse": ddlse}
            arrays |= _list_bias_direction("dlist_bias_cotangent", dlist_bias_cotangent)
            reports = reports_of(self._plan.double_backward({**arrays, **written}))
            dlist_bias = self._list_bias_gradient()
        of_inputs = self._gradients(inputs, gradients, reports)
        return DoubleBackward(
            inputs=replace(of_inputs, dlist_bias=dlist_bias),
            ddout=memory.given_back(ddout, self._dtype, like),
            ddlse=memory.given_back(ddlse, acc, like),
            reports=reports,
        )

    def _shapes_of_outputs(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the shapes of out and of lse."""
        lengths, rows = self._lengths, len(self._q_rows)
        batch, heads = lengths["batch"], lengths["q_heads"]
        return (batch, rows, heads, lengths["value_dim"]), (batch, heads, rows)

    def _direction(self, given: tuple[Any, ...], spelled: str) -> dict[str, Any]:
        """Returns the arrays of a direction, as the module names them. ``spelled`` has the form of
        their names, in which an error is raised.
        """
        short = ("q", "k", "v") if spelled.startswith("d") else ("query", "key", "value")
        arrays = {}
        for name, of, value in zip(TENSOR_NAMES, (*short, *TENSOR_NAMES[3:]), given, strict=True):
            argument = spelled.format(of)
            if name in ("query", "key", "value"):
                arrays[f"{name}_direction"] = self._of_dtype(argument, value).array
            elif value is not None:
                acc, memory = accumulator(self._dtype), self._memory
                array = memory.converted(argument, memory.tensor(argument, value), acc)
                arrays[f"{name}_direction"] = memory.sinks(array) if name != "bias" else array
        return arrays

    def _empty_gradients(self, arrays: dict[str, Any], like: Any) -> dict[str, Any]:
        """Returns arrays for the gradients of inputs, as the module names them."""
        acc, memory = accumulator(self._dtype), self._memory
        gradients = {
            f"d{short}": memory.empty(arrays[name].shape, self._dtype, like)
            for short, name in (("q", "query"), ("k", "key"), ("v", "value"))
        }
        for name in ("bias", "softmax_aux"):
            if name in arrays:
                gradients[f"d{name}"] = memory.empty(arrays[name].shape, acc, like)
        return gradients

    def _gradients(
        self, inputs: _Inputs, gradients: dict[str, Any], reports: tuple[Report, ...]
    ) -> Gradients:
        """Returns gradients in the shapes and element types in which their inputs were given."""
        memory, like = self._memory, inputs.query.library
        sources = {"dbias": inputs.bias, "dsoftmax_aux": inputs.softmax_aux}
        results = {}
        for name, array in gradients.items():
            source, dtype = sources.get(name), self._dtype
            if source is not None:
                dtype = source.dtype
                acc = accumulator(self._dtype)
                array = memory.converted(name, Tensor(array, acc, like), dtype)
                array = array if array.shape == source.array.shape else array[0]
            results[name] = memory.given_back(array, dtype, like)
        return Gradients(**results, reports=reports)

    def forward_start(
        self,
        query: Any,
        key: Any,
        value: Any,
        *,
        bias: Any = None,
        softmax_aux: Any = None,
        out: Any = None,
        lse: Any = None,
    ) -> StartedPass[Forward]:
        """Starts ``forward`` on a thread of its own, so that the program can do something else.

        ``StartedPass.wait`` returns what ``forward`` returns and raises what it raises, also of
        arguments. Until then arrays stay as they are. With ``comm``, ranks may start or call the
        pass, and MPI has been initialised with ``MPI_THREAD_MULTIPLE``, as mpi4py does. Not with
        ``stream``: such a pass returns before its work is done.

        Args:
            query, key, value, bias, softmax_aux, out, lse: As in ``forward``.
        """
        return self._start(
            lambda: self.forward(
                query, key, value, bias=bias, softmax_aux=softmax_aux, out=out, lse=lse
            )
        )

    def backward_start(
        self,
        query: Any,
        key: Any,
        value: Any,
        forward: Forward,
        dout: Any,
        dlse: Any = None,
        *,
        bias: Any = None,
        softmax_aux: Any = None,
    ) -> StartedPass[Gradients]:
        """Starts ``backward`` on a thread of its own, as ``forward_start``.

        Args:
            query, key, value, forward, dout, dlse, bias, softmax_aux: As in ``backward``.
        """
        return self._start(
            lambda: self.backward(
                query, key, value, forward, dout, dlse, bias=bias, softmax_aux=softmax_aux
            )
        )

    def _start(self, work: Callable[[], T]) -> StartedPass[T]:
        plan = self._idle()
        if isinstance(self._memory, DeviceMemory):
            why = "a pass in a stream returns before its work is done"
            raise unsupported("a pass on a thread of its own", why)
        if not plan.any_thread():
            why = "MPI was initialised below MPI_THREAD_MULTIPLE"
            raise unsupported("a pass on a thread of its own", why)

        def ended() -> None:
            self._started = None

        self._started = Pass(work, plan.interrupt)
        return StartedPass(self._started, ended)

    def _idle(self) -> _annulus.Plan:
        """Returns the plan, unless a pass is under way that another thread runs."""
        started = self._started
        # in a forked child the module refuses the plan itself
        if (
            started is not None
            and not started.is_of_parent
            and threading.current_thread() is not started.thread
        ):
            want = "StartedPass.wait before another call"
            raise invalid("plan", "one with a pass under way", want)
        return self._plan

    @contextmanager
    def _collective(self) -> Iterator[None]:
        """Lets the other ranks of a call know if its arguments are refused here."""
        self._idle().begin()
        try:
            yield
        except Exception as error:
            self._plan.refuse(*argument_got_want(error))
            raise

    def _of_dtype(self, name: str, value: Any) -> Tensor:
        given = self._memory.tensor(name, value)
        if given.dtype != self._dtype:
            raise invalid(name, f"elements {given.dtype}", f"{self._dtype}, as the plan")
        return given

    def _inputs(self, query: Any, key: Any, value: Any, bias: Any, softmax_aux: Any) -> _Inputs:
        tensors = {
            name: self._of_dtype(name, array)
            for name, array in (("query", query), ("key", key), ("value", value))
        }
        arrays = {name: given.array for name, given in tensors.items()}
        acc = accumulator(self._dtype)
        memory = self._memory
        bias = None if bias is None else memory.tensor("bias", bias)
        sinks = None if softmax_aux is None else memory.tensor("softmax_aux", softmax_aux)
        if bias is not None:
            arrays["bias"] = memory.converted("bias", bias, acc)
        if sinks is not None:
            arrays["softmax_aux"] = memory.sinks(memory.converted("softmax_aux", sinks, acc))
        return _Inputs(arrays, tensors["query"], bias, sinks)


@dataclass(frozen=True)
class _Inputs:
    """Inputs of a pass as the extension module reads them, and as they were given."""

    arrays: dict[str, Any]
    query: Tensor
    bias: Tensor | None
    softmax_aux: Tensor | None


def _place(
    backend: str, device: int | None, stream: Any, ranks: Any, threads: int | None
) -> Place | None:
    """Checks what goes with a stream; None without one."""
    if stream is None:
        return None
    handle = _check.integer("stream", stream)
    if backend != "cuda":
        raise invalid("backend", repr(backend), '"cuda", since a stream is given')
    if "cuda" not in BACKENDS:
        raise unsupported("stream", "this build has no backend cuda")
    if device is None:
        raise invalid("device", None, "the number of the stream's GPU")
    if ranks not in (None, 1):
        raise unsupported("stream", f"a ring of {ranks} ranks in one process; use comm")
    if threads is not None:
        raise invalid("threads", threads, "None: the backend cuda computes on a GPU")
    return Place(device, handle)


def _list_bias_direction(name: str, direction: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Returns the direction of the values of key_lists for the library."""
    return {} if direction is None else {"list_bias_direction": _key_lists.numbers(name, direction)}


def batch_arrays(given: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Returns the arrays of a batch that are given, in the element types of the module."""
    arrays = {}
    for name, value in given.items():
        if value is None:
            continue
        if name == "attention_mask":
            arrays[name] = _arrays.visible_pairs(name, value)
        elif name == "key_list_bias":
            arrays[name] = _key_lists.numbers(name, value)
        elif name.startswith("key_list"):
            axes = 3 if name == "key_list_offsets" else 1
            arrays[name] = _arrays.integers(name, value, "int64", axes)
        elif name.startswith("cum_seqlens"):
            arrays[name] = _arrays.integers(name, value, "int64", 1)
        else:
            ids = name.endswith("segment_ids")
            arrays[name] = _arrays.integers(name, value, "int32" if ids else "int64", 2)
    return arrays


def reports_of(reports: list[tuple[float, float, int, int]]) -> tuple[Report, ...]:
    return tuple(Report(*report) for report in reports)
