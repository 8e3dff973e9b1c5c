//! What comes with a batch rather than with the problem: segment ids, positions, a dense mask, packed lengths.

use ndarray::Array2;

use crate::{DenseMask, Dims, Error, Layout, Result, Side, memory};

/// What a batch brings. On a ring every rank gives its own rows (`cum_seqlens` whole); in one process the whole batch is given.
///
/// Every condition is and-ed with the spec's mask.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Batch {
    /// `[b, q rows]`; negative = padding. If only one of the two is given it serves for both, and lengths must agree.
    pub q_segment_ids: Option<Array2<i32>>,
    /// `[b, kv rows]`.
    pub kv_segment_ids: Option<Array2<i32>>,
    /// `[b, q rows]`: explicit positions, used as they are (alignment adds nothing).
    pub q_positions: Option<Array2<i64>>,
    /// `[b, kv rows]`: explicit positions.
    pub kv_positions: Option<Array2<i64>>,
    /// `[b|1, q_heads|1, q rows, **all** kv rows]`.
    pub attention_mask: Option<DenseMask>,
    /// `[sequences + 1]`, ascending from 0, the same packing in every batch row; rows after the last are padding. If only one of
    /// the two is given it serves for both, and lengths must agree.
    pub cum_seqlens_q: Option<Vec<i64>>,
    /// `[sequences + 1]`.
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

    /// Checks shapes and numbers; `q_rows` and `kv_rows` are the rows held here.
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
            // room for window and chunk arithmetic at both ends
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
                    .map_or("nothing".into(), |first| format!("{first} as the first number"));
                return Err(Error::invalid(name, got, "numbers from 0 on"));
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

    /// Checks that segment ids given on one side only can serve for the other: this rank must hold the same rows of both.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming the ids that were given.
    pub fn validate_layout(
        &self,
        dims: &Dims,
        layout: &Layout,
        rank: usize,
        ranks: usize,
    ) -> Result<()> {
        let (given, missing) = match (&self.q_segment_ids, &self.kv_segment_ids) {
            (Some(_), None) => ("q_segment_ids", "kv_segment_ids"),
            (None, Some(_)) => ("kv_segment_ids", "q_segment_ids"),
            _ => return Ok(()),
        };
        let rows = |side, len| layout.shard(side, len, rank, ranks);
        let (q_rows, kv_rows) = (rows(Side::Q, dims.q_len), rows(Side::Kv, dims.kv_len));
        // the same runs are the same rows; other runs may be
        if q_rows == kv_rows || q_rows.iter().eq(kv_rows.iter()) {
            return Ok(());
        }
        Err(Error::invalid(
            given,
            "alone, with a layout that deals queries and keys differently",
            format!("{missing} as well"),
        ))
    }

    /// One rank's share of a whole batch that [`Batch::validate`] has accepted: the given global query and key rows, in that order.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn select(&self, q_rows: &[u64], kv_rows: &[u64]) -> Result<Self> {
        fn pick<T: Copy + bytemuck::Zeroable>(
            name: &str,
            array: &Option<Array2<T>>,
            rows: &[u64],
        ) -> Result<Option<Array2<T>>> {
            let Some(array) = array else { return Ok(None) };
            let mut picked = memory::zeros(name, (array.nrows(), rows.len()))?;
            picked
                .indexed_iter_mut()
                .for_each(|((b, i), id)| *id = array[[b, crate::index(rows[i])]]);
            Ok(Some(picked))
        }
        let lens = |name, lens: &Option<Vec<i64>>| {
            lens.as_ref()
                .map(|lens| memory::collect(name, lens.len(), lens.iter().copied()))
                .transpose()
        };
        Ok(Self {
            q_segment_ids: pick("q_segment_ids", &self.q_segment_ids, q_rows)?,
            kv_segment_ids: pick("kv_segment_ids", &self.kv_segment_ids, kv_rows)?,
            q_positions: pick("q_positions", &self.q_positions, q_rows)?,
            kv_positions: pick("kv_positions", &self.kv_positions, kv_rows)?,
            attention_mask: self
                .attention_mask
                .as_ref()
                .map(|mask| mask.select_queries(q_rows))
                .transpose()?,
            cum_seqlens_q: lens("cum_seqlens_q", &self.cum_seqlens_q)?,
            cum_seqlens_k: lens("cum_seqlens_k", &self.cum_seqlens_k)?,
        })
    }
}

/// Returns the number of arithmetic runs of a list, found greedily.
fn runs(numbers: impl Iterator<Item = i64>) -> u64 {
    let mut runs = 0;
    let mut last = 0i64;
    let mut step = None;
    for number in numbers {
        let difference = number.checked_sub(last);
        if runs == 0 || (step.is_some() && step != difference) || difference.is_none() {
            runs += 1;
            step = None;
        } else {
            step = difference;
        }
        last = number;
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Local shapes of one rank: 3 of 8 queries, 4 of 8 keys.
    const DIMS: Dims = Dims {
        batch: 2,
        q_len: 8,
        kv_len: 8,
        q_heads: 4,
        kv_heads: 2,
        head_dim: 16,
        value_dim: 16,
    };

    fn refused(dims: &Dims, batch: &Batch, rows: (usize, usize)) -> (String, String, String) {
        match batch.validate(dims, rows.0, rows.1) {
            Err(Error::InvalidArgument { argument, got, want }) => (argument, got, want),
            other => panic!("{batch:?} gave {other:?}"),
        }
    }

    fn zeros<T: Clone + Default>(b: usize, rows: usize) -> Option<Array2<T>> {
        Some(Array2::from_elem((b, rows), T::default()))
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
            let layout = crate::Layout::Contiguous;
            let (alignment, side) = (crate::Alignment::TopLeft, crate::Side::Q);
            let shard = crate::Shard::local(&dims, alignment, &layout, side, 0, 1, &batch);
            let runs = shard.segments[0].runs().len() as u64;
            assert_eq!(batch.planning_bytes(), runs * PLANNING_BYTES_PER_RUN, "{ids:?}");
        }
    }

    #[test]
    fn a_batch_that_fits_is_accepted() {
        let none = Batch::default();
        assert_eq!(none.validate(&DIMS, 3, 4), Ok(()));
        let all = Batch {
            q_segment_ids: Some(Array2::from_elem((2, 3), -7)),
            kv_segment_ids: zeros(2, 4),
            q_positions: Some(Array2::from_elem((2, 3), i64::MAX / 4)),
            kv_positions: Some(Array2::from_elem((2, 4), -(i64::MAX / 4))),
            attention_mask: Some(DenseMask::from_fn([1, 4, 3, 8], |_| true)),
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
            let cases = [
                (
                    "q_segment_ids",
                    Batch {
                        q_segment_ids: zeros(b, q),
                        kv_segment_ids: zeros(2, 4),
                        ..Batch::default()
                    },
                ),
                (
                    "kv_segment_ids",
                    Batch {
                        q_segment_ids: zeros(2, 3),
                        kv_segment_ids: zeros(b, k),
                        ..Batch::default()
                    },
                ),
                ("q_positions", Batch { q_positions: zeros(b, q), ..Batch::default() }),
                ("kv_positions", Batch { kv_positions: zeros(b, k), ..Batch::default() }),
            ];
            for (name, batch) in cases {
                let (argument, got, want) = refused(&DIMS, &batch, (3, 4));
                let rows = if name.starts_with("q_") { ((b, q), (2, 3)) } else { ((b, k), (2, 4)) };
                assert_eq!(
                    (argument.as_str(), got, want),
                    (name, format!("{:?}", rows.0), format!("{:?}", rows.1))
                );
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
            assert_eq!(refused(&DIMS, &batch, (3, 4)).0, "attention_mask", "{shape:?}");
        }
    }

    #[test]
    fn positions_that_leave_no_room_for_arithmetic_are_refused() {
        for position in [i64::MAX, i64::MIN, i64::MAX / 4 + 1, -(i64::MAX / 4) - 1] {
            let positions = Some(Array2::from_elem((2, 3), position));
            let (argument, got, _) = refused(
                &DIMS,
                &Batch { q_positions: positions.clone(), ..Batch::default() },
                (3, 4),
            );
            assert_eq!((argument.as_str(), got), ("q_positions", position.to_string()));
            assert_eq!(
                refused(&DIMS, &Batch { kv_positions: positions, ..Batch::default() }, (3, 3)).0,
                "kv_positions"
            );
        }
    }

    #[test]
    fn what_is_given_on_one_side_only_needs_equal_lengths() {
        let q_only = Batch { q_segment_ids: zeros(2, 3), ..Batch::default() };
        let kv_only = Batch { kv_segment_ids: zeros(2, 3), ..Batch::default() };
        assert_eq!(q_only.validate(&DIMS, 3, 3), Ok(()));
        assert_eq!(kv_only.validate(&DIMS, 3, 3), Ok(()));
        // local lengths differ, global lengths differ
        let longer = Dims { kv_len: 9, ..DIMS };
        assert_eq!(refused(&DIMS, &q_only, (3, 4)).0, "q_segment_ids");
        assert_eq!(refused(&longer, &q_only, (3, 3)).0, "q_segment_ids");
        assert_eq!(refused(&longer, &kv_only, (3, 3)).0, "kv_segment_ids");
        let (q_lens, k_lens) = (
            Batch { cum_seqlens_q: Some(vec![0, 4]), ..Batch::default() },
            Batch { cum_seqlens_k: Some(vec![0, 4]), ..Batch::default() },
        );
        assert_eq!(q_lens.validate(&DIMS, 3, 4).and(k_lens.validate(&DIMS, 3, 4)), Ok(()));
        assert_eq!(refused(&longer, &q_lens, (3, 4)).0, "cum_seqlens_q");
        assert_eq!(refused(&longer, &k_lens, (3, 4)).0, "cum_seqlens_k");
    }

    #[test]
    fn packed_lengths_without_meaning_are_refused() {
        let bad: [(Vec<i64>, &str); 6] = [
            (vec![], "nothing"),
            (vec![1, 4], "1 as the first number"),
            (vec![-1, 4], "-1 as the first number"),
            (vec![0, 5, 4], "4 after 5"),
            (vec![0, 4, 9], "9 as the last number"),
            (vec![0, -1], "-1 after 0"),
        ];
        for (lens, says) in bad {
            let (argument, got, _) = refused(
                &DIMS,
                &Batch { cum_seqlens_q: Some(lens.clone()), ..Batch::default() },
                (3, 4),
            );
            assert_eq!((argument.as_str(), got.as_str()), ("cum_seqlens_q", says));
            assert_eq!(
                refused(&DIMS, &Batch { cum_seqlens_k: Some(lens), ..Batch::default() }, (3, 4)).0,
                "cum_seqlens_k"
            );
        }
        let unlike = Batch {
            cum_seqlens_q: Some(vec![0, 4, 8]),
            cum_seqlens_k: Some(vec![0, 8]),
            ..Batch::default()
        };
        assert_eq!(
            refused(&DIMS, &unlike, (3, 4)),
            ("cum_seqlens_k".into(), "1 sequences".into(), "2 sequences, as cum_seqlens_q".into())
        );
    }

    #[test]
    fn ids_of_one_side_do_not_serve_where_a_layout_deals_the_sides_differently() {
        use crate::{CustomLayout, Runs};
        let custom = CustomLayout {
            q: vec![Runs::counting(0, 4), Runs::counting(4, 4)],
            kv: vec![Runs::counting(4, 4), Runs::counting(0, 4)],
        };
        let custom = Layout::Custom(std::sync::Arc::new(custom));
        let batch = Batch { kv_segment_ids: zeros(2, 4), ..Batch::default() };
        assert_eq!(batch.validate_layout(&DIMS, &Layout::Zigzag, 1, 2), Ok(()));
        assert!(
            matches!(batch.validate_layout(&DIMS, &custom, 1, 2), Err(Error::InvalidArgument { argument, .. }) if argument == "kv_segment_ids")
        );
        let both = Batch { q_segment_ids: zeros(2, 4), ..batch };
        assert_eq!(both.validate_layout(&DIMS, &custom, 1, 2), Ok(()));
    }

    #[test]
    fn a_share_has_the_rows_it_was_asked_for() {
        let numbers = |first: i64| {
            Some(Array2::from_shape_fn((2, 8), |(b, i)| first + 10 * b as i64 + i as i64))
        };
        let batch = Batch {
            q_positions: numbers(0),
            kv_segment_ids: numbers(100).map(|ids| ids.mapv(|id| id as i32)),
            attention_mask: Some(DenseMask::from_fn([1, 2, 8, 8], |[_, h, q, k]| h + q == k)),
            ..Batch::default()
        };
        let share = batch.select(&[6, 1], &[3]).unwrap();
        assert_eq!(share.q_positions, Some(ndarray::array![[6, 1], [16, 11]]));
        assert_eq!(share.kv_segment_ids, Some(ndarray::array![[103], [113]]));
        let seen = |head| {
            share
                .attention_mask
                .as_ref()
                .map(|mask| [mask.line(0, head, 0)[0], mask.line(1, head, 1)[0]])
        };
        assert_eq!((seen(0), seen(1)), (Some([1 << 6, 1 << 1]), Some([1 << 7, 1 << 2])));
    }
}
