//! Every mask's predicate compared with its lowering to intervals and with its formula.

use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::{DenseMask, Error};

const FAR: i64 = i64::MAX / 4;

fn position() -> impl Strategy<Value = i64> {
    prop_oneof![8 => -12i64..24, 1 => -FAR..=FAR, 1 => Just(FAR), 1 => Just(-FAR)]
}

fn offset() -> impl Strategy<Value = i64> {
    prop_oneof![
        4 => Just(0i64),
        6 => -9i64..9,
        1 => any::<i64>(),
        1 => Just(i64::MAX),
        1 => Just(i64::MIN)
    ]
}

fn size() -> impl Strategy<Value = u64> {
    prop_oneof![8 => 0u64..14, 1 => any::<u64>(), 1 => Just(u64::MAX)]
}

fn leaf() -> impl Strategy<Value = SharedMask> {
    let shared = |mask: Arc<dyn Mask>| mask;
    prop_oneof![
        Just(shared(Arc::new(Everything))),
        offset().prop_map(move |offset| shared(Arc::new(Causal { offset }))),
        (prop::option::of(size()), prop::option::of(size()), size(), offset()).prop_map(
            move |(left, right, first_visible, offset)| shared(Arc::new(Window {
                left,
                right,
                first_visible,
                offset
            }))
        ),
        size().prop_map(move |size| shared(Arc::new(ChunkedCausal { size: size.max(1) }))),
        size().prop_map(move |len| shared(Arc::new(Prefix { len }))),
        (2u64..5, 2u64..6, 1u64..3, any::<bool>()).prop_map(
            move |(rows, columns, size, circle)| {
                let last = Axis { periodic: circle, ..Axis::new(columns, 2) };
                let axes = vec![Axis::new(rows, size), last];
                shared(Arc::new(Neighborhood { axes, edge: Edge::Shift }))
            }
        ),
        (2i64..5).prop_map(move |n| shared(Arc::new(Predicate::of_positions(
            format!("every {n}th"),
            move |i, j| (i - j) % n == 0
        )))),
    ]
}

/// Returns any mask, with up to three levels of combinations.
pub(crate) fn any_mask() -> impl Strategy<Value = SharedMask> {
    leaf().prop_recursive(3, 12, 3, |inner| {
        let shared = |mask: Arc<dyn Mask>| mask;
        prop_oneof![
            (inner.clone(), inner.clone()).prop_map(|(a, b)| and(a, b)),
            (inner.clone(), inner.clone()).prop_map(|(a, b)| or(a, b)),
            prop::collection::vec(inner.clone(), 0..4)
                .prop_map(move |masks| shared(Arc::new(And(masks)))),
            prop::collection::vec(inner.clone(), 0..4)
                .prop_map(move |masks| shared(Arc::new(Or(masks)))),
            prop::collection::vec(inner, 1..3)
                .prop_map(move |masks| shared(Arc::new(PerHead(masks)))),
        ]
    })
}

fn pair(head: usize, i: i64, j: i64) -> (Query, Key) {
    (Query { batch: 0, head, row: 0, position: i }, Key { row: 0, position: j })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn the_lowering_equals_the_predicate(
        mask in any_mask(),
        head in 0usize..2,
        i in position(),
        keys in prop::collection::vec(position(), 40),
    ) {
        let (query, _) = pair(head, i, 0);
        let intervals = mask.intervals(&query);
        let bound = mask.bound(&query);
        // also near the query and near the ends of the bound, to detect off-by-one errors
        let near_query = (-2..=2).map(|d| i + d);
        let near_ends = bound
            .ranges()
            .iter()
            .flat_map(|range| [range.start, range.end])
            .flat_map(|end| (-1..=1).map(move |d| end.saturating_add(d)))
            .filter(|end| end.unsigned_abs() <= FAR as u64);
        for j in keys.into_iter().chain(near_ends).chain(near_query) {
            let (query, key) = pair(head, i, j);
            let visible = mask.visible(&query, &key);
            if let Some(intervals) = &intervals {
                prop_assert_eq!(visible, intervals.contains(j), "{:?} i={} j={}", &mask, i, j);
            }
            prop_assert!(!visible || bound.contains(j), "{:?} i={} j={}", &mask, i, j);
        }
    }

    #[test]
    fn and_or_are_logical(a in any_mask(), b in any_mask(), i in position(), j in position()) {
        let (query, key) = pair(0, i, j);
        let x = a.visible(&query, &key);
        let y = b.visible(&query, &key);
        prop_assert_eq!(and(a.clone(), b.clone()).visible(&query, &key), x && y);
        prop_assert_eq!(or(a, b).visible(&query, &key), x || y);
    }

    /// The formulas of the table in `docs/semantics.md`, in 128 bits so that no number is clamped.
    #[test]
    fn masks_equal_their_formulas(
        i in position(),
        j in position(),
        offset in offset(),
        left in size(),
        right in size(),
        n in size(),
    ) {
        let (query, key) = pair(0, i, j);
        let p = i128::from(i);
        let k = i128::from(j);
        let centre = p + i128::from(offset);
        let from = centre - i128::from(left);
        let to = centre + i128::from(right);
        prop_assert_eq!(Causal { offset }.visible(&query, &key), k <= centre);
        let window = |left, right, first_visible| {
            Window { left, right, first_visible, offset }.visible(&query, &key)
        };
        let first = i128::from(n);
        prop_assert_eq!(window(Some(left), Some(right), 0), from <= k && k <= to);
        prop_assert_eq!(window(None, Some(right), 0), k <= to);
        prop_assert_eq!(window(Some(left), None, 0), from <= k);
        prop_assert_eq!(
            window(Some(left), Some(right), n),
            (from <= k && k <= to) || (n > 0 && k < first)
        );
        let size = i128::from(n.max(1));
        prop_assert_eq!(
            ChunkedCausal { size: n.max(1) }.visible(&query, &key),
            p.div_euclid(size) == k.div_euclid(size) && k <= p
        );
        prop_assert_eq!(Prefix { len: n }.visible(&query, &key), k < first || k <= p);
    }
}

#[test]
fn combinations_are_flat_and_omit_everything() {
    let causal: SharedMask = Arc::new(Causal::default());
    let window: SharedMask = Arc::new(Window::new(Some(3), None));
    let everything: SharedMask = Arc::new(Everything);
    let text = |mask: SharedMask| format!("{mask:?}");
    assert_eq!(text(and(everything.clone(), causal.clone())), text(causal.clone()));
    assert_eq!(text(and(everything.clone(), everything.clone())), "Everything");
    assert_eq!(text(or(causal.clone(), everything)), "Everything");
    let both = and(causal.clone(), window.clone());
    assert_eq!(
        text(and(both.clone(), causal.clone())),
        text(Arc::new(And(vec![causal.clone(), window.clone(), causal.clone()])))
    );
    let either = or(causal.clone(), window.clone());
    assert_eq!(
        text(or(causal.clone(), either.clone())),
        text(Arc::new(Or(vec![causal.clone(), causal, window])))
    );
    // a disjunction within a conjunction is not merged
    assert_eq!(text(and(both, either.clone())).matches("Or(").count(), 1);
}

#[test]
fn a_mask_without_intervals_has_a_bound() {
    let odd: SharedMask = Arc::new(Predicate::of_positions("odd", |i, j| (i + j) % 2 != 0));
    let causal: SharedMask = Arc::new(Causal::default());
    let (query, _) = pair(0, 7, 0);
    let both = and(odd.clone(), causal.clone());
    assert_eq!(both.intervals(&query), None);
    assert_eq!(both.bound(&query), KeyIntervals::one(i64::MIN, 8));
    let nothing: SharedMask = Arc::new(Or(Vec::new()));
    assert_eq!(and(both, nothing).intervals(&query), Some(KeyIntervals::nothing()));
    let all: SharedMask = Arc::new(Prefix { len: u64::MAX });
    assert_eq!(or(odd, all).intervals(&query), Some(KeyIntervals::everything()));
}

#[test]
fn a_dense_mask_is_indexed_by_row_number() {
    let bits = DenseMask::from_fn([2, 1, 3, 70], |[b, _, q, k]| (b + q + k) % 3 == 0);
    let mask = Dense(Arc::new(bits));
    for (b, q, k) in [(0, 0, 0), (1, 2, 69), (1, 0, 68), (0, 1, 64)] {
        let query = Query { batch: b, head: 5, row: q as u64, position: -100 };
        assert_eq!(
            mask.visible(&query, &Key { row: k as u64, position: 1 << 40 }),
            (b + q + k) % 3 == 0
        );
    }
    assert!(
        mask.per_batch()
            && !mask.per_head()
            && mask.intervals(&Query { batch: 0, head: 0, row: 0, position: 0 }).is_none()
    );
}

#[test]
fn invalid_parameters_are_refused() {
    let dims = Dims { kv_heads: 2, ..Dims::new(2, 8, 4, 16) };
    let shared = |mask: ChunkedCausal| -> SharedMask { Arc::new(mask) };
    let dense =
        |shape| -> SharedMask { Arc::new(Dense(Arc::new(DenseMask::from_fn(shape, |_| true)))) };
    let argument = |mask: SharedMask| match mask.validate(&dims) {
        Err(Error::InvalidArgument { argument, .. }) => Some(argument),
        other => panic!("{mask:?} gave {other:?}"),
    };
    let bad = shared(ChunkedCausal { size: 0 });
    assert_eq!(argument(bad.clone()).as_deref(), Some("chunk_size"));
    // also inside another mask
    assert_eq!(
        argument(and(bad.clone(), Arc::new(Causal::default()))).as_deref(),
        Some("chunk_size")
    );
    assert_eq!(
        argument(or(bad.clone(), Arc::new(Causal::default()))).as_deref(),
        Some("chunk_size")
    );
    assert_eq!(argument(Arc::new(PerHead(vec![bad; 4]))).as_deref(), Some("chunk_size"));
    assert_eq!(
        argument(Arc::new(PerHead(vec![shared(ChunkedCausal { size: 2 }); 3]))).as_deref(),
        Some("mask")
    );
    for shape in [[3, 1, 8, 8], [1, 2, 8, 8], [1, 1, 7, 8], [1, 1, 8, 9]] {
        assert_eq!(argument(dense(shape)).as_deref(), Some("mask"), "{shape:?}");
    }
    for shape in [[1, 1, 8, 8], [2, 4, 8, 8], [2, 1, 8, 8], [1, 4, 8, 8]] {
        assert_eq!(dense(shape).validate(&dims), Ok(()));
    }
}

#[test]
fn closures_are_distinguished_by_name() {
    let a = Predicate::of_positions("a", |_, _| true);
    let b = Predicate::of_pairs("b", |query, _| query.head == 0);
    assert_ne!(format!("{a:?}"), format!("{b:?}"));
    assert!(!a.per_head() && !a.per_batch() && b.per_head() && b.per_batch());
}
