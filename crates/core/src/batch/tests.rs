//! Accepted batches, rejected batches with the arguments that errors name, and parts of ranks.

use super::*;

/// Global lengths of the tests; the tested rank owns 3 of 8 queries and 4 of 8 keys.
const DIMS: Dims =
    Dims { batch: 2, q_len: 8, kv_len: 8, q_heads: 4, kv_heads: 2, head_dim: 16, value_dim: 16 };

/// Returns argument, got and want of the error for a rank with `q_rows` and `kv_rows`.
fn refused(dims: &Dims, batch: &Batch, [q_rows, kv_rows]: [usize; 2]) -> (String, String, String) {
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
            let (argument, got, want) = refused(&DIMS, &batch, [3, 4]);
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
        let batch =
            Batch { attention_mask: Some(DenseMask::from_fn(shape, |_| true)), ..Batch::default() };
        assert_eq!(refused(&DIMS, &batch, [3, 4]).0, "attention_mask", "{shape:?}");
    }
}

#[test]
fn positions_near_the_limits_of_i64_are_refused() {
    for position in [i64::MAX, i64::MIN, i64::MAX / 4 + 1, -(i64::MAX / 4) - 1] {
        let positions = Some(Array2::from_elem((2, 3), position));
        let (argument, got, _) =
            refused(&DIMS, &Batch { q_positions: positions.clone(), ..Batch::default() }, [3, 4]);
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
    let numbers =
        |first: i64| Some(Array2::from_shape_fn((2, 8), |(b, i)| first + 10 * b as i64 + i as i64));
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
        let shard = crate::Shard::of_rows(&dims, crate::Alignment::TopLeft, Side::Q, rows, &batch);
        let runs = shard.segments[0].runs().len() as u64;
        assert_eq!(batch.planning_bytes(), runs * PLANNING_BYTES_PER_RUN, "{ids:?}");
    }
}
