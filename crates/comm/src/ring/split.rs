//! The home block's backward in two parts, so that the last transfer of gradients has something to hide under.
//!
//! ```text
//! step 0            tiles of the early rows of the home block    ← hide the first block's arrival
//! steps 1 …         tiles of the blocks that come by             ← hide the blocks, and the gradients of the step before
//! after the last    tiles of the late rows of the home block     ← hide the last gradients' way home
//! ```
//! Without the second part the last gradients would travel while all ranks do nothing but wait. How rows are divided is a matter of this rank alone,
//! decided when a plan is made: nothing that travels depends on it.

use std::ops::Range;

use annulus_core::{Backend, Error, Group, Message, Result, RowSet, Rows, Schedule, Space, Spec, mask::Query};

use super::{
    legs::Places,
    parts::{SHORT_TILE, TILE},
    shared::Shared,
};

/// How many queries and how many keys stand for all when work is estimated.
const SAMPLES: usize = 64;

/// How many rows of the home block are attended in step 0; the others come after the last step. All of them if there is nothing to hide after it.
///
/// Both parts get the share of work that the transfers which they hide have of the bytes.
pub(super) fn early_rows(spec: &Spec, schedule: &Schedule, place: usize, queries: &Rows, keys: &Rows) -> u64 {
    let all = keys.len() as u64;
    let steps = &schedule.steps[place];
    let Some(last) = last_step(schedule, place) else { return all };
    let rows = |messages: &[Message]| messages.iter().map(|message| message.rows.count()).sum::<u64>();
    let hides = |group: &Group, record: u64| rows(&group.sends).max(rows(&group.receives)) * record;
    let first = hides(&steps[0].before, spec.kv_record().bytes());
    let after = hides(&steps[last].after, spec.gradient_record().bytes());
    let tile = if all >= 2 * TILE { TILE } else { SHORT_TILE };
    if after == 0 || all < 2 * tile {
        return all;
    }
    let share = first as f64 / (first + after) as f64;
    let rows = share_of_work(spec, queries, keys, share) * all as f64;
    // at least a tile each
    ((rows / tile as f64).round() as u64 * tile).clamp(tile, (all - 1) / tile * tile)
}

/// The last step in which this rank does anything at all.
pub(super) fn last_step(schedule: &Schedule, place: usize) -> Option<usize> {
    let idle = |group: &Group| group.sends.is_empty() && group.receives.is_empty();
    schedule.steps[place].iter().rposition(|step| !(step.rows.is_empty() && idle(&step.before) && idle(&step.after)))
}

/// The share of the keys that is the first `share` of the work, as a few queries see a few keys.
fn share_of_work(spec: &Spec, queries: &Rows, keys: &Rows, share: f64) -> f64 {
    let spread = |count: usize| (0..count.min(SAMPLES)).map(move |sample| (2 * sample + 1) * count / (2 * count.min(SAMPLES)));
    let mut seen = vec![0u32; keys.len().min(SAMPLES)];
    let positions = keys.positions(0);
    for query in spread(queries.len()) {
        let (row, position) = (queries.rows()[query], queries.positions(0)[query]);
        let segment = queries.segments(0).map(|segments| segments[query]);
        let spans = spec.mask.bound(&Query { batch: 0, head: 0, row, position });
        for (seen, key) in seen.iter_mut().zip(spread(keys.len())) {
            *seen += u32::from(spans.contains(positions[key]) && segment == keys.segments(0).map(|segments| segments[key]));
        }
    }
    let all: u32 = seen.iter().sum();
    let mut left = share * f64::from(all);
    for (place, &pairs) in seen.iter().enumerate() {
        if f64::from(pairs) > left {
            return (place as f64 + left / f64::from(pairs)) / seen.len() as f64;
        }
        left -= f64::from(pairs);
    }
    // nothing is visible
    share
}

/// Where a message's records are added to the home gradient, and where they are the first of their rows.
#[derive(Debug, Default)]
pub(crate) struct Homecoming {
    /// Rows of which the home gradient knows nothing yet: written.
    pub(crate) written: Places,
    /// All other rows.
    pub(crate) added: Places,
}

impl Homecoming {
    /// Divides `places` by whether their rows are `unwritten`, which they are no longer.
    pub(super) fn divide(places: Places, unwritten: &mut RowSet) -> Self {
        let mut home = Self::default();
        for (into, from) in places {
            let mut next = into.start;
            let from_of = |rows: &Range<u64>| from.start + (rows.start - into.start)..from.start + (rows.end - into.start);
            let begin = unwritten.ranges().partition_point(|range| range.end <= into.start);
            for range in unwritten.ranges()[begin..].iter().take_while(|range| range.start < into.end) {
                let written = range.start.max(into.start)..range.end.min(into.end);
                home.added.extend((next < written.start).then(|| (next..written.start, from_of(&(next..written.start)))));
                next = written.end;
                home.written.push((written.clone(), from_of(&written)));
            }
            home.added.extend((next < into.end).then(|| (next..into.end, from_of(&(next..into.end)))));
        }
        *unwritten = unwritten.difference(&home.written.iter().map(|(into, _)| into.clone()).collect());
        home
    }

    /// Takes the records of a buffer into the home gradient.
    pub(super) fn take_in<B: Backend>(
        &self,
        backend: &B,
        workspace: &mut B::Workspace,
        home: &mut <B::Space as Space>::Buffer,
        (from, ready): (&<B::Space as Space>::Buffer, &<B::Space as Space>::Event),
    ) -> Result<()> {
        for (places, add) in [(&self.written, false), (&self.added, true)] {
            if !places.is_empty() {
                backend.combine(workspace, home, from, ready, places, add)?;
            }
        }
        Ok(())
    }
}

impl Shared {
    /// Rows of the home block that are attended after the last step of a backward pass.
    pub(super) fn late_rows(&self) -> u64 {
        self.keys.len() as u64 - self.way.early
    }

    /// The same, as local rows.
    pub(super) fn late_set(&self) -> RowSet {
        std::iter::once(self.way.early..self.keys.len() as u64).collect()
    }

    /// Their records, of a buffer with all of the home block's.
    pub(super) fn late_part<S: Space>(&self, spec: &Spec, home: &S::Buffer) -> Result<S::Buffer> {
        let at = |row: u64| row * spec.kv_record().bytes();
        let part = S::part(home, at(self.way.early)..at(self.keys.len() as u64));
        part.ok_or_else(|| Error::Device { what: "a block that cannot be divided where the plan divides it".into() })
    }
}

#[cfg(test)]
mod tests {
    use annulus_core::{Alignment, Coordinates, DType, Dims, Host, Layout, Order, Route, mask::Causal};

    use super::*;

    fn set(ranges: &[Range<u64>]) -> RowSet {
        ranges.iter().cloned().collect()
    }

    #[test]
    fn the_first_records_of_a_row_are_written_and_all_others_added() {
        let mut unwritten = set(&[4..8, 10..20]);
        // rows 2..6 and 7..12 came, as records 0..4 and 4..9
        let home = Homecoming::divide(vec![(2..6, 0..4), (7..12, 4..9)], &mut unwritten);
        assert_eq!(home.written, [(4..6, 2..4), (7..8, 4..5), (10..12, 7..9)]);
        assert_eq!(home.added, [(2..4, 0..2), (8..10, 5..7)]);
        assert_eq!(unwritten, set(&[6..7, 12..20]));
        let again = Homecoming::divide(vec![(4..7, 0..3)], &mut unwritten);
        assert_eq!((again.written, again.added), (vec![(6..7, 2..3)], vec![(4..6, 0..2)]));
        let rest = Homecoming::divide(vec![(12..20, 0..8)], &mut unwritten);
        assert!(rest.added.is_empty() && rest.written == [(12..20, 0..8)] && unwritten.is_empty());
    }

    #[test]
    fn both_parts_have_the_work_of_what_they_hide() {
        let early = |causal: bool, layout: &Layout, route, rank, n: usize| {
            let spec = Spec::new(Dims::new(1, n, 2, 16), DType::F32);
            let spec = if causal { Spec { mask: std::sync::Arc::new(Causal::default()), ..spec } } else { spec };
            let coordinates = Coordinates::plain(&spec.dims, Alignment::TopLeft, layout, 2);
            let shared = Shared::derive::<Host>(&spec, route, &Order::ascending(2), rank, coordinates, true);
            (shared.way.early, shared.keys.len() as u64)
        };
        // as many bytes of gradients as of keys and values; every key is seen by all
        assert_eq!(early(false, &Layout::Contiguous, Route::RelayUp, 0, 1024), (256, 512));
        // the first of the two chunks is seen by 3 times as many queries as the second: 0.5 = (3 of 4)·(x of the chunk, all of its queries seen …)
        let (rows, all) = early(true, &Layout::Zigzag, Route::RelayDown, 0, 4096);
        assert!((576..=768).contains(&rows) && all == 2048, "{rows} of {all}");
        // rank 0 needs no block of rank 1's, and sends one; gradients of its own come home
        let (rows, all) = early(true, &Layout::Contiguous, Route::RelayUp, 0, 1024);
        assert!(0 < rows && rows < all, "{rows} of {all}");
        // too short to be divided
        assert_eq!(early(false, &Layout::Contiguous, Route::RelayUp, 0, 30), (15, 15));
    }
}
