//! Rows of documents that are left, and those that are dealt, while documents are dealt.

use std::{cmp::Ordering, collections::VecDeque, ops::Range};

use super::{
    chunk_deal::Chunk,
    query_work::QueryWork,
    tile_deal::{RankChunks, TILE_ROWS},
};

/// End of a document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    First,
    Last,
}

/// Rows of a document that are not dealt.
#[derive(Clone)]
pub(super) struct Document {
    /// Range that all of them are in, and begin and end.
    pub(super) range: Range<u64>,
    /// Rows within the range that are dealt, ascending: not its first nor its last ones.
    dealt: Vec<Range<u64>>,
    /// Number of rows.
    pub(super) rows: u64,
    pub(super) work: u128,
    /// Mean of the pairs of the queries of the last tile.
    pub(super) last_pairs: f64,
    /// True if rows of it are dealt.
    is_cut: bool,
}

impl Document {
    /// Returns the ranges of rows that are not dealt, in ascending order.
    pub(super) fn parts(&self) -> impl DoubleEndedIterator<Item = Range<u64>> {
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

/// Documents of which no row, some or all are dealt.
#[derive(Clone)]
pub(super) struct DocumentRows<'a> {
    pub(super) pairs: &'a QueryWork,
    pub(super) all: Vec<Document>,
    /// Documents of which no row is dealt, those with the fewest pairs of a last row first.
    pub(super) whole: VecDeque<usize>,
    /// Documents of which rows are dealt and others are left, in the same order.
    pub(super) cut: Vec<usize>,
    /// Pairs of all rows that are left.
    pub(super) left: u128,
    pub(super) dealt: RankChunks,
}

impl<'a> DocumentRows<'a> {
    /// Creates documents between these first rows and ends, of which no row is dealt.
    pub(super) fn new(pairs: &'a QueryWork, begins: &[u64], ends: &[u64]) -> Self {
        let sums = pairs.before_each(std::iter::once(0).chain(ends.iter().copied()));
        let rows = begins.iter().zip(ends).map(|(&begin, &end)| begin..end);
        let document = |(range, sums): (Range<u64>, &[u128])| Document {
            rows: range.end - range.start,
            work: sums[1] - sums[0],
            last_pairs: last_pairs(pairs, &range),
            is_cut: false,
            dealt: Vec::new(),
            range,
        };
        let all: Vec<Document> = rows.zip(sums.windows(2)).map(document).collect();
        let mut whole: Vec<usize> = (0..all.len()).filter(|&of| all[of].rows > 0).collect();
        whole.sort_by(|&a, &b| all[a].last_pairs.total_cmp(&all[b].last_pairs).then(a.cmp(&b)));
        Self {
            pairs,
            all,
            whole: whole.into(),
            cut: Vec::new(),
            left: sums.last().copied().unwrap_or(0),
            dealt: Vec::new(),
        }
    }

    /// Returns the document with the most pairs of a last row.
    pub(super) fn longest(&self) -> Option<usize> {
        let [whole, cut] = [self.whole.back(), self.cut.last()].map(Option::<&usize>::copied);
        let last = |document: usize| self.all[document].last_pairs;
        match (whole, cut) {
            (Some(whole), Some(cut)) => Some(if last(cut) > last(whole) { cut } else { whole }),
            (whole, cut) => whole.or(cut),
        }
    }

    /// Returns the pairs of rows at one end of a document.
    pub(super) fn work_of(&self, document: usize, end: End, rows: u64) -> u128 {
        let document = &self.all[document];
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

    /// Returns the pairs of the first rows of a document after `skipped` ones.
    pub(super) fn work_after(&self, document: usize, skipped: u64, rows: u64) -> u128 {
        let work = |rows| self.work_of(document, End::First, rows);
        work(skipped + rows) - if skipped > 0 { work(skipped) } else { 0 }
    }

    /// Returns the number of the first rows of a document that have at most `mean` pairs each.
    pub(super) fn light_first(&self, document: usize, mean: f64) -> u64 {
        let document = &self.all[document];
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

    /// Returns the order of two documents in a list.
    fn order(&self, a: usize, b: usize) -> Ordering {
        let last = |document: usize| self.all[document].last_pairs;
        last(a).total_cmp(&last(b)).then(a.cmp(&b))
    }

    /// Removes a document from its list, before rows of it are dealt.
    pub(super) fn remove(&mut self, document: usize) {
        let order = |other: &usize| self.order(*other, document);
        if self.all[document].is_cut {
            if let Ok(index) = self.cut.binary_search_by(order) {
                self.cut.remove(index);
            }
        } else if let Ok(index) = self.whole.binary_search_by(order) {
            self.whole.remove(index);
        }
    }

    /// Inserts a document into its list, if it has rows that are not dealt.
    pub(super) fn insert(&mut self, document: usize) {
        let order = |other: &usize| self.order(*other, document);
        let Document { rows, is_cut, .. } = self.all[document];
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
    pub(super) fn deal_rows(&mut self, rank: usize, document: usize, end: End, rows: u64) {
        if rows == 0 {
            return;
        }
        self.remove(document);
        let mut left = rows.min(self.all[document].rows);
        while left > 0 {
            let dealt = self.all[document].remove_rows(end, left);
            left -= dealt.end - dealt.start;
            self.deal(rank, document, dealt);
        }
        self.insert(document);
    }

    /// Deals rows within one part of a document.
    pub(super) fn deal_middle(&mut self, rank: usize, document: usize, rows: Range<u64>) {
        self.remove(document);
        self.all[document].remove_middle(rows.clone());
        self.deal(rank, document, rows);
        self.insert(document);
    }

    /// Deals rows that are no longer in the parts of a document, which is in no list.
    fn deal(&mut self, rank: usize, document: usize, rows: Range<u64>) {
        let work = self.pairs.between(&rows);
        let from = &mut self.all[document];
        from.rows -= rows.end - rows.start;
        from.work -= work;
        from.is_cut = true;
        let last = from.parts().next_back();
        from.last_pairs = last.map_or(0.0, |last| last_pairs(self.pairs, &last));
        self.left -= work;
        self.dealt.push((rank, Chunk { rows, work }));
    }
}

/// Returns the mean of the pairs of the queries of the last tile.
fn last_pairs(pairs: &QueryWork, rows: &Range<u64>) -> f64 {
    let count = TILE_ROWS.min(rows.end - rows.start);
    pairs.between(&(rows.end - count..rows.end)) as f64 / count.max(1) as f64
}

/// Returns the largest number up to `most` that fits, if 0 fits and all numbers below one that fits
/// do.
pub(super) fn largest(most: u64, fits: impl Fn(u64) -> bool) -> u64 {
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
