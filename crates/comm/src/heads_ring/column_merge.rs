//! Merge of the partial results of key columns, for the own queries of a rank.
//!
//! ```text
//! forward    (out, lse) of each column: an online softmax over columns, in f64
//! backward   dq = Σ over columns of the partial dq, in the accumulator's type
//! ```
//! Each part is merged when it arrives: the own column first, then those before it, descending. The
//! order depends on the grid alone. Memory does not depend on the number of columns.

use std::ops::Range;

use annulus_core::{
    BackwardInputs, DType, Dims, Element, Error, HostTensors, HostViewMut, Result, Spec, index,
    memory,
};

use super::shard_tensors::ShardTensor;
use crate::merged_softmax::MergedSoftmax;

/// Results of the own queries while the parts of the columns arrive.
pub(super) struct ColumnMerge {
    /// `[batch, rows, heads, value_dim]`.
    shape: [usize; 4],
    acc: Vec<f64>,
    /// Statistics of each row and head.
    softmax: Vec<MergedSoftmax>,
}

/// Tensors of the own queries and all heads in a plan with several key columns.
pub(super) struct ColumnTensors {
    pub(super) merge: ColumnMerge,
    /// Of a plan with a backward pass.
    pub(super) backward: Option<ColumnGradients>,
}

/// Tensors of the own queries in a backward pass.
pub(super) struct ColumnGradients {
    /// dlse − ⟨out, dout⟩.
    pub(super) minus_delta: ShardTensor,
    /// Sum of the partial dq.
    pub(super) dq: ShardTensor,
}

impl ColumnTensors {
    /// Allocates the tensors of `rows` own queries.
    pub(super) fn new(spec: &Spec, rows: u64, backward: bool) -> Result<Self> {
        let Dims { batch, q_heads, head_dim, value_dim, .. } = spec.dims;
        let sums = spec.dtype.accumulator();
        let tensor = |dim| ShardTensor::with_shape([batch, index(rows), q_heads, dim], sums);
        let gradients = || Ok(ColumnGradients { minus_delta: tensor(1)?, dq: tensor(head_dim)? });
        let backward = backward.then(gradients).transpose()?;
        let merge = ColumnMerge::new([batch, index(rows), q_heads, value_dim])?;
        Ok(Self { merge, backward })
    }

    pub(super) fn bytes(&self) -> u64 {
        let gradients = self.backward.iter().flat_map(|of| [&of.minus_delta, &of.dq]);
        self.merge.bytes() + gradients.map(ShardTensor::bytes).sum::<u64>()
    }
}

impl ColumnGradients {
    /// Computes −delta of the own queries.
    pub(super) fn compute<S: HostTensors>(&mut self, inputs: &BackwardInputs<'_, S>) -> Result<()> {
        let mut into = self.minus_delta.view_mut()?;
        match inputs.dlse {
            Some(dlse) => into.round_from(&dlse.swap_rows_and_heads()),
            None => into.fill_zero(),
        }
        into.subtract_row_products(&inputs.out, &inputs.dout);
        Ok(())
    }
}

impl ColumnMerge {
    fn new(shape: [usize; 4]) -> Result<Self> {
        let [batch, rows, heads, dim] = shape;
        let lines = batch * rows * heads;
        let acc = memory::filled("the merged output", lines * dim, 0.0)?;
        let softmax = memory::filled("the merged statistics", lines, MergedSoftmax::EMPTY)?;
        Ok(Self { shape, acc, softmax })
    }

    fn bytes(&self) -> u64 {
        (size_of_val(&self.acc[..]) + size_of_val(&self.softmax[..])) as u64
    }

    /// Forgets the parts of the last pass.
    pub(super) fn begin(&mut self) {
        self.acc.fill(0.0);
        self.softmax.fill(MergedSoftmax::EMPTY);
    }

    /// Merges a part: out, then lse, of some heads of all rows, packed, in the accumulator's type.
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
        let (out, lse) = part.split_at_checked(lines * dim * size).ok_or_else(short)?;
        if lse.len() < lines * size {
            return Err(short());
        }
        let element = |bytes: &[u8]| bytemuck::pod_read_unaligned::<T>(bytes).to_f64();
        // rows of no elements have no chunks: their lse is merged all the same
        let mut outs = out.chunks_exact((dim * size).max(1));
        let mut scores = lse.chunks_exact(size).map(element);
        for row in 0..batch * rows {
            for head in heads.clone() {
                let line = row * q_heads + head;
                let out = outs.next().unwrap_or_default().chunks_exact(size).map(element);
                let score = scores.next().unwrap_or(f64::NEG_INFINITY);
                let Some([rescale, weight]) = self.softmax[line].add(score) else { continue };
                let acc = &mut self.acc[line * dim..(line + 1) * dim];
                acc.iter_mut().zip(out).for_each(|(acc, x)| *acc = *acc * rescale + weight * x);
            }
        }
        Ok(())
    }

    /// Divides, and writes out `[batch, rows, heads, value_dim]` and lse `[batch, rows, heads, 1]`,
    /// rounded once.
    pub(super) fn finish(&mut self, out: &mut HostViewMut<'_>, lse: &mut HostViewMut<'_>) {
        let dim = self.shape[3];
        for (line, softmax) in self.softmax.iter().enumerate() {
            let acc = &mut self.acc[line * dim..(line + 1) * dim];
            acc.iter_mut().for_each(|acc| *acc /= softmax.normalizer());
        }
        out.write(&self.acc);
        lse.write_each(self.softmax.iter().map(MergedSoftmax::lse));
    }
}

#[cfg(test)]
mod tests {
    use ndarray::Array4;

    use super::*;

    const SHAPE: [usize; 4] = [2, 3, 4, 5];

    /// Packed out and lse of heads `heads` of part `number`; row 1 has no visible key in part 1.
    fn part(number: usize, heads: Range<usize>) -> Vec<u8> {
        let [batch, rows, _, dim] = SHAPE;
        let lines = (0..batch * rows)
            .flat_map(|row| heads.clone().map(move |head| (row, head)))
            .collect::<Vec<_>>();
        let out = lines.iter().flat_map(|&(row, head)| {
            (0..dim).map(move |element| out_of(number, row, head, element))
        });
        let lse = lines.iter().map(|&(row, head)| lse_of(number, row, head));
        out.chain(lse).flat_map(f64::to_ne_bytes).collect()
    }

    fn out_of(number: usize, row: usize, head: usize, element: usize) -> f64 {
        ((number * 31 + row * 17 + head * 7 + element * 3) % 23) as f64 - 11.0
    }

    fn lse_of(number: usize, row: usize, head: usize) -> f64 {
        if (number, row) == (1, 1) {
            return f64::NEG_INFINITY;
        }
        ((number * 13 + row * 5 + head) % 7) as f64 - 3.0
    }

    fn merged(parts: &[usize]) -> [Array4<f64>; 2] {
        let [batch, rows, heads, _] = SHAPE;
        let mut merge = ColumnMerge::new(SHAPE).unwrap();
        merge.add(DType::F64, 0..heads, &part(2, 0..heads)).unwrap();
        merge.begin();
        for &number in parts {
            for heads in [0..1, 1..heads] {
                merge.add(DType::F64, heads.clone(), &part(number, heads)).unwrap();
            }
        }
        let mut out = Array4::zeros(SHAPE);
        let mut lse = Array4::zeros([batch, rows, heads, 1]);
        merge.finish(&mut HostViewMut::F64(out.view_mut()), &mut HostViewMut::F64(lse.view_mut()));
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
            let weights = [0, 1, 2].map(|number| lse_of(number, row, head).exp());
            let sum: f64 = weights.iter().sum();
            let want: f64 =
                (0..3).map(|number| weights[number] * out_of(number, row, head, element)).sum();
            assert!((got - want / sum).abs() < 1e-13, "{line}");
            assert!((lse[[batch, row % SHAPE[1], head, 0]] - sum.ln()).abs() < 1e-14);
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
        let mut merge = ColumnMerge::new(SHAPE).unwrap();
        let message = part(0, 0..4);
        let mut short = |len| merge.add(DType::F64, 0..4, &message[..len]).is_err();
        assert!(short(0) && short(message.len() / 2) && short(message.len() - 1));
    }
}
