//! A covering array: few configurations in which any two values of different factors occur together
//! at least once.
//!
//! | factor | values |
//! |---|---|
//! | mask | the families of `matrix.rs` |
//! | layout | contiguous, zigzag, striped, random, last rank without rows, chosen from the mask |
//! | dims | raggedness, GQA, odd head dims, batch, fewer rows than ranks |
//! | dtype | f32, f64, bf16, f16 |
//! | feature | one option that changes the result, or none |
//! | backward | one pass or two, with or without a gradient of lse |
//! | route | chosen from the mask, relay up, relay down, direct |
//! | receive ahead | by default, by 2 steps, by 3 |
//!
//! Every configuration runs forward and backward. A two-pass backward is never combined with a
//! dense mask or with a bias that has a query axis, because several ranks refuse it.
//!
//! # Source
//! Cohen et al. 1997 (AETG): one configuration after the other, each started with an uncovered pair
//! and completed greedily.

use std::sync::Arc;

use annulus_core::{
    Alibi, Alignment, BackwardMode, BiasOrder, DType, Dims, Dropout, Runs, SinkShape, Spec,
};
use annulus_plan::{CustomLayout, Layout, Route};

use super::{LAYOUTS, Verdict, examine, judge, matrix};
use crate::{Case, Draw, Setting, Subject};

/// The factors, with their number of values.
const FACTORS: [(&str, usize); 8] = [
    ("mask", matrix::FAMILIES),
    ("layout", 6),
    ("dims", DIMS.len()),
    ("dtype", 4),
    ("feature", FEATURES.len()),
    ("backward", 4),
    ("route", 4),
    ("receive ahead", 3),
];
const MASK: usize = 0;
const FEATURE: usize = 4;
const BACKWARD: usize = 5;

/// Dims of batch, lengths, heads and head dims that differ in raggedness and GQA.
const DIMS: [Dims; 6] = [
    dims(1, [17, 17], [2, 1], [7, 5]),
    dims(2, [24, 24], [4, 2], [8, 8]),
    dims(1, [33, 12], [1, 1], [4, 4]),
    dims(2, [9, 33], [3, 3], [1, 2]),
    dims(1, [1, 5], [2, 2], [16, 2]),
    dims(1, [40, 40], [2, 1], [4, 4]),
];

const fn dims(
    batch: usize,
    [q_len, kv_len]: [usize; 2],
    [q_heads, kv_heads]: [usize; 2],
    [head_dim, value_dim]: [usize; 2],
) -> Dims {
    Dims { batch, q_len, kv_len, q_heads, kv_heads, head_dim, value_dim }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Feature {
    None,
    BottomRight,
    BiasOverQueries,
    BiasPerPair,
    Alibi,
    SharedSinks,
    SinksPerHead,
    SoftCap,
    Dropout,
    Unnormalized,
    RoundedLogits,
}

const FEATURES: [Feature; 11] = [
    Feature::None,
    Feature::BottomRight,
    Feature::BiasOverQueries,
    Feature::BiasPerPair,
    Feature::Alibi,
    Feature::SharedSinks,
    Feature::SinksPerHead,
    Feature::SoftCap,
    Feature::Dropout,
    Feature::Unnormalized,
    Feature::RoundedLogits,
];

/// One value of every factor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Configuration {
    values: [usize; FACTORS.len()],
}

impl Configuration {
    /// Returns the case; the same configuration gives the same case.
    pub fn case(&self) -> Case {
        let [mask, _, dims, dtype, feature, backward, ..] = self.values;
        let draw =
            &mut Draw::new(self.values.iter().fold(1, |seed, &value| seed * 64 + value as u64));
        let dims = DIMS[dims];
        let feature = FEATURES[feature];
        let Dims { batch, q_len, kv_len, q_heads, .. } = dims;
        let mut spec = Spec::new(dims, DType::F64);
        match feature {
            Feature::None => {}
            Feature::BottomRight => spec.alignment = Alignment::BottomRight,
            Feature::BiasOverQueries => spec.bias = Some([1, q_heads, 1, kv_len]),
            Feature::BiasPerPair => spec.bias = Some([batch, 1, q_len, kv_len]),
            Feature::Alibi => spec.bias_function = Some(Arc::new(Alibi::published(q_heads))),
            Feature::SharedSinks => spec.sinks = Some(SinkShape { per_head: false, count: 2 }),
            Feature::SinksPerHead => spec.sinks = Some(SinkShape { per_head: true, count: 1 }),
            // with a bias, whose order would otherwise have no effect
            Feature::SoftCap => {
                spec.soft_cap = Some(2.0);
                spec.bias_order = BiasOrder::BeforeSoftCap;
                spec.bias = Some([1, 1, 1, kv_len]);
            }
            Feature::Dropout => {
                spec.dropout = Some(Dropout { probability: 0.4, seed: draw.bits() })
            }
            Feature::Unnormalized => spec.normalize = false,
            Feature::RoundedLogits => spec.logits_dtype = DType::Bf16,
        }
        if backward % 2 == 1 {
            spec.backward = BackwardMode::TwoPass;
        }
        let mut case = Case::new(self.to_string(), spec, matrix::masks(mask, &dims, draw), draw);
        if feature == Feature::RoundedLogits {
            // multiples of 1/4 have exact products and sums: no order of summation changes the
            // rounding of a logit
            [&mut case.q, &mut case.k]
                .into_iter()
                .for_each(|tensor| tensor.mapv_inplace(|x| (4.0 * x).round() / 4.0));
        }
        if backward >= 2 {
            case.dlse = Some(draw.tensor((batch, q_heads, q_len)));
        }
        case.batch = matrix::batch(mask, &dims, draw);
        case.in_dtype(matrix::DTYPES[dtype])
    }

    /// Returns its setting over `ranks` ranks; the same configuration gives the same setting.
    pub fn setting(&self, ranks: usize) -> Setting {
        let [_, layout, dims, .., route, receive_ahead] = self.values;
        let dims = DIMS[dims];
        let layout = match layout {
            3 => Some(matrix::random_layout(&dims, ranks, &mut Draw::new(ranks as u64))),
            4 => Some(last_rank_empty(&dims, ranks)),
            5 => None,
            named => Some(LAYOUTS[named].clone()),
        };
        Setting {
            ranks,
            layout,
            route: [None, Some(Route::RelayUp), Some(Route::RelayDown), Some(Route::Direct)][route],
            receive_ahead: [None, Some(2), Some(3)][receive_ahead],
            ..Setting::ALONE
        }
    }
}

impl std::fmt::Display for Configuration {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let named =
            FACTORS.iter().zip(self.values).map(|((name, _), value)| format!("{name} {value}"));
        formatter.write_str(&named.collect::<Vec<_>>().join(", "))
    }
}

/// Distributes all rows over the ranks before the last, which owns none.
fn last_rank_empty(dims: &Dims, ranks: usize) -> Layout {
    let holders = (ranks - 1).max(1);
    let deal = |len: usize| {
        let runs = |rank| {
            let edge = |holder: usize| (len * holder / holders) as i64;
            if rank < holders { (edge(rank)..edge(rank + 1)).collect() } else { Runs::new() }
        };
        (0..ranks).map(runs).collect()
    };
    Layout::Custom(Arc::new(CustomLayout { q: deal(dims.q_len), kv: deal(dims.kv_len) }))
}

/// True if two values of different factors may be combined, the lower factor first.
fn may_meet(factor: usize, value: usize, other_factor: usize, other: usize) -> bool {
    let two_pass = other_factor == BACKWARD && other % 2 == 1;
    let refused = (factor == MASK && value == matrix::DENSE_BATCH)
        || (factor == FEATURE && FEATURES[value] == Feature::BiasPerPair);
    !(two_pass && refused)
}

/// Returns configurations that cover every allowed pair of values of different factors.
pub fn pairwise() -> Vec<Configuration> {
    let factors = FACTORS.len();
    // met[a][x][b][y], a < b: true if value x of factor a was combined with value y of factor b, or
    // may not be
    let row = |a: usize, x: usize| {
        (0..factors)
            .map(|b| (0..FACTORS[b].1).map(|y| b <= a || !may_meet(a, x, b, y)).collect())
            .collect()
    };
    let mut met: Vec<Vec<Vec<Vec<bool>>>> =
        (0..factors).map(|a| (0..FACTORS[a].1).map(|x| row(a, x)).collect()).collect();
    let draw = &mut Draw::new(7);
    let mut all = Vec::new();
    while let Some([(a, x), (b, y)]) = first_missing(&met) {
        let mut best: Option<(usize, [Option<usize>; FACTORS.len()])> = None;
        for _ in 0..20 {
            let mut values = [None; FACTORS.len()];
            (values[a], values[b]) = (Some(x), Some(y));
            for factor in draw.permutation(factors) {
                if values[factor].is_none() {
                    values[factor] = fill(&met, &values, factor, draw);
                }
            }
            let gain = pairs(&values).filter(|&[(a, x), (b, y)]| !met[a][x][b][y]).count();
            if values.iter().all(Option::is_some) && best.is_none_or(|(most, _)| gain > most) {
                best = Some((gain, values));
            }
        }
        // every uncovered pair can be completed: values that exclude each other leave others of
        // both factors
        let Some((_, values)) = best else { break };
        pairs(&values).for_each(|[(a, x), (b, y)]| met[a][x][b][y] = true);
        all.push(Configuration { values: values.map(Option::unwrap_or_default) });
    }
    all
}

type Value = (usize, usize);

fn first_missing(met: &[Vec<Vec<Vec<bool>>>]) -> Option<[Value; 2]> {
    let of = |a: usize, x: usize| {
        (0..FACTORS.len()).flat_map(move |b| (0..FACTORS[b].1).map(move |y| [(a, x), (b, y)]))
    };
    let all = (0..FACTORS.len()).flat_map(|a| (0..FACTORS[a].1).flat_map(move |x| of(a, x)));
    all.into_iter().find(|&[(a, x), (b, y)]| !met[a][x][b][y])
}

/// Returns the pairs of the values that are set, the lower factor first.
fn pairs(values: &[Option<usize>; FACTORS.len()]) -> impl Iterator<Item = [Value; 2]> {
    let set: Vec<Value> =
        values.iter().enumerate().filter_map(|(factor, value)| Some((factor, (*value)?))).collect();
    (0..set.len()).flat_map(move |b| (0..b).map(|a| [set[a], set[b]]).collect::<Vec<_>>())
}

/// Returns the value of `factor` that covers most new pairs, a random one of equals; `None` if none
/// is allowed.
fn fill(
    met: &[Vec<Vec<Vec<bool>>>],
    values: &[Option<usize>; FACTORS.len()],
    factor: usize,
    draw: &mut Draw,
) -> Option<usize> {
    let candidates = (0..FACTORS[factor].1).filter_map(|value| {
        let mut tried = *values;
        tried[factor] = Some(value);
        let news = pairs(&tried)
            .map(|[(a, x), (b, y)]| may_meet(a, x, b, y).then_some(usize::from(!met[a][x][b][y])));
        Some((news.sum::<Option<usize>>()?, value))
    });
    let candidates: Vec<(usize, usize)> = candidates.collect();
    let most = candidates.iter().map(|(gain, _)| *gain).max()?;
    let best: Vec<usize> =
        candidates.into_iter().filter(|(gain, _)| *gain == most).map(|(_, value)| value).collect();
    Some(draw.pick(&best))
}

/// Runs every configuration, on each of the numbers of ranks in turn.
///
/// # Errors
/// The first configuration whose answer is wrong.
pub fn pairwise_cases(subject: &dyn Subject, ranks: &[usize]) -> Verdict {
    for (configuration, &ranks) in pairwise().iter().zip(ranks.iter().cycle()) {
        let case = configuration.case();
        examine(subject, &judge(&case)?, &case, &configuration.setting(ranks))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn pairs_are_covered_exactly_if_they_are_allowed() {
        let all = pairwise();
        assert!(all.len() <= 400, "{} configurations", all.len());
        let two_pass = [1, 3];
        let per_pair =
            FEATURES.iter().position(|&feature| feature == Feature::BiasPerPair).unwrap();
        for (b, (name_b, count_b)) in FACTORS.into_iter().enumerate() {
            for (a, (name_a, count_a)) in FACTORS.into_iter().enumerate().take(b) {
                for (x, y) in (0..count_a).flat_map(|x| (0..count_b).map(move |y| (x, y))) {
                    let refused = b == BACKWARD
                        && two_pass.contains(&y)
                        && [(MASK, matrix::DENSE_BATCH), (FEATURE, per_pair)].contains(&(a, x));
                    let meets = all.iter().any(|configuration| {
                        configuration.values[a] == x && configuration.values[b] == y
                    });
                    assert_eq!(meets, !refused, "{name_a} {x} and {name_b} {y}");
                }
            }
        }
    }

    #[test]
    fn every_value_changes_the_case_or_the_setting() {
        // a configuration as text without its name
        let described = |values: [usize; FACTORS.len()]| {
            let configuration = Configuration { values };
            let case = configuration.case();
            let setting = configuration.setting(3);
            format!(
                "{:?} {:?} {:?} {} {setting} {:?}",
                case.spec,
                case.masks,
                case.batch,
                case.dlse.is_some(),
                setting.layout
            )
        };
        for (factor, (name, count)) in FACTORS.into_iter().enumerate() {
            let of = |value| {
                let mut values = [1, 0, 1, 0, 0, 0, 0, 0];
                values[factor] = value;
                described(values)
            };
            assert_eq!((0..count).map(of).collect::<BTreeSet<_>>().len(), count, "{name}");
        }
    }
}
