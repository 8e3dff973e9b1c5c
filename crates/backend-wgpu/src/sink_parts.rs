//! Parts of the kernels of sinks, whose work is rows × sinks: each has a range of the workgroups
//! and of the steps that an invocation takes, so that its work and its loops are bounded.

use std::ops::Range;

/// Upper bound of the steps of an invocation in a part, each a sink or a row of one head: 16 ms at
/// 1 µs, because a single workgroup waits for its loads. Also far below the 65,535 iterations after
/// which software adapters leave loops. A constant, because it determines the order of the sums of
/// dsinks and of dbias over rows.
pub(crate) const MAX_STEPS: usize = 1 << 14;

/// FLOPs of a step of the 64 invocations of a workgroup: an exponential and a few products each.
pub(crate) const STEP_FLOPS: u64 = 64 * 32;

/// A part: a range of the workgroups does a range of their steps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SinkPart {
    pub(crate) groups: Range<usize>,
    pub(crate) steps: Range<usize>,
    /// FLOPs.
    pub(crate) work: u64,
    /// True if no part follows.
    pub(crate) is_last: bool,
}

/// Workgroups and their steps, and how far they are divided into parts.
#[derive(Debug)]
pub(crate) struct SinkParts {
    groups: usize,
    steps: usize,
    /// Upper bound of the steps of a part; at least 1.
    most_steps: usize,
    /// FLOPs of a step of a workgroup.
    flops: u64,
    /// First workgroup and first step of the next part.
    next: (usize, usize),
}

impl SinkParts {
    /// Divides `steps` steps of each of `groups` workgroups; none take one part as well.
    pub(crate) fn new(groups: usize, steps: usize, most_steps: usize, flops: u64) -> Self {
        Self { groups, steps, most_steps: most_steps.max(1), flops, next: (0, 0) }
    }

    /// Returns the next part: as many workgroups as `budget` FLOPs allow, but at least one. All
    /// workgroups have done their earlier steps in earlier parts.
    pub(crate) fn next(&mut self, budget: u64) -> Option<SinkPart> {
        let (group, step) = self.next;
        let is_done = group >= self.groups || (step >= self.steps && step > 0);
        if is_done {
            return None;
        }
        let step_end = self.steps.min(step + self.most_steps);
        // a workgroup without a step reads and writes its rows
        let each = self.flops * ((step_end - step) as u64).max(1);
        let count = usize::try_from(budget / each).unwrap_or(usize::MAX).max(1);
        let group_end = self.groups.min(group.saturating_add(count));
        self.next = match group_end == self.groups {
            true if step_end == self.steps => (self.groups, step_end),
            true => (0, step_end),
            false => (group_end, step),
        };
        Some(SinkPart {
            groups: group..group_end,
            steps: step..step_end,
            work: each * (group_end - group) as u64,
            is_last: self.next.0 == self.groups,
        })
    }
}

/// Returns the rows of a part of a kernel whose invocations, 64 a workgroup, each take `heads`
/// steps a row: as many as `most_steps` allow, but at least one row an invocation.
pub(crate) fn rows_of_part(heads: usize, most_steps: usize) -> usize {
    64 * (most_steps / heads.max(1)).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All parts of a budget.
    fn parts(mut parts: SinkParts, budget: u64) -> Vec<SinkPart> {
        std::iter::from_fn(|| parts.next(budget)).collect()
    }

    #[test]
    fn parts_of_many_sinks_are_bounded_and_cover_all_steps() {
        // 65,536 sinks: two steps each in the forward epilogue, one workgroup each for dsinks
        for (groups, steps) in [(4096, 2 * 65_536), (65_536, 16_384), (3, 5), (1, 100_000)] {
            for budget in [1, 1 << 24, 1 << 30, u64::MAX] {
                let all = parts(SinkParts::new(groups, steps, MAX_STEPS, STEP_FLOPS), budget);
                let mut done = vec![0; groups];
                for part in &all {
                    assert!(part.work <= budget || part.groups.len() == 1, "{part:?}");
                    // 16 ms at 1 µs a step, a quarter of a software adapter's 65,535 iterations
                    assert!((1..=16_384).contains(&part.steps.len()), "{part:?}");
                    assert_eq!(part.work, 2048 * (part.groups.len() * part.steps.len()) as u64);
                    for group in part.groups.clone() {
                        assert_eq!(done[group], part.steps.start, "{part:?}: in order");
                        done[group] = part.steps.end;
                    }
                }
                assert!(done.iter().all(|&end| end == steps), "{groups} {steps} {budget}");
                let last = all.iter().filter(|part| part.is_last).count();
                assert!(last == 1 && all[all.len() - 1].is_last);
            }
        }
    }

    #[test]
    fn rows_without_sinks_are_finished_and_no_rows_are_not() {
        let all = parts(SinkParts::new(10, 0, MAX_STEPS, STEP_FLOPS), 4 * STEP_FLOPS);
        let groups: Vec<_> = all.iter().map(|part| part.groups.clone()).collect();
        assert_eq!(groups, [0..4, 4..8, 8..10]);
        assert!(all.iter().all(|part| part.steps == (0..0)));
        assert!(parts(SinkParts::new(0, 8, MAX_STEPS, STEP_FLOPS), 1).is_empty());
    }

    #[test]
    fn a_part_has_few_rows_if_heads_are_many() {
        for heads in [1, 3, 32, 128, 16_384, 1 << 20] {
            let rows = rows_of_part(heads, MAX_STEPS);
            assert!(rows >= 64);
            let steps = rows / 64 * heads;
            assert!(steps <= 16_384.max(heads) && 2 * steps > 16_384, "{heads}");
        }
        assert_eq!(rows_of_part(32, 1), 64);
    }
}
