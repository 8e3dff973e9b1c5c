//! Inputs of a batch that restrict the mask: segment ids, positions, a dense mask, key lists and
//! packed sequence lengths.

use std::sync::Arc;

use ndarray::Array2;

use crate::{DenseMask, Dims, Error, KeyLists, Result, Runs, Side, memory, run::for_each_run};

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
    /// Keys that each query attends to, at most: `[b|1, groups, q rows]` lists of global key rows.
    pub key_lists: Option<Arc<KeyLists>>,
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
        if let Some(lists) = &self.key_lists {
            lists.validate(dims, q_rows)?;
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
            key_lists: self
                .key_lists
                .as_ref()
                .map(|lists| lists.select_queries(q_rows).map(Arc::new))
                .transpose()?,
            ..self.select_coordinates(q_rows, kv_rows)?
        })
    }

    /// As [`Batch::select`], without the dense mask and the key lists.
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
            key_lists: None,
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
mod tests {
    //! Accepted batches, rejected batches with the arguments that errors name, and parts of ranks.

    use super::*;

    /// Global lengths of the tests; the tested rank owns 3 of 8 queries and 4 of 8 keys.
    const DIMS: Dims = Dims {
        batch: 2,
        q_len: 8,
        kv_len: 8,
        q_heads: 4,
        kv_heads: 2,
        head_dim: 16,
        value_dim: 16,
    };

    /// Returns argument, got and want of the error for a rank with `q_rows` and `kv_rows`.
    fn refused(
        dims: &Dims,
        batch: &Batch,
        [q_rows, kv_rows]: [usize; 2],
    ) -> (String, String, String) {
        match batch.validate(dims, q_rows, kv_rows) {
            Err(Error::InvalidArgument { argument, got, want }) => (argument, got, want),
            other => panic!("{batch:?} gave {other:?}"),
        }
    }

    fn zeros<T: Clone + Default>(b: usize, rows: usize) -> Option<Array2<T>> {
        Some(Array2::from_elem((b, rows), T::default()))
    }

    #[test]
    fn valid_batches_are_accepted() {
        let none = Batch::default();
        assert_eq!(none.validate(&DIMS, 3, 4), Ok(()));
        let all = Batch {
            q_segment_ids: Some(Array2::from_elem((2, 3), -7)),
            kv_segment_ids: zeros(2, 4),
            q_positions: Some(Array2::from_elem((2, 3), i64::MAX / 4)),
            kv_positions: Some(Array2::from_elem((2, 4), -(i64::MAX / 4))),
            attention_mask: Some(DenseMask::from_fn([1, 4, 3, 8], |_| true)),
            key_lists: KeyLists::new(vec![0, 1, 2, 2], vec![7, 0]).ok().map(Arc::new),
            cum_seqlens_q: Some(vec![0, 0, 3, 3, 8]),
            cum_seqlens_k: Some(vec![0, 1, 1, 5, 7]),
        };
        assert_eq!(all.validate(&DIMS, 3, 4), Ok(()));
        // no sequence at all: every row is padding
        assert_eq!(
            Batch { cum_seqlens_q: Some(vec![0]), ..Batch::default() }.validate(&DIMS, 3, 4),
            Ok(())
        );
    }

    #[test]
    fn arrays_of_the_wrong_shape_are_refused_by_name() {
        for (b, q, k) in [(1, 3, 4), (2, 8, 8), (2, 0, 0), (3, 3, 4)] {
            let [q_ids, kv_ids] = [zeros(b, q), zeros(b, k)];
            let (q_segment_ids, kv_segment_ids) = (zeros(2, 3), zeros(2, 4));
            let none = Batch::default;
            let cases = [
                ("q_segment_ids", Batch { q_segment_ids: q_ids, kv_segment_ids, ..none() }),
                ("kv_segment_ids", Batch { q_segment_ids, kv_segment_ids: kv_ids, ..none() }),
                ("q_positions", Batch { q_positions: zeros(b, q), ..none() }),
                ("kv_positions", Batch { kv_positions: zeros(b, k), ..none() }),
            ];
            for (name, batch) in cases {
                let (argument, got, want) = refused(&DIMS, &batch, [3, 4]);
                let rows = if name.starts_with("q_") { ((b, q), (2, 3)) } else { ((b, k), (2, 4)) };
                let shapes = (format!("{:?}", rows.0), format!("{:?}", rows.1));
                assert_eq!((argument.as_str(), (got, want)), (name, shapes));
            }
        }
        for shape in [
            [3, 1, 3, 8],
            [1, 2, 3, 8],
            [1, 1, 8, 8],
            [1, 1, 3, 4],
            [0, 1, 3, 8],
            [1, 0, 3, 8],
            [1, 1, 1, 1],
        ] {
            let batch = Batch {
                attention_mask: Some(DenseMask::from_fn(shape, |_| true)),
                ..Batch::default()
            };
            assert_eq!(refused(&DIMS, &batch, [3, 4]).0, "attention_mask", "{shape:?}");
        }
    }

    #[test]
    fn positions_near_the_limits_of_i64_are_refused() {
        for position in [i64::MAX, i64::MIN, i64::MAX / 4 + 1, -(i64::MAX / 4) - 1] {
            let positions = Some(Array2::from_elem((2, 3), position));
            let (argument, got, _) = refused(
                &DIMS,
                &Batch { q_positions: positions.clone(), ..Batch::default() },
                [3, 4],
            );
            assert_eq!((argument.as_str(), got), ("q_positions", position.to_string()));
            assert_eq!(
                refused(&DIMS, &Batch { kv_positions: positions, ..Batch::default() }, [3, 3]).0,
                "kv_positions"
            );
        }
    }

    #[test]
    fn inputs_of_one_side_alone_require_equal_lengths() {
        let q_only = Batch { q_segment_ids: zeros(2, 3), ..Batch::default() };
        let kv_only = Batch { kv_segment_ids: zeros(2, 3), ..Batch::default() };
        assert_eq!(q_only.validate(&DIMS, 3, 3), Ok(()));
        assert_eq!(kv_only.validate(&DIMS, 3, 3), Ok(()));
        // different local lengths, then different global lengths
        let longer = Dims { kv_len: 9, ..DIMS };
        assert_eq!(refused(&DIMS, &q_only, [3, 4]).0, "q_segment_ids");
        assert_eq!(refused(&longer, &q_only, [3, 3]).0, "q_segment_ids");
        assert_eq!(refused(&longer, &kv_only, [3, 3]).0, "kv_segment_ids");
        let q_lens = Batch { cum_seqlens_q: Some(vec![0, 4]), ..Batch::default() };
        let k_lens = Batch { cum_seqlens_k: Some(vec![0, 4]), ..Batch::default() };
        assert_eq!(q_lens.validate(&DIMS, 3, 4).and(k_lens.validate(&DIMS, 3, 4)), Ok(()));
        assert_eq!(refused(&longer, &q_lens, [3, 4]).0, "cum_seqlens_q");
        assert_eq!(refused(&longer, &k_lens, [3, 4]).0, "cum_seqlens_k");
    }

    #[test]
    fn invalid_packed_lengths_are_refused() {
        let bad: [(Vec<i64>, &str); 6] = [
            (vec![], "an empty list"),
            (vec![1, 4], "1 as the first number"),
            (vec![-1, 4], "-1 as the first number"),
            (vec![0, 5, 4], "4 after 5"),
            (vec![0, 4, 9], "9 as the last number"),
            (vec![0, -1], "-1 after 0"),
        ];
        for (lens, message) in bad {
            let (argument, got, _) = refused(
                &DIMS,
                &Batch { cum_seqlens_q: Some(lens.clone()), ..Batch::default() },
                [3, 4],
            );
            assert_eq!((argument.as_str(), got.as_str()), ("cum_seqlens_q", message));
            assert_eq!(
                refused(&DIMS, &Batch { cum_seqlens_k: Some(lens), ..Batch::default() }, [3, 4]).0,
                "cum_seqlens_k"
            );
        }
        let different_counts = Batch {
            cum_seqlens_q: Some(vec![0, 4, 8]),
            cum_seqlens_k: Some(vec![0, 8]),
            ..Batch::default()
        };
        assert_eq!(
            refused(&DIMS, &different_counts, [3, 4]),
            ("cum_seqlens_k".into(), "1 sequences".into(), "2 sequences, as cum_seqlens_q".into())
        );
    }

    #[test]
    fn ids_of_one_side_alone_are_refused_if_a_rank_owns_other_rows_of_the_other_side() {
        let zigzag: Runs = [0, 1, 6, 7].into_iter().collect();
        let equal = |_| zigzag.clone();
        let other = |side| match side {
            Side::Q => Runs::counting(0, 4),
            Side::Kv => Runs::counting(4, 4),
        };
        let batch = Batch { kv_segment_ids: zeros(2, 4), ..Batch::default() };
        assert_eq!(batch.validate_rows(equal), Ok(()));
        assert!(matches!(
            batch.validate_rows(other),
            Err(Error::InvalidArgument { argument, .. }) if argument == "kv_segment_ids"
        ));
        let both = Batch { q_segment_ids: zeros(2, 4), ..batch };
        assert_eq!(both.validate_rows(other), Ok(()));
    }

    #[test]
    fn select_returns_the_rows_of_a_rank() {
        let numbers = |first: i64| {
            Some(Array2::from_shape_fn((2, 8), |(b, i)| first + 10 * b as i64 + i as i64))
        };
        let batch = Batch {
            q_positions: numbers(0),
            kv_segment_ids: numbers(100).map(|ids| ids.mapv(|id| id as i32)),
            attention_mask: Some(DenseMask::from_fn([1, 2, 8, 8], |[_, h, q, k]| h + q == k)),
            ..Batch::default()
        };
        let part = batch.select(&[6, 1], &[3]).unwrap();
        assert_eq!(part.q_positions, Some(ndarray::array![[6, 1], [16, 11]]));
        assert_eq!(part.kv_segment_ids, Some(ndarray::array![[103], [113]]));
        let words = |head| {
            part.attention_mask
                .as_ref()
                .map(|mask| [mask.line(0, head, 0)[0], mask.line(1, head, 1)[0]])
        };
        assert_eq!(words(0), Some([1 << 6, 1 << 1]));
        assert_eq!(words(1), Some([1 << 7, 1 << 2]));
    }

    #[test]
    fn runs_are_counted_as_shards_compress_them() {
        let ids = [vec![], vec![7], vec![0, 0, 1, 1, 1], vec![3, 5, 7, 8, 9, 9], vec![4, 1, 3, 0]];
        for ids in ids {
            let batch = Batch {
                q_segment_ids: Array2::from_shape_vec((1, ids.len()), ids.clone()).ok(),
                ..Batch::default()
            };
            let dims = Dims::new(1, ids.len(), 1, 1);
            let rows = Runs::counting(0, ids.len() as u64);
            let shard =
                crate::Shard::of_rows(&dims, crate::Alignment::TopLeft, Side::Q, rows, &batch);
            let runs = shard.segments[0].runs().len() as u64;
            assert_eq!(batch.planning_bytes(), runs * PLANNING_BYTES_PER_RUN, "{ids:?}");
        }
    }
}
