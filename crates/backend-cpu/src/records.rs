//! Blocks in wire order: this rank's rows written as records, and sums of gradient records.

use std::ops::Range;

use annulus_core::{Host, HostBuffer, Inputs, Result, Saved, Spec};
use ndarray::{ArrayView4, s};

use crate::{
    forward::Acc,
    input::{Input, array, device, elements, elements_mut},
    real::Real,
    sight::TILE,
    team::Team,
    workspace::{State, Summed},
};

/// The buffer's bytes, which nobody else may hold while they are written.
pub(crate) fn bytes_mut(buffer: &mut HostBuffer) -> Result<&mut [u8]> {
    buffer.bytes_mut().ok_or_else(|| device("a block buffer is still in flight"))
}

/// Writes k and v as records of [`Spec::kv_record`].
pub(crate) fn pack<E: Input<Accumulator: Summed>>(
    team: &Team,
    state: &mut State<Acc<E>>,
    inputs: &Inputs<'_, Host>,
    into: &mut HostBuffer,
) -> Result<()> {
    state.in_place = false;
    let record = state.local.spec.kv_record();
    let (k, v) = (array::<E>("k", inputs.k)?, array::<E>("v", inputs.v)?);
    let (len, v_at) = (annulus_core::index(record.bytes()), annulus_core::index(record.offset(1, 0, 0)));
    let chunks = records_mut(into, len * state.local.keys.len())?.chunks_mut(TILE * len).enumerate();
    team.run(&mut state.scratch, chunks, None, |_, (index, chunk), _| {
        for (row, record) in chunk.chunks_exact_mut(len).enumerate() {
            let (of_k, of_v) = record.split_at_mut(v_at);
            write_row(k, index * TILE + row, of_k);
            write_row(v, index * TILE + row, of_v);
        }
    });
    Ok(())
}

/// The first `len` bytes of a buffer.
fn records_mut(buffer: &mut HostBuffer, len: usize) -> Result<&mut [u8]> {
    let bytes = bytes_mut(buffer)?;
    let got = bytes.len();
    bytes.get_mut(..len).ok_or_else(|| device(format!("a block buffer of {got} bytes where its records take {len}")))
}

/// Row `row` of every batch row and head.
fn write_row<E: Input>(tensor: ArrayView4<'_, E>, row: usize, into: &mut [u8]) {
    let (batch, _, heads, dim) = tensor.dim();
    let places = (0..batch).flat_map(|b| (0..heads).map(move |h| (b, h)));
    for ((b, h), into) in places.zip(into.chunks_exact_mut(dim * size_of::<E>())) {
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

/// Writes q, dout and row statistics as records of [`Spec::query_record`].
pub(crate) fn pack_queries<E: Input<Accumulator: Summed>>(
    team: &Team,
    state: &mut State<Acc<E>>,
    inputs: &Inputs<'_, Host>,
    saved: &Saved<'_, Host>,
    into: &mut HostBuffer,
) -> Result<()> {
    let State { local, statistics, scratch, .. } = state;
    let (q, dout) = (array::<E>("q", inputs.q)?, array::<E>("dout", saved.dout)?);
    let QueryRecord { len, dout_at, statistics_at } = QueryRecord::of(&local.spec);
    let lines = local.spec.dims.batch * local.spec.dims.q_heads;
    let chunks = records_mut(into, len * local.queries.len())?.chunks_mut(TILE * len).enumerate();
    let statistics = &*statistics;
    team.run(scratch, chunks, None, |_, (index, chunk), _| {
        for (row, record) in chunk.chunks_exact_mut(len).enumerate() {
            let row = index * TILE + row;
            let (vectors, numbers) = record.split_at_mut(statistics_at);
            let (of_q, of_dout) = vectors.split_at_mut(dout_at);
            write_row(q, row, of_q);
            write_row(dout, row, of_dout);
            for (line, into) in (0..lines).zip(numbers.chunks_exact_mut(Spec::ROW_STATISTICS * size_of::<Acc<E>>())) {
                into.copy_from_slice(bytemuck::cast_slice(&statistics.of(line, row)));
            }
        }
    });
    Ok(())
}

/// Byte offsets within a record of [`Spec::query_record`].
pub(crate) struct QueryRecord {
    pub(crate) len: usize,
    pub(crate) dout_at: usize,
    pub(crate) statistics_at: usize,
}

impl QueryRecord {
    pub(crate) fn of(spec: &Spec) -> Self {
        let record = spec.query_record();
        let at = |field| annulus_core::index(record.offset(field, 0, 0));
        Self { len: annulus_core::index(record.bytes()), dout_at: at(1), statistics_at: at(2) }
    }

    /// The statistics of one row and line (batch row · q_heads + head). They may lie at any byte.
    pub(crate) fn statistics<A: Real>(&self, bytes: &[u8], row: usize, line: usize) -> [A; Spec::ROW_STATISTICS] {
        let size = size_of::<[A; Spec::ROW_STATISTICS]>();
        let start = row * self.len + self.statistics_at + line * size;
        bytemuck::pod_read_unaligned(&bytes[start..start + size])
    }
}

/// Elements below which a second thread is not worth waking.
const WORTH_SHARING: usize = 1 << 18;

/// `into[place] ← from[place]`, or `+=`, for pairs of ranges of gradient records.
pub(crate) fn combine<A: Real>(
    team: &Team,
    state: &mut State<A>,
    into: &mut HostBuffer,
    from: &HostBuffer,
    places: &[(Range<u64>, Range<u64>)],
    add: bool,
) -> Result<()> {
    let record = state.local.spec.gradient_record();
    let len = annulus_core::index(record.bytes()) / size_of::<A>();
    let into_rows = places.iter().map(|(into, _)| into.end).max().unwrap_or(0);
    let from_rows = places.iter().map(|(_, from)| from.end).max().unwrap_or(0);
    let from = elements::<A>(from.bytes(), annulus_core::index(from_rows), &record)?;
    let into = elements_mut::<A>(bytes_mut(into)?, annulus_core::index(into_rows), &record)?;
    let span = |rows: &Range<u64>| annulus_core::index(rows.start) * len..annulus_core::index(rows.end) * len;
    let combine = |into: &mut [A], from: &[A]| {
        let pairs = into.iter_mut().zip(from);
        if add { pairs.for_each(|(into, &from)| *into += from) } else { pairs.for_each(|(into, &from)| *into = from) }
    };
    for (to, of) in places {
        let (into, from) = (&mut into[span(to)], &from[span(of)]);
        if into.len() < WORTH_SHARING {
            combine(into, from);
        } else {
            let chunks = into.chunks_mut(WORTH_SHARING / 4).zip(from.chunks(WORTH_SHARING / 4));
            team.run(&mut state.scratch, chunks, None, |_, (into, from), _| combine(into, from));
        }
    }
    Ok(())
}
