//! Inputs of a batch that restrict the mask: segment ids, positions, a dense mask and packed
//! sequence lengths.

use ndarray::Array2;

use crate::{DenseMask, Dims, Error, Result, Runs, Side, memory, run::for_each_run};

/// Inputs of a batch that restrict the mask, in addition to the spec's.
///
/// A pair is visible if all of them and the spec's mask permit it. On a ring, every rank passes
/// its own rows, but the whole `cum_seqlens`. In one process, the whole batch is passed.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Batch {
    /// Segment ids of the queries, `[b, q rows]`; negative ids are padding. Ids of one side alone
    /// are used for both sides, which requires equal lengths.
    pub q_segment_ids: Option<Array2<i32>>,
    /// Segment ids of the keys, `[b, kv rows]`.
    pub kv_segment_ids: Option<Array2<i32>>,
    /// Positions of the queries, `[b, q rows]`. They are used without alignment.
    pub q_positions: Option<Array2<i64>>,
    /// Positions of the keys, `[b, kv rows]`.
    pub kv_positions: Option<Array2<i64>>,
    /// Dense mask, `[b|1, q_heads|1, q rows, kv_len]`. The last axis is global.
    pub attention_mask: Option<DenseMask>,
    /// First query row of each packed sequence and the end of the last, `[sequences + 1]`,
    /// ascending from 0. The packing is that of every batch row; rows after the last sequence are
    /// padding. A list of one side alone is used for both sides, which requires equal lengths.
    pub cum_seqlens_q: Option<Vec<i64>>,
    /// First key row of each packed sequence and the end of the last, `[sequences + 1]`.
    pub cum_seqlens_k: Option<Vec<i64>>,
}

/// Bytes that planning allocates per run of segment ids or positions: the run, its encoding, its
/// copies in messages, and the entries of the searches for needed rows, each list with the room
/// into which it grows.
const PLANNING_BYTES_PER_RUN: u64 = 256;

impl Batch {
    /// Returns the bytes that planning allocates for segment ids and positions of this batch.
    ///
    /// Ids and positions are compressed to arithmetic runs: documents take a run each, ids in no
    /// order a run per row.
    pub fn planning_bytes(&self) -> u64 {
        let ids = [&self.q_segment_ids, &self.kv_segment_ids].into_iter().flatten();
        let positions = [&self.q_positions, &self.kv_positions].into_iter().flatten();
        // without elements there may be any number of batch rows, and none to count
        let ids = ids.filter(|ids| !ids.is_empty());
        let positions = positions.filter(|positions| !positions.is_empty());
        let ids = ids.flat_map(|ids| {
            ids.rows().into_iter().map(|row| runs(row.iter().map(|&id| id.into())))
        });
        let positions = positions.flat_map(|positions| {
            positions.rows().into_iter().map(|row| runs(row.iter().copied()))
        });
        ids.chain(positions).sum::<u64>().saturating_mul(PLANNING_BYTES_PER_RUN)
    }

    /// Returns true if each rank has a part of the batch: ids or positions. Packed lengths are
    /// whole on every rank.
    pub const fn differs_between_ranks(&self) -> bool {
        self.q_segment_ids.is_some()
            || self.kv_segment_ids.is_some()
            || self.q_positions.is_some()
            || self.kv_positions.is_some()
    }

    /// Checks shapes and values of one rank's part. The rank owns `q_rows` query rows and `kv_rows`
    /// key rows.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming the tensor.
    pub fn validate(&self, dims: &Dims, q_rows: usize, kv_rows: usize) -> Result<()> {
        fn shape<T>(name: &str, array: &Option<Array2<T>>, want: (usize, usize)) -> Result<()> {
            match array {
                Some(array) if array.dim() != want => {
                    Err(Error::invalid(name, format!("{:?}", array.dim()), format!("{want:?}")))
                }
                _ => Ok(()),
            }
        }
        shape("q_segment_ids", &self.q_segment_ids, (dims.batch, q_rows))?;
        shape("kv_segment_ids", &self.kv_segment_ids, (dims.batch, kv_rows))?;
        shape("q_positions", &self.q_positions, (dims.batch, q_rows))?;
        shape("kv_positions", &self.kv_positions, (dims.batch, kv_rows))?;
        for (name, positions) in
            [("q_positions", &self.q_positions), ("kv_positions", &self.kv_positions)]
        {
            // sums of a position with a window, chunk or offset of the same size do not overflow
            let most = i64::MAX / 4;
            if let Some(position) = positions
                .iter()
                .flatten()
                .find(|position| position.unsigned_abs() > most.unsigned_abs())
            {
                return Err(Error::invalid(
                    name,
                    position,
                    format!("positions between -{most} and {most}"),
                ));
            }
        }
        if self.q_segment_ids.is_some() != self.kv_segment_ids.is_some()
            && (q_rows != kv_rows || dims.q_len != dims.kv_len)
        {
            let (given, missing) = if self.q_segment_ids.is_some() {
                ("q_segment_ids", "kv_segment_ids")
            } else {
                ("kv_segment_ids", "q_segment_ids")
            };
            return Err(Error::invalid(
                given,
                "alone, with unequal lengths",
                format!("{missing} as well"),
            ));
        }
        if let Some(mask) = &self.attention_mask {
            mask.validate("attention_mask", dims, q_rows)?;
        }
        self.validate_cum_seqlens(dims)
    }

    fn validate_cum_seqlens(&self, dims: &Dims) -> Result<()> {
        for (name, lens, len) in [
            ("cum_seqlens_q", &self.cum_seqlens_q, dims.q_len),
            ("cum_seqlens_k", &self.cum_seqlens_k, dims.kv_len),
        ] {
            let Some(lens) = lens else { continue };
            if lens.first() != Some(&0) {
                let got = lens
                    .first()
                    .map_or("an empty list".into(), |first| format!("{first} as the first number"));
                return Err(Error::invalid(name, got, "0 as the first number"));
            }
            if let Some(at) = lens.windows(2).position(|pair| pair[0] > pair[1]) {
                return Err(Error::invalid(
                    name,
                    format!("{} after {}", lens[at + 1], lens[at]),
                    "ascending numbers",
                ));
            }
            if let Some(last) = lens.last().filter(|last| last.cast_unsigned() > len as u64) {
                return Err(Error::invalid(
                    name,
                    format!("{last} as the last number"),
                    format!("at most {len}"),
                ));
            }
        }
        match (&self.cum_seqlens_q, &self.cum_seqlens_k) {
            (Some(q), Some(k)) if q.len() != k.len() => Err(Error::invalid(
                "cum_seqlens_k",
                format!("{} sequences", k.len() - 1),
                format!("{} sequences, as cum_seqlens_q", q.len() - 1),
            )),
            (Some(_), None) if dims.q_len != dims.kv_len => Err(Error::invalid(
                "cum_seqlens_q",
                "alone, with unequal lengths",
                "cum_seqlens_k as well",
            )),
            (None, Some(_)) if dims.q_len != dims.kv_len => Err(Error::invalid(
                "cum_seqlens_k",
                "alone, with unequal lengths",
                "cum_seqlens_q as well",
            )),
            _ => Ok(()),
        }
    }

    /// Checks that segment ids of one side alone can be used for both: a rank must own the same
    /// rows of both sides.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming the ids that were given.
    pub fn validate_rows(&self, rows: impl Fn(Side) -> Runs) -> Result<()> {
        let (given, missing) = match (&self.q_segment_ids, &self.kv_segment_ids) {
            (Some(_), None) => ("q_segment_ids", "kv_segment_ids"),
            (None, Some(_)) => ("kv_segment_ids", "q_segment_ids"),
            _ => return Ok(()),
        };
        let [q_rows, kv_rows] = [rows(Side::Q), rows(Side::Kv)];
        // equal runs are equal rows, which is the common case; different runs may be equal rows too
        if q_rows == kv_rows || q_rows.iter().eq(kv_rows.iter()) {
            return Ok(());
        }
        Err(Error::invalid(
            given,
            "alone, with a layout that assigns different rows of queries and keys to a rank",
            format!("{missing} as well"),
        ))
    }

    /// Returns one rank's part of a whole batch: the query rows `q_rows` and the key rows `kv_rows`
    /// by row number, in that order. [`Batch::validate`] must have accepted the batch.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn select(&self, q_rows: &[u64], kv_rows: &[u64]) -> Result<Self> {
        Ok(Self {
            attention_mask: self
                .attention_mask
                .as_ref()
                .map(|mask| mask.select_queries(q_rows))
                .transpose()?,
            ..self.select_coordinates(q_rows, kv_rows)?
        })
    }

    /// As [`Batch::select`], without the dense mask.
    pub fn select_coordinates(&self, q_rows: &[u64], kv_rows: &[u64]) -> Result<Self> {
        fn select_rows<T: Copy + bytemuck::Zeroable>(
            name: &str,
            array: &Option<Array2<T>>,
            rows: &[u64],
        ) -> Result<Option<Array2<T>>> {
            let Some(array) = array else { return Ok(None) };
            let mut selected = memory::zeros(name, (array.nrows(), rows.len()))?;
            selected
                .indexed_iter_mut()
                .for_each(|((b, i), element)| *element = array[[b, crate::index(rows[i])]]);
            Ok(Some(selected))
        }
        let lens = |name, lens: &Option<Vec<i64>>| {
            lens.as_ref()
                .map(|lens| memory::collect(name, lens.len(), lens.iter().copied()))
                .transpose()
        };
        Ok(Self {
            q_segment_ids: select_rows("q_segment_ids", &self.q_segment_ids, q_rows)?,
            kv_segment_ids: select_rows("kv_segment_ids", &self.kv_segment_ids, kv_rows)?,
            q_positions: select_rows("q_positions", &self.q_positions, q_rows)?,
            kv_positions: select_rows("kv_positions", &self.kv_positions, kv_rows)?,
            attention_mask: None,
            cum_seqlens_q: lens("cum_seqlens_q", &self.cum_seqlens_q)?,
            cum_seqlens_k: lens("cum_seqlens_k", &self.cum_seqlens_k)?,
        })
    }
}

/// Returns the number of arithmetic runs of a list.
fn runs(numbers: impl Iterator<Item = i64>) -> u64 {
    let mut runs = 0;
    for_each_run(numbers, |_| runs += 1);
    runs
}

#[cfg(test)]
mod tests;
