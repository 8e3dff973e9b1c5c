//! Bands: masks whose key interval moves with the query, lowered for whole runs of queries.
//!
//! ```text
//! interval of query i   [lo(i), hi(i))
//! lo(i) = max(i + first, start of i's chunk)
//! hi(i) = min(i + end, max(prefix, i + 1))
//! ```
//! A term that a mask does not have is left out. Both ends are non-decreasing in i. The intervals
//! of queries at equal distances therefore have one interval as their union if each touches the
//! next, which the terms alone decide.

use std::ops::Range;

use super::clip;
use crate::Run;

/// Lowering of a mask for all queries at once. Conjunctions of bands are bands.
///
/// The query at position i attends to the keys from max(i + first, start of its chunk) up to
/// min(i + end, max(prefix, i + 1)), exclusive. A term that the mask does not have is left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Band {
    first: Option<i128>,
    end: Option<i128>,
    chunk: Option<u64>,
    prefix: Option<u64>,
}

impl Band {
    /// Returns the band of all keys.
    pub const fn everything() -> Self {
        Self { first: None, end: None, chunk: None, prefix: None }
    }

    /// Masks the keys before position i + `first`.
    #[must_use]
    pub fn starting(self, first: i128) -> Self {
        Self { first: Some(self.first.map_or(first, |other| other.max(first))), ..self }
    }

    /// Masks the keys from position i + `end` on.
    #[must_use]
    pub fn ending(self, end: i128) -> Self {
        Self { end: Some(self.end.map_or(end, |other| other.min(end))), ..self }
    }

    /// Masks the keys before the start of the query's chunk of `size` positions.
    pub(super) fn in_chunks(self, size: u64) -> Self {
        Self { chunk: Some(size.max(1)), ..self }
    }

    /// Masks the keys after the query, except those before position `len`.
    pub(super) const fn with_prefix(self, len: u64) -> Self {
        Self { prefix: Some(len), ..self }
    }

    /// Returns the conjunction; `None` if it has two sizes of chunks that are no multiples.
    pub(super) fn and(self, other: Self) -> Option<Self> {
        let chunk = match (self.chunk, other.chunk) {
            (Some(a), Some(b)) if a.is_multiple_of(b) => Some(b),
            (Some(a), Some(b)) if b.is_multiple_of(a) => Some(a),
            (Some(_), Some(_)) => return None,
            (a, b) => a.or(b),
        };
        let least = |a: Option<u64>, b: Option<u64>| a.into_iter().chain(b).min();
        let both = Self { chunk, prefix: least(self.prefix, other.prefix), ..self };
        let both = other.first.map_or(both, |first| both.starting(first));
        Some(other.end.map_or(both, |end| both.ending(end)))
    }

    /// Returns the keys of the query at `position`; an empty range if there are none.
    pub fn at(&self, position: i64) -> Range<i64> {
        let i = i128::from(position);
        let first = self.first.map(|first| i + first);
        let chunk = self.chunk.map(|size| i.div_euclid(size.into()) * i128::from(size));
        let end = self.end.map(|end| i + end);
        let prefix = self.prefix.map(|len| i128::from(len).max(i + 1));
        let lo = first.into_iter().chain(chunk).max().map_or(i64::MIN, clip);
        lo..end.into_iter().chain(prefix).min().map_or(i64::MAX, clip)
    }

    /// Returns true if hi(i) ≥ lo(i + `step`) + `margin` for all i.
    ///
    /// hi(i) ≥ i + least end and lo(i + step) ≤ i + step + largest first, because a chunk starts at
    /// the query or before it.
    fn reaches(&self, step: i128, margin: i128, chunk: Option<u64>) -> bool {
        let least_end = self.end.into_iter().chain(self.prefix.map(|_| 1)).min();
        let largest_first = self.first.into_iter().chain(chunk.map(|_| 0)).max();
        match (least_end, largest_first) {
            (Some(end), Some(first)) => end >= step + first + margin,
            _ => true,
        }
    }

    /// Returns true if every query attends to at least one position.
    pub fn is_never_empty(&self) -> bool {
        self.reaches(0, 1, self.chunk)
    }

    /// Returns the maximum number of intervals of [`Band::cover`].
    pub fn most_intervals(&self, run: &Run) -> u64 {
        let step = i128::from(run.step);
        if run.count < 2 || step == 0 || self.reaches(step, 0, self.chunk) {
            return run.count.min(1);
        }
        let span = i128::from(run.at(run.count - 1)) - i128::from(run.start);
        match self.chunk {
            Some(size) if self.reaches(step, 0, None) => {
                let chunks = span / i128::from(size) + 2;
                u64::try_from(chunks).unwrap_or(run.count).min(run.count)
            }
            _ => run.count,
        }
    }

    /// Calls `found` with intervals whose union is that of the keys of all queries at the positions
    /// `run`, an ascending run: one interval if each query's touches the next, else one per chunk
    /// or per query.
    pub fn cover(&self, run: &Run, mut found: impl FnMut(Range<i64>)) {
        let step = i128::from(run.step);
        if run.count < 2 || step == 0 || self.reaches(step, 0, self.chunk) {
            return self.cover_touching(run, &mut found);
        }
        // within a chunk the start of the chunk is a constant, which cannot leave a gap
        let touch = self.reaches(step, 0, None);
        self.for_each_chunk(run, |part, _| {
            if touch {
                self.cover_touching(&part, &mut found);
            } else {
                (0..part.count).for_each(|index| {
                    self.cover_touching(
                        &Run { start: part.at(index), step: 0, count: 1 },
                        &mut found,
                    )
                });
            }
        });
    }

    /// Calls `found` with the union of the intervals of `run`, which is one interval.
    fn cover_touching(&self, run: &Run, found: &mut impl FnMut(Range<i64>)) {
        if run.count > 0 {
            let all = self.at(run.start).start..self.at(run.at(run.count - 1)).end;
            if !all.is_empty() {
                found(all);
            }
        }
    }

    /// Divides an ascending run where the chunk of its positions changes. Calls `found` with each
    /// part and the start of its chunk; with the whole run and no start if the band has no chunks.
    fn for_each_chunk(&self, run: &Run, mut found: impl FnMut(Run, Option<i128>)) {
        let Some(size) = self.chunk.map(i128::from) else { return found(*run, None) };
        let mut index = 0;
        while index < run.count {
            let start = run.at(index);
            let chunk = i128::from(start).div_euclid(size) * size;
            let left = run.count - index;
            let count = match i128::from(run.step) {
                0 => left,
                step => {
                    let within = (chunk + size - i128::from(start) + step - 1) / step;
                    u64::try_from(within).unwrap_or(left).min(left)
                }
            };
            found(Run { start, count, ..*run }, Some(chunk));
            index += count;
        }
    }

    /// Returns the prefix, unless i + end ≤ i + 1 is the least term of hi(i) whatever it is.
    fn effective_prefix(&self) -> Option<u64> {
        self.prefix.filter(|_| self.end.is_none_or(|end| end > 1))
    }

    /// Returns true if [`Band::count_pairs`] has a result, for any queries and keys: if the terms
    /// exclude queries without keys, and hi(i) is not the least of two terms.
    pub fn has_closed_form(&self) -> bool {
        let has_two_ends = self.end.is_some() && self.effective_prefix().is_some();
        self.reaches(0, 0, self.chunk) && !has_two_ends
    }

    /// Sums the numbers of `keys` (consecutive positions) over the queries at the positions `run`,
    /// an ascending run. `None` if the terms do not exclude queries without keys, or if hi(i) is
    /// the least of two terms.
    #[inline]
    pub fn count_pairs(&self, run: &Run, keys: &Range<i64>) -> Option<u128> {
        self.count_few_pairs(run, keys).or_else(|| self.count_any_pairs(run, keys))
    }

    /// As [`Band::count_pairs`], of any queries and numbers. It is not inlined, so that few
    /// registers are saved where it is not called.
    #[inline(never)]
    fn count_any_pairs(&self, run: &Run, keys: &Range<i64>) -> Option<u128> {
        if !self.has_closed_form() {
            return None;
        }
        let prefix = self.effective_prefix();
        let keys = i128::from(keys.start)..i128::from(keys.end);
        let clamp = |x: i128| x.clamp(keys.start, keys.end);
        let ends = match (self.end, prefix) {
            (Some(end), _) => sum_clamped(run, end, &keys),
            (None, Some(len)) => sum_clamped(run, 1, &(clamp(len.into())..keys.end)),
            (None, None) => i128::from(run.count) * keys.end,
        };
        let mut starts = 0;
        self.for_each_chunk(run, |part, chunk| {
            let least = chunk.map_or(keys.start, clamp);
            starts += match self.first {
                Some(first) => sum_clamped(&part, first, &(least..keys.end)),
                None => i128::from(part.count) * least,
            };
        });
        u128::try_from(ends - starts).ok()
    }

    /// As [`Band::count_pairs`], of consecutive queries and small numbers: the rows of a packed
    /// document, of which there may be thousands. 128 bits take several times as long.
    #[inline]
    fn count_few_pairs(&self, run: &Run, keys: &Range<i64>) -> Option<u128> {
        let end = self.end.filter(|_| self.chunk.is_none() && self.prefix.is_none())?;
        if run.step != 1 || self.first.is_some_and(|first| first > end) {
            return None;
        }
        let (count, start) = (small(run.count)?, small(run.start)?);
        let keys = small(keys.start)?..small(keys.end)?;
        let starts = match self.first {
            Some(first) => sum_few_clamped(start + small(first)?, count, &keys),
            None => count * keys.start,
        };
        let ends = sum_few_clamped(start + small(end)?, count, &keys);
        u128::try_from(ends - starts).ok()
    }
}

/// Bound of the numbers of [`Band::count_few_pairs`]: a product of two sums of two is at most 2⁶⁰,
/// of which three are added.
const SMALL: i64 = 1 << 29;

/// Returns a number if it is within [`SMALL`].
fn small(number: impl TryInto<i64>) -> Option<i64> {
    number.try_into().ok().filter(|number| (-SMALL..=SMALL).contains(number))
}

/// Sums the numbers `first, first + 1, …`, each clamped to `bounds.start..=bounds.end`. All numbers
/// are small.
#[inline]
fn sum_few_clamped(first: i64, count: i64, bounds: &Range<i64>) -> i64 {
    let low = (bounds.start - first).max(0).min(count);
    let high = (bounds.end - first).max(low).min(count);
    let between = (high - low) * first + (high - low) * (low + high - 1) / 2;
    low * bounds.start + between + (count - high) * bounds.end
}

/// Sums the numbers of an ascending run, each plus `offset` and clamped to
/// `bounds.start..=bounds.end`.
fn sum_clamped(run: &Run, offset: i128, bounds: &Range<i128>) -> i128 {
    let first = i128::from(run.start) + offset;
    let count = i128::from(run.count);
    let step = i128::from(run.step);
    if step == 0 {
        return count * first.clamp(bounds.start, bounds.end);
    }
    // a division of 128 bits takes much longer than one of 64 bits
    let below = |bound: i128| match u64::try_from(bound - first) {
        Ok(distance) => i128::from(distance.div_ceil(run.step.cast_unsigned())).min(count),
        Err(_) if bound <= first => 0,
        Err(_) => (bound - first + step - 1).div_euclid(step).clamp(0, count),
    };
    let low = below(bounds.start);
    let high = below(bounds.end).max(low);
    let between = high - low;
    let indices = between * (low + high - 1) / 2;
    low * bounds.start + between * first + step * indices + (count - high) * bounds.end
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;
    use crate::{
        Mask,
        mask::{Causal, ChunkedCausal, Everything, Prefix, Query, SharedMask, Window, and},
    };

    /// Returns a mask with a band, or a conjunction of up to three.
    fn banded() -> impl Strategy<Value = SharedMask> {
        let side = || prop_oneof![Just(None), (0u64..9).prop_map(Some)];
        let one = prop_oneof![
            Just(Arc::new(Everything) as SharedMask),
            (-4i64..4).prop_map(|offset| Arc::new(Causal { offset }) as SharedMask),
            (side(), side(), -3i64..3).prop_map(|(left, right, offset)| {
                Arc::new(Window { offset, ..Window::new(left, right) }) as SharedMask
            }),
            (1u64..7).prop_map(|size| Arc::new(ChunkedCausal { size }) as SharedMask),
            (0u64..12).prop_map(|len| Arc::new(Prefix { len }) as SharedMask),
        ];
        prop::collection::vec(one, 1..4)
            .prop_map(|masks| masks.into_iter().fold(Arc::new(Everything) as SharedMask, and))
    }

    fn positions(mask: &dyn Mask, position: i64) -> Vec<i64> {
        let query = Query { batch: 0, head: 0, row: 0, position };
        let intervals = mask.bound(&query);
        (-60..60).filter(|&key| intervals.contains(key)).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]
        #[test]
        fn a_band_is_the_bound_of_every_query_and_of_every_run(
            mask in banded(),
            start in -20i64..20,
            step in 0i64..6,
            count in 1u64..8,
            keys in (-25i64..25, 0i64..30),
        ) {
            // no band: chunks of two sizes that are no multiples
            let Some(band) = mask.band(0, 0) else { return Ok(()) };
            let run = Run { start, step, count };
            let keys = keys.0..keys.0 + keys.1;
            let mut all = std::collections::BTreeSet::new();
            let mut pairs = 0;
            for index in 0..count {
                let of_query = positions(&*mask, run.at(index));
                let at = band.at(run.at(index));
                let of_band: Vec<i64> = (-60..60).filter(|key| at.contains(key)).collect();
                prop_assert_eq!(&of_band, &of_query);
                prop_assert!(!(band.is_never_empty() && of_query.is_empty()));
                pairs += of_query.iter().filter(|&key| keys.contains(key)).count() as u128;
                all.extend(of_query);
            }
            let mut covered = std::collections::BTreeSet::new();
            let mut intervals = 0;
            band.cover(&run, |range| {
                intervals += 1;
                covered.extend((-60..60).filter(|key| range.contains(key)));
            });
            prop_assert_eq!(covered, all);
            prop_assert!(intervals <= band.most_intervals(&run));
            let got = band.count_pairs(&run, &keys);
            if let Some(got) = got {
                prop_assert_eq!(got, pairs);
            }
            // far from 0, where sums take 128 bits
            if band.chunk.is_none() && band.prefix.is_none() {
                let far = 1 << 40;
                let run = Run { start: start + far, ..run };
                prop_assert_eq!(band.count_pairs(&run, &(keys.start + far..keys.end + far)), got);
            }
        }
    }

    #[test]
    fn common_masks_cover_a_run_of_any_length_with_one_interval() {
        let causal: SharedMask = Arc::new(Causal::default());
        let window: SharedMask = Arc::new(Window::new(Some(100), None));
        let chunked: SharedMask = Arc::new(ChunkedCausal { size: 64 });
        let run = Run { start: 0, step: 1, count: 1 << 40 };
        for mask in [
            Arc::new(Everything) as SharedMask,
            causal.clone(),
            and(causal.clone(), window.clone()),
            chunked.clone(),
            and(chunked, window),
            Arc::new(Prefix { len: 7 }),
            and(causal, Arc::new(Prefix { len: 7 })),
        ] {
            let mut intervals = 0;
            mask.band(0, 0).unwrap().cover(&run, |_| intervals += 1);
            assert_eq!(intervals, 1, "{mask:?}");
        }
    }

    #[test]
    fn pairs_of_common_masks_are_counted_in_closed_form() {
        let n = 1i64 << 40;
        let run = Run { start: 0, step: 1, count: n.cast_unsigned() };
        let causal = Causal::default().band(0, 0).unwrap();
        let all = n as u128 * (n as u128 + 1) / 2;
        assert_eq!(causal.count_pairs(&run, &(0..n)), Some(all));
        let prefix = Prefix { len: 2 }.band(0, 0).unwrap();
        assert_eq!(prefix.count_pairs(&run, &(0..n)), Some(all + 1));
        let window = Window::new(Some(1), Some(1)).band(0, 0).unwrap();
        assert_eq!(window.count_pairs(&run, &(0..n)), Some(3 * n as u128 - 2));
    }
}
