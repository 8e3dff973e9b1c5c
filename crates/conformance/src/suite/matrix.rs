//! Mask family × ranks × layout, with dims, GQA, element type, features and batches sampled over
//! that product.
//!
//! The product of masks, ranks and layouts is run in full at tiny sizes. Every member draws its
//! dims (raggedness, GQA, odd head dims), element type and other features at random. Any two values
//! of two of them are therefore combined almost certainly, but not all combinations are. [`sizes`]
//! are fewer and larger; [`random_cases`] combine everything at random.
//!
//! Strategies other than the ring run over every grid that ranks and heads admit.

use std::{ops::Range, sync::Arc};

use annulus_core::{
    Alignment, BackwardMode, Batch, BiasOrder, DType, DenseMask, Dims, Error, Mask, Runs,
    SinkShape, Spec, index,
    mask::{Causal, Dense, PerHead, Predicate, Window, or},
};
use annulus_plan::{CustomLayout, HeadGrid, Layout, Route, Strategy};
use ndarray::Array2;

use super::{
    LAYOUTS, Verdict, examine, examine_twice, judge,
    numeric::{large_constant, large_constants},
};
use crate::{Case, Draw, Masks, Setting, Subject};

/// Sampled part of a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scale {
    /// Every member.
    Full,
    /// One member in this many.
    OneIn(usize),
}

impl Scale {
    /// True if member `number` is in the sample.
    const fn includes(self, number: usize) -> bool {
        match self {
            Self::Full => true,
            Self::OneIn(every) => number.is_multiple_of(every),
        }
    }
}

/// 33 ranks are more than most cases have rows, so that some ranks own none.
const RANKS: [usize; 9] = [1, 2, 3, 4, 5, 7, 8, 16, 33];
pub(super) const DTYPES: [DType; 4] = [DType::F32, DType::F64, DType::Bf16, DType::F16];

/// Runs every mask family × every number of ranks × every layout, a random one included.
///
/// # Errors
/// The first member whose answer is wrong.
pub fn matrix(subject: &dyn Subject, scale: Scale) -> Verdict {
    let mut number = 0;
    for family in 0..FAMILIES {
        for ranks in RANKS {
            for layout in 0..=LAYOUTS.len() {
                number += 1;
                if !scale.includes(number) {
                    continue;
                }
                let draw = &mut Draw::new(number as u64);
                let dims = dims(draw);
                let layout = LAYOUTS
                    .get(layout)
                    .cloned()
                    .unwrap_or_else(|| random_layout(&dims, ranks, draw));
                let case = featured(family, dims, draw).in_dtype(draw.pick(subject.dtypes()));
                examine(subject, &judge(&case)?, &case, &Setting::new(ranks, layout))?;
            }
        }
    }
    Ok(())
}

/// Runs awkward sizes up to 113 × 203, each with one mask, a few ranks and every layout.
///
/// # Errors
/// The first size whose answer is wrong.
pub fn sizes(subject: &dyn Subject, scale: Scale) -> Verdict {
    let lengths = [(1, 1), (1, 65), (63, 63), (65, 65), (33, 17), (63, 7), (113, 203)];
    for (number, (q_len, kv_len)) in
        lengths.into_iter().enumerate().filter(|(number, _)| scale.includes(*number))
    {
        let draw = &mut Draw::new(number as u64);
        let dims =
            Dims { batch: 1, q_len, kv_len, q_heads: 2, kv_heads: 1, head_dim: 33, value_dim: 20 };
        let mut case = featured(draw.pick(&[1, 2, 3]), dims, draw);
        case.spec.alignment = Alignment::BottomRight;
        for (turn, layout) in LAYOUTS.into_iter().enumerate() {
            let case = case.in_dtype(subject.dtypes()[(number + turn) % subject.dtypes().len()]);
            examine(subject, &judge(&case)?, &case, &Setting::new(draw.pick(&[2, 3, 5]), layout))?;
        }
    }
    Ok(())
}

/// Runs random cases on random settings, both drawn from the seed.
///
/// # Errors
/// The first case whose answer is wrong.
pub fn random_cases(subject: &dyn Subject, seeds: impl Iterator<Item = u64>) -> Verdict {
    for seed in seeds {
        let draw = &mut Draw::new(!seed);
        let case = Case::random(seed).in_dtype(draw.pick(subject.dtypes()));
        let ranks = draw.pick(&[1, 2, 3, 4, 6]);
        let layout = match draw.below(5) {
            0 => None,
            1 => Some(random_layout(&case.spec.dims, ranks, draw)),
            named => Some(LAYOUTS[named - 2].clone()),
        };
        // ids of one side serve for both only if every rank owns the same rows of both
        let lone_ids = case.batch.q_segment_ids.is_some() != case.batch.kv_segment_ids.is_some();
        let layout = layout.filter(|layout| !(lone_ids && matches!(layout, Layout::Custom(_))));
        let route = draw.pick(&routes(ranks));
        examine(
            subject,
            &judge(&case)?,
            &case,
            &Setting { ranks, layout, route, ..Setting::ALONE },
        )?;
    }
    Ok(())
}

/// Returns the routes of a ring of this many ranks, and `None`. Routes over nodes have the largest
/// nodes that divide the ranks into at least two.
pub fn routes(ranks: usize) -> Vec<Option<Route>> {
    let divides = |size: &usize| ranks.is_multiple_of(*size);
    let node_ranks = (1..ranks).rev().find(divides).unwrap_or(1);
    let of_nodes = [
        Route::RailsUp { node_ranks },
        Route::RailsDown { node_ranks },
        Route::OncePerNode { node_ranks },
    ];
    std::iter::once(None).chain(Route::ALL.into_iter().chain(of_nodes).map(Some)).collect()
}

fn dims(draw: &mut Draw) -> Dims {
    let (q_len, kv_len) =
        draw.pick(&[(17, 17), (17, 17), (7, 7), (24, 24), (33, 12), (9, 33), (1, 5), (40, 40)]);
    let (q_heads, kv_heads) = draw.pick(&[(1, 1), (2, 1), (4, 2), (3, 3)]);
    let (head_dim, value_dim) = draw.pick(&[(4, 4), (7, 5), (8, 8), (1, 2)]);
    Dims { batch: draw.pick(&[1, 2]), q_len, kv_len, q_heads, kv_heads, head_dim, value_dim }
}

/// Number of mask families.
pub(super) const FAMILIES: usize = 13;
/// The family whose batch has a dense mask.
pub(super) const DENSE_BATCH: usize = 12;

/// Returns a case of this mask family, with some other features.
fn featured(family: usize, dims: Dims, draw: &mut Draw) -> Case {
    let mut spec = Spec::new(dims, DType::F64);
    spec.alignment = draw.pick(&[Alignment::TopLeft, Alignment::BottomRight]);
    spec.normalize = !draw.once_in(4);
    spec.soft_cap = draw.pick(&[None, None, Some(2.0)]);
    spec.bias_order = draw.pick(&[BiasOrder::AfterSoftCap, BiasOrder::BeforeSoftCap]);
    if draw.once_in(3) {
        spec.sinks = Some(SinkShape { per_head: draw.once_in(2), count: 2 });
    }
    if draw.once_in(4) {
        spec.bias = Some(
            [dims.batch, dims.q_heads, dims.q_len, dims.kv_len].map(|len| draw.pick(&[1, len])),
        );
    }
    if spec.bias.is_none_or(|shape| shape[2] == 1) && family != DENSE_BATCH {
        spec.backward = draw.pick(&[BackwardMode::OnePass, BackwardMode::TwoPass]);
    }
    let mut case =
        Case::new(format!("mask family {family}"), spec, masks(family, &dims, draw), draw);
    if draw.once_in(2) {
        case.dlse = Some(draw.tensor((dims.batch, dims.q_heads, dims.q_len)));
    }
    case.batch = batch(family, &dims, draw);
    case
}

/// Returns the masks of a family; the batch of the family may mask further pairs.
pub(super) fn masks(family: usize, dims: &Dims, draw: &mut Draw) -> Masks {
    let plain = Masks::default();
    let causal = Masks { causal: true, ..Masks::default() };
    let window = |left, right| Window::new(left, right);
    let object = |mask: Arc<dyn Mask>| Masks { objects: vec![mask], ..Masks::default() };
    match family {
        0 => plain,
        1 => causal,
        2 => Masks { window: Some([Some(4), None]), ..causal },
        3 => Masks { window: Some([Some(3), Some(2)]), first_visible: draw.pick(&[0, 2]), ..plain },
        4 => Masks { chunk: Some(6), ..plain },
        5 => Masks { prefix: Some(5), ..plain },
        6 => object(or(
            Arc::new(window(Some(1), Some(0))),
            Arc::new(Window { offset: -9, ..window(Some(2), Some(2)) }),
        )),
        7 => object(Arc::new(PerHead(
            (0..dims.q_heads)
                .map(|h| {
                    if h % 2 == 0 {
                        Arc::new(Causal { offset: 0 }) as Arc<dyn Mask>
                    } else {
                        Arc::new(window(Some(2), Some(2)))
                    }
                })
                .collect(),
        ))),
        8 => object(Arc::new(Predicate::of_positions("a multiple of 3 apart", |i, j| {
            (i - j) % 3 == 0
        }))),
        9 => {
            let bits = draw.bits();
            let shape = [1, dims.q_heads, dims.q_len, dims.kv_len];
            object(Arc::new(Dense(Arc::new(DenseMask::from_fn(shape, |[_, h, i, j]| {
                bits >> ((h * 17 + i * 5 + j * 3) % 61) & 1 != 0
            })))))
        }
        // masks of the batch under a causal mask: 10 segment ids, 11 packed lengths or positions,
        // 12 dense
        _ => causal,
    }
}

/// Returns the batch of a family.
pub(super) fn batch(family: usize, dims: &Dims, draw: &mut Draw) -> Batch {
    let Dims { batch, q_len, kv_len, .. } = *dims;
    let mut made = Batch::default();
    match family {
        10 => {
            let ids = |len: usize| {
                Array2::from_shape_fn((batch, len), |(b, row)| {
                    if row % 11 == 10 { -1 } else { ((row + b) * 3 / len) as i32 }
                })
            };
            made.q_segment_ids = Some(ids(q_len));
            made.kv_segment_ids = Some(ids(kv_len));
        }
        11 if draw.once_in(2) => {
            let thirds =
                |len: usize| vec![0, len as i64 / 3, len as i64 / 3, len as i64 - len as i64 / 9];
            made.cum_seqlens_q = Some(thirds(q_len));
            made.cum_seqlens_k = Some(thirds(kv_len));
        }
        11 => {
            let mut positions = |len: usize| {
                Array2::from_shape_fn((batch, len), |(b, row)| {
                    (row as i64 * 5 + b as i64) % 23 - 3 + draw.below(2) as i64
                })
            };
            made.q_positions = Some(positions(q_len));
            made.kv_positions = Some(positions(kv_len));
        }
        12 => {
            let bits = draw.bits();
            let shape = [draw.pick(&[1, batch]), 1, q_len, kv_len];
            made.attention_mask = Some(DenseMask::from_fn(shape, |[b, _, i, j]| {
                bits >> ((b * 29 + i * 7 + j) % 64) & 1 != 0
            }));
        }
        _ => {}
    }
    made
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

/// Ring sizes with several divisors.
const GRID_RANKS: [usize; 5] = [2, 3, 4, 6, 8];

/// Returns a setting for each grid of heads × queries × keys that `ranks` and a case admit, but the
/// ring; layouts in turn, from number `first` on.
pub fn strategy_settings(case: &Case, ranks: usize, first: usize) -> Vec<Setting> {
    let grids = HeadGrid::candidates(&case.spec, ranks, true);
    let strategies = grids.iter().map(HeadGrid::strategy);
    let setting = |(number, strategy): (usize, Strategy)| {
        let layout: Option<Layout> = LAYOUTS.get((first + number) % 4).cloned();
        Setting { ranks, layout, strategy, ..Setting::ALONE }
    };
    strategies.filter(|&strategy| strategy != Strategy::Ring).enumerate().map(setting).collect()
}

/// Returns a setting for each published strategy that `ranks` ranks and a case admit, with nodes of
/// every size that divides the ranks.
pub fn published_settings(case: &Case, ranks: usize) -> Vec<Setting> {
    let nodes = (1..ranks).filter(|&node_ranks| ranks.is_multiple_of(node_ranks));
    let once = nodes.map(|node_ranks| Strategy::OncePerNode { node_ranks });
    let all = [Strategy::Ring, Strategy::AllGather, Strategy::AllToAll, Strategy::PassQ];
    let admits = |strategy: &Strategy| HeadGrid::of(&case.spec.dims, ranks, *strategy).is_ok();
    let with = |strategy| Setting { ranks, strategy, ..Setting::ALONE };
    all.into_iter().chain(once).filter(admits).map(with).collect()
}

/// Computes random cases in all element types of the subject, over rings of several sizes.
///
/// # Errors
/// The first wrong answer.
pub fn strategies(subject: &dyn Subject, seeds: Range<u64>) -> Verdict {
    compute_grids(subject, seeds, |_| true)
}

/// As [`strategies`], only those that divide heads alone, for backends that compute no partial
/// results of key columns. The others must be refused.
///
/// # Errors
/// The first wrong answer, or an answer where a refusal is due.
pub fn head_strategies(subject: &dyn Subject, seeds: Range<u64>) -> Verdict {
    let is_of_heads = |strategy: Strategy| matches!(strategy, Strategy::HeadsRing { .. });
    compute_grids(subject, seeds.clone(), is_of_heads)?;
    for seed in seeds {
        let case = Case::random_heads(seed).in_dtype(subject.dtypes()[0]);
        let settings = strategy_settings(&case, 2, 0);
        for setting in settings.iter().filter(|setting| !is_of_heads(setting.strategy)) {
            match subject.run(&case, setting, 1) {
                Err(Error::Unsupported { .. }) => {}
                Err(error) => return Err(format!("{} on {setting}: {error}", case.name)),
                Ok(_) => return Err(format!("{} on {setting}: not refused", case.name)),
            }
        }
    }
    Ok(())
}

fn compute_grids(
    subject: &dyn Subject,
    seeds: Range<u64>,
    is_due: impl Fn(Strategy) -> bool,
) -> Verdict {
    let dtypes = subject.dtypes();
    for seed in seeds {
        let case = Case::random_heads(seed).in_dtype(dtypes[index(seed) % dtypes.len()]);
        let judge = judge(&case)?;
        let ranks = GRID_RANKS[index(seed) % GRID_RANKS.len()];
        let published = published_settings(&case, ranks);
        let all = strategy_settings(&case, ranks, index(seed)).into_iter().chain(published);
        for setting in all {
            if is_due(setting.strategy) {
                examine_twice(subject, &judge, &case, &setting)?;
            }
        }
    }
    for ranks in [2, 3, 4] {
        let dtype = dtypes[ranks % dtypes.len()];
        for setting in strategy_settings(&large_constant(dtype, 0.0), ranks, ranks) {
            if is_due(setting.strategy) {
                large_constants(subject, dtype, None, &setting)?;
            }
        }
    }
    Ok(())
}
