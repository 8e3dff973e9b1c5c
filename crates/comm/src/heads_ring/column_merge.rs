//! Merge of the partial results of key columns, for the own queries of a rank.
//!
//! ```text
//! forward    (out, max, sum) of each column, and ties if the output is not normalised: an online
//!            softmax over columns, in f64 (`merged_softmax.rs`)
//! backward   dq = Σ over columns of the partial dq, in the accumulator's type
//! ```
//! Each part is merged when it arrives: the own column first, then those before it, descending. The
//! order depends on the grid alone. Memory does not depend on the number of columns.

use std::ops::Range;

use annulus_core::{
    BackwardInputs, DType, Dims, Element, Error, HostView, HostViewMut, Outputs, Result, Spec,
    index, memory,
};

use super::shard_tensor::ShardTensor;
use crate::merged_softmax::MergedSoftmax;

/// Results of the own queries while the parts of the columns arrive.
pub(super) struct ColumnMerge {
    /// `[batch, rows, heads, value_dim]`.
    shape: [usize; 4],
    acc: Vec<f64>,
    /// Statistics of each row and head.
    lines: Vec<MergedSoftmax>,
    normalize: bool,
}

/// Tensors of the own queries and all heads in a plan with several key columns.
pub(super) struct ColumnTensors {
    pub(super) merge: ColumnMerge,
    /// Of a plan with a backward pass.
    pub(super) backward: Option<ColumnGradients>,
}

/// Tensors of the own queries in a backward pass.
pub(super) struct ColumnGradients {
    /// dlse − ⟨out, dout⟩; of an output that is not normalised dlse.
    pub(super) minus_delta: ShardTensor,
    /// −⟨out, dout⟩ / ties, of an output that is not normalised.
    pub(super) minus_share: Option<ShardTensor>,
    /// Sum of the partial dq.
    pub(super) dq: ShardTensor,
}

impl ColumnTensors {
    /// Allocates the tensors of `rows` own queries.
    pub(super) fn new(spec: &Spec, rows: u64, backward: bool) -> Result<Self> {
        let Dims { batch, q_heads, head_dim, value_dim, .. } = spec.dims;
        let sums = spec.dtype.accumulator();
        let tensor = |dim| ShardTensor::with_shape([batch, index(rows), q_heads, dim], sums);
        let gradients = || {
            let minus_share = (!spec.normalize).then(|| tensor(1)).transpose()?;
            Ok(ColumnGradients { minus_delta: tensor(1)?, minus_share, dq: tensor(head_dim)? })
        };
        let backward = backward.then(gradients).transpose()?;
        let shape = [batch, index(rows), q_heads, value_dim];
        let merge = ColumnMerge::new(shape, spec.normalize)?;
        Ok(Self { merge, backward })
    }

    pub(super) fn bytes(&self) -> u64 {
        let gradients = self
            .backward
            .iter()
            .flat_map(|of| [&of.minus_delta, &of.dq].into_iter().chain(&of.minus_share));
        self.merge.bytes() + gradients.map(ShardTensor::bytes).sum::<u64>()
    }
}

impl ColumnGradients {
    /// Computes −delta of the own queries, or dlse and the shares of their maxima.
    ///
    /// # Errors
    /// [`Error::Internal`] without ties of an output that is not normalised.
    pub(super) fn compute(&mut self, inputs: &BackwardInputs<HostView<'_>>) -> Result<()> {
        let subtract = |into: &mut HostViewMut<'_>| {
            let parts = std::iter::once(&inputs.out).chain(&inputs.out_residual);
            parts.for_each(|out| into.subtract_row_products(out, &inputs.dout));
        };
        let mut into = self.minus_delta.view_mut()?;
        match inputs.dlse {
            Some(dlse) => into.round_from(&dlse.swap_rows_and_heads()),
            None => into.fill_zero(),
        }
        let Some(share) = &mut self.minus_share else {
            subtract(&mut into);
            return Ok(());
        };
        let ties = inputs.ties.ok_or_else(|| Error::internal("no ties"))?;
        let mut into = share.view_mut()?;
        into.fill_zero();
        subtract(&mut into);
        into.divide(&ties.swap_rows_and_heads());
        Ok(())
    }
}

impl ColumnMerge {
    fn new(shape: [usize; 4], normalize: bool) -> Result<Self> {
        let [batch, rows, heads, dim] = shape;
        let count = batch * rows * heads;
        let acc = memory::filled("the merged output", count * dim, 0.0)?;
        let lines = memory::filled("the merged statistics", count, MergedSoftmax::EMPTY)?;
        Ok(Self { shape, acc, lines, normalize })
    }

    fn bytes(&self) -> u64 {
        (size_of_val(&self.acc[..]) + size_of_val(&self.lines[..])) as u64
    }

    /// Forgets the parts of the last pass.
    pub(super) fn begin(&mut self) {
        self.acc.fill(0.0);
        self.lines.fill(MergedSoftmax::EMPTY);
    }

    /// Merges a part: out, max and sum of some heads of all rows, and ties of an output that is not
    /// normalised, one after another, packed, in the accumulator's type.
    pub(super) fn add(&mut self, dtype: DType, heads: Range<usize>, part: &[u8]) -> Result<()> {
        match dtype {
            DType::F64 => self.add_elements::<f64>(heads, part),
            _ => self.add_elements::<f32>(heads, part),
        }
    }

    fn add_elements<T: Element>(&mut self, heads: Range<usize>, part: &[u8]) -> Result<()> {
        let [batch, rows, q_heads, dim] = self.shape;
        let size = size_of::<T>();
        let lines = batch * rows * heads.len();
        let short = || Error::internal("a message that is shorter than its partial results");
        let (out, statistics) = part.split_at_checked(lines * dim * size).ok_or_else(short)?;
        let fields = if self.normalize { 2 } else { 3 };
        if statistics.len() < fields * lines * size {
            return Err(short());
        }
        let element = |bytes: &[u8]| bytemuck::pod_read_unaligned::<T>(bytes).to_f64();
        // max, sum, ties
        let number = |field: usize, index: usize| {
            let first = (field * lines + index) * size;
            element(&statistics[first..first + size])
        };
        // rows of no elements have no chunks: their statistics are merged all the same
        let mut outs = out.chunks_exact((dim * size).max(1));
        let all = (0..batch * rows).flat_map(|row| heads.clone().map(move |head| (row, head)));
        for (index, (row, head)) in all.enumerate() {
            let line = row * q_heads + head;
            let out = outs.next().unwrap_or_default().chunks_exact(size).map(element);
            let [max, sum] = [0, 1].map(|field| number(field, index));
            let ties = if self.normalize { 0.0 } else { number(2, index) };
            let factors = self.lines[line].add(MergedSoftmax { max, sum, ties });
            let Some([rescale, weight]) = factors else { continue };
            let weight = if self.normalize { weight * sum } else { weight };
            let acc = &mut self.acc[line * dim..(line + 1) * dim];
            acc.iter_mut().zip(out).for_each(|(acc, x)| *acc = *acc * rescale + weight * x);
        }
        Ok(())
    }

    /// Divides if the output is normalised, and writes the outputs, rounded once.
    pub(super) fn finish(&mut self, outputs: &mut Outputs<HostViewMut<'_>>) {
        let Self { shape, acc, lines, normalize } = self;
        let dim = shape[3];
        if *normalize {
            for (line, softmax) in lines.iter().enumerate() {
                let acc = &mut acc[line * dim..(line + 1) * dim];
                acc.iter_mut().for_each(|acc| *acc /= softmax.normalizer());
            }
        }
        let write = |into: Option<&mut HostViewMut<'_>>, of: fn(&MergedSoftmax) -> f64| {
            if let Some(into) = into {
                into.reborrow().swap_rows_and_heads().write_each(lines.iter().map(of));
            }
        };
        let Outputs { out, lse, max, sum, ties, out_residual } = outputs.as_mut();
        write(Some(lse), MergedSoftmax::lse);
        write(max, |line| line.max);
        write(sum, |line| line.sum);
        write(ties, |line| line.ties);
        out.write(acc);
        if let Some(residual) = out_residual {
            residual.write_residual(acc);
        }
    }
}

#[cfg(test)]
mod tests {
    use ndarray::Array4;

    use super::*;

    const SHAPE: [usize; 4] = [2, 3, 4, 5];

    /// Packed out, max and sum of heads `heads` of part `number`; row 1 has no visible key in part
    /// 1.
    fn part(number: usize, heads: Range<usize>) -> Vec<u8> {
        let [batch, rows, _, dim] = SHAPE;
        let lines = (0..batch * rows)
            .flat_map(|row| heads.clone().map(move |head| (row, head)))
            .collect::<Vec<_>>();
        let out = lines.iter().flat_map(|&(row, head)| {
            (0..dim).map(move |element| out_of(number, row, head, element))
        });
        let max = lines.iter().map(|&(row, head)| max_of(number, row, head));
        let sum = lines.iter().map(|&(row, head)| sum_of(number, row, head));
        out.chain(max).chain(sum).flat_map(f64::to_ne_bytes).collect()
    }

    fn out_of(number: usize, row: usize, head: usize, element: usize) -> f64 {
        ((number * 31 + row * 17 + head * 7 + element * 3) % 23) as f64 - 11.0
    }

    fn max_of(number: usize, row: usize, head: usize) -> f64 {
        if (number, row) == (1, 1) {
            return f64::NEG_INFINITY;
        }
        ((number * 13 + row * 5 + head) % 7) as f64 - 3.0
    }

    fn sum_of(number: usize, row: usize, head: usize) -> f64 {
        if (number, row) == (1, 1) { 0.0 } else { 1.0 + ((number + row + head) % 3) as f64 }
    }

    fn merged(parts: &[usize]) -> [Array4<f64>; 2] {
        let [batch, rows, heads, _] = SHAPE;
        let mut merge = ColumnMerge::new(SHAPE, true).unwrap();
        merge.add(DType::F64, 0..heads, &part(2, 0..heads)).unwrap();
        merge.begin();
        for &number in parts {
            for heads in [0..1, 1..heads] {
                merge.add(DType::F64, heads.clone(), &part(number, heads)).unwrap();
            }
        }
        let mut out = Array4::zeros(SHAPE);
        let mut lse = Array4::zeros([batch, heads, rows, 1]);
        let [out_view, lse_view] = [&mut out, &mut lse].map(|of| HostViewMut::F64(of.view_mut()));
        merge.finish(&mut Outputs {
            out: out_view,
            lse: lse_view,
            max: None,
            sum: None,
            ties: None,
            out_residual: None,
        });
        [out, lse]
    }

    fn distance(a: &Array4<f64>, b: &Array4<f64>) -> f64 {
        a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
    }

    #[test]
    fn parts_are_one_softmax() {
        let [out, lse] = merged(&[0, 1, 2]);
        for (line, ((batch, row, head, element), &got)) in out.indexed_iter().enumerate() {
            let row = batch * SHAPE[1] + row;
            let weights =
                [0, 1, 2].map(|number| max_of(number, row, head).exp() * sum_of(number, row, head));
            let sum: f64 = weights.iter().sum();
            let want: f64 =
                (0..3).map(|number| weights[number] * out_of(number, row, head, element)).sum();
            assert!((got - want / sum).abs() < 1e-13, "{line}");
            assert!((lse[[batch, head, row % SHAPE[1], 0]] - sum.ln()).abs() < 1e-14);
        }
    }

    #[test]
    fn a_part_that_is_dropped_or_merged_twice_changes_the_result() {
        let [out, lse] = merged(&[0, 1, 2]);
        let [other, other_lse] = merged(&[2, 0, 1]);
        assert!(distance(&out, &other) < 1e-13 && distance(&lse, &other_lse) < 1e-14);
        for wrong in [&[0, 1][..], &[1, 2], &[0, 2], &[0, 1, 2, 2]] {
            let [other, other_lse] = merged(wrong);
            assert!(distance(&out, &other) > 1.0 && distance(&lse, &other_lse) > 0.1, "{wrong:?}");
        }
    }

    #[test]
    fn a_short_message_is_an_error() {
        let mut merge = ColumnMerge::new(SHAPE, true).unwrap();
        let message = part(0, 0..4);
        let mut short = |len| merge.add(DType::F64, 0..4, &message[..len]).is_err();
        assert!(short(0) && short(message.len() / 2) && short(message.len() - 1));
        // of an output that is not normalised, the ties are missing
        let mut unnormalized = ColumnMerge::new(SHAPE, false).unwrap();
        assert!(unnormalized.add(DType::F64, 0..4, &message).is_err());
    }
}
