//! Layouts: the assignment of rows to ranks, for any length and any number of ranks.
//! [`RingShards`] has the row numbers, positions and segment ids of all ranks, from which a rank
//! computes the schedule.

mod boxes;

use std::{num::NonZeroUsize, sync::Arc};

use annulus_core::{Alignment, Batch, Dims, Error, Result, Run, Runs, Shard, Side, index, memory};

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
    /// Assigns rows by a list: of the caller, or of [`Layout::boxes`] or [`Layout::graph`].
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

/// Shards of all ranks on both sides. The lists are indexed by ring index.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RingShards {
    /// Query rows, `q[ring_index]`.
    pub q: Vec<Arc<Shard>>,
    /// Key rows, `kv[ring_index]`.
    pub kv: Vec<Arc<Shard>>,
}

impl RingShards {
    /// Computes the shards of dims, alignment and layout, without a batch.
    pub fn plain(dims: &Dims, alignment: Alignment, layout: &Layout, ranks: usize) -> Self {
        let shards = |side| {
            (0..ranks)
                .map(|rank| {
                    Arc::new(layout.local_shard(
                        dims,
                        alignment,
                        side,
                        rank,
                        ranks,
                        &Batch::default(),
                    ))
                })
                .collect()
        };
        Self { q: shards(Side::Q), kv: shards(Side::Kv) }
    }

    /// Computes the shards of a whole batch, whose rows are those of all ranks. The dense mask is
    /// not part of a shard.
    ///
    /// Dims, layout and batch must have been validated.
    ///
    /// # Errors
    /// [`annulus_core::Error::InvalidArgument`] of [`Layout::validate_batch`];
    /// [`annulus_core::Error::OutOfMemory`].
    pub fn of_batch(
        dims: &Dims,
        alignment: Alignment,
        layout: &Layout,
        ranks: usize,
        batch: &Batch,
    ) -> Result<Self> {
        let mut shards = Self {
            q: memory::list("the shards of all ranks", ranks)?,
            kv: memory::list("the shards of all ranks", ranks)?,
        };
        let differs = batch.differs_between_ranks();
        // rows, ids and positions of both sides are the same
        let starts = [&batch.cum_seqlens_q, &batch.cum_seqlens_k];
        let are_equal = !differs
            && dims.q_len == dims.kv_len
            && (starts[0] == starts[1] || starts.iter().any(|starts| starts.is_none()))
            && layout.has_equal_sides();
        for rank in 0..ranks {
            layout.validate_batch(batch, dims, rank, ranks)?;
            let rows = |side, len| {
                let rows = layout.shard(side, len, rank, ranks);
                memory::collect(
                    "row numbers",
                    index(rows.len()),
                    rows.iter().map(i64::cast_unsigned),
                )
            };
            let selected = if differs {
                let q_rows = rows(Side::Q, dims.q_len)?;
                Some(batch.select_coordinates(&q_rows, &rows(Side::Kv, dims.kv_len)?)?)
            } else {
                None
            };
            let own = selected.as_ref().unwrap_or(batch);
            let local = |side| layout.local_shard(dims, alignment, side, rank, ranks, own);
            let q = Arc::new(local(Side::Q));
            shards.kv.push(if are_equal { Arc::clone(&q) } else { Arc::new(local(Side::Kv)) });
            shards.q.push(q);
        }
        Ok(shards)
    }
}

#[cfg(test)]
mod tests;
