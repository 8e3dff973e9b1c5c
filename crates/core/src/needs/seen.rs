//! What one rank's queries see, as a union: disjoint ascending intervals of positions for every class.

use std::ops::Range;

use super::{Piece, below};
use crate::{Run, Spans};

/// Filled query by query, then closed, then asked about pieces of keys.
#[derive(Default)]
pub(super) struct Seen {
    /// the newest interval of each place in the spans: neighbours' spans overlap place by place, so that most rows only stretch it
    open: [Range<i64>; Spans::MOST],
    class: usize,
    /// once closed: sorted by class and start, disjoint and not touching within a class
    intervals: Vec<(usize, Range<i64>)>,
    /// once closed: the intervals of class c are `first[c]..first[c + 1]`
    first: Vec<usize>,
}

impl Seen {
    pub(super) fn clear(&mut self) {
        self.open = Default::default();
        self.intervals.clear();
    }

    /// Adds what one query sees of its class.
    pub(super) fn add(&mut self, class: usize, spans: &Spans) {
        if class != self.class {
            self.flush();
            self.class = class;
        }
        for (place, range) in spans.ranges().iter().enumerate() {
            let open = &mut self.open[place];
            if range.start <= open.end && open.start <= range.end && !open.is_empty() {
                *open = open.start.min(range.start)..open.end.max(range.end);
            } else {
                let full = std::mem::replace(open, range.clone());
                self.keep(full);
            }
        }
    }

    /// Ends the filling; there are `classes` classes.
    pub(super) fn close(&mut self, classes: usize) {
        self.flush();
        self.intervals.sort_unstable_by_key(|(class, range)| (*class, range.start));
        self.intervals.dedup_by(|next, kept| {
            let joined = next.0 == kept.0 && next.1.start <= kept.1.end;
            if joined {
                kept.1.end = kept.1.end.max(next.1.end);
            }
            joined
        });
        self.first.clear();
        self.first.resize(classes + 1, 0);
        self.intervals.iter().for_each(|(class, _)| self.first[class + 1] += 1);
        (0..classes).for_each(|class| self.first[class + 1] += self.first[class]);
    }

    /// Passes the seen local rows of `piece` to `found`, as ranges.
    pub(super) fn select(&self, piece: &Piece, mut found: impl FnMut(Range<u64>)) {
        let (run, count) = (ascending(&piece.positions), piece.count);
        let (least, most) = (run.start, run.at(count - 1));
        let intervals = &self.intervals[self.first[piece.class]..self.first[piece.class + 1]];
        let reaching = &intervals[intervals.partition_point(|(_, range)| range.end <= least)..];
        let reaching = &reaching[..reaching.partition_point(|(_, range)| range.start <= most)];
        let mut select = |range: Range<u64>| {
            if piece.positions.step < 0 {
                found(piece.first + count - range.end..piece.first + count - range.start);
            } else {
                found(piece.first + range.start..piece.first + range.end);
            }
        };
        if reaching.len() as u64 <= count {
            for (_, range) in reaching {
                let indices = below(&run, range.start)..below(&run, range.end);
                if !indices.is_empty() {
                    select(indices);
                }
            }
        } else {
            // few keys far apart between many intervals: ask key by key
            for index in 0..count {
                let position = run.at(index);
                let after = reaching.partition_point(|(_, range)| range.end <= position);
                if reaching.get(after).is_some_and(|(_, range)| range.start <= position) {
                    select(index..index + 1);
                }
            }
        }
    }

    fn flush(&mut self) {
        for open in std::mem::take(&mut self.open) {
            self.keep(open);
        }
    }

    fn keep(&mut self, range: Range<i64>) {
        if !range.is_empty() {
            self.intervals.push((self.class, range));
        }
    }
}

/// The same numbers from least to most.
pub(super) const fn ascending(run: &Run) -> Run {
    if run.step < 0 { Run { start: run.at(run.count - 1), step: run.step.wrapping_neg(), count: run.count } } else { *run }
}
