//! Which global rows a rank holds, for any length and any number of ranks.

use std::sync::Arc;

use crate::{Error, Result, Run, Runs};

/// How rows are dealt to ranks. Shards may be uneven or empty; nothing is ever padded.
#[derive(Debug, Clone, PartialEq, Eq)]
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

    /// The global rows of `rank`, in local order.
    pub fn shard(&self, side: Side, len: usize, rank: usize, ranks: usize) -> Runs {
        let mut runs = Runs::new();
        let mut chunk = |index: usize, chunks: usize| {
            // chunk boundaries ⌊len·i/chunks⌋: sizes differ by at most one
            let edge = |i: usize| (len as u128 * i as u128 / chunks as u128) as i64;
            runs.push_run(Run { start: edge(index), step: 1, count: (edge(index + 1) - edge(index)).cast_unsigned() });
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
            Self::Custom(custom) => match side {
                Side::Q => return custom.q[rank].clone(),
                Side::Kv => return custom.kv[rank].clone(),
            },
        }
        runs
    }

    /// Checks a custom layout: every row on exactly one rank.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming `layout`.
    pub fn validate(&self, q_len: usize, kv_len: usize, ranks: usize) -> Result<()> {
        if ranks == 0 {
            return Err(Error::invalid("ranks", 0, "at least 1"));
        }
        let Self::Custom(custom) = self else { return Ok(()) };
        for (name, shards, len) in [("q", &custom.q, q_len), ("kv", &custom.kv, kv_len)] {
            if shards.len() != ranks {
                return Err(Error::invalid("layout", format!("{} shards of {name}", shards.len()), format!("{ranks}, one a rank")));
            }
            let mut seen = vec![false; len];
            for row in shards.iter().flat_map(Runs::iter) {
                match usize::try_from(row).ok().and_then(|row| seen.get_mut(row)) {
                    Some(seen) if !*seen => *seen = true,
                    Some(_) => return Err(Error::invalid("layout", format!("{name} row {row} twice"), "every row once")),
                    None => return Err(Error::invalid("layout", format!("{name} row {row}"), format!("rows 0..{len}"))),
                }
            }
            if let Some(row) = seen.iter().position(|seen| !seen) {
                return Err(Error::invalid("layout", format!("no rank for {name} row {row}"), "every row once"));
            }
        }
        Ok(())
    }
}
