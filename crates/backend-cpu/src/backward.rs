//! The beginning and the end of the backward pass.
//!
//! ```text
//! begin:   row statistics from out, lse, dout, dlse            (statistics.rs)
//! end:     dq = scale·Σ dS·K, dk and dv from their records, dbias, each rounded once;
//!          da_t = −Σ_i e^{a_t − lse_i}·delta_i − [a_t = max_i]·share_i
//! ```

use annulus_core::{Element, Gradients, Host, HostBuffer, Inputs, Result, Saved};
use ndarray::{ArrayView1, ArrayView4, ArrayViewMut1, ArrayViewMut4, Axis};

use crate::{
    finish::sink_line,
    forward::Acc,
    input::{Input, Source, array, array_mut},
    isa::{Job, Path},
    real::Real,
    sight::TILE,
    statistics::Statistics,
    team::Team,
    workspace::{Order, State, Summed},
};

/// Computes row statistics and clears all sums.
pub(crate) fn begin<E: Input<Accumulator: Summed>>(team: &Team, state: &mut State<Acc<E>>, saved: &Saved<'_, Host>) -> Result<()> {
    state.order = None;
    let State { local, geometry, blocks, scratch, statistics, bias_gradient, .. } = state;
    team.run(scratch, blocks.iter_mut(), None, |_, block, _| block.sums.fill(Acc::<E>::ZERO));
    bias_gradient.iter_mut().for_each(|gradient| gradient.clear());
    let rows = RowsOf::<E> {
        path: geometry.path,
        out: array("out", saved.out)?,
        dout: array("dout", saved.dout)?,
        lse: array("lse", saved.lse)?,
        dlse: saved.dlse.map(|dlse| array("dlse", dlse)).transpose()?,
        max: saved.max.map(|max| array("max", max)).transpose()?,
        ties: saved.ties.map(|ties| array("ties", ties)).transpose()?,
        normalize: local.spec.normalize,
    };
    let (len, heads) = (statistics.rows.max(1), local.spec.dims.q_heads);
    let Statistics { lse, max, delta, share, .. } = statistics;
    let mut optional = (max.chunks_mut(len), share.chunks_mut(len));
    let lines = lse.chunks_mut(len).zip(delta.chunks_mut(len)).enumerate();
    let lines = lines.map(|(line, (lse, delta))| {
        let (max, share) = (optional.0.next().unwrap_or_default(), optional.1.next().unwrap_or_default());
        (line, Line { lse, delta, max, share })
    });
    team.run(scratch, lines, None, |_, (line, mut into), _| rows.fill(line / heads, line % heads, &mut into));
    Ok(())
}

/// Statistics of one batch row and head; max and share are empty where out is normalised.
struct Line<'a, A> {
    lse: &'a mut [A],
    delta: &'a mut [A],
    max: &'a mut [A],
    share: &'a mut [A],
}

/// What row statistics are made of.
struct RowsOf<'a, E: Input> {
    path: Path,
    out: ArrayView4<'a, E>,
    dout: ArrayView4<'a, E>,
    lse: ArrayView4<'a, Acc<E>>,
    dlse: Option<ArrayView4<'a, Acc<E>>>,
    max: Option<ArrayView4<'a, Acc<E>>>,
    ties: Option<ArrayView4<'a, Acc<E>>>,
    normalize: bool,
}

impl<E: Input> RowsOf<'_, E> {
    fn fill(&self, batch: usize, head: usize, into: &mut Line<'_, Acc<E>>) {
        let (out, dout) = (Source::tensor(self.out), Source::tensor(self.dout));
        for row in 0..into.lse.len() {
            let at = [batch, head, row, 0];
            let of = |view: Option<ArrayView4<'_, Acc<E>>>| view.map_or(0.0, |view| view[at].to_f64());
            let lse = self.lse[at];
            into.lse[row] = lse;
            // an empty row has no gradient, whatever dout and dlse say
            let empty = lse == -Acc::<E>::INFINITY;
            let product = if empty { 0.0 } else { dot(self.path, &out, &dout, [batch, row, head]) };
            let dlse = if empty { 0.0 } else { of(self.dlse) };
            if self.normalize {
                into.delta[row] = Acc::<E>::from_f64(product - dlse);
            } else {
                into.max[row] = Acc::<E>::from_f64(of(self.max));
                into.delta[row] = Acc::<E>::from_f64(-dlse);
                into.share[row] = Acc::<E>::from_f64(if empty { 0.0 } else { product / of(self.ties) });
            }
        }
    }
}

/// ⟨a, b⟩ of one row, in sums of every eighth product: the same wherever the rows lie.
fn dot<E: Input>(path: Path, a: &Source<'_, E>, b: &Source<'_, E>, [batch, row, head]: [usize; 3]) -> f64 {
    let (a, b) = (a.vector(batch, row, head), b.vector(batch, row, head));
    if let (Some(a), Some(b)) = (a.to_slice(), b.to_slice()) {
        return Acc::<E>::run(path, 1, Dot { a, b });
    }
    let mut sums = [0.0; SUMS];
    for (i, (a, b)) in a.iter().zip(b).enumerate() {
        sums[i % SUMS] += a.to_f64() * b.to_f64();
    }
    sums.iter().sum()
}

/// Sums of a [`Dot`].
const SUMS: usize = 8;

/// ⟨a, b⟩ of elements that lie side by side.
struct Dot<'a, E> {
    a: &'a [E],
    b: &'a [E],
}

impl<E: Input> Job for Dot<'_, E> {
    type Output = f64;

    #[inline(always)]
    fn run<const FUSED: bool, const ROWS: usize, const VECTORS: usize, const WIDTH: usize>(self) -> f64 {
        let ((a, a_rest), (b, b_rest)) = (self.a.as_chunks::<SUMS>(), self.b.as_chunks::<SUMS>());
        let mut sums = [0.0; SUMS];
        for (a, b) in a.iter().zip(b) {
            for i in 0..SUMS {
                sums[i] += a[i].widen().to_f64() * b[i].widen().to_f64();
            }
        }
        for (i, (a, b)) in a_rest.iter().zip(b_rest).enumerate() {
            sums[i] += a.to_f64() * b.to_f64();
        }
        sums.iter().sum()
    }
}

/// Writes the gradients.
pub(crate) fn finish<E: Input<Accumulator: Summed>>(
    team: &Team,
    state: &mut State<Acc<E>>,
    inputs: &Inputs<'_, Host>,
    home: &HostBuffer,
    gradients: &mut Gradients<'_, Host>,
) -> Result<()> {
    let mut dq = array_mut::<E>("dq", &mut gradients.dq)?;
    let (mut dk, mut dv) = (array_mut::<E>("dk", &mut gradients.dk)?, array_mut::<E>("dv", &mut gradients.dv)?);
    let mut scratch = std::mem::take(&mut state.scratch);
    write_dq(team, state, &mut scratch, &mut dq);
    let record = state.local.spec.gradient_record();
    let (rows, path) = (state.local.keys.len(), state.geometry.path);
    for (field, tensor) in [(0, &mut dk), (1, &mut dv)] {
        let source = Source::<Acc<E>>::records(home.bytes(), rows, &record, field)?;
        let chunks = tensor.axis_chunks_iter_mut(Axis(1), TILE).enumerate();
        team.run(&mut scratch, chunks, None, |_, (index, mut chunk), _| {
            for (batch, mut chunk) in chunk.outer_iter_mut().enumerate() {
                for (row, mut chunk) in chunk.outer_iter_mut().enumerate() {
                    for (head, into) in chunk.outer_iter_mut().enumerate() {
                        let sums = source.vector(batch, index * TILE + row, head);
                        write_row(path, into, sums, <Acc<E> as Real>::ONE);
                    }
                }
            }
        });
    }
    state.scratch = scratch;
    if let (Some(gradient), Some(dbias)) = (&state.bias_gradient, gradients.dbias.as_mut()) {
        gradient.write(array_mut("dbias", dbias)?);
    }
    if let (Some(sinks), Some(dsinks)) = (inputs.sinks, gradients.dsinks.as_mut()) {
        write_dsinks(&state.statistics, state.local.spec.dims.q_heads, array("softmax_aux", sinks)?, array_mut("dsinks", dsinks)?);
    }
    Ok(())
}

/// Writes factor·sums, rounded.
fn write_row<E: Input>(path: Path, mut into: ArrayViewMut1<'_, E>, sums: ArrayView1<'_, E::Accumulator>, factor: E::Accumulator) {
    match (into.as_slice_mut(), sums.to_slice()) {
        (Some(into), Some(sums)) => <E::Accumulator as Real>::run(path, 1, Narrow { into, sums, factor }),
        _ => into.iter_mut().zip(sums).for_each(|(into, &sum)| *into = E::narrow(factor * sum)),
    }
}

/// The same where elements lie side by side.
struct Narrow<'a, E: Input> {
    into: &'a mut [E],
    sums: &'a [E::Accumulator],
    factor: E::Accumulator,
}

impl<E: Input> Job for Narrow<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<const FUSED: bool, const ROWS: usize, const VECTORS: usize, const WIDTH: usize>(self) {
        for (into, &sum) in self.into.iter_mut().zip(self.sums) {
            *into = E::narrow(self.factor * sum);
        }
    }
}

fn write_dq<E: Input<Accumulator: Summed>>(
    team: &Team,
    state: &State<Acc<E>>,
    scratch: &mut [crate::scratch::Scratch<Acc<E>>],
    dq: &mut ArrayViewMut4<'_, E>,
) {
    let (geometry, depth) = (&state.geometry, state.geometry.head_rows());
    let scale = Acc::<E>::from_f64(state.local.spec.scale);
    let chunks = dq.axis_chunks_iter_mut(Axis(1), state.q_rows).enumerate();
    team.run(scratch, chunks, None, |_, (index, mut dq), _| {
        for block in state.blocks_of_rows(index) {
            for (place, head) in geometry.heads(block.kv_head).enumerate() {
                let mut dq = dq.index_axis_mut(Axis(0), block.batch);
                let mut dq = dq.index_axis_mut(Axis(1), head);
                if state.order == Some(Order::Rows) {
                    let width = geometry.query_width();
                    let lines = block.sums[block.lane(place, 0) * width..].chunks_exact(width);
                    for (into, line) in dq.outer_iter_mut().zip(lines) {
                        let dim = into.len();
                        write_row(geometry.path, into, ArrayView1::from(&line[..dim]), scale);
                    }
                    continue;
                }
                for strip in geometry.strips(block.rows.len()) {
                    let first = block.lane(place, strip.rows.start);
                    let sums = &block.sums[first * depth..(first + strip.width) * depth];
                    for (lane, row) in strip.rows.clone().enumerate() {
                        let column = sums.iter().skip(lane).step_by(strip.width);
                        let into = dq.index_axis_mut(Axis(0), row).into_iter();
                        into.zip(column).for_each(|(into, &sum)| *into = E::narrow(scale * sum));
                    }
                }
            }
        }
    });
}

/// What the local rows give to the gradients of the sinks, summed in f64.
fn write_dsinks<A: Real>(statistics: &Statistics<A>, heads: usize, sinks: ArrayView4<'_, A>, mut into: ArrayViewMut4<'_, A>) {
    let (lines, count) = (sinks.dim().0, sinks.dim().1);
    let all = statistics.lse.len().checked_div(statistics.rows).unwrap_or(0);
    for line in 0..lines {
        for sink in 0..count {
            let mut sum = 0.0;
            for plane in (0..all).filter(|plane| lines == 1 || plane % heads == line) {
                let logit = sink_line(Some(sinks), plane % heads).nth(sink).unwrap_or(f64::NEG_INFINITY);
                // one of −∞ is none
                if logit == f64::NEG_INFINITY {
                    continue;
                }
                for row in 0..statistics.rows {
                    let [lse, max, delta, share] = statistics.of(plane, row).map(Element::to_f64);
                    let lost = if !statistics.max.is_empty() && logit == max { share } else { 0.0 };
                    sum -= (logit - lse).exp() * delta + lost;
                }
            }
            into[[line, sink, 0, 0]] = A::from_f64(sum);
        }
    }
}
