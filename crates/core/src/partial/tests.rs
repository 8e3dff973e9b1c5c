//! The laws of a commutative monoid for f32 and f64, including infinite and extreme maxima.

use proptest::prelude::*;

use super::*;

const DIM: usize = 3;

/// Returns partial results with maxima that are near or far apart. A maximum of −∞ has acc = 0 and
/// sum = 0.
fn partial<T: Element<Accumulator = T>>() -> impl Strategy<Value = Partial<T>> {
    let max = prop_oneof![
        8 => -30.0..30.0f64,
        2 => -1e4..1e4f64,
        1 => Just(f64::NEG_INFINITY),
        1 => Just(0.0)
    ];
    (prop::collection::vec(-9.0..9.0f64, DIM), max, 1.0..70.0f64).prop_map(|(acc, max, sum)| {
        let is_empty = max == f64::NEG_INFINITY;
        let unless_empty = |x: f64| T::from_f64(if is_empty { 0.0 } else { x });
        Partial::new(
            acc.iter().map(|&x| unless_empty(x * sum)).collect(),
            T::from_f64(max),
            unless_empty(sum),
        )
    })
}

fn numbers<T: Element<Accumulator = T>>(partial: &Partial<T>) -> Vec<f64> {
    partial.acc().iter().chain([&partial.max(), &partial.sum()]).map(|x| x.to_f64()).collect()
}

fn bits<T: Element<Accumulator = T>>(partial: &Partial<T>) -> Vec<u64> {
    numbers(partial).into_iter().map(f64::to_bits).collect()
}

fn epsilon<T: Element>() -> f64 {
    if T::DTYPE == crate::DType::F64 { f64::EPSILON } else { f64::from(f32::EPSILON) }
}

fn laws<T: Element<Accumulator = T>>(
    a: &Partial<T>,
    b: &Partial<T>,
    c: &Partial<T>,
) -> Result<(), TestCaseError> {
    // identity: exact from both sides, with an empty acc or one of zeros
    let with_zeros =
        Partial::new(vec![T::from_f64(0.0); DIM], T::from_f64(f64::NEG_INFINITY), T::from_f64(0.0));
    for identity in [Partial::identity(), with_zeros] {
        prop_assert_eq!(&a.merge(&identity), a);
        prop_assert_eq!(&identity.merge(a), a);
    }
    // commutativity: bit for bit
    let ab = a.merge(b);
    prop_assert_eq!(bits(&ab), bits(&b.merge(a)));
    // no NaN from finite numbers and −∞
    prop_assert!(numbers(&ab).iter().all(|x| !x.is_nan()), "{a:?} + {b:?} = {ab:?}");
    let (out, lse) = ab.out();
    prop_assert!(out.iter().chain([&lse]).all(|x| !x.to_f64().is_nan()), "{out:?} {lse:?}");
    // associativity: 4 ulp of the sum of magnitudes
    let left = ab.merge(c);
    let right = a.merge(&b.merge(c));
    prop_assert_eq!(left.max(), right.max());
    let magnitudes = |partial: &Partial<T>| {
        let acc = partial.acc().iter().map(|x| T::from_f64(x.to_f64().abs())).collect();
        Partial::new(acc, partial.max(), partial.sum())
    };
    let most = magnitudes(a).merge(&magnitudes(b)).merge(&magnitudes(c));
    for ((x, y), most) in numbers(&left).into_iter().zip(numbers(&right)).zip(numbers(&most)) {
        prop_assert!(x == y || (x - y).abs() <= 4.0 * epsilon::<T>() * most, "{x} {y} of {most}");
    }
    Ok(())
}

proptest! {
    #[test]
    fn f64_satisfies_the_laws((a, b, c) in (partial::<f64>(), partial::<f64>(), partial::<f64>())) {
        laws(&a, &b, &c)?;
    }

    #[test]
    fn f32_satisfies_the_laws((a, b, c) in (partial::<f32>(), partial::<f32>(), partial::<f32>())) {
        laws(&a, &b, &c)?;
    }

    #[test]
    fn final_rows_merge_to_the_softmax_of_all_keys(
        scores in prop::collection::vec(-20.0..20.0f64, 1..12),
        cut in 0usize..12,
    ) {
        let cut = cut.min(scores.len());
        // the value of each key is its score
        let attend = |scores: &[f64]| {
            let sum: f64 = scores.iter().map(|x| x.exp()).sum();
            let acc = scores.iter().map(|x| x.exp() * x).sum::<f64>();
            let out = if scores.is_empty() { 0.0 } else { acc / sum };
            Partial::from_out(vec![out], sum.ln())
        };
        let (whole, lse) = attend(&scores).out();
        let (merged, merged_lse) = attend(&scores[..cut]).merge(&attend(&scores[cut..])).out();
        prop_assert!((whole[0] - merged[0]).abs() < 1e-13, "{whole:?} {merged:?}");
        prop_assert!((lse - merged_lse).abs() < 1e-13, "{lse} {merged_lse}");
    }

    #[test]
    fn single_keys_merged_in_any_order_give_the_softmax(
        keys in prop::collection::vec((-50.0..50.0f64, -3.0..3.0f64), 1..20),
        order in any::<u64>(),
    ) {
        let one = |&(score, value): &(f64, f64)| Partial::new(vec![value], score, 1.0);
        let mut parts: Vec<_> = keys.iter().map(one).collect();
        // merge neighbours in a random order with the seed `order`
        let mut draw = order;
        while parts.len() > 1 {
            draw = draw.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let at = (draw >> 33) as usize % (parts.len() - 1);
            let right = parts.remove(at + 1);
            parts[at] = right.merge(&parts[at]);
        }
        let max = keys.iter().map(|key| key.0).fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = keys.iter().map(|key| (key.0 - max).exp()).sum();
        let acc: f64 = keys.iter().map(|key| (key.0 - max).exp() * key.1).sum();
        let (out, lse) = parts[0].out();
        prop_assert!((out[0] - acc / sum).abs() < 1e-13);
        prop_assert!((lse - max - sum.ln()).abs() < 1e-13);
    }
}

#[test]
fn rows_without_keys_merge_without_nan() {
    let empty =
        Partial::<f32>::identity().merge(&Partial::from_out(vec![0.0; 2], f32::NEG_INFINITY));
    assert_eq!(empty, Partial::new(vec![0.0; 2], f32::NEG_INFINITY, 0.0));
    assert_eq!(empty.out(), (vec![0.0; 2], f32::NEG_INFINITY));
    let empty = Partial::<f64>::identity().merge(&Partial::identity());
    assert_eq!(empty.out(), (vec![], f64::NEG_INFINITY));
}

#[test]
fn nan_propagates() {
    let good = Partial::new(vec![1.0, 2.0], 0.5, 1.0);
    // from a score to the whole row; from an element of a value to that element
    let score = Partial::new(vec![f64::NAN, f64::NAN], f64::NAN, f64::NAN);
    let value = Partial::new(vec![f64::NAN, 1.0], -3.0, 1.0);
    let sum = Partial::new(vec![1.0, 1.0], -3.0, f64::NAN);
    for (bad, want) in
        [(score, [true, true, true]), (value, [true, false, false]), (sum, [true, true, true])]
    {
        for merged in [
            bad.merge(&good),
            good.merge(&bad),
            bad.merge(&Partial::identity()),
            Partial::identity().merge(&bad),
        ] {
            let (out, lse) = merged.out();
            assert_eq!([out[0].is_nan(), out[1].is_nan(), lse.is_nan()], want, "{merged:?}");
            // acc is not divided by the sum: it is NaN only if the score or the value was
            let kept = if bad.acc()[0].is_nan() { want } else { [false; 3] };
            let acc = merged.acc();
            assert_eq!([acc[0].is_nan(), acc[1].is_nan()], kept[..2], "{merged:?}");
        }
    }
    assert!(Partial::from_out(vec![f64::NAN], f64::NEG_INFINITY).merge(&good).acc()[0].is_nan());
    assert!(Partial::from_out(vec![1.0], f64::NAN).merge(&good).max().is_nan());
}

#[test]
fn finite_sums_merge_without_nan_at_infinite_and_extreme_maxima() {
    let maxima = [f64::NEG_INFINITY, -1e308, -1.0, 0.0, 1e308, f64::INFINITY];
    for a in maxima {
        for b in maxima {
            let merged = Partial::new(vec![1.0], a, 1.0).merge(&Partial::new(vec![-2.0], b, 2.0));
            assert_eq!(merged.max(), a.max(b));
            assert!(!merged.acc()[0].is_nan() && merged.sum() >= 1.0, "{a} {b} {merged:?}");
        }
    }
}
