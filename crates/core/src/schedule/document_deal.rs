//! Documents dealt to ranks, whole where they fit, so that few rows are sent.
//!
//! ```text
//! for each rank, with an equal share of the pairs that are left:
//!     if the longest document fits:
//!         whole documents, the longest that fits first, while the rows that the rank still needs
//!         have about the mean of the pairs (AFTER_WHOLE)
//!     heavy = the longest document if it does not fit, else the shortest one whose last rows have
//!             as many pairs as the other rows of the rank need
//!     the other rows of the rank:
//!         the last tiles of heavy, as many as fit together with the others
//!         one tile before them that has the missing pairs
//!         the first rows of heavy, up to an equal share of its rows
//!         light rows: the shortest documents, then more first rows of heavy, then of others
//! ```
//! Under a causal mask a rank needs the keys of a document up to its last query there. So it costs
//! most rows if many ranks have late queries of a long document. A rank with such queries
//! therefore has as many of them as its pairs permit, together with queries that cost no rows: of
//! documents that it has whole, and of the beginning of the same document. All ranks of a document
//! need its first rows, so each of them has an equal share, and sends as much as the others.
//!
//! Tiles are counted from the end of a document, so that its cuts leave whole tiles. Only light
//! rows are cut elsewhere, which attend to few tiles of keys.
//!
//! # The bound of the rows sent
//! Let W(j) be the pairs of the queries of a document from its query j on, and B the most pairs of
//! a rank. At least W(j) / B ranks have one of these queries, and all but the owner of key j
//! receive it. So any layout sends at least the sum of ⌈W(j) / B⌉ − 1 over all rows j. This does
//! not count that the other rows of these ranks have pairs too
//! (`benches/record/documents.md` has figures).

use std::ops::Range;

use super::{
    document_ends::DocumentEnds,
    document_rows::{Document, DocumentRows, End, largest},
    query_work::QueryWork,
    tile_deal::{RankChunks, Shares, TILE_ROWS},
};
use crate::Runs;

/// Least and most pairs of the rows that a rank still needs after each whole document, relative to
/// the mean. Whole documents are then fewer or more, and the rows that complete them have more or
/// fewer pairs. No pair is best for all lengths, so that several deals are compared.
pub(super) const AFTER_WHOLE: [[f64; 2]; 3] = [[0.6, 1.5], [0.3, 2.0], [0.8, 1.25]];

/// Largest difference from the pairs that a rank needs, relative to these, that no other rows are
/// sought for: ranks stay below 1.01 times the mean, up to which chunks are exchanged afterwards.
const CLOSE: f64 = 0.008;

/// Most pairs of a whole document relative to those that a rank still needs: half of [`CLOSE`]
/// above them, because other rows may exceed them too.
const EXCEEDED: f64 = 1.004;

/// Ratio of the pairs of the last query of a document to those of its middle one, from which on its
/// later queries have more pairs. It is 2 under a causal mask, and 1 if all queries attend to all
/// keys.
const GROWING: u128 = 2;

/// Rows and pairs that a rank still needs.
#[derive(Clone, Copy)]
struct Needs {
    rows: u64,
    work: u128,
}

impl Needs {
    /// Returns the pairs of a row.
    fn mean(self) -> f64 {
        self.work as f64 / self.rows.max(1) as f64
    }

    fn without(self, rows: u64, work: u128) -> Self {
        Self { rows: self.rows - rows, work: self.work.saturating_sub(work) }
    }
}

/// First rows of documents, in the order in which they are dealt to a rank.
#[derive(Default)]
struct LightRows {
    parts: Vec<LightPart>,
    rows: u64,
    work: u128,
}

/// First rows of one document, after those of a part before.
struct LightPart {
    document: usize,
    /// Rows of the document in a part before.
    skipped: u64,
    rows: u64,
    /// Rows and pairs of all parts before.
    rows_before: u64,
    work_before: u128,
}

/// Rows of a rank that has a part of a document.
struct Cut {
    /// Number of the last rows of the document.
    last: u64,
    /// A tile before these.
    middle: Option<Range<u64>>,
    /// The other rows, as many as are needed.
    light: LightRows,
}

/// A deal of documents.
#[derive(Clone)]
pub(super) struct DocumentDeal<'a> {
    shares: Shares,
    /// First row of each document.
    begins: Vec<u64>,
    documents: DocumentRows<'a>,
}

impl<'a> DocumentDeal<'a> {
    /// Prepares the deal. `ids` has the segment id of each row in the first batch row: only this
    /// one is used. `None` if there are no two documents, if the deal takes more than `most_steps`,
    /// or if those with half of the pairs have later queries with no more pairs than earlier ones.
    pub(super) fn new(
        pairs: &'a QueryWork,
        shares: Shares,
        ids: &Runs,
        most_steps: u128,
    ) -> Option<Self> {
        let ends = DocumentEnds::of(ids.runs(), shares.rows);
        if ends.len() < 2 || steps(ends.len(), shares.ranks) > most_steps {
            return None;
        }
        let begins: Vec<u64> =
            std::iter::once(0).chain(ends.iter().copied()).take(ends.len()).collect();
        let documents = DocumentRows::new(pairs, &begins, &ends);
        let is_growing = |document: &&Document| {
            let Range { start, end } = document.range;
            let of_row = |row: u64| pairs.between(&(row..row + 1));
            let middle = start + document.rows / 2;
            document.rows > 1 && of_row(end - 1) + 1 >= GROWING * of_row(middle - 1)
        };
        let growing: u128 = documents.all.iter().filter(is_growing).map(|of| of.work).sum();
        (growing >= documents.left / 2).then_some(Self { shares, begins, documents })
    }

    /// Returns the steps of a deal, each of which takes about 1 µs
    /// (`benches/record/documents.md`).
    pub(super) fn steps(&self) -> u128 {
        steps(self.begins.len(), self.shares.ranks)
    }

    /// Deals all rows. `after_whole` is one of [`AFTER_WHOLE`].
    pub(super) fn run(mut self, after_whole: [f64; 2]) -> RankChunks {
        let ranks = self.shares.ranks;
        for rank in 0..ranks {
            let rows = self.shares.begin(rank + 1) - self.shares.begin(rank);
            let needs = Needs { rows, work: self.documents.left / (ranks - rank) as u128 };
            self.serve(rank, needs, after_whole);
        }
        self.documents.dealt
    }

    /// Returns the first row of each document.
    pub(super) fn begins(&self) -> &[u64] {
        &self.begins
    }

    /// Deals the rows of a rank.
    fn serve(&mut self, rank: usize, all: Needs, after_whole: [f64; 2]) {
        let mut needs = all;
        let mut heavy = self.documents.longest().filter(|&longest| !self.fits(longest, needs));
        if heavy.is_none() {
            needs = self.deal_whole(rank, needs, after_whole.map(|of| of * all.mean()));
        }
        while needs.rows > 0 {
            let Some(document) = heavy.take().or_else(|| self.heavy_for(needs.mean())) else {
                break;
            };
            let light = self.light_rows(document, needs, 0);
            // true if the last rows of the document and light rows have more pairs than needed
            let is_enough = |rows: u64, work: u128| {
                let left = needs.rows.checked_sub(rows);
                let of_light = left.and_then(|left| self.work_of_light(&light, left));
                of_light.is_none_or(|of_light| work + of_light > needs.work)
            };
            let Document { rows, work, .. } = self.documents.all[document];
            let most = (rows - self.documents.light_first(document, needs.mean())).min(needs.rows);
            let of_most = self.documents.work_of(document, End::Last, most);
            let (rows, work) = if !is_enough(rows, work) {
                (rows, work)
            } else if most > 0 && !is_enough(most, of_most) {
                (most, of_most)
            } else {
                let cut = self.cut(document, needs, CLOSE * all.work as f64);
                self.deal_cut(rank, document, needs.rows, &cut);
                break;
            };
            self.documents.deal_rows(rank, document, End::Last, rows);
            needs = needs.without(rows, work);
        }
    }

    /// Deals whole documents, while the rows that a rank still needs have at least the first and at
    /// most the second of `mean` pairs, and there are enough others for these. Returns what the
    /// rank still needs.
    fn deal_whole(&mut self, rank: usize, all: Needs, mean: [f64; 2]) -> Needs {
        let mut needs = all;
        let mut taken = Vec::new();
        while let Some(document) = self.longest_that_fits(needs, mean) {
            self.documents.remove(document);
            let Document { rows, work, .. } = self.documents.all[document];
            needs = needs.without(rows, work);
            taken.push((document, rows, work));
        }
        while needs.rows > 0
            && !self.suffice_for(needs)
            && let Some((document, rows, work)) = taken.pop()
        {
            self.documents.insert(document);
            needs = Needs { rows: needs.rows + rows, work: needs.work + work };
        }
        for (document, rows, _) in taken {
            self.documents.deal_rows(rank, document, End::Last, rows);
        }
        needs
    }

    /// Divides the rows that a rank still needs: as many of the last rows of `heavy` as fit, and
    /// light rows. Their pairs differ by at most `close` from those that are needed, if there is a
    /// tile for that.
    fn cut(&self, heavy: usize, needs: Needs, close: f64) -> Cut {
        let with_last = |light: &LightRows, rows: u64| {
            let of_light = self.work_of_light(light, needs.rows - rows)?;
            Some(self.documents.work_of(heavy, End::Last, rows) + of_light)
        };
        // if there are too few light rows, more heavy ones
        let fit =
            |light: &LightRows, rows| with_last(light, rows).is_none_or(|work| work <= needs.work);
        // as many rows of the document for each of its ranks, if it takes all of their pairs: its
        // first rows are needed by all of them, so that a rank with many would send the most
        let Document { rows: all, work, .. } = self.documents.all[heavy];
        let share = (needs.work as f64 / work.max(1) as f64).min(1.0);
        let rows_of_heavy = (all as f64 * share) as u64;
        let few = self.documents.light_first(heavy, needs.mean());
        let (mut first, mut tiles, mut most) = (0, 0, 0);
        let mut light = LightRows::default();
        // fewer last rows fit beside more first ones, so that their numbers are approximated
        for _ in 0..3 {
            light = self.light_rows(heavy, needs, first);
            most = (all - few.max(first)).min(needs.rows);
            tiles = largest(most / TILE_ROWS, |tiles| fit(&light, tiles * TILE_ROWS));
            first = rows_of_heavy.saturating_sub(tiles * TILE_ROWS) / TILE_ROWS * TILE_ROWS;
        }
        let last = tiles * TILE_ROWS;
        let is_close = |work: u128| (needs.work as f64 - work as f64).abs() <= close;
        if with_last(&light, last).is_some_and(is_close) {
            return Cut { last, middle: None, light };
        }
        let middle = self.middle_tile(heavy, last, needs, &light);
        match middle.filter(|(_, missing)| *missing <= close) {
            Some((tile, _)) => Cut { last, middle: Some(tile), light },
            None => {
                let more = (most - last).min(TILE_ROWS);
                let more = largest(more, |more| fit(&light, last + more));
                Cut { last: last + more, middle: None, light }
            }
        }
    }

    /// Deals the `rows` that a rank still needs, as divided.
    fn deal_cut(&mut self, rank: usize, heavy: usize, rows: u64, cut: &Cut) {
        let mut left = rows - cut.last;
        self.documents.deal_rows(rank, heavy, End::Last, cut.last);
        if let Some(tile) = &cut.middle {
            left -= TILE_ROWS;
            self.documents.deal_middle(rank, heavy, tile.clone());
        }
        for part in &cut.light.parts {
            let rows = part.rows.min(left).min(self.documents.all[part.document].rows);
            self.documents.deal_rows(rank, part.document, End::First, rows);
            left -= rows;
        }
        // there are too few light rows
        while left > 0
            && let Some(document) = self.documents.longest()
        {
            let rows = self.documents.all[document].rows.min(left);
            self.documents.deal_rows(rank, document, End::Last, rows);
            left -= rows;
        }
    }

    /// Returns the tile of `heavy` before its last `rows` rows whose pairs are closest to those
    /// that these and light rows lack, and the difference.
    fn middle_tile(
        &self,
        heavy: usize,
        rows: u64,
        needs: Needs,
        light: &LightRows,
    ) -> Option<(Range<u64>, f64)> {
        let left = needs.rows.checked_sub(rows + TILE_ROWS)?;
        let others =
            self.documents.work_of(heavy, End::Last, rows) + self.work_of_light(light, left)?;
        let wanted = needs.work.checked_sub(others)?;
        let mut skipped = rows;
        let mut best: Option<(Range<u64>, f64)> = None;
        for part in self.documents.all[heavy].parts().rev() {
            let last = skipped.min(part.end - part.start);
            skipped -= last;
            let end = part.end - last;
            let tiles = (end - part.start) / TILE_ROWS;
            // the tile before `end` by this number
            let tile = |before: u64| end - (before + 1) * TILE_ROWS..end - before * TILE_ROWS;
            let has_more = |before: u64| self.documents.pairs.between(&tile(before)) >= wanted;
            let count = largest(tiles, |count| count == 0 || has_more(count - 1));
            for before in count.saturating_sub(1)..tiles.min(count + 1) {
                let work = self.documents.pairs.between(&tile(before));
                let difference = (work as f64 - wanted as f64).abs();
                if best.as_ref().is_none_or(|(_, least)| difference < *least) {
                    best = Some((tile(before), difference));
                }
            }
        }
        best
    }

    /// Returns true if a document and light rows have at most the rows and pairs that are needed.
    fn fits(&self, document: usize, needs: Needs) -> bool {
        let Document { rows, work, .. } = self.documents.all[document];
        if rows > needs.rows || work > needs.work {
            return false;
        }
        let mut rest = needs.without(rows, work);
        for light in self.documents.whole.iter().copied().filter(|&light| light != document) {
            if rest.rows == 0 {
                break;
            }
            let Document { rows, work, .. } = self.documents.all[light];
            let (rows, work) = if rows <= rest.rows {
                (rows, work)
            } else {
                (rest.rows, self.documents.work_of(light, End::First, rest.rows))
            };
            if work > rest.work {
                return false;
            }
            rest = rest.without(rows, work);
        }
        rest.rows == 0
    }

    /// Returns the longest document after which the rows that a rank still needs have at least the
    /// first and at most the second of `mean` pairs.
    fn longest_that_fits(&self, needs: Needs, mean: [f64; 2]) -> Option<usize> {
        if needs.rows == 0 {
            return None;
        }
        let is_too_long = |document: usize| {
            let Document { rows, work, .. } = self.documents.all[document];
            let pairs = needs.work as f64 - work as f64;
            rows > needs.rows
                || work as f64 > EXCEEDED * needs.work as f64
                || rows < needs.rows && pairs < mean[0] * (needs.rows - rows) as f64
        };
        let is_too_short = |document: usize| {
            let Document { rows, work, .. } = self.documents.all[document];
            let pairs = needs.work as f64 - work as f64;
            if rows < needs.rows {
                pairs > mean[1] * (needs.rows - rows) as f64
            } else {
                pairs > (EXCEEDED - 1.0) * needs.work as f64
            }
        };
        let fits = |document: &usize| !is_too_long(*document) && !is_too_short(*document);
        let shorter = self.documents.whole.partition_point(|&document| !is_too_long(document));
        let whole = shorter.checked_sub(1).map(|index| self.documents.whole[index]).filter(fits);
        let cut = self.documents.cut.iter().rev().copied().find(fits);
        let last = |document: Option<usize>| document.map(|of| self.documents.all[of].last_pairs);
        if last(cut) > last(whole) { cut } else { whole }
    }

    /// Returns the shortest document whose last rows have `mean` pairs each, else the longest.
    fn heavy_for(&self, mean: f64) -> Option<usize> {
        let last = |document: usize| self.documents.all[document].last_pairs;
        let whole = self.documents.whole.partition_point(|&document| last(document) < mean);
        let cut = self.documents.cut.partition_point(|&document| last(document) < mean);
        match (self.documents.whole.get(whole).copied(), self.documents.cut.get(cut).copied()) {
            (Some(whole), Some(cut)) => Some(if last(cut) <= last(whole) { cut } else { whole }),
            (None, None) => self.documents.longest(),
            (whole, cut) => whole.or(cut),
        }
    }

    /// Returns true if there are as many rows with more and with fewer pairs than the mean of those
    /// that are needed, so that some of both have the mean.
    fn suffice_for(&self, needs: Needs) -> bool {
        let mean = needs.mean();
        let all = || self.documents.cut.iter().chain(&self.documents.whole).copied();
        let light = |document: usize| self.documents.light_first(document, mean);
        let mut rows = 0;
        let has_light = all().any(|document| {
            rows += light(document);
            rows >= needs.rows
        });
        rows = 0;
        has_light
            && all().rev().any(|document| {
                rows += self.documents.all[document].rows - light(document);
                rows >= needs.rows
            })
    }

    /// Returns light rows in the order in which they are dealt beside the last rows of `heavy`, of
    /// which the `first` rows come first: as many as a rank needs, or all.
    fn light_rows(&self, heavy: usize, needs: Needs, first: u64) -> LightRows {
        let mean = needs.mean();
        let mut light = LightRows::default();
        let mut add = |document: usize, skipped: u64, rows: u64| {
            if rows > 0 {
                light.parts.push(LightPart {
                    document,
                    skipped,
                    rows,
                    rows_before: light.rows,
                    work_before: light.work,
                });
                light.rows += rows;
                light.work += self.documents.work_after(document, skipped, rows);
            }
            light.rows < needs.rows
        };
        let is_light = |document: usize| self.documents.all[document].last_pairs <= mean;
        let [cut, whole] = [
            self.documents.cut.partition_point(|&document| is_light(document)),
            self.documents.whole.partition_point(|&document| is_light(document)),
        ];
        if first > 0 && !add(heavy, 0, first) {
            return light;
        }
        let short =
            self.documents.cut[..cut].iter().chain(self.documents.whole.range(..whole)).copied();
        let others =
            self.documents.cut[cut..].iter().chain(self.documents.whole.range(whole..)).copied();
        let all = short.chain(Some(heavy)).chain(others);
        for (index, document) in all.enumerate() {
            let is_repeated = document == heavy && index != cut + whole;
            let skipped = if document == heavy { first } else { 0 };
            let rows = self.documents.light_first(document, mean).saturating_sub(skipped);
            if !is_repeated && !add(document, skipped, rows) {
                break;
            }
        }
        light
    }

    /// Returns the pairs of the first `rows` light rows; `None` if there are not as many.
    fn work_of_light(&self, light: &LightRows, rows: u64) -> Option<u128> {
        if rows >= light.rows {
            return (rows == light.rows).then_some(light.work);
        }
        let after = light.parts.partition_point(|part| part.rows_before <= rows);
        let part = &light.parts[after.checked_sub(1)?];
        let rows = rows - part.rows_before;
        Some(part.work_before + self.documents.work_after(part.document, part.skipped, rows))
    }
}

/// Returns the steps of a deal of documents: one for each, 16 for each rank, and those of removing
/// documents from the middle of a long list, which moves the others.
const fn steps(documents: usize, ranks: usize) -> u128 {
    let documents = documents as u128;
    documents + documents * documents / 20_000 + 16 * ranks as u128
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;
    use crate::{
        Batch, DType, Dims, Layout, RingShards, Spec,
        mask::{Causal, Everything, SharedMask},
    };

    /// Runs `test` on the deal of documents of these lengths.
    fn with_deal(
        lens: &[i64],
        ranks: usize,
        mask: SharedMask,
        test: impl FnOnce(Option<DocumentDeal<'_>>),
    ) {
        let starts = std::iter::once(0).chain(lens.iter().scan(0, |end, len| {
            *end += len;
            Some(*end)
        }));
        let batch = Batch { cum_seqlens_q: Some(starts.collect()), ..Batch::default() };
        let rows = lens.iter().sum::<i64>();
        let spec = Spec { mask, ..Spec::new(Dims::new(1, rows as usize, 1, 1), DType::F32) };
        let whole =
            RingShards::of_batch(&spec.dims, spec.alignment, &Layout::Contiguous, 1, &batch);
        let whole = whole.expect("a valid batch");
        let pairs = QueryWork::new(&spec, &whole).expect("a valid spec");
        let shares = Shares { rows: rows.cast_unsigned(), ranks };
        test(DocumentDeal::new(&pairs, shares, &whole.q[0].segments[0], u128::MAX));
    }

    #[test]
    fn only_growing_documents_are_dealt() {
        let causal = || Arc::new(Causal::default());
        with_deal(&[300, 200], 2, causal(), |deal| assert!(deal.is_some()));
        with_deal(&[500], 2, causal(), |deal| assert!(deal.is_none()));
        with_deal(&[300, 200], 2, Arc::new(Everything), |deal| assert!(deal.is_none()));
    }

    proptest! {
        #[test]
        fn every_row_is_dealt_once(
            lens in prop::collection::vec(1i64..400, 2..12),
            ranks in 1usize..6,
            after_whole in prop::sample::select(&AFTER_WHOLE[..]),
        ) {
            let rows = lens.iter().sum::<i64>() as usize;
            with_deal(&lens, ranks, Arc::new(Causal::default()), |deal| {
                let deal = deal.expect("a causal mask");
                let mut owner = vec![usize::MAX; rows];
                let mut counts = vec![0; ranks];
                for (rank, chunk) in deal.clone().run(after_whole) {
                    let work = deal.documents.pairs.between(&chunk.rows);
                    assert_eq!(chunk.work, work);
                    for row in chunk.rows.clone() {
                        assert_eq!(owner[row as usize], usize::MAX);
                        owner[row as usize] = rank;
                    }
                    counts[rank] += chunk.rows.end - chunk.rows.start;
                }
                let begin = |rank| deal.shares.begin(rank);
                let want: Vec<u64> = (0..ranks).map(|of| begin(of + 1) - begin(of)).collect();
                assert_eq!(counts, want);
            });
        }
    }
}
