"""The definition of an attention, plans of it, and the results of a pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from . import _annulus, _arrays, _check
from ._annulus import BiasFunction, Mask
from ._arrays import Tensor, accumulator, empty, given_back, tensor
from ._errors import argument_got_want, invalid, refused, unsupported

T = TypeVar("T")
Rows = Sequence[Sequence[int]]
ALIGNMENTS = ("top_left", "bottom_right")
BIAS_ORDERS = ("after_soft_cap", "before_soft_cap")
PRECISIONS = ("highest", "high", "default")
LAYOUTS = ("contiguous", "zigzag", "striped")
ROUTES = ("relay_up", "relay_down", "direct")
BACKWARD_MODES = ("one_pass", "two_pass")
Numbers = npt.NDArray[np.int64]


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

    def __post_init__(self) -> None:
        self._config()

    def plan(self, **arguments: Any) -> Plan:
        """Plans this attention: ``Plan(self, **arguments)``."""
        return Plan(self, **arguments)

    def _config(self) -> dict[str, Any]:
        """Returns the checked parameters, as the extension module reads them."""
        left, right = _check.window(self.sliding_window)
        for name, value, kind in (
            ("mask", self.mask, Mask),
            ("bias_function", self.bias_function, BiasFunction),
        ):
            if value is not None and not isinstance(value, kind):
                raise invalid(name, repr(value), f"one of annulus.{name.split('_')[0]} objects")
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
        }


@dataclass(frozen=True)
class Report:
    """Times and bytes of one pass on one rank.

    Attributes:
        seconds: Wall-clock time of the pass.
        waiting_seconds: Time in which the rank waited for others.
        bytes_sent: Payload bytes that the rank sent.
        bytes_predicted: Payload bytes that it sends by the schedule.
    """

    seconds: float
    waiting_seconds: float
    bytes_sent: int
    bytes_predicted: int


@dataclass(frozen=True)
class Forward:
    """Outputs of a forward pass, which are inputs of the backward pass.

    Attributes:
        out: ``[batch, q_len, q_heads, value_dim]``, in the inputs' element type.
        lse: ``[batch, q_heads, q_len]``, natural logarithm, float32 (float64 for float64 inputs).
            −∞ for a query without a visible key and without sinks.
        max: Maximum of the scores and sinks, shape of lse. Only of an unnormalised output.
        sum: Σ e^(s − max), shape of lse. Only of an unnormalised output.
        ties: Number of keys and sinks that share the maximum. Only of an unnormalised output.
        reports: Times and bytes of the ranks of this process.
    """

    out: Any
    lse: Any
    max: Any = None
    sum: Any = None
    ties: Any = None
    reports: tuple[Report, ...] = ()


@dataclass(frozen=True)
class Gradients:
    """Outputs of a backward pass, each with the shape and element type of its input.

    Attributes:
        dq, dk, dv: Of query, key and value.
        dbias: Of the bias, or None.
        dsoftmax_aux: Of the sinks, or None.
        reports: Times and bytes of the ranks of this process.
    """

    dq: Any
    dk: Any
    dv: Any
    dbias: Any = None
    dsoftmax_aux: Any = None
    reports: tuple[Report, ...] = ()


class Plan:
    """A plan of an attention, made once and used for many passes.

    Without ``comm`` it is a whole ring in this process, of ``ranks`` ranks, over whole tensors.
    With ``comm``, an mpi4py communicator, this process is one rank: its tensors have the rows
    ``q_rows`` and ``kv_rows`` only, and every method but the properties is collective.

    A pass releases the GIL. An exception of a signal handler, such as KeyboardInterrupt, ends the
    pass within about 0.1 s, and the plan with it; over MPI, on all ranks. Two threads cannot use
    one plan at the same time.

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
        comm: An mpi4py communicator. It is duplicated, and can be freed afterwards.
        layout: ``contiguous``, ``zigzag``, ``striped``, or the rows of every rank as (query rows,
            key rows), two lists of lists. Default: chosen by the mask.
        route: ``relay_up``, ``relay_down`` or ``direct``. Default: chosen by the mask.
        threads: Threads of each rank. Default: the cores, divided by the ranks on the machine.
        deadline: Seconds of silence after which a call fails. Default: 120; at least 1.
        backward_mode: ``one_pass`` or ``two_pass``.
        forward_only: Plans no backward pass, which needs less memory.
        local_gradients: Returns dsoftmax_aux, and dbias broadcast over queries, as this rank's own
            part. Only with ``comm``.
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
        layout: str | tuple[Rows, Rows] | None = None,
        route: str | None = None,
        threads: int | None = None,
        deadline: float | None = None,
        backward_mode: str = "one_pass",
        forward_only: bool = False,
        local_gradients: bool = False,
    ) -> None:
        def prepare() -> tuple[dict[str, Any], int | None]:
            if not isinstance(attention, Attention):
                raise invalid("attention", repr(attention), "an annulus.Attention")
            if ranks is not None and comm is not None:
                raise invalid("ranks", ranks, "None, since comm has its own ranks")
            lengths = {
                "batch": batch,
                "q_len": q_len,
                "kv_len": q_len if kv_len is None else kv_len,
                "q_heads": q_heads,
                "kv_heads": q_heads if kv_heads is None else kv_heads,
                "head_dim": head_dim,
                "value_dim": head_dim if value_dim is None else value_dim,
            }
            self._lengths = {name: _check.integer(name, value) for name, value in lengths.items()}
            self._dtype = _arrays.dtype_name("dtype", dtype)
            self._normalized = attention.normalize_output
            config = {
                **attention._config(),
                "dtype": self._dtype,
                "bias": _bias_shape(bias_shape),
                "softmax_aux": _sinks(softmax_aux_shape, self._lengths["q_heads"]),
                "layout": _layout(layout),
                "route": None if route is None else _check.choice("route", route, ROUTES),
                "deadline": _check.number_or_none("deadline", deadline),
                "backward_mode": _check.choice("backward_mode", backward_mode, BACKWARD_MODES),
                "forward_only": _check.boolean("forward_only", forward_only),
                "local_gradients": _check.boolean("local_gradients", local_gradients),
            }
            return config, _check.integer_or_none("threads", threads, least=1)

        handle = None if comm is None else _fortran_handle(comm)
        config, own_threads = agreed(comm, prepare)
        if handle is None:
            count = 1 if ranks is None else _check.integer("ranks", ranks, least=1)
            self._plan = _annulus.Plan.local(config, self._lengths, count, own_threads)
        else:
            self._plan = _annulus.Plan.over_mpi(config, self._lengths, handle, own_threads)
        self._q_rows = _spelled(self._plan.q_rows())
        self._kv_rows = _spelled(self._plan.kv_rows())

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
        return self._plan.ring()[0]

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self._plan.ring()[1]

    @property
    def layout(self) -> str:
        """Layout in force: ``contiguous``, ``zigzag``, ``striped`` or ``custom``."""
        return self._plan.ring()[2]

    @property
    def dtype(self) -> str:
        """Element type of query, key, value, out and their gradients."""
        return self._dtype

    def __str__(self) -> str:
        return self._plan.describe()

    def close(self) -> None:
        """Frees the plan. With ``comm`` it waits at most a second for the other ranks."""
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
    ) -> None:
        """Adapts the plan to a batch. What is not given is removed; ``update()`` removes all.

        Args:
            q_segment_ids, kv_segment_ids: ``[batch, rows]``, integers. Visible only if equal and
                not negative. One given serves for both.
            q_positions, kv_positions: ``[batch, rows]``, explicit positions.
            attention_mask: ``[batch or 1, q_heads or 1, query rows, kv_len]``, bools or integers:
                visible only if not zero. All keys, also with ``comm``.
            cum_seqlens_q, cum_seqlens_k: ``[sequences + 1]``, ascending from 0: packed sequences,
                in which positions restart. Whole, also with ``comm``.
        """
        given = {
            "q_segment_ids": q_segment_ids,
            "kv_segment_ids": kv_segment_ids,
            "q_positions": q_positions,
            "kv_positions": kv_positions,
            "attention_mask": attention_mask,
            "cum_seqlens_q": cum_seqlens_q,
            "cum_seqlens_k": cum_seqlens_k,
        }
        with self._collective():
            self._plan.update(batch_arrays(given))

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
            lengths, rows = self._lengths, len(self._q_rows)
            statistics = (lengths["batch"], lengths["q_heads"], rows)
            whole = (lengths["batch"], rows, lengths["q_heads"], lengths["value_dim"])
            arrays = {
                "out": _output("out", out, whole, self._dtype),
                "lse": _output("lse", lse, statistics, acc),
            }
            if not self._normalized:
                arrays |= {name: empty(statistics, acc) for name in ("max", "sum", "ties")}
            reports = self._plan.forward({**inputs.arrays, **arrays})
        like = inputs.query.library
        results = {name: given_back(array, acc, like) for name, array in arrays.items()}
        results["out"] = given_back(arrays["out"], self._dtype, like) if out is None else out
        if lse is not None:
            results["lse"] = lse
        return Forward(**results, reports=_reports(reports))

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
            arrays["out"] = self._of_dtype("out", forward.out).array
            arrays["dout"] = self._of_dtype("dout", dout).array
            given = {
                "lse": forward.lse,
                "max": forward.max,
                "sum": forward.sum,
                "ties": forward.ties,
            }
            for name, array in {**given, "dlse": dlse}.items():
                if array is not None:
                    arrays[name] = _arrays.converted(tensor(name, array), acc)
            gradients = {
                f"d{short}": empty(arrays[name].shape, self._dtype)
                for short, name in (("q", "query"), ("k", "key"), ("v", "value"))
            }
            for name in ("bias", "softmax_aux"):
                if name in arrays:
                    gradients[f"d{name}"] = empty(arrays[name].shape, acc)
            reports = self._plan.backward({**arrays, **gradients})
        like = inputs.query.library
        results = {name: given_back(array, self._dtype, like) for name, array in gradients.items()}
        for name, source in (("bias", inputs.bias), ("softmax_aux", inputs.softmax_aux)):
            if source is not None:
                array = gradients[f"d{name}"].reshape(source.array.shape)
                own = _arrays.converted(Tensor(array, acc, like), source.dtype)
                results[f"d{name}"] = given_back(own, source.dtype, like)
        return Gradients(**results, reports=_reports(reports))

    @contextmanager
    def _collective(self) -> Iterator[None]:
        """Lets the other ranks of a call know if its arguments are refused here."""
        self._plan.begin()
        try:
            yield
        except Exception as error:
            self._plan.refuse(*argument_got_want(error))
            raise

    def _of_dtype(self, name: str, value: Any) -> Tensor:
        given = tensor(name, value)
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
        bias = None if bias is None else tensor("bias", bias)
        sinks = None if softmax_aux is None else tensor("softmax_aux", softmax_aux)
        if bias is not None:
            arrays["bias"] = _arrays.converted(bias, acc)
        if sinks is not None:
            array = _arrays.converted(sinks, acc)
            arrays["softmax_aux"] = array[None, :] if array.ndim == 1 else array
        return _Inputs(arrays, tensors["query"], bias, sinks)


@dataclass(frozen=True)
class _Inputs:
    """Inputs of a pass as the extension module reads them, and as they were given."""

    arrays: dict[str, np.ndarray[Any, Any]]
    query: Tensor
    bias: Tensor | None
    softmax_aux: Tensor | None


def batch_arrays(given: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Returns the arrays of a batch that are given, in the element types of the module."""
    arrays = {}
    for name, value in given.items():
        if value is None:
            continue
        if name == "attention_mask":
            arrays[name] = _arrays.visible_pairs(name, value)
        elif name.startswith("cum_seqlens"):
            arrays[name] = _arrays.integers(name, value, "int64", 1)
        else:
            ids = name.endswith("segment_ids")
            arrays[name] = _arrays.integers(name, value, "int32" if ids else "int64", 2)
    return arrays


def agreed(comm: Any, work: Callable[[], T]) -> T:
    """Returns the result of ``work``, or raises on all ranks if it fails on one.

    Collective over ``comm``, unless that is None.
    """
    if comm is None:
        return work()
    try:
        result, failure = work(), None
    except Exception as error:
        failure = error
    told = comm.allgather(None if failure is None else str(failure))
    if failure is not None:
        raise failure
    for rank, what in enumerate(told):
        if what is not None:
            raise refused(rank, what)
    return result


def _output(name: str, given: Any, shape: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
    if given is None:
        return empty(shape, dtype)
    if _arrays.library(given) == "jax":
        raise unsupported(name, "a JAX array is never written")
    found = tensor(name, given, writable=True)
    if found.dtype != dtype or found.array.shape != shape:
        raise invalid(name, f"{found.dtype} {found.array.shape}", f"{dtype} {shape}")
    return found.array


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


def _layout(layout: Any) -> Any:
    if layout is None or isinstance(layout, str):
        return None if layout is None else _check.choice("layout", layout, LAYOUTS)
    want = "a name, or (query rows, key rows) of every rank"
    if not isinstance(layout, (tuple, list)) or len(layout) != 2:
        raise invalid("layout", repr(layout), want)
    return tuple(
        [[_check.integer("layout", row, least=None) for row in rows] for rows in side]
        for side in layout
    )


def check_communicator(comm: Any) -> None:
    """Checks that a communicator is one of mpi4py's."""
    if not hasattr(comm, "py2f") or not hasattr(comm, "allgather"):
        raise invalid("comm", repr(comm), "an mpi4py communicator")


def _fortran_handle(comm: Any) -> int:
    if not _annulus.HAS_MPI:
        why = 'this build has no MPI; pip install ./python -C build-args="--features mpi"'
        raise unsupported("comm", why)
    check_communicator(comm)
    from mpi4py import MPI

    own, other = _annulus.mpi_library(), MPI.Get_library_version()
    if own.strip("\0\n ") != other.strip("\0\n "):
        raise unsupported("comm", f"mpi4py uses {other!r}, and annulus was built with {own!r}")
    return int(comm.py2f())


def _spelled(runs: list[tuple[int, int, int]]) -> Numbers:
    parts = [start + step * np.arange(count, dtype=np.int64) for start, step, count in runs]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _reports(reports: list[tuple[float, float, int, int]]) -> tuple[Report, ...]:
    return tuple(Report(*report) for report in reports)
