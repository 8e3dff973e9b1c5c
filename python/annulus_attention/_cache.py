"""KV caches for decoding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from . import _annulus, _arrays, _check
from ._agreement import agreed, carrier
from ._arrays import HostMemory, Tensor, accumulator, given_back, tensor
from ._attention import Attention, Numbers, config, lengths, options_of, spelled_runs
from ._errors import argument_got_want, invalid, unsupported
from ._plan import reports_of
from ._results import Forward

PAGE_ROWS = 64
# a page of the reproducible order is a whole leaf, or 2^n of them
LEAF_ROWS = 256


class Cache:
    """A KV cache for decoding and chunked prefill, whose rows are sharded over ranks.

    A program appends the keys and values of new tokens, in chunks or one by one, and attends with
    their queries. Row i of the cache has the row number and the position i. Every ranks-th page of
    rows is on the same rank. A call of ``attend`` is one all-gather of (out, lse), whose bytes do
    not depend on the number of cached rows. With ``reproducible`` results have the bits of one
    attention over all cached rows, and the bytes of a call grow with the number of pages that its
    queries attend to.

    Without ``comm`` all ranks are threads of this process. With ``comm``, an mpi4py communicator,
    this process is one rank: making a cache and ``attend`` are collective, all else is local. All
    ranks pass the same queries, and get the same bits.

    Releases the GIL. An exception of a signal handler, such as KeyboardInterrupt, ends ``attend``
    within about 0.1 s, and the cache with it. Two threads cannot use one cache at the same time. A
    forked child cannot use the caches of its parent: it makes its own.

        cache = annulus.Cache(annulus.Attention(causal=True), batch=1, q_heads=32, head_dim=128)
        cache.append(key, value)
        out = cache.attend(query).out

    Args:
        attention: What is computed, with ``normalize_output``. Its alignment has no effect: queries
            are those of the last rows.
        batch, q_heads, kv_heads, head_dim, value_dim: Lengths of the tensors. Defaults: kv_heads
            is q_heads, value_dim is head_dim.
        dtype: Element type of the tensors: float64, float32, bfloat16 or float16.
        softmax_aux_shape: Shape of the sinks, if calls are given some: ``[sinks]`` shared by all
            heads, or ``[q_heads, sinks]``.
        page_rows: Rows of a page, 1 to 2**32. Numbers of rows of two ranks differ by at most one
            page. Default: 64. With ``reproducible`` 256 times a power of two; default: 256.
        ranks: Ranks in this process. Default: 1.
        comm: An mpi4py communicator, which is duplicated and can be freed afterwards; or an
            ``Endpoint``, which several plans and caches share.
        backend, device: As for ``Plan``. Keys and values are in the memory of the backend; an
            append copies its rows there, and nothing else. ``reproducible`` is for ``cpu`` only.
        threads: Threads of each rank of ``cpu``. Default: the cores, divided by the ranks on the
            machine.
        deadline, arrival_deadline: As for ``Plan``.
    """

    def __init__(
        self,
        attention: Attention,
        *,
        batch: int,
        q_heads: int,
        head_dim: int,
        kv_heads: int | None = None,
        value_dim: int | None = None,
        dtype: Any = "float32",
        softmax_aux_shape: Sequence[int] | None = None,
        page_rows: int | None = None,
        ranks: int | None = None,
        comm: Any = None,
        # options.toml: Cache
        deadline: float | None = None,
        threads: int | None = None,
        arrival_deadline: float | None = None,
        backend: str | None = None,
        device: int | None = None,
        # options.toml: end
    ) -> None:
        options = options_of(locals())

        def prepare() -> tuple[dict[str, Any], tuple[str, int | None], int | None]:
            if not isinstance(attention, Attention):
                raise invalid("attention", repr(attention), "an annulus_attention.Attention")
            if not attention.normalize_output:
                raise unsupported("normalize_output", "the KV cache merges normalised outputs")
            if ranks is not None and comm is not None:
                raise invalid("ranks", ranks, "None, since comm has its own ranks")
            self._lengths = lengths(
                batch=batch,
                q_len=0,
                kv_len=0,
                q_heads=q_heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
                value_dim=value_dim,
            )
            self._dtype = _arrays.dtype_name("dtype", dtype)
            default = LEAF_ROWS if attention.reproducible else PAGE_ROWS
            given = _check.integer_or_none("page_rows", page_rows, least=1)
            self._page_rows = default if given is None else given
            checked = config(
                attention,
                self._lengths,
                options,
                dtype=self._dtype,
                softmax_aux_shape=softmax_aux_shape,
            )
            computes = (checked["backend"] or "cpu", checked["device"])
            return checked, computes, checked["threads"]

        handle, ranks_of_comm = carrier(comm)
        checked, computes, own_threads = agreed(ranks_of_comm, "cache", prepare, deadline)
        pages = self._page_rows
        if handle is None:
            count = 1 if ranks is None else _check.integer("ranks", ranks, least=1)
            self._cache = _annulus.Cache.local(
                checked, self._lengths, pages, count, computes, own_threads
            )
        else:
            self._cache = _annulus.Cache.over_mpi(
                checked, self._lengths, pages, handle, computes, own_threads
            )
        self._whole = comm is None

    def __len__(self) -> int:
        """Number of cached rows of all ranks."""
        return self._cache.lengths()[0]

    @property
    def local_len(self) -> int:
        """Number of cached rows of this process."""
        return self._cache.lengths()[1]

    @property
    def page_rows(self) -> int:
        """Rows of a page."""
        return self._page_rows

    @property
    def rank(self) -> int:
        """This rank; 0 of a ring in this process."""
        return self._cache.ring()[0]

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self._cache.ring()[1]

    @property
    def dtype(self) -> str:
        """Element type of query, key, value and out."""
        return self._dtype

    @property
    def buffer_bytes(self) -> int:
        """Bytes of keys, values and message buffers of this process.

        The memory of a rank grows by segments of at least 4096 rows.
        """
        return self._cache.buffer_bytes()

    def predicted_bytes(self, queries: int) -> int:
        """Payload bytes that this process sends in a call with so many queries."""
        return self._cache.bytes_predicted(_check.integer("queries", queries))

    def append(self, key: Any, value: Any) -> None:
        """Appends rows that every rank passes; each rank copies those of its pages. Local.

        Args:
            key: ``[batch, rows, kv_heads, head_dim]``. Any strides.
            value: ``[batch, rows, kv_heads, value_dim]``.
        """
        arrays = self._rows(key, value, None)
        self._cache.append(arrays, None)

    def append_own(self, count: int, key: Any, value: Any) -> None:
        """Appends ``count`` rows, of which this process passes ``own_rows(count)`` only. Local.

        Args:
            count: Rows of all ranks, the same on every rank.
            key: ``[batch, own rows, kv_heads, head_dim]``, in ascending order.
            value: ``[batch, own rows, kv_heads, value_dim]``.
        """
        own = len(self.own_rows(count))
        arrays = self._rows(key, value, own)
        self._cache.append(arrays, None if self._whole else count)

    def own_rows(self, count: int) -> Numbers:
        """Rows of this process among the next ``count`` rows, which count from 0.

        Without ``comm``: all of them.
        """
        return spelled_runs(self._cache.own_rows(_check.integer("count", count)))

    def truncate(self, length: int) -> None:
        """Removes the rows from ``length`` on, such as tokens of a speculation. Local."""
        length = _check.integer("length", length)
        if length > len(self):
            raise invalid("length", length, f"at most the {len(self)} cached rows")
        self._cache.truncate(length)

    def attend(
        self, query: Any, *, softmax_aux: Any = None, out: Any = None, lse: Any = None
    ) -> Forward:
        """Computes out and lse of the queries of the last cached rows: of n queries, query i has
        row len − n + i. Collective.

        Args:
            query: ``[batch, n, q_heads, head_dim]``, n at most ``len(cache)``, the same on every
                rank.
            softmax_aux: As ``softmax_aux_shape``.
            out, lse: Arrays ``[batch, n, q_heads, value_dim]`` and ``[batch, q_heads, n]`` to write
                instead of new ones. They overlap nothing.

        Returns:
            ``out`` and ``lse``, and a report of each rank of this process.
        """
        self._cache.begin()
        with self._collective():
            batch, q_heads = self._lengths["batch"], self._lengths["q_heads"]
            given = self._of_shape("query", query, q_heads, self._lengths["head_dim"])
            queries = given.array.shape[1]
            if queries > len(self):
                want = f"at most the {len(self)} cached rows"
                raise invalid("query", f"{queries} queries", want)
            acc = accumulator(self._dtype)
            whole = (batch, queries, q_heads, self._lengths["value_dim"])
            statistics = (batch, q_heads, queries)
            memory, like = HostMemory(), given.library
            arrays = {
                "query": given.array,
                "out": memory.output("out", out, whole, self._dtype, like),
                "lse": memory.output("lse", lse, statistics, acc, like),
            }
            if softmax_aux is not None:
                sinks = _arrays.converted(tensor("softmax_aux", softmax_aux), acc)
                arrays["softmax_aux"] = sinks[None, :] if sinks.ndim == 1 else sinks
            reports = self._cache.attend(arrays)
        like = given.library
        return Forward(
            out=given_back(arrays["out"], self._dtype, like) if out is None else out,
            lse=given_back(arrays["lse"], acc, like) if lse is None else lse,
            reports=reports_of(reports),
        )

    def close(self) -> None:
        """Frees the cache. With ``comm`` it waits at most a second for the other ranks."""
        self._cache.close()

    def __enter__(self) -> Cache:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @contextmanager
    def _collective(self) -> Iterator[None]:
        """Lets the other ranks of a call know if its arguments are refused here."""
        try:
            yield
        except Exception as error:
            self._cache.refuse(*argument_got_want(error))
            raise

    def _rows(self, key: Any, value: Any, rows: int | None) -> dict[str, Any]:
        kv_heads = self._lengths["kv_heads"]
        keys = self._of_shape("key", key, kv_heads, self._lengths["head_dim"], rows)
        rows = keys.array.shape[1]
        values = self._of_shape("value", value, kv_heads, self._lengths["value_dim"], rows)
        return {"key": keys.array, "value": values.array}

    def _of_shape(
        self, name: str, value: Any, heads: int, dim: int, rows: int | None = None
    ) -> Tensor:
        given = tensor(name, value)
        if given.dtype != self._dtype:
            raise invalid(name, f"elements {given.dtype}", f"{self._dtype}, as the cache")
        shape = given.array.shape
        if len(shape) != 4:
            raise invalid(name, f"{len(shape)} axes", "4: [batch, rows, heads, dim]")
        want = (self._lengths["batch"], shape[1] if rows is None else rows, heads, dim)
        if shape != want:
            raise invalid(name, f"shape {shape}", want)
        return given
