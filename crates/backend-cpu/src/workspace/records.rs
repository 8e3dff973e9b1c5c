//! Blocks in wire order: writes this rank's rows as records, and reduces gradient records.

use std::ops::Range;

use annulus_core::{
    BackwardInputs, Error, Host, HostBuffer, Inputs, RangePairs, Reduction, Result, Spec,
};
use ndarray::{ArrayView4, s};

use crate::{
    simd::dispatch::Real,
    threads::team::Team,
    tile::{
        input::{Acc, Input, array, elements, elements_mut},
        tile_mask::TILE,
    },
    workspace::state::{State, Summed},
};

/// Returns the bytes of a buffer, or an error if another owner (a transfer in flight) still holds
/// it.
pub(crate) fn bytes_mut(buffer: &mut HostBuffer) -> Result<&mut [u8]> {
    buffer.bytes_mut().ok_or_else(|| Error::internal("a block buffer is still in flight"))
}

/// Writes K and V as records of [`Spec::kv_row_layout`].
pub(crate) fn pack<E: Input<Accumulator: Summed>>(
    team: &Team,
    state: &mut State<Acc<E>>,
    inputs: &Inputs<'_, Host>,
    into: &mut HostBuffer,
) -> Result<()> {
    let record = state.shard.spec.kv_row_layout();
    let k = array::<E>("k", inputs.k)?;
    let v = array::<E>("v", inputs.v)?;
    let (len, v_at) =
        (annulus_core::index(record.bytes()), annulus_core::index(record.offset(1, 0, 0)));
    let chunks =
        records_mut(into, len * state.shard.keys.len())?.chunks_mut(TILE * len).enumerate();
    team.run(&mut state.scratch, chunks, None, |_, (index, chunk), _| {
        for (row, record) in chunk.chunks_exact_mut(len).enumerate() {
            let (k_bytes, v_bytes) = record.split_at_mut(v_at);
            write_row(k, index * TILE + row, k_bytes);
            write_row(v, index * TILE + row, v_bytes);
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

/// Writes row `row` of every batch row and head.
fn write_row<E: Input>(tensor: ArrayView4<'_, E>, row: usize, into: &mut [u8]) {
    let (batch, _, heads, dim) = tensor.dim();
    let vectors = (0..batch).flat_map(|b| (0..heads).map(move |h| (b, h)));
    for ((b, h), into) in vectors.zip(into.chunks_exact_mut(dim * size_of::<E>())) {
        let vector = tensor.slice_move(s![b, row, h, ..]);
        match vector.to_slice() {
            Some(vector) => into.copy_from_slice(bytemuck::cast_slice(vector)),
            None => into
                .chunks_exact_mut(size_of::<E>())
                .zip(vector)
                .for_each(|(into, element)| into.copy_from_slice(bytemuck::bytes_of(element))),
        }
    }
}

/// Writes q, dout and row statistics as records of [`Spec::query_row_layout`].
pub(crate) fn pack_queries<E: Input<Accumulator: Summed>>(
    team: &Team,
    state: &mut State<Acc<E>>,
    inputs: &BackwardInputs<'_, Host>,
    into: &mut HostBuffer,
) -> Result<()> {
    let State { shard, statistics, scratch, .. } = state;
    let q = array::<E>("q", inputs.forward.q)?;
    let dout = array::<E>("dout", inputs.dout)?;
    let QueryRecord { len, dout_at, statistics_at } = QueryRecord::of(&shard.spec);
    let lines = shard.spec.dims.batch * shard.spec.dims.q_heads;
    let chunks = records_mut(into, len * shard.queries.len())?.chunks_mut(TILE * len).enumerate();
    let statistics = &*statistics;
    team.run(scratch, chunks, None, |_, (index, chunk), _| {
        for (row, record) in chunk.chunks_exact_mut(len).enumerate() {
            let row = index * TILE + row;
            let (vectors, numbers) = record.split_at_mut(statistics_at);
            let (q_bytes, dout_bytes) = vectors.split_at_mut(dout_at);
            write_row(q, row, q_bytes);
            write_row(dout, row, dout_bytes);
            for (line, into) in
                (0..lines).zip(numbers.chunks_exact_mut(Spec::ROW_STATISTICS * size_of::<Acc<E>>()))
            {
                into.copy_from_slice(bytemuck::cast_slice(&statistics.of(line, row)));
            }
        }
    });
    Ok(())
}

/// Byte offsets within a record of [`Spec::query_row_layout`].
pub(crate) struct QueryRecord {
    pub(crate) len: usize,
    pub(crate) dout_at: usize,
    pub(crate) statistics_at: usize,
}

impl QueryRecord {
    pub(crate) fn of(spec: &Spec) -> Self {
        let record = spec.query_row_layout();
        let at = |field| annulus_core::index(record.offset(field, 0, 0));
        Self { len: annulus_core::index(record.bytes()), dout_at: at(1), statistics_at: at(2) }
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
    state: &mut State<A>,
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
