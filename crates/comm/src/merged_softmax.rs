//! Merge of partial results over disjoint sets of keys: of the key columns of a grid, and of the
//! ranks of a KV cache. Parts are merged in the order in which they are added.
//!
//! ```text
//! m = max over parts of mₚ      ℓ = Σ e^(mₚ − m)·ℓₚ      ties = Σ tiesₚ where mₚ = m
//! acc = Σ e^(mₚ − m)·accₚ       lse = m + ln ℓ           accₚ = ℓₚ·outₚ of a normalised output
//! ```
//! In f64. A part is a set of keys, or a sink, which has a score and no output. The maximum and the
//! sum are sent apart: lse alone has lost ln ℓ where the maximum is large.
//!
//! # Source
//! Milakov, Gimelshein 2018, Online normalizer calculation for softmax, §3.

use std::ops::Range;

use annulus_core::{
    DType, Element, Error, HostView, HostViewMut, Outputs, Result, Spec, memory, rebased_score_sum,
};

/// Softmax statistics of one row over some keys and sinks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct MergedSoftmax {
    pub(crate) max: f64,
    pub(crate) sum: f64,
    /// Scores that are equal to the maximum.
    pub(crate) ties: f64,
}

impl MergedSoftmax {
    /// No part.
    pub(crate) const EMPTY: Self = Self { max: f64::NEG_INFINITY, sum: 0.0, ties: 0.0 };

    /// Returns the part of one sink.
    pub(crate) fn sink(score: f64) -> Self {
        if score == f64::NEG_INFINITY {
            Self::EMPTY
        } else {
            Self { max: score, sum: 1.0, ties: 1.0 }
        }
    }

    /// Adds a part to those before it. Returns the factors e^(m − m') of the accumulators of both;
    /// `None` if the part has no visible key and no sink, and the accumulator is unchanged.
    pub(crate) fn add(&mut self, part: Self) -> Option<[f64; 2]> {
        if part.sum == 0.0 {
            return None;
        }
        // e^(∞ − ∞) is undefined
        let is_nan = [self.max, part.max].iter().any(|&max| max.is_nan() || max == f64::INFINITY);
        let max = if is_nan { f64::NAN } else { self.max.max(part.max) };
        let factor = |of: f64| if of == max { 1.0 } else { (of - max).exp() };
        let ties = |of: &Self| if of.max == max { of.ties } else { 0.0 };
        let [rescale, weight] = [self.max, part.max].map(factor);
        let sum = self.sum * rescale + part.sum * weight;
        *self = Self { max, sum, ties: ties(self) + ties(&part) };
        Some([rescale, weight])
    }

    /// Returns the divisor of the accumulator; 1 without visible keys and sinks.
    pub(crate) fn normalizer(&self) -> f64 {
        if self.sum == 0.0 { 1.0 } else { self.sum }
    }

    pub(crate) fn lse(&self) -> f64 {
        self.max + self.sum.ln()
    }
}

/// Merge of the partial results of some queries, which are added one after another. Memory does not
/// depend on their number.
pub(crate) struct PartialMerge {
    /// `[batch, rows, heads, value_dim]`.
    shape: [usize; 4],
    acc: Vec<f64>,
    /// Statistics of each row and head.
    lines: Vec<MergedSoftmax>,
    /// Statistics of the scores of each row and head, if wanted.
    scores: Vec<MergedScores>,
    normalize: bool,
}

/// Statistics of the scores of one row over some keys and sinks.
#[derive(Debug, Clone, Copy)]
struct MergedScores {
    max_product: f64,
    max_score: f64,
    /// Σ e^(s − m)·(s − m), over keys and sinks.
    score_sum: f64,
}

impl MergedScores {
    /// No part.
    const EMPTY: Self =
        Self { max_product: f64::NEG_INFINITY, max_score: f64::NEG_INFINITY, score_sum: 0.0 };

    /// Returns those of a part from its statistics, of which the third is its entropy.
    fn of_part([max_product, max_score, entropy]: [f64; 3], part: &MergedSoftmax) -> Self {
        // H = ln ℓ − t/ℓ
        let score_sum = if part.sum == 0.0 { 0.0 } else { part.sum * (part.sum.ln() - entropy) };
        Self { max_product, max_score, score_sum }
    }

    /// Adds a part. `before` and `part` are the statistics of the softmax of both, `max` is the
    /// maximum of both.
    fn add(
        &mut self,
        (before, part): (&MergedSoftmax, &MergedSoftmax),
        scores: Self,
        (max, [rescale, weight]): (f64, [f64; 2]),
    ) {
        let of = |scores: &Self, softmax: &MergedSoftmax| {
            rebased_score_sum(scores.score_sum, [softmax.max, softmax.sum], max)
        };
        self.score_sum = of(self, before) * rescale + of(&scores, part) * weight;
        self.max_product = self.max_product.max(scores.max_product);
        self.max_score = self.max_score.max(scores.max_score);
    }

    /// Returns the statistics of the row, whose softmax is `softmax`.
    fn finish(&self, softmax: &MergedSoftmax) -> [f64; 3] {
        if softmax.sum.is_nan() {
            return [f64::NAN; 3];
        }
        let entropy = softmax.normalizer().ln() - self.score_sum / softmax.normalizer();
        [self.max_product, self.max_score, entropy]
    }
}

impl PartialMerge {
    /// Allocates the merge of results of this shape, without parts. Outputs are divided by the sum
    /// if they `normalize`, which those of the parts then are, too.
    /// With `statistics`, those of the scores are merged, too.
    pub(crate) fn new(shape: [usize; 4], normalize: bool, statistics: bool) -> Result<Self> {
        let [batch, rows, heads, dim] = shape;
        let count = batch * rows * heads;
        let acc = memory::filled("the merged output", count * dim, 0.0)?;
        let lines = memory::filled("the merged statistics", count, MergedSoftmax::EMPTY)?;
        let of_scores = if statistics { count } else { 0 };
        let scores = memory::filled("the merged statistics", of_scores, MergedScores::EMPTY)?;
        Ok(Self { shape, acc, lines, scores, normalize })
    }

    pub(crate) fn bytes(&self) -> u64 {
        let Self { acc, lines, scores, .. } = self;
        (size_of_val(&acc[..]) + size_of_val(&lines[..]) + size_of_val(&scores[..])) as u64
    }

    /// Removes all parts.
    pub(crate) fn clear(&mut self) {
        self.acc.fill(0.0);
        self.lines.fill(MergedSoftmax::EMPTY);
        self.scores.fill(MergedScores::EMPTY);
    }

    /// Adds the results of some heads over further keys: `out` `[batch, rows, heads, value_dim]`
    /// and `statistics` `[batch, rows, heads]`; with statistics of scores also `scores`
    /// `[batch, rows, heads, 3]`.
    pub(crate) fn add(
        &mut self,
        heads: Range<usize>,
        mut out: impl Iterator<Item = f64>,
        statistics: impl Iterator<Item = MergedSoftmax>,
        mut scores: impl Iterator<Item = f64>,
    ) {
        let [batch, rows, all_heads, dim] = self.shape;
        let lines =
            (0..batch * rows).flat_map(|row| heads.clone().map(move |head| row * all_heads + head));
        for (line, part) in lines.zip(statistics) {
            let out = out.by_ref().take(dim);
            let mut next = || scores.next().unwrap_or(f64::NAN);
            let of_part = [next(), next(), next()];
            let before = self.lines[line];
            let Some(factors @ [rescale, weight]) = self.lines[line].add(part) else {
                out.for_each(drop);
                continue;
            };
            if let Some(scores) = self.scores.get_mut(line) {
                let of_part = MergedScores::of_part(of_part, &part);
                scores.add((&before, &part), of_part, (self.lines[line].max, factors));
            }
            let weight = if self.normalize { weight * part.sum } else { weight };
            let acc = &mut self.acc[line * dim..(line + 1) * dim];
            acc.iter_mut().zip(out).for_each(|(acc, x)| *acc = *acc * rescale + weight * x);
        }
    }

    /// Adds a message with the results of some heads in the accumulator's type, packed: out, max
    /// and sum, and ties of an output that is not normalised.
    pub(crate) fn add_message(
        &mut self,
        dtype: DType,
        heads: Range<usize>,
        message: &[u8],
    ) -> Result<()> {
        match dtype {
            DType::F64 => self.add_elements::<f64>(heads, message),
            _ => self.add_elements::<f32>(heads, message),
        }
    }

    fn add_elements<T: Element>(&mut self, heads: Range<usize>, message: &[u8]) -> Result<()> {
        let [batch, rows, _, dim] = self.shape;
        let lines = batch * rows * heads.len();
        let size = size_of::<T>();
        let normalize = self.normalize;
        let last = if normalize { 1 } else { 2 };
        let of_scores = if self.scores.is_empty() { 0 } else { Spec::SCORE_STATISTICS };
        if message.len() < (dim + last + 1 + of_scores) * lines * size {
            return Err(too_short());
        }
        let numbers = |range: Range<usize>| {
            let bytes = message[range.start * size..range.end * size].chunks_exact(size);
            bytes.map(|bytes| bytemuck::pod_read_unaligned::<T>(bytes).to_f64())
        };
        let statistic = |number: usize| numbers((dim + number) * lines..(dim + number + 1) * lines);
        let statistics = statistic(0).zip(statistic(1)).zip(statistic(last));
        let statistics = statistics.map(|((max, sum), last)| MergedSoftmax {
            max,
            sum,
            ties: if normalize { 0.0 } else { last },
        });
        let first = (dim + last + 1) * lines;
        let scores = numbers(first..first + of_scores * lines);
        self.add(heads, numbers(0..dim * lines), statistics, scores);
        Ok(())
    }

    /// Adds sinks `[q_heads|1, count, 1, 1]`.
    pub(crate) fn add_sinks(&mut self, sinks: &HostView<'_>) -> Result<()> {
        let [of_heads, count, ..] = sinks.shape();
        let sinks = sinks.widened()?;
        let [_, _, heads, dim] = self.shape;
        for (line, softmax) in self.lines.iter_mut().enumerate() {
            let first = if of_heads > 1 { line % heads * count } else { 0 };
            for &sink in &sinks[first..first + count] {
                let (before, part) = (*softmax, MergedSoftmax::sink(sink));
                let Some(factors @ [rescale, _]) = softmax.add(part) else { continue };
                if let Some(scores) = self.scores.get_mut(line) {
                    scores.add((&before, &part), MergedScores::EMPTY, (softmax.max, factors));
                }
                self.acc[line * dim..(line + 1) * dim].iter_mut().for_each(|acc| *acc *= rescale);
            }
        }
        Ok(())
    }

    /// Divides if the output is normalised, and writes the outputs, rounded once.
    pub(crate) fn finish(&mut self, outputs: &mut Outputs<HostViewMut<'_>>) {
        let Self { shape, acc, lines, scores, normalize } = self;
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
        let Outputs { out, lse, max, sum, ties, out_residual, statistics, head_statistics: _ } =
            outputs.as_mut();
        write(Some(lse), MergedSoftmax::lse);
        write(max, |line| line.max);
        write(sum, |line| line.sum);
        write(ties, |line| line.ties);
        if let Some(statistics) = statistics {
            let of_lines = scores.iter().zip(lines.iter());
            let numbers = of_lines.flat_map(|(scores, softmax)| scores.finish(softmax));
            statistics.reborrow().swap_rows_and_heads().write_each(numbers);
        }
        out.write(acc);
        if let Some(residual) = out_residual {
            residual.write_residual(acc);
        }
    }
}

/// Returns the error of a message that lacks results.
pub(crate) fn too_short() -> Error {
    Error::internal("a message that is shorter than its partial results")
}

#[cfg(test)]
mod tests {
    use ndarray::Array4;

    use super::*;

    fn of(scores: &[f64]) -> MergedSoftmax {
        let mut all = MergedSoftmax::EMPTY;
        scores.iter().for_each(|&score| {
            all.add(MergedSoftmax::sink(score));
        });
        all
    }

    #[test]
    fn empty_rows_nan_and_infinity() {
        let empty = of(&[f64::NEG_INFINITY; 3]);
        assert_eq!((empty.lse(), empty.normalizer()), (f64::NEG_INFINITY, 1.0));
        assert_eq!(of(&[]).add(MergedSoftmax::EMPTY), None);
        assert_eq!(of(&[f64::NEG_INFINITY, 2.5]).lse(), 2.5);
        for broken in [f64::NAN, f64::INFINITY] {
            let softmax = of(&[1.0, broken, f64::NEG_INFINITY]);
            assert!(softmax.lse().is_nan() && softmax.normalizer().is_nan());
            assert!(of(&[broken, 1.0]).lse().is_nan());
        }
        assert!((of(&[1.0, 1.0]).lse() - (1.0 + 2f64.ln())).abs() < 1e-15);
    }

    #[test]
    fn statistics_of_parts_are_those_of_all_scores() {
        let direct = |scores: &[f64]| {
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum = scores.iter().map(|score| (score - max).exp()).sum();
            let ties = scores.iter().filter(|&&score| score == max).count() as f64;
            if scores.is_empty() { MergedSoftmax::EMPTY } else { MergedSoftmax { max, sum, ties } }
        };
        let parts: [&[f64]; 5] = [&[], &[1.0, 3.0], &[3.0, 3.0, 0.5], &[], &[-700.0, 2.5]];
        let mut merged = MergedSoftmax::EMPTY;
        let factors = parts.map(|part| merged.add(direct(part)));
        assert_eq!(factors.map(|of| of.is_some()), [false, true, true, false, true]);
        let all = direct(&parts.concat());
        assert_eq!((merged.max, merged.ties), (all.max, 3.0));
        assert!((merged.sum - all.sum).abs() < 1e-14);
        // a larger maximum takes the place of those before it
        assert_eq!(merged.add(direct(&[4.0])), Some([(-1f64).exp(), 1.0]));
        assert_eq!((merged.max, merged.ties), (4.0, 1.0));
        merged.add(MergedSoftmax { max: f64::NAN, sum: f64::NAN, ties: 1.0 });
        assert!(merged.max.is_nan() && merged.sum.is_nan());
    }

    #[test]
    fn a_maximum_that_absorbs_the_logarithm_keeps_the_sum() {
        // three parts of 1, 2 and 4 keys at finfo(f32).min: the mean of all keys
        let low = f64::from(f32::MIN);
        let mut merged = MergedSoftmax::EMPTY;
        for keys in [1.0, 2.0, 4.0] {
            merged.add(MergedSoftmax { max: low, sum: keys, ties: keys });
        }
        assert_eq!((merged.sum, merged.lse()), (7.0, low));
    }

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
        let mut merge = PartialMerge::new(SHAPE, true, false).unwrap();
        merge.add_message(DType::F64, 0..heads, &part(2, 0..heads)).unwrap();
        merge.clear();
        for &number in parts {
            for heads in [0..1, 1..heads] {
                merge.add_message(DType::F64, heads.clone(), &part(number, heads)).unwrap();
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
            statistics: None,
            head_statistics: None,
        });
        [out, lse]
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
    fn a_short_message_is_an_error() {
        let mut merge = PartialMerge::new(SHAPE, true, false).unwrap();
        let message = part(0, 0..4);
        let mut short = |len| merge.add_message(DType::F64, 0..4, &message[..len]).is_err();
        assert!(short(0) && short(message.len() / 2) && short(message.len() - 1));
        // of an output that is not normalised, the ties are missing
        let mut unnormalized = PartialMerge::new(SHAPE, false, false).unwrap();
        assert!(unnormalized.add_message(DType::F64, 0..4, &message).is_err());
    }
}
