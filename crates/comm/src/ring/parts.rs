//! The last block that reaches a rank, unless it goes on from there, comes in parts, so that its tiles hide its own arrival.
//!
//! Every other block arrives under the tiles of the block before it. The last one would, where the network is slower than those tiles, be waited
//! for with nothing left to compute but itself: on two ranks that is half of the pass.
//!
//! ```text
//! network   ├──── 1/2 ────┼─ 1/4 ─┼ 1/8 ┼ 1/8 ┤
//! tiles     ├─ the block before ─┤├──── 1/2 ────┼─ 1/4 ─┼ 1/8 ┼ 1/8 ┤
//! ```
//! Each part is a message of its own. Sender and receiver divide it alike, by the schedule. The parts halve, so that little is left to do when the last has
//! come, and so that all but the first take no more memory than half a block.

use std::{ops::Range, sync::Arc};

use annulus_core::{Block, Result, Route, Rows, Schedule, Shard, Space, Tick};

use super::{blocks::Blocks, flight::Flight, legs::Leg};

/// Parts of a block at most.
pub(super) const MOST: usize = 4;
/// Tags that a journey around so many ranks may use: one a step, and those of parts.
pub(crate) const fn tags(ranks: usize) -> u64 {
    (ranks + MOST) as u64
}

/// Rows at which a block may be divided: whole tiles of every backend's.
pub(super) const TILE: u64 = 64;
/// The same of blocks too short for that; their records still begin at multiples of 8 bytes.
pub(super) const SHORT_TILE: u64 = 8;

/// The step in which the last block that comes to this rank is attended, if it is not passed on then.
pub(super) fn last_block(schedule: &Schedule, place: usize) -> Option<usize> {
    let steps = &schedule.steps[place];
    let last = steps.iter().rposition(|step| !step.rows.is_empty()).filter(|&step| step > 0);
    last.filter(|&step| schedule.route == Route::Direct || steps[step].before.sends.is_empty())
}

/// Places in a block of so many rows at which its parts begin and end; one part if it is too short for more.
pub(super) fn parts(rows: u64) -> Vec<Range<u64>> {
    let tile = if rows >= 2 * TILE { TILE } else { SHORT_TILE };
    let mut start = 0;
    let mut parts = Vec::with_capacity(MOST);
    for eighths in [4, 6, 7] {
        let end = rows * eighths / 8 / tile * tile;
        if start < end {
            parts.push(start..end);
            start = end;
        }
    }
    parts.push(start..rows);
    parts
}

/// What the places `part` of all that `ranges` hold, one after another, are.
pub(super) fn cut(ranges: &[Range<u64>], part: &Range<u64>) -> Vec<Range<u64>> {
    let mut before = 0;
    let mut kept = Vec::new();
    for range in ranges {
        let count = range.end - range.start;
        let (from, to) = (part.start.clamp(before, before + count), part.end.clamp(before, before + count));
        kept.extend((from < to).then(|| range.start + (from - before)..range.start + (to - before)));
        before += count;
    }
    kept
}

/// Brings one block after another to this rank and lets `attend` have it, with its step. `shards` are those whose rows travel.
pub(super) fn visit<S: Space>(
    legs: &[Leg],
    shards: &[Arc<Shard>],
    mut blocks: Blocks<'_, S>,
    flight: &mut Flight<'_, S>,
    rows: &mut Rows,
    mut attend: impl FnMut(usize, &Block<'_, S>, Tick<'_>) -> Result<()>,
) -> Result<()> {
    for (step, leg) in legs.iter().enumerate() {
        blocks.post_next(&leg.before_in_parts, flight)?;
        if let Some((buffer, ready)) = blocks.here() {
            shards[leg.owner].expand(&leg.rows, rows);
            attend(step, &Block { buffer, ready, rows }, &mut || flight.tick())?;
        }
        for part in &leg.parts {
            let arrived = flight.land_next()?;
            shards[leg.owner].expand(part, rows);
            let block = Block { buffer: &arrived.buffer, ready: &arrived.ready, rows };
            attend(step, &block, &mut || flight.tick())?;
            blocks.give(arrived.buffer);
        }
        if legs.get(step + 1).is_some_and(|next| !next.parts.is_empty()) {
            // nothing is received any more after those parts, so what is still being sent is not written to
            flight.check()?;
        } else {
            for (_, arrived) in flight.land()? {
                blocks.arrive(arrived);
            }
        }
        blocks.advance();
    }
    blocks.put_back();
    Ok(())
}

#[cfg(test)]
mod tests {
    use annulus_core::{
        Alignment, Coordinates, Dims, Layout, Needs, Order,
        mask::{Causal, Everything, Mask},
    };

    use super::*;
    use crate::ring::legs;

    #[test]
    fn senders_and_receivers_divide_alike() {
        let mut divided = 0;
        for (ranks, route, causal) in (2..=9).flat_map(|ranks| {
            let routes = [Route::RelayUp, Route::RelayDown, Route::Direct];
            routes.into_iter().flat_map(move |route| [(ranks, route, false), (ranks, route, true)])
        }) {
            let mask: &dyn Mask = if causal { &Causal::default() } else { &Everything };
            for layout in [Layout::Contiguous, Layout::Zigzag] {
                let coordinates = Coordinates::plain(&Dims::new(1, 301, 2, 16), Alignment::TopLeft, &layout, ranks);
                let schedule = Schedule::build(&Needs::of_queries(mask, 2, 1, &coordinates), route, false);
                let (mut sent, mut received) = (Vec::new(), Vec::new());
                for place in 0..ranks {
                    let way = legs::way(&schedule, &Order::ascending(ranks), place, 0, 8, 8);
                    for (step, leg) in way.legs.iter().enumerate() {
                        let hops = |from: &[annulus_core::Hop]| from.iter().map(|hop| (hop.peer, hop.tag, hop.bytes())).collect::<Vec<_>>();
                        let of = |to: usize| move |(from, tag, bytes): (usize, u64, u64)| (step, from, to, tag, bytes);
                        received.extend(hops(&leg.before_in_parts.receives).into_iter().map(of(place)));
                        sent.extend(hops(&leg.before_in_parts.sends).into_iter().map(|(to, tag, bytes)| (step, place, to, tag, bytes)));
                        assert_eq!(leg.before.bytes_sent(), leg.before_in_parts.bytes_sent());
                        assert!(
                            leg.parts.is_empty()
                                || leg.parts.iter().fold(annulus_core::RowSet::new(), |all, part| all.union(part)) == leg.rows
                        );
                        divided += usize::from(!leg.parts.is_empty());
                    }
                }
                sent.sort_unstable();
                received.sort_unstable();
                assert_eq!(sent, received, "{ranks} ranks, {route:?}, causal: {causal}, {layout:?}");
            }
        }
        assert!(divided > 100, "{divided}");
    }

    #[test]
    fn parts_halve_and_cover_all_rows() {
        assert_eq!(parts(1024), [0..512, 512..768, 768..896, 896..1024]);
        assert_eq!(parts(200), [0..64, 64..128, 128..200]);
        assert_eq!(parts(128), [0..64, 64..128]);
        assert_eq!(parts(50), [0..24, 24..32, 32..40, 40..50]);
        assert_eq!(parts(16), [0..8, 8..16]);
        assert_eq!(parts(15), [0..8, 8..15]);
        assert_eq!(parts(9), std::slice::from_ref(&(0..9)));
        for rows in 1..1000 {
            let parts = parts(rows);
            assert!(parts.len() <= MOST && parts.iter().all(|part| !part.is_empty()), "{rows}");
            assert!(
                parts[0].start == 0 && parts[parts.len() - 1].end == rows && parts.windows(2).all(|two| two[0].end == two[1].start),
                "{rows}"
            );
            // what the plan's memory for all but the first is
            assert!(rows < 16 || parts[0].end * 4 >= rows, "{rows}");
        }
    }

    #[test]
    fn a_part_is_cut_across_ranges() {
        let ranges = [10..14, 20..21, 30..40];
        assert_eq!(cut(&ranges, &(0..15)), ranges);
        assert_eq!(cut(&ranges, &(2..6)), [12..14, 20..21, 30..31]);
        assert_eq!(cut(&ranges, &(3..5)), [13..14, 20..21]);
        assert_eq!(cut(&ranges, &(5..5)), []);
    }
}
