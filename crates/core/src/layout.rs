//! Which global rows a rank holds, for any length and any number of ranks.

use std::sync::Arc;

use crate::{Error, Result, Run, Runs, memory};

/// How rows are dealt to ranks. Shards may be uneven or empty; nothing is ever padded.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Layout {
    /// Rank r holds one run of rows.
    Contiguous,
    /// The rows are cut into 2·ranks chunks; rank r holds chunks r and 2·ranks − 1 − r. Balances causal masks.
    Zigzag,
    /// Rank r holds rows r, r + ranks, r + 2·ranks, …
    Striped,
    /// Whatever the caller says.
    Custom(Arc<CustomLayout>),
}

/// Rows of every rank, in local order, for queries and for keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CustomLayout {
    /// `q[rank]`: the global query rows of that rank.
    pub q: Vec<Runs>,
    /// `kv[rank]`: the global key rows of that rank.
    pub kv: Vec<Runs>,
}

/// Which of the two sequences a layout is asked about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// Queries.
    Q,
    /// Keys and values.
    Kv,
}

impl Layout {
    /// The name on the command line.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Contiguous => "contiguous",
            Self::Zigzag => "zigzag",
            Self::Striped => "striped",
            Self::Custom(_) => "custom",
        }
    }

    /// The global rows of `rank`, in local order; none if there is no such rank.
    ///
    /// # Source
    /// Zigzag: Zhu 2024 (ring-flash-attention), Llama 3's context parallelism; striped: Brandon et al. 2023.
    pub fn shard(&self, side: Side, len: usize, rank: usize, ranks: usize) -> Runs {
        let mut runs = Runs::new();
        if rank >= ranks {
            return runs;
        }
        let mut chunk = |index: usize, chunks: usize| {
            // chunk boundaries ⌊len·i/chunks⌋: sizes differ by at most one
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
            Self::Custom(custom) => {
                let shards = match side {
                    Side::Q => &custom.q,
                    Side::Kv => &custom.kv,
                };
                return shards.get(rank).cloned().unwrap_or_default();
            }
        }
        runs
    }

    /// Checks that there are ranks and, of a custom layout, that every row is on exactly one of them.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming `ranks` or `layout`; [`Error::OutOfMemory`] if there is no room for a bit a row.
    pub fn validate(&self, q_len: usize, kv_len: usize, ranks: usize) -> Result<()> {
        if ranks == 0 {
            return Err(Error::invalid("ranks", 0, "at least 1"));
        }
        let Self::Custom(custom) = self else { return Ok(()) };
        for (name, shards, len) in [("q", &custom.q, q_len), ("kv", &custom.kv, kv_len)] {
            if shards.len() != ranks {
                return Err(Error::invalid(
                    "layout",
                    format!("{} shards of {name}", shards.len()),
                    format!("{ranks}, one a rank"),
                ));
            }
            every_row_once(name, shards, len)?;
        }
        Ok(())
    }
}

/// Ends after `len` + 1 rows at most, however many a run claims to have: a row is new, or it is an error.
fn every_row_once(name: &str, shards: &[Runs], len: usize) -> Result<()> {
    let words = len.div_ceil(64);
    let mut seen: Vec<u64> = memory::filled("a bit a row of the layout", words, 0)?;
    let refuse =
        |got| Err(Error::invalid("layout", got, format!("every {name} row of 0..{len} once")));
    for row in shards.iter().flat_map(Runs::iter) {
        let Some(place) = usize::try_from(row).ok().filter(|&place| place < len) else {
            return refuse(format!("{name} row {row}"));
        };
        let bit = 1 << (place % 64);
        if seen[place / 64] & bit != 0 {
            return refuse(format!("{name} row {row} twice"));
        }
        seen[place / 64] |= bit;
    }
    match (0..len).find(|row| seen[row / 64] >> (row % 64) & 1 == 0) {
        Some(row) => refuse(format!("no rank for {name} row {row}")),
        None => Ok(()),
    }
}

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

    /// The same rows as a custom layout, whose check is independent of how they were dealt.
    fn spelled_out(layout: &Layout, len: usize, ranks: usize) -> Layout {
        let shards = |side| (0..ranks).map(|rank| layout.shard(side, len, rank, ranks)).collect();
        custom(shards(Side::Q), shards(Side::Kv))
    }

    proptest! {
        #[test]
        fn shards_partition_the_rows_evenly(len in 0usize..200, ranks in 1usize..70) {
            for layout in &LAYOUTS {
                layout.validate(len, len, ranks).unwrap();
                spelled_out(layout, len, ranks).validate(len, len, ranks).unwrap();
                let counts: Vec<u64> = (0..ranks).map(|rank| layout.shard(Side::Q, len, rank, ranks).len()).collect();
                let (least, most) = (counts.iter().min().unwrap(), counts.iter().max().unwrap());
                // a rank has one chunk, or two of which each may be one longer than another rank's
                prop_assert!(most - least <= if matches!(layout, Layout::Zigzag) { 2 } else { 1 }, "{layout:?} {counts:?}");
            }
        }
    }

    #[test]
    fn fewer_rows_than_ranks_leave_ranks_empty() {
        for layout in &LAYOUTS {
            for (len, ranks) in [(0, 1), (0, 5), (1, 2), (3, 8), (7, 64)] {
                spelled_out(layout, len, ranks).validate(len, len, ranks).unwrap();
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
    fn shards_are_what_the_layouts_say() {
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
        let dealt = custom(vec![runs(&[3, 1]), runs(&[0, 2])], vec![runs(&[]), runs(&[0])]);
        dealt.validate(4, 1, 2).unwrap();
        assert_eq!(dealt.shard(Side::Q, 4, 0, 2).iter().collect::<Vec<_>>(), [3, 1]);
        assert!(dealt.shard(Side::Kv, 1, 0, 2).is_empty());
    }

    #[test]
    fn long_sequences_are_dealt_without_overflow() {
        let len = 1usize << 40;
        for layout in &LAYOUTS {
            let total: u64 = (0..48).map(|rank| layout.shard(Side::Q, len, rank, 48).len()).sum();
            assert_eq!(total, len as u64);
        }
    }

    #[test]
    fn bad_layouts_are_refused_with_what_is_wrong() {
        let told = |layout: &Layout, q_len, kv_len, ranks| {
            layout.validate(q_len, kv_len, ranks).unwrap_err().to_string()
        };
        assert_eq!(told(&Layout::Contiguous, 4, 4, 0), "ranks: got 0, want at least 1");
        let good = runs(&[0, 1]);
        let one = |rows: &[i64]| custom(vec![good.clone()], vec![runs(rows)]);
        one(&[1, 0]).validate(2, 2, 1).unwrap();
        assert_eq!(told(&one(&[0, 1]), 2, 2, 3), "layout: got 1 shards of q, want 3, one a rank");
        assert_eq!(
            told(&one(&[0, 0]), 2, 2, 1),
            "layout: got kv row 0 twice, want every kv row of 0..2 once"
        );
        assert_eq!(
            told(&one(&[0, 2]), 2, 2, 1),
            "layout: got kv row 2, want every kv row of 0..2 once"
        );
        assert_eq!(
            told(&one(&[-1, 0]), 2, 2, 1),
            "layout: got kv row -1, want every kv row of 0..2 once"
        );
        assert_eq!(
            told(&one(&[0]), 2, 2, 1),
            "layout: got no rank for kv row 1, want every kv row of 0..2 once"
        );
        assert_eq!(
            told(&one(&[]), 3, 0, 1),
            "layout: got no rank for q row 2, want every q row of 0..3 once"
        );
        // a run that claims more rows than there are numbers, and a length beyond any memory
        let mut endless = Runs::new();
        endless.push_run(Run { start: 0, step: 1, count: u64::MAX });
        assert_eq!(
            told(&custom(vec![endless], vec![runs(&[])]), 2, 0, 1),
            "layout: got q row 2, want every q row of 0..2 once"
        );
        let vast = custom(vec![runs(&[])], vec![runs(&[])]).validate(usize::MAX, 0, 1);
        assert!(matches!(vast, Err(Error::OutOfMemory { .. })), "{vast:?}");
    }
}
