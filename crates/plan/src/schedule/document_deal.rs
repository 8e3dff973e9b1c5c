//! Documents dealt to ranks, whole where they fit, so that few rows are sent.
//!
//! ```text
//! for each rank, with an equal share of the rows, and of the pairs that are left:
//!     if the longest document fits:
//!         whole documents, the longest that fits first, while the rows that the rank still needs
//!         have about the mean of the pairs (AFTER_WHOLE)
//!     heavy = the longest document if it does not fit, else the shortest one whose last rows have
//!             as many pairs as the other rows of the rank need
//!     the other rows of the rank:
//!         the last tiles of heavy, as many as fit together with the others
//!         one tile before them, or of another document, that has about the missing pairs; if there
//!         is none, more last rows of heavy
//!         the first rows of heavy, up to an equal share of its rows
//!         light rows: the shortest documents, then more first rows of heavy, then of others
//! ```
//! Documents are sorted by the pairs of their last rows. Rows with the most pairs and rows with the
//! fewest are dealt together, so that the rows that are left keep the mean of all, and the last
//! ranks can be served as the first ones. A document without others gives zigzag shards.
//!
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
//! not count that the other rows of these ranks have pairs too.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
};

use super::{query_work::UnitWork, row_exchange::Chunk, tile_order::TILE_ROWS};

/// Least and most pairs of the rows that a rank still needs after each whole document, relative to
/// the mean. Whole documents are then fewer or more, and the rows that complete them have more or
/// fewer pairs.
const AFTER_WHOLE: [f64; 2] = [0.6, 1.5];

/// Largest difference from the pairs that a rank needs, relative to these, at which no tile with
/// the missing pairs is sought.
const CLOSE: f64 = 0.008;

/// Largest difference with which a whole tile is dealt instead of single rows. Later ranks have the
/// pairs that are missing, and exchanges of rows do the rest: with 4,096 rows a rank there are as
/// many tiles as on contiguous shards, and 1.5 % more with 0.008.
const NEAR: f64 = 0.1;

/// As [`NEAR`], for each tile of a rank: exchanges cannot balance larger differences between ranks
/// of few rows.
const NEAR_OF_TILE: f64 = 0.006;

/// Pieces in which a tile with the missing pairs is sought, beside the one that is cut.
const FEW_PIECES: usize = 4;

/// Documents in a row that do not fit a rank, after which no more whole ones are sought.
const MISSES: usize = 16;

/// Consecutive units of one document that are not dealt.
#[derive(Clone)]
struct Piece {
    units: Range<u64>,
    /// First unit of the document.
    document: u64,
    work: u128,
    /// Pairs of a unit at the end: mean of the last tile.
    last: u128,
}

impl Piece {
    const fn len(&self) -> u64 {
        self.units.end - self.units.start
    }
}

/// Units and pairs that a rank still needs.
#[derive(Clone, Copy)]
struct Needs {
    units: u64,
    work: u128,
}

impl Needs {
    /// Returns the pairs of a unit.
    fn mean(self) -> f64 {
        self.work as f64 / self.units.max(1) as f64
    }

    const fn without(self, piece: &Piece) -> Self {
        Self {
            units: self.units.saturating_sub(piece.len()),
            work: self.work.saturating_sub(piece.work),
        }
    }

    const fn fit(self, piece: &Piece) -> bool {
        piece.len() <= self.units && piece.work <= self.work
    }
}

/// Parts of the units of a rank, in the order in which they are dealt.
#[derive(Default)]
struct LightUnits {
    parts: Vec<LightPart>,
    units: u64,
    work: u128,
}

/// Consecutive units, and the numbers of units and pairs of all parts before.
struct LightPart {
    units: Range<u64>,
    units_before: u64,
    work_before: u128,
}

/// Numbers of the last and of the first units of a piece that a rank has, and of its light units.
#[derive(Clone, Copy)]
struct Cut {
    last: u64,
    first: u64,
    light: u64,
}

/// A deal of documents. Its units are single rows or leaves.
pub(super) struct DocumentDeal<'a> {
    work: &'a UnitWork<'a>,
    /// Units of a tile.
    tile: u64,
    /// By first unit.
    pieces: BTreeMap<u64, Piece>,
    /// Pairs of a last unit, and first unit, of each piece.
    order: BTreeSet<(u128, u64)>,
    /// Pairs of all pieces.
    left: u128,
    ranks: Vec<Vec<Chunk>>,
}

impl<'a> DocumentDeal<'a> {
    /// Deals all units. `ends` are the ends of the documents, and `shares` the numbers of units of
    /// the ranks. Returns the chunks of each rank.
    pub(super) fn run(
        work: &'a UnitWork<'a>,
        ends: &[u64],
        shares: impl ExactSizeIterator<Item = u64>,
    ) -> Vec<Vec<Chunk>> {
        let ranks = shares.len();
        let mut deal = Self {
            tile: (TILE_ROWS / work.unit).max(1),
            work,
            pieces: BTreeMap::new(),
            order: BTreeSet::new(),
            left: 0,
            ranks: vec![Vec::new(); ranks],
        };
        let begins = std::iter::once(0).chain(ends.iter().copied());
        begins.zip(ends).for_each(|(begin, &end)| deal.insert(begin..end, begin));
        for (rank, units) in shares.enumerate() {
            deal.serve(rank, Needs { units, work: deal.left / (ranks - rank) as u128 });
        }
        deal.ranks
    }

    fn insert(&mut self, units: Range<u64>, document: u64) {
        if units.is_empty() {
            return;
        }
        let work = self.work.between(&units);
        let count = self.tile.min(units.end - units.start);
        let last = self.work.between(&(units.end - count..units.end)) / u128::from(count);
        self.left += work;
        self.order.insert((last, units.start));
        self.pieces.insert(units.start, Piece { units, document, work, last });
    }

    /// Deals units of one piece.
    fn deal(&mut self, rank: usize, units: Range<u64>) {
        let containing = self.pieces.range(..=units.start).next_back();
        let Some(start) = containing.map(|(&start, _)| start).filter(|_| !units.is_empty()) else {
            return;
        };
        let Some(piece) = self.pieces.remove(&start) else { return };
        self.order.remove(&(piece.last, start));
        self.left -= piece.work;
        self.insert(start..units.start, piece.document);
        self.insert(units.end..piece.units.end, piece.document);
        let work = self.work.between(&units);
        self.ranks[rank].push(Chunk { rows: units, work });
    }

    /// Returns the pieces, those with the fewest pairs of a last unit first.
    fn by_last(&self) -> impl DoubleEndedIterator<Item = &Piece> {
        self.order.iter().filter_map(|(_, start)| self.pieces.get(start))
    }

    fn longest(&self) -> Option<Piece> {
        self.by_last().next_back().cloned()
    }

    /// Returns the pieces of a document, in ascending order.
    fn pieces_of(&self, document: u64) -> impl Iterator<Item = &Piece> {
        let from = self.pieces.range(document..).map(|(_, piece)| piece);
        from.take_while(move |piece| piece.document == document)
    }

    /// Returns true if no later piece of the same document is left.
    fn is_last(&self, piece: &Piece) -> bool {
        let next = self.pieces.range(piece.units.end..).next();
        next.is_none_or(|(_, next)| next.document != piece.document)
    }

    /// Returns the longest piece before `end` in the order.
    fn longest_before(&self, end: (u128, u64)) -> Option<Piece> {
        let (_, start) = self.order.range(..end).next_back()?;
        self.pieces.get(start).cloned()
    }

    /// Returns the shortest piece whose last units have as many pairs as are needed, else the
    /// longest one.
    fn heavy_for(&self, needs: Needs) -> Option<Piece> {
        let mean = needs.mean().ceil() as u128;
        let heavy = self.order.range((mean, 0)..).next();
        heavy.and_then(|(_, start)| self.pieces.get(start).cloned()).or_else(|| self.longest())
    }

    /// Deals the units of a rank.
    fn serve(&mut self, rank: usize, all: Needs) {
        let mut needs = all;
        let mut heavy = self.longest().filter(|longest| !needs.fit(longest));
        if heavy.is_none() {
            needs = self.deal_whole(rank, needs);
        }
        while needs.units > 0 {
            let Some(piece) = heavy.take().or_else(|| self.heavy_for(needs)) else { break };
            needs = self.deal_cut(rank, &piece, needs, all);
        }
    }

    /// Deals whole pieces, while the units that a rank still needs have about the mean of the
    /// pairs, and other pieces have as many. Returns what the rank still needs.
    fn deal_whole(&mut self, rank: usize, all: Needs) -> Needs {
        let [least, most] = AFTER_WHOLE.map(|bound| bound * all.mean());
        let mut needs = all;
        let mut end = (u128::MAX, 0);
        // pairs of a last unit of the longest piece that was left
        let mut longest_left = None;
        let mut misses = 0;
        while misses < MISSES
            && needs.units > 0
            && let Some(piece) = self.longest_before(end)
        {
            end = (piece.last, piece.units.start);
            let rest = needs.without(&piece);
            let of_others = longest_left.or_else(|| Some(self.longest_before(end)?.last));
            let suits = if rest.units == 0 {
                rest.work as f64 <= CLOSE * all.work as f64
            } else {
                (least..=most).contains(&rest.mean())
                    && of_others.is_some_and(|last| last as f64 >= rest.mean())
            };
            if needs.fit(&piece) && suits && self.is_last(&piece) {
                self.deal(rank, piece.units);
                needs = rest;
                misses = 0;
                continue;
            }
            misses += 1;
            longest_left = longest_left.or(Some(piece.last));
            if !needs.fit(&piece) {
                // under a full mask the pairs of a last unit are proportional to the units, under a
                // causal one too, and those of all units to their square
                let units = needs.units as f64 / piece.len() as f64;
                let work = needs.work as f64 / piece.work.max(1) as f64;
                let fitting = (piece.last as f64 * units.min(work.sqrt())).ceil() as u128;
                end = end.min((fitting.saturating_add(1), 0));
            }
        }
        needs
    }

    /// Deals all of a piece if the rank needs more, else the last units of the piece that fit, and
    /// light ones. `all` is what the rank needed at first. Returns what it still needs.
    fn deal_cut(&mut self, rank: usize, heavy: &Piece, needs: Needs, all: Needs) -> Needs {
        let Range { start, end } = heavy.units;
        let of_document = || self.pieces_of(heavy.document);
        let first = of_document().next().unwrap_or(heavy);
        let few = self.light_first(&first.units, needs.mean());
        let light = self.light_units(heavy, few, needs);
        // as many units of the document for each of its ranks, if it takes all of their pairs: its
        // first units are needed by all of them, so that a rank with many would send the most
        let work: u128 = of_document().map(|piece| piece.work).sum();
        let share = (needs.work as f64 / work.max(1) as f64).min(1.0);
        let share = (of_document().map(Piece::len).sum::<u64>() as f64 * share) as u64;
        let first = first.units.clone();
        let cut = |last: u64, others: u64| {
            let is_cut = if first.start == start { last } else { 0 };
            let left = first.end - first.start - is_cut;
            let light_first = share.saturating_sub(last).min(few).min(left).min(others);
            let light_first = light_first / self.tile * self.tile;
            let missing = (others - light_first).saturating_sub(light.units);
            let first = light_first + missing.min(left - light_first);
            Cut { last, first, light: others - first }
        };
        let work = |cut: Cut| {
            let of_document = [first.start..first.start + cut.first, end - cut.last..end];
            let of_document: u128 = of_document.iter().map(|units| self.work.between(units)).sum();
            of_document + light.work_of(self.work, cut.light)
        };
        let with_last = |last: u64| cut(last, needs.units - last);
        let fits = |last: u64| work(with_last(last)) <= needs.work;
        let most = heavy.len().min(needs.units);
        if most == heavy.len() && fits(most) {
            self.deal(rank, start..end);
            return needs.without(heavy);
        }
        let last = self.tile * largest(most / self.tile, |tiles| fits(tiles * self.tile));
        let mut chosen = with_last(last);
        let mut middle = None;
        if (work(chosen) as f64) < needs.work as f64 - CLOSE * all.work as f64 {
            if let Some(others) = needs.units.checked_sub(last + self.tile) {
                let with_tile = cut(last, others);
                let wanted = needs.work.saturating_sub(work(with_tile));
                let begin = if first.start == start { start + with_tile.first } else { start };
                let left = begin..end - last;
                let tiles = all.units as f64 / self.tile as f64;
                let near = all.work as f64 * NEAR.min(NEAR_OF_TILE * tiles);
                let of_heavy = self.tile_of(&left, wanted, near);
                middle = of_heavy.or_else(|| self.tile_of_others(heavy, needs, wanted, near));
                if middle.is_some() {
                    chosen = with_tile;
                }
            }
            if middle.is_none() {
                let more = largest((most - last).min(self.tile - 1), |more| fits(last + more));
                chosen = with_last(last + more);
            }
        }
        let rest = Needs {
            units: chosen.light.saturating_sub(light.units),
            work: needs.work.saturating_sub(work(chosen)),
        };
        let of_document = [first.start..first.start + chosen.first, end - chosen.last..end];
        for units in of_document.into_iter().chain(middle).chain(light.first(chosen.light)) {
            self.deal(rank, units);
        }
        rest
    }

    /// Returns the tile of `units`, counted from their end, whose pairs differ least from `wanted`,
    /// if they differ by at most `near`.
    fn tile_of(&self, units: &Range<u64>, wanted: u128, near: f64) -> Option<Range<u64>> {
        let tiles = units.end.saturating_sub(units.start) / self.tile;
        let tile = |before: u64| {
            let end = units.end - before * self.tile;
            end - self.tile..end
        };
        let work = |before: u64| self.work.between(&tile(before));
        let count = largest(tiles, |count| count == 0 || work(count - 1) >= wanted);
        let nearest = (count.saturating_sub(1)..tiles.min(count + 1))
            .map(|before| (work(before).abs_diff(wanted), before))
            .min()?;
        (nearest.0 as f64 <= near).then(|| tile(nearest.1))
    }

    /// As [`DocumentDeal::tile_of`], of documents other than that of `heavy`, without the light
    /// first units of pieces.
    fn tile_of_others(
        &self,
        heavy: &Piece,
        needs: Needs,
        wanted: u128,
        near: f64,
    ) -> Option<Range<u64>> {
        // pairs may grow within a tile, so that those of its last unit may be more than its mean
        let least = wanted / u128::from(self.tile);
        let ends = self.order.range((least.max(needs.mean() as u128 + 1), 0)..).take(FEW_PIECES);
        let pieces = ends.filter_map(|(_, start)| self.pieces.get(start));
        let others = pieces.filter(|piece| piece.document != heavy.document);
        others.map(|piece| &piece.units).find_map(|units| {
            let first = self.light_first(units, needs.mean());
            self.tile_of(&(units.start + first..units.end), wanted, near)
        })
    }

    /// Returns the number of the first units that have at most `mean` pairs each.
    fn light_first(&self, units: &Range<u64>, mean: f64) -> u64 {
        let is_light = |unit: u64| self.work.between(&(unit..unit + 1)) as f64 <= mean;
        largest(units.end - units.start, |first| first == 0 || is_light(units.start + first - 1))
    }

    /// Lists units that complete those of `heavy`, of whose document `few` first units are light:
    /// the shortest documents up to the mean of the pairs, then first units of others.
    fn light_units(&self, heavy: &Piece, few: u64, needs: Needs) -> LightUnits {
        let mut light = LightUnits::default();
        let mean = needs.mean() as u128;
        let mut others = self.by_last().filter(|piece| piece.document != heavy.document);
        let mut long: Vec<&Piece> = Vec::new();
        while light.units < needs.units
            && let Some(piece) = others.next()
        {
            if piece.last <= mean && self.is_last(piece) {
                light.push(piece.units.clone(), piece.work);
                continue;
            }
            // the first units of `heavy` are preferred
            if light.units + few >= needs.units {
                break;
            }
            let first = self.light_first(&piece.units, needs.mean());
            let units = piece.units.start..piece.units.start + first;
            light.push(units.clone(), self.work.between(&units));
            long.push(piece);
        }
        let rest = long.iter().map(|piece| {
            let first = self.light_first(&piece.units, needs.mean());
            piece.units.start + first..piece.units.end
        });
        for units in rest {
            light.push(units.clone(), self.work.between(&units));
        }
        light
    }
}

impl LightUnits {
    fn push(&mut self, units: Range<u64>, work: u128) {
        let (units_before, work_before) = (self.units, self.work);
        self.units += units.end - units.start;
        self.work += work;
        self.parts.push(LightPart { units, units_before, work_before });
    }

    /// Returns the parts with the first `count` units.
    fn first(&self, count: u64) -> impl Iterator<Item = Range<u64>> {
        let of_count = self.parts.iter().take_while(move |part| part.units_before < count);
        of_count.map(move |LightPart { units, units_before, .. }| {
            units.start..units.end.min(units.start + count - units_before)
        })
    }

    /// Returns the pairs of the first `count` units.
    fn work_of(&self, work: &UnitWork<'_>, count: u64) -> u128 {
        let parts = self.parts.partition_point(|part| part.units_before < count);
        let last = parts.checked_sub(1).map(|last| &self.parts[last]);
        last.map_or(0, |LightPart { units, units_before, work_before }| {
            let end = units.end.min(units.start + count - units_before);
            work_before + work.between(&(units.start..end))
        })
    }
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
