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
//! (`benches/record/2026-11-26-document-deal.md` has figures).

use std::{cmp::Ordering, collections::VecDeque, ops::Range};

use super::{
    chunk_deal::Chunk,
    query_work::QueryWork,
    tile_deal::{RankChunks, Shares, TILE_ROWS},
};
use crate::{Run, Runs};

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

/// End of a document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    First,
    Last,
}

/// Rows of a document that are not dealt.
#[derive(Clone)]
struct Document {
    /// Range that all of them are in, and begin and end.
    range: Range<u64>,
    /// Rows within the range that are dealt, ascending: not its first nor its last ones.
    dealt: Vec<Range<u64>>,
    /// Number of rows.
    rows: u64,
    work: u128,
    /// Mean of the pairs of the queries of the last tile.
    last_pairs: f64,
    /// True if rows of it are dealt.
    is_cut: bool,
}

impl Document {
    /// Returns the ranges of rows that are not dealt, in ascending order.
    fn parts(&self) -> impl DoubleEndedIterator<Item = Range<u64>> {
        (0..=self.dealt.len()).map(|index| {
            let begin = index.checked_sub(1).map_or(self.range.start, |last| self.dealt[last].end);
            let end = self.dealt.get(index).map_or(self.range.end, |next| next.start);
            begin..end
        })
    }

    /// Removes up to `count` rows at one end, within one part. Returns them.
    fn remove_rows(&mut self, end: End, count: u64) -> Range<u64> {
        let all = self.range.clone();
        let removed = match end {
            End::First => {
                let most = self.dealt.first().map_or(all.end, |dealt| dealt.start);
                all.start..all.start.saturating_add(count).min(most)
            }
            End::Last => {
                let least = self.dealt.last().map_or(all.start, |dealt| dealt.end);
                all.end.saturating_sub(count).max(least)..all.end
            }
        };
        match end {
            End::First => self.range.start = removed.end,
            End::Last => self.range.end = removed.start,
        }
        self.trim();
        removed
    }

    /// Removes rows within one part.
    fn remove_middle(&mut self, rows: Range<u64>) {
        let index = self.dealt.partition_point(|dealt| dealt.end <= rows.start);
        self.dealt.insert(index, rows);
        self.trim();
    }

    /// Lets the range begin and end with rows that are not dealt.
    fn trim(&mut self) {
        while let Some(last) = self.dealt.pop_if(|last| last.end == self.range.end) {
            self.range.end = last.start;
        }
        while let Some(first) = self.dealt.first().filter(|first| first.start == self.range.start) {
            self.range.start = first.end;
            self.dealt.remove(0);
        }
    }
}

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

/// Ends of documents, from the runs of their ids.
///
/// Consecutive documents of one row, which need no other row, are dealt as one. So the documents
/// depend on the ids alone, and not on the runs into which these are compressed: the ids 0 0 1 2 2
/// are the runs 0 0, 1 2 and 2, or 0 0, 1 and 2 2.
#[derive(Default)]
struct DocumentEnds {
    ends: Vec<u64>,
    /// Id of the rows at the end, and their number.
    last: Option<(i64, u64)>,
    /// True if the last document in `ends` has rows of different ids.
    is_of_single_rows: bool,
}

impl DocumentEnds {
    /// Returns the ends of the documents that divide `rows` rows, ascending.
    fn of(ids: &[Run], rows: u64) -> Vec<u64> {
        let mut all = Self::default();
        for run in ids.iter().filter(|run| run.count > 0) {
            if run.step == 0 || run.count == 1 {
                all.add_rows(run.start, run.count);
            } else {
                // only the first and the last row can have the id of rows of another run
                all.add_rows(run.start, 1);
                all.end_document();
                all.add_document(run.count - 2, true);
                all.add_rows(run.at(run.count - 1), 1);
            }
        }
        all.end_document();
        let end = all.ends.last().copied().unwrap_or(0);
        all.add_document(rows.saturating_sub(end), false);
        all.ends
    }

    fn add_rows(&mut self, id: i64, count: u64) {
        match &mut self.last {
            Some((last, rows)) if *last == id => *rows += count,
            _ => {
                self.end_document();
                self.last = Some((id, count));
            }
        }
    }

    fn end_document(&mut self) {
        if let Some((_, rows)) = self.last.take() {
            self.add_document(rows, rows == 1);
        }
    }

    fn add_document(&mut self, rows: u64, is_of_single_rows: bool) {
        if rows == 0 {
            return;
        }
        let begin = self.ends.last().copied().unwrap_or(0);
        if is_of_single_rows && self.is_of_single_rows {
            self.ends.pop();
        }
        self.ends.push(begin + rows);
        self.is_of_single_rows = is_of_single_rows;
    }
}

/// Documents that are not dealt.
#[derive(Clone)]
pub(super) struct DocumentDeal<'a> {
    pairs: &'a QueryWork,
    shares: Shares,
    /// First row of each document.
    begins: Vec<u64>,
    documents: Vec<Document>,
    /// Documents of which no row is dealt, those with the fewest pairs of a last row first.
    whole: VecDeque<usize>,
    /// Documents of which rows are dealt and others are left, in the same order.
    cut: Vec<usize>,
    /// Pairs of all rows that are left.
    left: u128,
    dealt: RankChunks,
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
        let before = pairs.before_each(std::iter::once(0).chain(ends.iter().copied()));
        let begins: Vec<u64> =
            std::iter::once(0).chain(ends.iter().copied()).take(ends.len()).collect();
        let documents: Vec<Document> = begins
            .iter()
            .copied()
            .zip(&ends)
            .zip(before.windows(2))
            .map(|((begin, &end), sums)| Document {
                range: begin..end,
                dealt: Vec::new(),
                rows: end - begin,
                work: sums[1] - sums[0],
                last_pairs: last_pairs(pairs, &(begin..end)),
                is_cut: false,
            })
            .collect();
        let left = pairs.before(shares.rows);
        let is_growing = |document: &&Document| {
            let Range { start, end } = document.range;
            let of_row = |row: u64| pairs.between(&(row..row + 1));
            let middle = start + document.rows / 2;
            document.rows > 1 && of_row(end - 1) + 1 >= GROWING * of_row(middle - 1)
        };
        let growing: u128 = documents.iter().filter(is_growing).map(|of| of.work).sum();
        if growing < left / 2 {
            return None;
        }
        let mut whole: Vec<usize> =
            (0..documents.len()).filter(|&index| documents[index].rows > 0).collect();
        whole.sort_by(|&a, &b| {
            documents[a].last_pairs.total_cmp(&documents[b].last_pairs).then(a.cmp(&b))
        });
        Some(Self {
            pairs,
            shares,
            left,
            begins,
            documents,
            whole: whole.into(),
            cut: Vec::new(),
            dealt: Vec::new(),
        })
    }

    /// Returns the steps of a deal, each of which takes about 1 µs
    /// (`benches/record/2026-11-26-document-deal.md`).
    pub(super) fn steps(&self) -> u128 {
        steps(self.documents.len(), self.shares.ranks)
    }

    /// Deals all rows. `after_whole` is one of [`AFTER_WHOLE`].
    pub(super) fn run(mut self, after_whole: [f64; 2]) -> RankChunks {
        let ranks = self.shares.ranks;
        for rank in 0..ranks {
            let rows = self.shares.begin(rank + 1) - self.shares.begin(rank);
            let needs = Needs { rows, work: self.left / (ranks - rank) as u128 };
            self.serve(rank, needs, after_whole);
        }
        self.dealt
    }

    /// Returns the first row of each document.
    pub(super) fn begins(&self) -> &[u64] {
        &self.begins
    }

    /// Deals the rows of a rank.
    fn serve(&mut self, rank: usize, all: Needs, after_whole: [f64; 2]) {
        let mut needs = all;
        let mut heavy = self.longest().filter(|&longest| !self.fits(longest, needs));
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
            let Document { rows, work, .. } = self.documents[document];
            let most = (rows - self.light_first(document, needs.mean())).min(needs.rows);
            let of_most = self.work_of(document, End::Last, most);
            let (rows, work) = if !is_enough(rows, work) {
                (rows, work)
            } else if most > 0 && !is_enough(most, of_most) {
                (most, of_most)
            } else {
                let cut = self.cut(document, needs, CLOSE * all.work as f64);
                self.deal_cut(rank, document, needs.rows, &cut);
                break;
            };
            self.deal_rows(rank, document, End::Last, rows);
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
            self.remove(document);
            let Document { rows, work, .. } = self.documents[document];
            needs = needs.without(rows, work);
            taken.push((document, rows, work));
        }
        while needs.rows > 0
            && !self.suffice_for(needs)
            && let Some((document, rows, work)) = taken.pop()
        {
            self.insert(document);
            needs = Needs { rows: needs.rows + rows, work: needs.work + work };
        }
        for (document, rows, _) in taken {
            self.deal_rows(rank, document, End::Last, rows);
        }
        needs
    }

    /// Divides the rows that a rank still needs: as many of the last rows of `heavy` as fit, and
    /// light rows. Their pairs differ by at most `close` from those that are needed, if there is a
    /// tile for that.
    fn cut(&self, heavy: usize, needs: Needs, close: f64) -> Cut {
        let with_last = |light: &LightRows, rows: u64| {
            let of_light = self.work_of_light(light, needs.rows - rows)?;
            Some(self.work_of(heavy, End::Last, rows) + of_light)
        };
        // if there are too few light rows, more heavy ones
        let fit =
            |light: &LightRows, rows| with_last(light, rows).is_none_or(|work| work <= needs.work);
        // as many rows of the document for each of its ranks, if it takes all of their pairs: its
        // first rows are needed by all of them, so that a rank with many would send the most
        let Document { rows: all, work, .. } = self.documents[heavy];
        let share = (needs.work as f64 / work.max(1) as f64).min(1.0);
        let rows_of_heavy = (all as f64 * share) as u64;
        let few = self.light_first(heavy, needs.mean());
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
        self.deal_rows(rank, heavy, End::Last, cut.last);
        if let Some(tile) = &cut.middle {
            left -= TILE_ROWS;
            self.deal_middle(rank, heavy, tile.clone());
        }
        for part in &cut.light.parts {
            let rows = part.rows.min(left).min(self.documents[part.document].rows);
            self.deal_rows(rank, part.document, End::First, rows);
            left -= rows;
        }
        // there are too few light rows
        while left > 0
            && let Some(document) = self.longest()
        {
            let rows = self.documents[document].rows.min(left);
            self.deal_rows(rank, document, End::Last, rows);
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
        let others = self.work_of(heavy, End::Last, rows) + self.work_of_light(light, left)?;
        let wanted = needs.work.checked_sub(others)?;
        let mut skipped = rows;
        let mut best: Option<(Range<u64>, f64)> = None;
        for part in self.documents[heavy].parts().rev() {
            let last = skipped.min(part.end - part.start);
            skipped -= last;
            let end = part.end - last;
            let tiles = (end - part.start) / TILE_ROWS;
            // the tile before `end` by this number
            let tile = |before: u64| end - (before + 1) * TILE_ROWS..end - before * TILE_ROWS;
            let has_more = |before: u64| self.pairs.between(&tile(before)) >= wanted;
            let count = largest(tiles, |count| count == 0 || has_more(count - 1));
            for before in count.saturating_sub(1)..tiles.min(count + 1) {
                let work = self.pairs.between(&tile(before));
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
        let Document { rows, work, .. } = self.documents[document];
        if rows > needs.rows || work > needs.work {
            return false;
        }
        let mut rest = needs.without(rows, work);
        for light in self.whole.iter().copied().filter(|&light| light != document) {
            if rest.rows == 0 {
                break;
            }
            let Document { rows, work, .. } = self.documents[light];
            let (rows, work) = if rows <= rest.rows {
                (rows, work)
            } else {
                (rest.rows, self.work_of(light, End::First, rest.rows))
            };
            if work > rest.work {
                return false;
            }
            rest = rest.without(rows, work);
        }
        rest.rows == 0
    }

    /// Returns the document with the most pairs of a last row.
    fn longest(&self) -> Option<usize> {
        let [whole, cut] = [self.whole.back(), self.cut.last()].map(Option::<&usize>::copied);
        let last = |document: usize| self.documents[document].last_pairs;
        match (whole, cut) {
            (Some(whole), Some(cut)) => Some(if last(cut) > last(whole) { cut } else { whole }),
            (whole, cut) => whole.or(cut),
        }
    }

    /// Returns the longest document after which the rows that a rank still needs have at least the
    /// first and at most the second of `mean` pairs.
    fn longest_that_fits(&self, needs: Needs, mean: [f64; 2]) -> Option<usize> {
        if needs.rows == 0 {
            return None;
        }
        let is_too_long = |document: usize| {
            let Document { rows, work, .. } = self.documents[document];
            let pairs = needs.work as f64 - work as f64;
            rows > needs.rows
                || work as f64 > EXCEEDED * needs.work as f64
                || rows < needs.rows && pairs < mean[0] * (needs.rows - rows) as f64
        };
        let is_too_short = |document: usize| {
            let Document { rows, work, .. } = self.documents[document];
            let pairs = needs.work as f64 - work as f64;
            if rows < needs.rows {
                pairs > mean[1] * (needs.rows - rows) as f64
            } else {
                pairs > (EXCEEDED - 1.0) * needs.work as f64
            }
        };
        let fits = |document: &usize| !is_too_long(*document) && !is_too_short(*document);
        let shorter = self.whole.partition_point(|&document| !is_too_long(document));
        let whole = shorter.checked_sub(1).map(|index| self.whole[index]).filter(fits);
        let cut = self.cut.iter().rev().copied().find(fits);
        let last = |document: Option<usize>| document.map(|of| self.documents[of].last_pairs);
        if last(cut) > last(whole) { cut } else { whole }
    }

    /// Returns the shortest document whose last rows have `mean` pairs each, else the longest.
    fn heavy_for(&self, mean: f64) -> Option<usize> {
        let last = |document: usize| self.documents[document].last_pairs;
        let whole = self.whole.partition_point(|&document| last(document) < mean);
        let cut = self.cut.partition_point(|&document| last(document) < mean);
        match (self.whole.get(whole).copied(), self.cut.get(cut).copied()) {
            (Some(whole), Some(cut)) => Some(if last(cut) <= last(whole) { cut } else { whole }),
            (None, None) => self.longest(),
            (whole, cut) => whole.or(cut),
        }
    }

    /// Returns true if there are as many rows with more and with fewer pairs than the mean of those
    /// that are needed, so that some of both have the mean.
    fn suffice_for(&self, needs: Needs) -> bool {
        let mean = needs.mean();
        let all = || self.cut.iter().chain(&self.whole).copied();
        let light = |document: usize| self.light_first(document, mean);
        let mut rows = 0;
        let has_light = all().any(|document| {
            rows += light(document);
            rows >= needs.rows
        });
        rows = 0;
        has_light
            && all().rev().any(|document| {
                rows += self.documents[document].rows - light(document);
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
                light.work += self.work_after(document, skipped, rows);
            }
            light.rows < needs.rows
        };
        let is_light = |document: usize| self.documents[document].last_pairs <= mean;
        let [cut, whole] = [
            self.cut.partition_point(|&document| is_light(document)),
            self.whole.partition_point(|&document| is_light(document)),
        ];
        if first > 0 && !add(heavy, 0, first) {
            return light;
        }
        let short = self.cut[..cut].iter().chain(self.whole.range(..whole)).copied();
        let others = self.cut[cut..].iter().chain(self.whole.range(whole..)).copied();
        let all = short.chain(Some(heavy)).chain(others);
        for (index, document) in all.enumerate() {
            let is_repeated = document == heavy && index != cut + whole;
            let skipped = if document == heavy { first } else { 0 };
            let rows = self.light_first(document, mean).saturating_sub(skipped);
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
        Some(part.work_before + self.work_after(part.document, part.skipped, rows))
    }

    /// Returns the pairs of the first rows of a document after `skipped` ones.
    fn work_after(&self, document: usize, skipped: u64, rows: u64) -> u128 {
        let work = |rows| self.work_of(document, End::First, rows);
        work(skipped + rows) - if skipped > 0 { work(skipped) } else { 0 }
    }

    /// Returns the number of the first rows of a document that have at most `mean` pairs each.
    fn light_first(&self, document: usize, mean: f64) -> u64 {
        let document = &self.documents[document];
        if document.last_pairs <= mean {
            return document.rows;
        }
        let is_light = |row: u64| self.pairs.between(&(row..row + 1)) as f64 <= mean;
        let mut first = 0;
        for part in document.parts() {
            let rows = part.end - part.start;
            let light = largest(rows, |rows| rows == 0 || is_light(part.start + rows - 1));
            first += light;
            if light < rows {
                break;
            }
        }
        first
    }

    /// Returns the pairs of rows at one end of a document.
    fn work_of(&self, document: usize, end: End, rows: u64) -> u128 {
        let document = &self.documents[document];
        if rows == document.rows {
            return document.work;
        }
        let mut work = 0;
        let mut left = rows;
        let mut parts = document.parts();
        while left > 0
            && let Some(Range { start: from, end: to }) = match end {
                End::First => parts.next(),
                End::Last => parts.next_back(),
            }
        {
            let count = left.min(to - from);
            left -= count;
            work += match end {
                End::First => self.pairs.between(&(from..from + count)),
                End::Last => self.pairs.between(&(to - count..to)),
            };
        }
        work
    }

    /// Returns the order of two documents in a list.
    fn order(&self, a: usize, b: usize) -> Ordering {
        let last = |document: usize| self.documents[document].last_pairs;
        last(a).total_cmp(&last(b)).then(a.cmp(&b))
    }

    /// Removes a document from its list, before rows of it are dealt.
    fn remove(&mut self, document: usize) {
        let order = |other: &usize| self.order(*other, document);
        if self.documents[document].is_cut {
            if let Ok(index) = self.cut.binary_search_by(order) {
                self.cut.remove(index);
            }
        } else if let Ok(index) = self.whole.binary_search_by(order) {
            self.whole.remove(index);
        }
    }

    /// Inserts a document into its list, if it has rows that are not dealt.
    fn insert(&mut self, document: usize) {
        let order = |other: &usize| self.order(*other, document);
        let Document { rows, is_cut, .. } = self.documents[document];
        if rows == 0 {
            return;
        }
        if is_cut {
            let index = self.cut.binary_search_by(order).unwrap_or_else(|index| index);
            self.cut.insert(index, document);
        } else {
            let index = self.whole.binary_search_by(order).unwrap_or_else(|index| index);
            self.whole.insert(index, document);
        }
    }

    /// Deals rows at one end of a document.
    fn deal_rows(&mut self, rank: usize, document: usize, end: End, rows: u64) {
        if rows == 0 {
            return;
        }
        self.remove(document);
        let mut left = rows.min(self.documents[document].rows);
        while left > 0 {
            let dealt = self.documents[document].remove_rows(end, left);
            left -= dealt.end - dealt.start;
            self.deal(rank, document, dealt);
        }
        self.insert(document);
    }

    /// Deals rows within one part of a document.
    fn deal_middle(&mut self, rank: usize, document: usize, rows: Range<u64>) {
        self.remove(document);
        self.documents[document].remove_middle(rows.clone());
        self.deal(rank, document, rows);
        self.insert(document);
    }

    /// Deals rows that are no longer in the parts of a document, which is in no list.
    fn deal(&mut self, rank: usize, document: usize, rows: Range<u64>) {
        let work = self.pairs.between(&rows);
        let from = &mut self.documents[document];
        from.rows -= rows.end - rows.start;
        from.work -= work;
        from.is_cut = true;
        let last = from.parts().next_back();
        from.last_pairs = last.map_or(0.0, |last| last_pairs(self.pairs, &last));
        self.left -= work;
        self.dealt.push((rank, Chunk { rows, work }));
    }
}

/// Returns the steps of a deal of documents: one for each, 16 for each rank, and those of removing
/// documents from the middle of a long list, which moves the others.
const fn steps(documents: usize, ranks: usize) -> u128 {
    let documents = documents as u128;
    documents + documents * documents / 20_000 + 16 * ranks as u128
}

/// Returns the mean of the pairs of the queries of the last tile.
fn last_pairs(pairs: &QueryWork, rows: &Range<u64>) -> f64 {
    let count = TILE_ROWS.min(rows.end - rows.start);
    pairs.between(&(rows.end - count..rows.end)) as f64 / count.max(1) as f64
}

/// Returns the largest number up to `most` that fits, if 0 fits and all numbers below one that fits
/// do.
fn largest(most: u64, fits: impl Fn(u64) -> bool) -> u64 {
    let (mut last, mut first_not) = (0, most + 1);
    while last + 1 < first_not {
        let middle = last + (first_not - last) / 2;
        if fits(middle) {
            last = middle;
        } else {
            first_not = middle;
        }
    }
    last
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

    #[test]
    fn documents_of_one_row_are_one_however_ids_are_compressed() {
        let run = |start, step, count| Run { start, step, count };
        let of = DocumentEnds::of;
        let want = [2, 4, 7];
        for runs in [
            &[run(0, 0, 2), run(1, 0, 1), run(2, 0, 1), run(3, 0, 3)][..],
            &[run(0, 0, 2), run(1, 1, 3), run(3, 0, 2)],
            &[run(0, 0, 1), run(0, 1, 4), run(3, 0, 2)],
            &[run(0, 0, 2), run(9, -2, 2), run(3, 0, 3)],
        ] {
            assert_eq!(of(runs, 7), want, "{runs:?}");
            assert_eq!(of(runs, 9), [2, 4, 7, 9], "rows without ids");
        }
        assert_eq!(of(&[run(5, 1, 6)], 6), [6]);
        assert_eq!(of(&[run(5, 1, 2), run(6, 0, 1), run(6, 1, 2)], 5), [1, 4, 5]);
        assert_eq!(of(&[], 3), [3]);
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
                    let work = deal.pairs.between(&chunk.rows);
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
