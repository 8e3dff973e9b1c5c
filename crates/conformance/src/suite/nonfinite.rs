//! NaN and ±∞ in queries, keys, values and sinks, visible and hidden: the answer has NaN exactly
//! where the oracle has it, and the oracle's numbers elsewhere, on any number of ranks and layout.
//!
//! ```text
//! visible logit NaN or +∞, sink NaN or +∞   out, lse, max, sum of the row are NaN
//! visible logit −∞                          weight 0
//! every visible logit −∞, no sinks          as a row without a visible key
//! ```

use std::sync::Arc;

use annulus_core::{Alignment, Batch, DType, DenseMask, Dims, SinkShape, Spec, mask::Predicate};
use ndarray::{Array2, Axis};

use super::{LAYOUTS, Verdict, ensure, examine, judge};
use crate::{Case, Draw, Masks, Setting, Subject};

/// Ranks that every case is computed on: alone, even and odd, more than rows divide by.
const RANKS: [usize; 5] = [1, 2, 3, 4, 7];

/// Values that the cases put into the tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Poison {
    /// NaN only, for devices whose arithmetic promises nothing for ∞.
    Nan,
    /// NaN, ∞ and −∞.
    NanAndInfinities,
}

/// Computes every case in every element type of the subject, on 1, 2, 3, 4 and 7 ranks and in
/// every layout.
pub fn nonfinite(subject: &dyn Subject, poison: Poison) -> Verdict {
    for &dtype in subject.dtypes() {
        nonfinite_on(subject, poison, dtype, &settings())?;
    }
    Ok(())
}

/// Computes every case in one element type, on these settings.
pub fn nonfinite_on(
    subject: &dyn Subject,
    poison: Poison,
    dtype: DType,
    settings: &[Setting],
) -> Verdict {
    hold(subject, cases(poison), dtype, settings)
}

/// Computes rows whose visible scores are all −∞, in every element type of the subject, on all
/// ranks and layouts of [`nonfinite`]. They are as rows without a visible key: dq is 0, although
/// the keys are infinite.
pub fn infinite_scores(subject: &dyn Subject) -> Verdict {
    for &dtype in subject.dtypes() {
        infinite_scores_on(subject, dtype, &settings())?;
    }
    Ok(())
}

/// [`infinite_scores`] in one element type, on these settings.
pub fn infinite_scores_on(subject: &dyn Subject, dtype: DType, settings: &[Setting]) -> Verdict {
    hold(subject, [true, false].map(weightless).into(), dtype, settings)
}

fn hold(subject: &dyn Subject, cases: Vec<Case>, dtype: DType, settings: &[Setting]) -> Verdict {
    for case in cases {
        let case = case.in_dtype(dtype);
        let judge = judge(&case)?;
        // without a NaN in the expected answer the case would test nothing
        let any = judge.want().arrays().iter().any(|(_, array)| array.iter().any(|x| x.is_nan()));
        ensure(any, || format!("{}: the oracle's answer has no NaN", case.name))?;
        settings.iter().try_for_each(|setting| examine(subject, &judge, &case, setting))?;
    }
    Ok(())
}

/// The settings of [`nonfinite`].
fn settings() -> Vec<Setting> {
    let over = |ranks| LAYOUTS.into_iter().map(move |layout| Setting::new(ranks, layout));
    RANKS.into_iter().flat_map(|ranks| over(ranks).take(if ranks == 1 { 1 } else { 3 })).collect()
}

const DIMS: Dims =
    Dims { batch: 2, q_len: 21, kv_len: 26, q_heads: 4, kv_heads: 2, head_dim: 8, value_dim: 5 };

fn cases(poison: Poison) -> Vec<Case> {
    let mut cases = vec![lost_nan()];
    for normalize in [true, false] {
        cases.extend(blocks(normalize));
        cases.extend((0..6).map(|seed| random(seed, normalize, poison)));
        cases.push(of_sinks(normalize, poison));
    }
    cases
}

fn case(name: String, dims: Dims, masks: Masks, change: impl FnOnce(&mut Spec)) -> Case {
    let mut spec = Spec::new(dims, DType::F64);
    change(&mut spec);
    Case::new(name, spec, masks, &mut Draw::new(dims.q_len as u64))
}

fn causal() -> Masks {
    Masks { causal: true, ..Masks::default() }
}

/// The row that lost its NaN on two ranks: its own block, all NaN, was merged before a finite one.
fn lost_nan() -> Case {
    let dims = Dims::new(1, 2, 1, 1);
    let mut case = case("k = [1, NaN]".into(), dims, causal(), |spec| spec.normalize = false);
    case.q.fill(1.0);
    case.k[[0, 0, 0, 0]] = 1.0;
    case.k[[0, 1, 0, 0]] = f64::NAN;
    case.v[[0, 0, 0, 0]] = 3.0;
    case.v[[0, 1, 0, 0]] = 5.0;
    case
}

/// The first or the last keys are NaN, whole blocks of them on any number of ranks; for many
/// queries and for one.
fn blocks(normalize: bool) -> Vec<Case> {
    let half = DIMS.kv_len / 2;
    let windowed = Masks { window: Some([Some(6), None]), ..causal() };
    let one = Dims { q_len: 1, kv_len: 40, ..DIMS };
    let mut cases = Vec::new();
    for (which, rows) in [("first", 0..half), ("last", half..DIMS.kv_len)] {
        let of = |mask: &str| format!("the {which} keys NaN, {mask}, normalised: {normalize}");
        let whole = case(of("causal"), DIMS, causal(), |spec| spec.normalize = normalize);
        let near = case(of("a window"), DIMS, windowed.clone(), |spec| spec.normalize = normalize);
        let decode = case(of("one query"), one, causal(), |spec| {
            spec.normalize = normalize;
            spec.alignment = Alignment::BottomRight;
        });
        for mut case in [whole, near, decode] {
            for row in rows.clone() {
                case.k.index_axis_mut(Axis(1), row).fill(f64::NAN);
            }
            cases.push(case);
        }
    }
    cases
}

/// A fortieth of the rows of queries, keys and values poisoned, a third of them in every element
/// and the others in one; many of them are masked.
fn random(seed: u64, normalize: bool, poison: Poison) -> Case {
    let draw = &mut Draw::new(seed);
    let name = format!("random poison {seed}, normalised: {normalize}");
    let masks = draw.pick(&[
        causal(),
        Masks { window: Some([Some(5), Some(1)]), ..Masks::default() },
        Masks {
            objects: vec![Arc::new(Predicate::of_positions("some", |i, j| {
                (i * 7 + j * 3) % 5 < 2
            }))],
            ..Masks::default()
        },
    ]);
    let mut case = case(name, DIMS, masks, |spec| {
        spec.normalize = normalize;
        spec.sinks = seed.is_multiple_of(3).then_some(SinkShape { per_head: true, count: 2 });
        spec.bias = seed.is_multiple_of(2).then_some([1, 4, 21, 26]);
    });
    if seed % 3 == 1 {
        // padding on both sides, and two segments
        let id = |row: usize| [0, 0, 1, -1][row * 4 / 26];
        case.batch = Batch {
            q_segment_ids: Some(Array2::from_shape_fn((2, 21), |(_, row)| id(row))),
            kv_segment_ids: Some(Array2::from_shape_fn((2, 26), |(_, row)| id(row))),
            ..Batch::default()
        };
    } else if seed % 3 == 2 {
        let mask = DenseMask::from_fn([1, 4, 21, 26], |[_, h, i, j]| (h + i + 2 * j) % 3 != 0);
        case.batch.attention_mask = Some(mask);
    }
    if let Some(bias) = &mut case.bias {
        bias.mapv_inplace(|x| if draw.once_in(4) { f64::NEG_INFINITY } else { x });
    }
    let values: &[f64] = match poison {
        Poison::Nan => &[f64::NAN],
        Poison::NanAndInfinities => &[f64::NAN, f64::INFINITY, f64::NEG_INFINITY],
    };
    for tensor in [&mut case.q, &mut case.k, &mut case.v] {
        for mut row in tensor.rows_mut() {
            if draw.once_in(40) {
                let value = draw.pick(values);
                if draw.once_in(3) {
                    row.fill(value);
                } else {
                    let element = draw.below(row.len());
                    row[element] = value;
                }
            }
        }
    }
    // one NaN query row, so that the expected answer has a NaN
    case.q.index_axis_mut(Axis(1), 2).fill(f64::NAN);
    case
}

/// Sinks of NaN and +∞ in two heads; some rows attend to nothing but their sinks.
fn of_sinks(normalize: bool, poison: Poison) -> Case {
    let masks = Masks { window: Some([Some(3), Some(0)]), ..Masks::default() };
    let name = format!("a sink, normalised: {normalize}");
    let dims = Dims { q_len: 35, ..DIMS };
    let mut case = case(name, dims, masks, |spec| {
        spec.normalize = normalize;
        spec.sinks = Some(SinkShape { per_head: true, count: 2 });
    });
    if let Some(sinks) = &mut case.sinks {
        sinks[[1, 0]] = f64::NAN;
        sinks[[2, 1]] = if poison == Poison::Nan { 0.5 } else { f64::INFINITY };
    }
    case
}

/// Logits of −∞ or +∞ for the first half of the keys; the first rows attend to no others.
fn weightless(normalize: bool) -> Case {
    let name = format!("logits of −∞, normalised: {normalize}");
    let mut case = case(name, DIMS, causal(), |spec| spec.normalize = normalize);
    case.q.index_axis_mut(Axis(3), 0).mapv_inplace(f64::abs);
    for row in 0..DIMS.kv_len / 2 {
        let mut keys = case.k.index_axis_mut(Axis(1), row);
        keys.index_axis_mut(Axis(2), 0).fill(f64::NEG_INFINITY);
    }
    case
}
