//! Layouts: the assignment of rows to ranks, for any length and any number of ranks.

use std::{num::NonZeroUsize, sync::Arc};

use annulus_core::{Alignment, Batch, Dims, Error, Result, Run, Runs, Shard, Side, memory};

/// The most ranks of a layout. A rank plans in O(ranks) time and memory: 65,536 ranks take about a
/// second, and a number that is a mistake must not take all memory.
pub const MOST_RANKS: usize = 1 << 20;

/// Checks a number of ranks.
///
/// # Errors
/// [`Error::InvalidArgument`] naming `ranks` if it is not 1 to [`MOST_RANKS`].
pub(crate) fn check_ranks(ranks: usize) -> Result<()> {
    match ranks {
        0 => Err(Error::invalid("ranks", 0, "at least 1")),
        1..=MOST_RANKS => Ok(()),
        _ => Err(Error::invalid("ranks", ranks, format!("at most {MOST_RANKS}"))),
    }
}

/// Assignment of rows to ranks. Shards may have different lengths or be empty. No rows are padded.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Layout {
    /// Divides the rows into one chunk per rank.
    Contiguous,
    /// Divides the rows into 2·ranks chunks and assigns chunks r and 2·ranks − 1 − r to rank r.
    /// Balances the work of a causal mask.
    Zigzag,
    /// Assigns rows r, r + ranks, r + 2·ranks, … to rank r.
    Striped,
    /// Assigns rows by a list of the caller.
    Custom(Arc<CustomLayout>),
    /// Assigns rows by the list of [`Layout::balanced`], for one batch of documents.
    Balanced(Arc<CustomLayout>),
    /// Assigns whole leaves ([`Layout::at_leaves`]).
    Leaves(LeafLayout),
}

/// Assignment of whole leaves: leaf i holds the rows i·L to (i + 1)·L − 1, the last one fewer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeafLayout {
    /// Assignment of leaves to ranks, as of rows: contiguous, zigzag or striped.
    of: Arc<Layout>,
    /// Rows of a leaf, L.
    rows: u64,
}

/// Rows of every rank, in local order, on both sides.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CustomLayout {
    /// Query rows, `q[rank]`.
    pub q: Vec<Runs>,
    /// Key rows, `kv[rank]`.
    pub kv: Vec<Runs>,
}

impl Layout {
    /// Returns the name on the command line.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Contiguous => "contiguous",
            Self::Zigzag => "zigzag",
            Self::Striped => "striped",
            Self::Custom(_) => "custom",
            Self::Balanced(_) => "balanced",
            Self::Leaves(leaves) => match *leaves.of {
                Self::Zigzag => "zigzag",
                Self::Striped => "striped",
                _ => "contiguous",
            },
        }
    }

    /// Returns the ring steps by which `Attention` posts receives ahead by default: 4 for a
    /// balanced layout, else 1. On a balanced layout the ranks have equal work in all steps
    /// together, not in each, so that a rank is often late by some steps.
    pub const fn receive_ahead(&self) -> NonZeroUsize {
        match self {
            Self::Balanced(_) => NonZeroUsize::MIN.saturating_add(3),
            _ => NonZeroUsize::MIN,
        }
    }

    /// Returns the list of rows of a custom or balanced layout.
    fn listed(&self) -> Option<&CustomLayout> {
        match self {
            Self::Custom(listed) | Self::Balanced(listed) => Some(listed),
            _ => None,
        }
    }

    /// Returns this layout with its cuts at multiples of `rows` rows: leaves are assigned as this
    /// layout assigns rows. A custom or balanced layout is unchanged:
    /// [`Layout::validate_leaves`] checks it.
    #[must_use]
    pub fn at_leaves(&self, rows: u64) -> Self {
        match self {
            Self::Custom(_) | Self::Balanced(_) => self.clone(),
            Self::Leaves(leaves) => Self::Leaves(LeafLayout { of: leaves.of.clone(), rows }),
            _ => Self::Leaves(LeafLayout { of: Arc::new(self.clone()), rows }),
        }
    }

    /// Returns the layout whose cuts [`Layout::at_leaves`] has moved, or this one.
    pub fn without_leaves(&self) -> &Self {
        match self {
            Self::Leaves(leaves) => &leaves.of,
            _ => self,
        }
    }

    /// Returns true if a rank has the same rows of sequences of the same length.
    pub(crate) fn has_equal_sides(&self) -> bool {
        match self {
            Self::Custom(custom) | Self::Balanced(custom) => custom.q == custom.kv,
            _ => true,
        }
    }

    /// Returns the row numbers of `rank`, in local order; none if there is no such rank.
    ///
    /// # Source
    /// Zigzag: Zhu 2024, ring-flash-attention; context parallelism of Llama 3. Striped: Brandon et
    /// al. 2023, Striped Attention.
    pub fn shard(&self, side: Side, len: usize, rank: usize, ranks: usize) -> Runs {
        let mut runs = Runs::new();
        if rank >= ranks {
            return runs;
        }
        let mut chunk = |index: usize, chunks: usize| {
            // chunks start at ⌊len·i/chunks⌋, so that their sizes differ by at most one
            let edge = |i: usize| (len as u128 * i as u128 / chunks as u128) as i64;
            runs.push_run(Run {
                start: edge(index),
                step: 1,
                count: (edge(index + 1) - edge(index)).cast_unsigned(),
            });
        };
        match self {
            Self::Contiguous => chunk(rank, ranks),
            Self::Zigzag => {
                chunk(rank, 2 * ranks);
                chunk(2 * ranks - 1 - rank, 2 * ranks);
            }
            Self::Striped => {
                let count = (len as u64).saturating_sub(rank as u64).div_ceil(ranks as u64);
                runs.push_run(Run { start: rank as i64, step: ranks as i64, count });
            }
            Self::Custom(listed) | Self::Balanced(listed) => {
                let shards = match side {
                    Side::Q => &listed.q,
                    Side::Kv => &listed.kv,
                };
                return shards.get(rank).cloned().unwrap_or_default();
            }
            Self::Leaves(leaves) => return leaves.shard(side, len, rank, ranks),
        }
        runs
    }

    /// Computes the shard of `rank` from its part of the batch.
    ///
    /// Dims, layout and batch must have been validated, the batch also by
    /// [`Layout::validate_batch`].
    pub fn local_shard(
        &self,
        dims: &Dims,
        alignment: Alignment,
        side: Side,
        rank: usize,
        ranks: usize,
        batch: &Batch,
    ) -> Shard {
        let rows = self.shard(side, dims.len(side), rank, ranks);
        Shard::of_rows(dims, alignment, side, rows, batch)
    }

    /// Checks that segment ids of one side alone can be used for both
    /// ([`Batch::validate_rows`]): the rank must own the same rows of both sides.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming the ids that were given.
    pub fn validate_batch(
        &self,
        batch: &Batch,
        dims: &Dims,
        rank: usize,
        ranks: usize,
    ) -> Result<()> {
        batch.validate_rows(|side| self.shard(side, dims.len(side), rank, ranks))
    }

    /// Checks that there are 1 to [`MOST_RANKS`] ranks and that a custom or balanced layout assigns
    /// every row to exactly one of them.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming `ranks` or `layout`; [`Error::OutOfMemory`] of the bitmap
    /// of the listed rows.
    pub fn validate(&self, q_len: usize, kv_len: usize, ranks: usize) -> Result<()> {
        self.validate_lists(q_len, kv_len, ranks, false)
    }

    /// As [`Layout::validate`], of a layout that may lack some keys: that of partial results
    /// ([`annulus_core::Spec::partial`]).
    ///
    /// # Errors
    /// As [`Layout::validate`].
    pub fn validate_partial(&self, q_len: usize, kv_len: usize, ranks: usize) -> Result<()> {
        self.validate_lists(q_len, kv_len, ranks, true)
    }

    fn validate_lists(
        &self,
        q_len: usize,
        kv_len: usize,
        ranks: usize,
        may_lack_keys: bool,
    ) -> Result<()> {
        check_ranks(ranks)?;
        let Some(listed) = self.listed() else { return Ok(()) };
        let q = ("q", &listed.q, q_len, false);
        for (name, shards, len, may_lack) in [q, ("kv", &listed.kv, kv_len, may_lack_keys)] {
            if shards.len() != ranks {
                return Err(Error::invalid(
                    "layout",
                    format!("{} shards of {name}", shards.len()),
                    format!("{ranks}, one per rank"),
                ));
            }
            check_partition(name, shards, len, may_lack)?;
        }
        Ok(())
    }
}

impl Layout {
    /// Checks that every shard of a custom or balanced layout consists of whole leaves of `rows`
    /// rows, each in ascending order; the last leaf of the sequence, which may be shorter, ends its
    /// shard.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming `layout`.
    pub fn validate_leaves(&self, q_len: usize, kv_len: usize, rows: u64) -> Result<()> {
        let Some(listed) = self.listed() else { return Ok(()) };
        for (name, shards, len) in [("q", &listed.q, q_len), ("kv", &listed.kv, kv_len)] {
            for shard in shards {
                let mut first = 0;
                for (index, row) in (0..).zip(shard.iter()) {
                    let row = row.unsigned_abs();
                    if index % rows == 0 {
                        first = row;
                    }
                    let leaf_len = rows.min((len as u64).saturating_sub(first));
                    let is_end = index % rows + 1 == rows || index + 1 == shard.len();
                    if first % rows != 0
                        || row != first + index % rows
                        || is_end && index % rows + 1 != leaf_len
                    {
                        return Err(Error::invalid(
                            "layout",
                            format!("{name} row {row} at index {index} of its shard"),
                            format!(
                                "whole leaves of {rows} rows, in ascending order, because the \
                                 attention is reproducible"
                            ),
                        ));
                    }
                }
            }
        }
        Ok(())
    }
}

impl LeafLayout {
    fn shard(&self, side: Side, len: usize, rank: usize, ranks: usize) -> Runs {
        let end = len as u64;
        let leaves = self.of.shard(side, annulus_core::index(end.div_ceil(self.rows)), rank, ranks);
        let mut runs = Runs::new();
        let mut rows = |first: u64, leaves: u64| {
            let start = (first * self.rows).min(end);
            let count = (first + leaves).saturating_mul(self.rows).min(end) - start;
            runs.push_run(Run { start: start.cast_signed(), step: 1, count });
        };
        for run in leaves.runs() {
            let first = run.start.unsigned_abs();
            if run.step == 1 || run.count == 1 {
                rows(first, run.count);
            } else {
                (0..run.count).for_each(|index| rows(run.at(index).unsigned_abs(), 1));
            }
        }
        runs
    }
}

/// Checks that the shards contain every row of `0..len` once; at most once if they may lack some.
///
/// Reads at most `len` + 1 rows, even of a run with a larger count: each row is either new or an
/// error.
fn check_partition(name: &str, shards: &[Runs], len: usize, may_lack: bool) -> Result<()> {
    let words = len.div_ceil(64);
    let mut assigned: Vec<u64> = memory::filled("the bitmap of the layout's rows", words, 0)?;
    let refuse =
        |got| Err(Error::invalid("layout", got, format!("every {name} row of 0..{len} once")));
    for row in shards.iter().flat_map(Runs::iter) {
        let Some(index) = usize::try_from(row).ok().filter(|&index| index < len) else {
            return refuse(format!("{name} row {row}"));
        };
        let bit = 1 << (index % 64);
        if assigned[index / 64] & bit != 0 {
            return refuse(format!("{name} row {row} twice"));
        }
        assigned[index / 64] |= bit;
    }
    match (0..len).find(|row| assigned[row / 64] >> (row % 64) & 1 == 0) {
        Some(row) if !may_lack => refuse(format!("no rank for {name} row {row}")),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod shard_tests;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LAYOUTS: [Layout; 3] = [Layout::Contiguous, Layout::Zigzag, Layout::Striped];

    fn custom(q: Vec<Runs>, kv: Vec<Runs>) -> Layout {
        Layout::Custom(Arc::new(CustomLayout { q, kv }))
    }

    fn runs(rows: &[i64]) -> Runs {
        rows.iter().copied().collect()
    }

    /// Returns the same rows as a custom layout, whose check does not use the layout's formula.
    fn as_custom(layout: &Layout, len: usize, ranks: usize) -> Layout {
        let shards = |side| (0..ranks).map(|rank| layout.shard(side, len, rank, ranks)).collect();
        custom(shards(Side::Q), shards(Side::Kv))
    }

    proptest! {
        #[test]
        fn shards_partition_the_rows_evenly(len in 0usize..200, ranks in 1usize..70) {
            for layout in &LAYOUTS {
                layout.validate(len, len, ranks).unwrap();
                as_custom(layout, len, ranks).validate(len, len, ranks).unwrap();
                let counts: Vec<u64> =
                    (0..ranks).map(|rank| layout.shard(Side::Q, len, rank, ranks).len()).collect();
                let least = counts.iter().min().unwrap();
                let most = counts.iter().max().unwrap();
                // chunks differ by at most one row, and a zigzag shard has two chunks
                let chunks = if matches!(layout, Layout::Zigzag) { 2 } else { 1 };
                prop_assert!(most - least <= chunks, "{layout:?} {counts:?}");
                let of_leaves = as_custom(&layout.at_leaves(8), len, ranks);
                of_leaves.validate(len, len, ranks).unwrap();
                of_leaves.validate_leaves(len, len, 8).unwrap();
            }
        }
    }

    #[test]
    fn fewer_rows_than_ranks_leave_ranks_empty() {
        for layout in &LAYOUTS {
            for (len, ranks) in [(0, 1), (0, 5), (1, 2), (3, 8), (7, 64)] {
                as_custom(layout, len, ranks).validate(len, len, ranks).unwrap();
                let empty = (0..ranks)
                    .filter(|&rank| layout.shard(Side::Kv, len, rank, ranks).is_empty())
                    .count();
                assert!(empty >= ranks - len, "{layout:?}");
                assert!(layout.shard(Side::Q, len, ranks, ranks).is_empty());
            }
            assert!(layout.shard(Side::Q, 5, 0, 0).is_empty());
        }
        assert!(custom(Vec::new(), Vec::new()).shard(Side::Q, 5, 0, 3).is_empty());
    }

    #[test]
    fn shards_have_the_documented_rows() {
        let rows =
            |layout: &Layout, rank| layout.shard(Side::Q, 8, rank, 2).iter().collect::<Vec<_>>();
        assert_eq!(
            (rows(&Layout::Contiguous, 0), rows(&Layout::Contiguous, 1)),
            (vec![0, 1, 2, 3], vec![4, 5, 6, 7])
        );
        assert_eq!(
            (rows(&Layout::Zigzag, 0), rows(&Layout::Zigzag, 1)),
            (vec![0, 1, 6, 7], vec![2, 3, 4, 5])
        );
        assert_eq!(
            (rows(&Layout::Striped, 0), rows(&Layout::Striped, 1)),
            (vec![0, 2, 4, 6], vec![1, 3, 5, 7])
        );
        let custom = custom(vec![runs(&[3, 1]), runs(&[0, 2])], vec![runs(&[]), runs(&[0])]);
        custom.validate(4, 1, 2).unwrap();
        assert_eq!(custom.shard(Side::Q, 4, 0, 2).iter().collect::<Vec<_>>(), [3, 1]);
        assert!(custom.shard(Side::Kv, 1, 0, 2).is_empty());
    }

    #[test]
    fn long_sequences_are_divided_without_overflow() {
        let len = 1usize << 40;
        for layout in &LAYOUTS {
            let total: u64 = (0..48).map(|rank| layout.shard(Side::Q, len, rank, 48).len()).sum();
            assert_eq!(total, len as u64);
        }
    }

    #[test]
    fn errors_state_the_fault_of_a_layout() {
        let message = |layout: &Layout, q_len, kv_len, ranks| {
            layout.validate(q_len, kv_len, ranks).unwrap_err().to_string()
        };
        assert_eq!(message(&Layout::Contiguous, 4, 4, 0), "ranks: got 0, want at least 1");
        let most = "ranks: got 1048577, want at most 1048576";
        assert_eq!(message(&Layout::Zigzag, 4, 4, MOST_RANKS + 1), most);
        let good = runs(&[0, 1]);
        let one = |rows: &[i64]| custom(vec![good.clone()], vec![runs(rows)]);
        one(&[1, 0]).validate(2, 2, 1).unwrap();
        assert_eq!(
            message(&one(&[0, 1]), 2, 2, 3),
            "layout: got 1 shards of q, want 3, one per rank"
        );
        assert_eq!(
            message(&one(&[0, 0]), 2, 2, 1),
            "layout: got kv row 0 twice, want every kv row of 0..2 once"
        );
        assert_eq!(
            message(&one(&[0, 2]), 2, 2, 1),
            "layout: got kv row 2, want every kv row of 0..2 once"
        );
        assert_eq!(
            message(&one(&[-1, 0]), 2, 2, 1),
            "layout: got kv row -1, want every kv row of 0..2 once"
        );
        assert_eq!(
            message(&one(&[0]), 2, 2, 1),
            "layout: got no rank for kv row 1, want every kv row of 0..2 once"
        );
        assert_eq!(
            message(&one(&[]), 3, 0, 1),
            "layout: got no rank for q row 2, want every q row of 0..3 once"
        );
        // a run that overflows, and a length for which no machine has memory
        let mut endless = Runs::new();
        endless.push_run(Run { start: 0, step: 1, count: u64::MAX });
        assert_eq!(
            message(&custom(vec![endless], vec![runs(&[])]), 2, 0, 1),
            "layout: got q row 2, want every q row of 0..2 once"
        );
        let vast = custom(vec![runs(&[])], vec![runs(&[])]).validate(usize::MAX, 0, 1);
        assert!(matches!(vast, Err(Error::OutOfMemory { .. })), "{vast:?}");
    }
}
