//! A covering array: few configurations in which any two values of different factors occur together
//! at least once.
//!
//! | factor | values |
//! |---|---|
//! | mask | none, causal, windows, chunks, a prefix, mask objects, masks of the batch |
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
//! Cohen et al. 1997 (AETG): one configuration after the other, each started with an uncovered
//! pair; here it is the best of some random ones.

use std::{collections::BTreeSet, sync::Arc};

use annulus_core::{
    Alibi, Alignment, BackwardMode, Batch, BiasOrder, DType, Dims, Dropout, Runs, SinkShape, Spec,
};
use annulus_plan::{CustomLayout, Layout, Route};
use annulus_test_cases::{mask_object, set_of_batch};

use super::{LAYOUTS, Verdict, examine, judge};
use crate::{Case, Draw, Masks, Setting, Subject};

const DTYPES: [DType; 4] = [DType::F32, DType::F64, DType::Bf16, DType::F16];

/// The factors, with their number of values.
const FACTORS: [(&str, usize); 8] = [
    ("mask", MASKS),
    ("layout", 6),
    ("dims", DIMS.len()),
    ("dtype", DTYPES.len()),
    ("feature", 11),
    ("backward", 4),
    ("route", 4),
    ("receive ahead", 3),
];
pub(super) const MASK: usize = 0;
pub(super) const LAYOUT: usize = 1;
const FEATURE: usize = 4;
const BACKWARD: usize = 5;

/// Number of masks.
pub(super) const MASKS: usize = 13;
/// The mask that is a dense one of the batch.
const DENSE_BATCH: usize = 12;
/// The feature that is a bias with a query axis.
const BIAS_PER_PAIR: usize = 3;

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

/// Value of a factor.
type Value = (usize, usize);

/// One value of every factor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Configuration {
    values: [usize; FACTORS.len()],
}

impl Configuration {
    /// Draws an allowed configuration with these values.
    pub(super) fn drawn(given: &[Value], draw: &mut Draw) -> Self {
        loop {
            let mut values = FACTORS.map(|(_, count)| draw.below(count));
            given.iter().for_each(|&(factor, value)| values[factor] = value);
            let drawn = Self { values };
            if drawn.pairs().all(may_meet) {
                return drawn;
            }
        }
    }

    /// Returns the pairs of its values, the lower factor first.
    fn pairs(&self) -> impl Iterator<Item = [Value; 2]> {
        let values = self.values;
        (0..values.len()).flat_map(move |b| (0..b).map(move |a| [(a, values[a]), (b, values[b])]))
    }

    /// Returns the case; the same configuration gives the same case.
    pub fn case(&self) -> Case {
        self.case_of(DIMS[self.values[2]])
    }

    /// Returns the case with other dims.
    pub(super) fn case_of(&self, dims: Dims) -> Case {
        let [mask, _, _, dtype, feature, backward, ..] = self.values;
        let draw =
            &mut Draw::new(self.values.iter().fold(1, |seed, &value| seed * 64 + value as u64));
        let Dims { batch, q_len, kv_len, q_heads, .. } = dims;
        let mut spec = Spec::new(dims, DType::F64);
        match feature {
            0 => {}
            1 => spec.alignment = Alignment::BottomRight,
            2 => spec.bias = Some([1, q_heads, 1, kv_len]),
            BIAS_PER_PAIR => spec.bias = Some([batch, 1, q_len, kv_len]),
            4 => spec.bias_function = Some(Arc::new(Alibi::published(q_heads))),
            5 => spec.sinks = Some(SinkShape { per_head: false, count: 2 }),
            6 => spec.sinks = Some(SinkShape { per_head: true, count: 1 }),
            // with a bias, whose order would otherwise have no effect
            7 => {
                spec.soft_cap = Some(2.0);
                spec.bias_order = BiasOrder::BeforeSoftCap;
                spec.bias = Some([1, 1, 1, kv_len]);
            }
            8 => spec.dropout = Some(Dropout { probability: 0.4, seed: draw.bits() }),
            9 => spec.normalize = false,
            _ => spec.logits_dtype = DType::Bf16,
        }
        if backward % 2 == 1 {
            spec.backward = BackwardMode::TwoPass;
        }
        let mut case = Case::new(self.to_string(), spec, masks(mask, &dims, draw), draw);
        if case.spec.logits_dtype == DType::Bf16 {
            case.round_scores();
        }
        if backward >= 2 {
            case.dlse = Some(draw.tensor((batch, q_heads, q_len)));
        }
        case.batch = masks_of_batch(mask, &dims, draw);
        case.in_dtype(DTYPES[dtype])
    }

    /// Returns its setting over `ranks` ranks; the same configuration gives the same setting.
    pub fn setting(&self, ranks: usize) -> Setting {
        let [_, layout, dims, .., route, receive_ahead] = self.values;
        let dims = DIMS[dims];
        let layout = match layout {
            3 => Some(random_layout(&dims, ranks, &mut Draw::new(ranks as u64))),
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

/// Returns the masks of this number; those of the batch may mask further pairs.
fn masks(mask: usize, dims: &Dims, draw: &mut Draw) -> Masks {
    let plain = Masks::default();
    let causal = Masks { causal: true, ..Masks::default() };
    match mask {
        0 => plain,
        1 => causal,
        2 => Masks { window: Some([Some(4), None]), ..causal },
        3 => Masks { window: Some([Some(3), Some(2)]), first_visible: draw.pick(&[0, 2]), ..plain },
        4 => Masks { chunk: Some(6), ..plain },
        5 => Masks { prefix: Some(5), ..plain },
        6..10 => Masks { objects: vec![mask_object(mask - 5, dims, draw)], ..plain },
        _ => causal,
    }
}

/// Returns the batch that masks pairs: segment ids, packed lengths or positions, or dense.
fn masks_of_batch(mask: usize, dims: &Dims, draw: &mut Draw) -> Batch {
    let kinds: &[usize] = match mask {
        10 => &[0],
        11 if draw.once_in(2) => &[3],
        11 => &[1, 2],
        DENSE_BATCH => &[4],
        _ => &[],
    };
    let mut batch = Batch::default();
    kinds.iter().for_each(|&kind| set_of_batch(kind, dims, draw, &mut batch));
    batch
}

/// Assigns rows to ranks at random and in random order, so that shards are uneven or empty.
pub(super) fn random_layout(dims: &Dims, ranks: usize, draw: &mut Draw) -> Layout {
    let mut deal = |len: usize| {
        let mut shards = vec![Vec::new(); ranks];
        for row in draw.permutation(len) {
            shards[draw.below(ranks)].push(row as i64);
        }
        shards.into_iter().map(|shard| shard.into_iter().collect::<Runs>()).collect()
    };
    Layout::Custom(Arc::new(CustomLayout { q: deal(dims.q_len), kv: deal(dims.kv_len) }))
}

/// True if two values of different factors may be combined, the lower factor first.
fn may_meet([(factor, value), (other_factor, other)]: [Value; 2]) -> bool {
    let two_pass = other_factor == BACKWARD && other % 2 == 1;
    let refused = [(MASK, DENSE_BATCH), (FEATURE, BIAS_PER_PAIR)].contains(&(factor, value));
    !(two_pass && refused)
}

/// Returns configurations that cover every allowed pair of values of different factors.
pub fn pairwise() -> Vec<Configuration> {
    let values = |factor: usize| (0..FACTORS[factor].1).map(move |value| (factor, value));
    let mut missing = BTreeSet::new();
    for b in 0..FACTORS.len() {
        for (one, other) in
            (0..b).flat_map(|a| values(a).flat_map(|x| values(b).map(move |y| (x, y))))
        {
            missing.insert([one, other]);
        }
    }
    missing.retain(|&pair| may_meet(pair));
    let draw = &mut Draw::new(7);
    let mut all = Vec::new();
    while let Some(pair) = missing.first().copied() {
        let drawn = (0..60).map(|_| Configuration::drawn(&pair, draw));
        let gain =
            |drawn: &Configuration| drawn.pairs().filter(|pair| missing.contains(pair)).count();
        let Some(best) = drawn.max_by_key(gain) else { break };
        for pair in best.pairs() {
            missing.remove(&pair);
        }
        all.push(best);
    }
    all
}

/// Runs every configuration, on each of the numbers of ranks in turn.
pub fn pairwise_cases(subject: &dyn Subject, ranks: &[usize]) -> Verdict {
    for (configuration, &ranks) in pairwise().iter().zip(ranks.iter().cycle()) {
        let case = configuration.case();
        examine(subject, &judge(&case)?, &case, &configuration.setting(ranks))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_changes_the_case_or_the_setting() {
        // a configuration as text without its name
        let described = |values: [usize; FACTORS.len()]| {
            let configuration = Configuration { values };
            let Case { spec, masks, batch, dlse, .. } = configuration.case();
            let setting = configuration.setting(3);
            let has_dlse = dlse.is_some();
            format!("{spec:?} {masks:?} {batch:?} {has_dlse} {setting} {:?}", setting.layout)
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
