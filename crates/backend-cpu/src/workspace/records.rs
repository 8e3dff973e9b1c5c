//! Blocks in wire order: writes this rank's rows as records, and reduces gradient records.

use std::ops::Range;

use annulus_core::{
    BackwardInputs, DenseMask, Element, Error, HostBuffer, HostView, Inputs, RangePairs, RankShard,
    Reduction, Result, RowField, RowLayout, RowSet, Spec, TangentInputs,
};
use ndarray::{ArrayView1, ArrayView4, ShapeBuilder};

use crate::{
    simd::dispatch::Real,
    threads::team::Team,
    tile::{
        input::{Acc, TileInput, TileSource, array, elements, elements_mut},
        tile_mask::TILE,
    },
    workspace::state::PassState,
};

/// Returns the bytes of a buffer, or an error if another owner (a transfer in flight) still holds
/// it.
pub(crate) fn bytes_mut(buffer: &mut HostBuffer) -> Result<&mut [u8]> {
    buffer.bytes_mut().ok_or_else(|| Error::internal("a block buffer is still in flight"))
}

/// Writes K and V of the local keys `sent` as records of [`Spec::kv_row_layout`].
pub(crate) fn pack<E: TileInput>(
    team: &Team,
    state: &mut PassState<Acc<E>>,
    inputs: &Inputs<HostView<'_>>,
    into: &mut HostBuffer,
    sent: &RowSet,
) -> Result<()> {
    let record = state.shard.spec.kv_row_layout();
    let k = TensorRows::of(array::<E>("k", inputs.k)?);
    let v = TensorRows::of(array::<E>("v", inputs.v)?);
    let (len, v_at) =
        (annulus_core::index(record.bytes()), annulus_core::index(record.offset(1, 0, 0)));
    let chunks =
        records_mut(into, len * state.shard.keys.len())?.chunks_mut(TILE * len).enumerate();
    team.run(&mut state.scratch, chunks, None, |_, (index, chunk), _| {
        let first = index * TILE;
        for row in sent.rows_within(first as u64..(first + chunk.len() / len) as u64) {
            let row = annulus_core::index(row);
            let (k_bytes, v_bytes) = chunk[(row - first) * len..][..len].split_at_mut(v_at);
            k.write(row, k_bytes);
            v.write(row, v_bytes);
        }
    });
    Ok(())
}

/// Writes K and V of the local keys and their tangents as records of [`Spec::tangent_row_layout`].
pub(crate) fn pack_tangents<E: TileInput>(
    team: &Team,
    state: &mut PassState<Acc<E>>,
    inputs: &TangentInputs<HostView<'_>>,
    into: &mut HostBuffer,
) -> Result<()> {
    let record = state.shard.spec.tangent_row_layout();
    let TangentInputs { primal, tangent, .. } = inputs;
    let source = |name, view| array::<E>(name, view).map(TileSource::tensor);
    let fields = [
        [source("k", primal.k)?, source("k", tangent.k)?],
        [source("v", primal.v)?, source("v", tangent.v)?],
    ];
    let len = annulus_core::index(record.bytes());
    if len == 0 {
        return Ok(());
    }
    let chunks =
        records_mut(into, len * state.shard.keys.len())?.chunks_mut(TILE * len).enumerate();
    team.run(&mut state.scratch, chunks, None, |_, (index, chunk), _| {
        for (row, mut bytes) in chunk.chunks_exact_mut(len).enumerate() {
            for (sources, field) in fields.iter().zip(record.fields()) {
                let vector = field.dim / 2 * size_of::<E>();
                for batch in 0..field.batch {
                    for head in 0..field.heads {
                        for source in sources {
                            let (into, rest) = bytes.split_at_mut(vector);
                            write_vector(source.vector(batch, index * TILE + row, head), into);
                            bytes = rest;
                        }
                    }
                }
            }
        }
    });
    Ok(())
}

/// Returns the first `len` bytes of a buffer.
fn records_mut(buffer: &mut HostBuffer, len: usize) -> Result<&mut [u8]> {
    let bytes = bytes_mut(buffer)?;
    let got = bytes.len();
    bytes.get_mut(..len).ok_or_else(|| {
        Error::internal(format!("a block buffer of {got} bytes, but its records take {len}"))
    })
}

/// Rows of a tensor that are copied into records.
#[derive(Clone, Copy)]
struct TensorRows<'a, E> {
    tensor: ArrayView4<'a, E>,
    source: TileSource<'a, E>,
}

impl<'a, E: Element> TensorRows<'a, E> {
    fn of(tensor: ArrayView4<'a, E>) -> Self {
        Self { tensor, source: TileSource::tensor(tensor) }
    }

    /// Writes row `row` of every batch row and head: all heads in one copy if they are contiguous.
    fn write(&self, row: usize, into: &mut [u8]) {
        let (batches, _, heads, dim) = self.tensor.dim();
        let len = dim * size_of::<E>();
        if len == 0 {
            return;
        }
        for (batch, into) in (0..batches).zip(into.chunks_exact_mut(heads * len)) {
            match self.source.row(batch, row) {
                Some(vectors) => into.copy_from_slice(bytemuck::cast_slice(vectors)),
                None => (0..heads).zip(into.chunks_exact_mut(len)).for_each(|(head, into)| {
                    write_vector(self.source.vector(batch, row, head), into);
                }),
            }
        }
    }
}

/// Writes one vector.
fn write_vector<E: Element>(vector: ArrayView1<'_, E>, into: &mut [u8]) {
    match vector.to_slice() {
        Some(vector) => into.copy_from_slice(bytemuck::cast_slice(vector)),
        None => into
            .chunks_exact_mut(size_of::<E>())
            .zip(vector)
            .for_each(|(into, element)| into.copy_from_slice(bytemuck::bytes_of(element))),
    }
}

/// Writes q, dout and row statistics, and rows of the bias and the dense mask that are sent with
/// them, as records of [`RankShard::query_row_layout`].
pub(crate) fn pack_queries<E: TileInput>(
    team: &Team,
    state: &mut PassState<Acc<E>>,
    inputs: &BackwardInputs<HostView<'_>>,
    into: &mut HostBuffer,
) -> Result<()> {
    let PassState { shard, statistics, scratch, .. } = state;
    let q = TensorRows::of(array::<E>("q", inputs.forward.q)?);
    let dout = TensorRows::of(array::<E>("dout", inputs.dout)?);
    let QueryRecord { len, dout_at, statistics_at, layout } = &QueryRecord::of(shard);
    let (&len, &dout_at, &statistics_at) = (len, dout_at, statistics_at);
    let extra = QueryExtra::of(layout);
    let bias = inputs.forward.bias.filter(|_| extra.bias.is_some());
    let bias = bias.map(|bias| array::<Acc<E>>("bias", bias)).transpose()?;
    let bias = bias.map(|bias| TensorRows::of(bias.permuted_axes([0, 2, 1, 3])));
    let mask = shard.attention_mask.as_deref().filter(|_| extra.mask.is_some());
    let lines = shard.spec.dims.batch * shard.spec.dims.q_heads;
    let chunks = records_mut(into, len * shard.queries.len())?.chunks_mut(TILE * len).enumerate();
    let statistics = &*statistics;
    team.run(scratch, chunks, None, |_, (index, chunk), _| {
        for (row, record) in chunk.chunks_exact_mut(len).enumerate() {
            let row = index * TILE + row;
            if let (Some(bias), Some(at)) = (bias, &extra.bias) {
                bias.write(row, &mut record[at.clone()]);
            }
            if let (Some(mask), Some(at)) = (mask, &extra.mask) {
                write_mask_row(mask, row, &mut record[at.clone()]);
            }
            let (vectors, numbers) = record.split_at_mut(statistics_at);
            let (q_bytes, dout_bytes) = vectors.split_at_mut(dout_at);
            q.write(row, q_bytes);
            dout.write(row, dout_bytes);
            for (line, into) in
                (0..lines).zip(numbers.chunks_exact_mut(Spec::ROW_STATISTICS * size_of::<Acc<E>>()))
            {
                let statistics = statistics.of(line, row..row + 1);
                into.copy_from_slice(bytemuck::cast_slice(statistics));
            }
        }
    });
    Ok(())
}

/// Writes the words of one query row of every batch row and head of a dense mask.
fn write_mask_row(mask: &DenseMask, row: usize, into: &mut [u8]) {
    let [batches, heads, _, keys] = mask.shape();
    let lines = (0..batches).flat_map(|b| (0..heads).map(move |h| mask.line(b, h, row)));
    for (line, into) in lines.zip(into.chunks_exact_mut(8 * keys.div_ceil(64).max(1))) {
        into.copy_from_slice(bytemuck::cast_slice(line));
    }
}

/// Bytes of the extra fields within a record, those that have elements.
pub(crate) struct QueryExtra {
    pub(crate) bias: Option<Range<usize>>,
    pub(crate) mask: Option<Range<usize>>,
}

impl QueryExtra {
    pub(crate) fn of(record: &RowLayout) -> Self {
        let bytes = |field: usize| {
            let RowField { batch, heads, dim, dtype } = *record.fields().get(field)?;
            let first = annulus_core::index(record.offset(field, 0, 0));
            let len = batch * heads * dim * dtype.bytes();
            (len > 0).then(|| first..first + len)
        };
        Self { bias: bytes(3), mask: bytes(4) }
    }
}

/// Byte offsets within a record of [`RankShard::query_row_layout`].
pub(crate) struct QueryRecord {
    pub(crate) len: usize,
    pub(crate) dout_at: usize,
    pub(crate) statistics_at: usize,
    pub(crate) layout: RowLayout,
}

impl QueryRecord {
    pub(crate) fn of(shard: &RankShard) -> Self {
        let layout = shard.query_row_layout();
        let at = |field| annulus_core::index(layout.offset(field, 0, 0));
        let len = annulus_core::index(layout.bytes());
        Self { len, dout_at: at(1), statistics_at: at(2), layout }
    }

    /// Returns the rows of the bias that were sent with `rows` queries, as `[b|1, heads|1, rows,
    /// keys|1]`. `None` if there are none.
    ///
    /// # Errors
    /// [`Error::Internal`] for a buffer that is too short.
    pub(crate) fn bias<'a, A: Real>(
        &self,
        bytes: &'a [u8],
        rows: usize,
    ) -> Result<Option<ArrayView4<'a, A>>> {
        let Some(at) = QueryExtra::of(&self.layout).bias else { return Ok(None) };
        let RowField { batch, heads, dim, .. } = self.layout.fields()[3];
        let elements = elements::<A>(bytes, rows, &self.layout)?;
        let elements = elements.get(at.start / size_of::<A>()..).unwrap_or_default();
        let shape = (batch, heads, rows, dim);
        let strides = (heads * dim, dim, self.len / size_of::<A>(), 1);
        let view = match rows {
            // no stride fits an empty block
            0 => ArrayView4::from_shape(shape, &[]),
            _ => ArrayView4::from_shape(shape.strides(strides), elements),
        };
        view.map(Some).map_err(Error::internal)
    }

    /// Reads the rows of the dense mask that were sent with `rows` queries into `mask`. Returns
    /// false if there are none.
    pub(crate) fn mask(
        &self,
        bytes: &[u8],
        rows: usize,
        kv_len: usize,
        mask: &mut DenseMask,
    ) -> Result<bool> {
        let Some(at) = QueryExtra::of(&self.layout).mask else { return Ok(false) };
        let RowField { batch, heads, dim, .. } = self.layout.fields()[4];
        mask.refill([batch, heads, rows, kv_len], |b, h, row| {
            let first = row * self.len + at.start + 8 * dim * (b * heads + h);
            bytes.get(first..first + 8 * dim).unwrap_or_default()
        })?;
        Ok(true)
    }

    /// Returns the statistics of one row and `line` (batch row · q_heads + head). They need not be
    /// aligned.
    pub(crate) fn statistics<A: Real>(
        &self,
        bytes: &[u8],
        row: usize,
        line: usize,
    ) -> [A; Spec::ROW_STATISTICS] {
        let size = size_of::<[A; Spec::ROW_STATISTICS]>();
        let start = row * self.len + self.statistics_at + line * size;
        bytemuck::pod_read_unaligned(&bytes[start..start + size])
    }
}

/// Minimum elements for which a second thread is woken: below, waking it takes longer than the copy
/// or addition.
const MIN_PARALLEL_ELEMENTS: usize = 1 << 18;

/// Computes `into[to] ← from[of]`, or `+=` with `add`, for pairs of row ranges of gradient records.
pub(crate) fn reduce_gradients<A: Real>(
    team: &Team,
    state: &mut PassState<A>,
    into: &mut HostBuffer,
    from: &HostBuffer,
    pairs: &RangePairs,
    reduction: Reduction,
) -> Result<()> {
    let record = state.shard.spec.gradient_row_layout();
    let len = annulus_core::index(record.bytes()) / size_of::<A>();
    let into_rows = pairs.iter().map(|(into, _)| into.end).max().unwrap_or(0);
    let from_rows = pairs.iter().map(|(_, from)| from.end).max().unwrap_or(0);
    let from = elements::<A>(from.bytes(), annulus_core::index(from_rows), &record)?;
    let into = elements_mut::<A>(bytes_mut(into)?, annulus_core::index(into_rows), &record)?;
    let span = |rows: &Range<u64>| {
        annulus_core::index(rows.start) * len..annulus_core::index(rows.end) * len
    };
    let reduce = |into: &mut [A], from: &[A]| {
        let pairs = into.iter_mut().zip(from);
        match reduction {
            Reduction::Copy => pairs.for_each(|(into, &from)| *into = from),
            Reduction::Add => pairs.for_each(|(into, &from)| *into += from),
        }
    };
    for (to, of) in pairs {
        let into = &mut into[span(to)];
        let from = &from[span(of)];
        if into.len() < MIN_PARALLEL_ELEMENTS {
            reduce(into, from);
        } else {
            let chunks = into
                .chunks_mut(MIN_PARALLEL_ELEMENTS / 4)
                .zip(from.chunks(MIN_PARALLEL_ELEMENTS / 4));
            team.run(&mut state.scratch, chunks, None, |_, (into, from), _| reduce(into, from));
        }
    }
    Ok(())
}
