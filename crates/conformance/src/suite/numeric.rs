//! The numeric rules of `docs/semantics.md`, one function each. `nonfinite.rs` has those of visible
//! NaN, random cases those of a bias of −∞.

use std::sync::Arc;

use annulus_core::{
    Alignment, BackwardMode, Batch, DType, DenseMask, Dims, SinkShape, Spec, index, mask::Predicate,
};
use ndarray::{Array2, Array4, Axis};

use crate::{
    Case, Draw, Masks, Setting, Subject, epsilon,
    suite::{LAYOUTS, Verdict, ensure, examine, judge, run},
};

/// Checks every rule in every element type, over a few ranks and layouts.
pub fn numeric_rules(subject: &dyn Subject) -> Verdict {
    for &dtype in subject.dtypes() {
        for setting in settings() {
            numeric_rules_on(subject, dtype, &setting)?;
        }
    }
    Ok(())
}

/// Checks every rule in one element type and one setting, for subjects that are too slow for
/// [`numeric_rules`].
pub fn numeric_rules_on(subject: &dyn Subject, dtype: DType, setting: &Setting) -> Verdict {
    let rule = |name: &str, verdict: Verdict| verdict.map_err(|wrong| format!("{name}: {wrong}"));
    rule("a row without a visible key", empty_rows(subject, dtype, setting))?;
    rule("a row that attends to sinks only", sinks_only(subject, dtype, setting))?;
    rule("a masked key changes no bit", masked_poison(subject, dtype, setting))?;
    rule("a masked query changes no bit", masked_queries(subject, dtype, setting))?;
    rule("lse is a natural logarithm", lse_base(subject, dtype, setting))?;
    rule("large logits do not overflow", extreme_logits(subject, dtype, setting))?;
    rule("scores that share a large constant", large_constants(subject, dtype, None, setting))?;
    rule("sums are kept in the accumulator and rounded once", wide_sums(subject, dtype, setting))
}

fn settings() -> [Setting; 4] {
    let [contiguous, zigzag, striped] = LAYOUTS;
    [Setting::ALONE, Setting::new(3, contiguous), Setting::new(4, zigzag), Setting::new(8, striped)]
}

const DIMS: Dims =
    Dims { batch: 2, q_len: 21, kv_len: 21, q_heads: 4, kv_heads: 2, head_dim: 8, value_dim: 5 };

fn case(
    name: &str,
    dims: Dims,
    dtype: DType,
    masks: Masks,
    change: impl FnOnce(&mut Spec),
) -> Case {
    let mut spec = Spec::new(dims, DType::F64);
    change(&mut spec);
    Case::new(name, spec, masks, &mut Draw::new(dims.q_len as u64)).in_dtype(dtype)
}

fn causal() -> Masks {
    Masks { causal: true, ..Masks::default() }
}

/// out = 0, lse = −∞, gradients 0; dout and dlse of such a row are ignored, even if they are NaN.
fn empty_rows(subject: &dyn Subject, dtype: DType, setting: &Setting) -> Verdict {
    // bottom-right with 9 more queries than keys: the positions of rows 0..9 precede key 0
    let dims = Dims { kv_len: 12, ..DIMS };
    for normalize in [true, false] {
        let mut case = case("rows before key 0", dims, dtype, causal(), |spec| {
            spec.alignment = Alignment::BottomRight;
            spec.normalize = normalize;
        });
        let nan = f64::NAN;
        let mut dlse = ndarray::Array3::zeros((2, 4, 21));
        for row in 0..9 {
            case.q.index_axis_mut(Axis(1), row).fill(nan);
            case.dout.index_axis_mut(Axis(1), row).fill(nan);
            dlse.index_axis_mut(Axis(2), row).fill(nan);
        }
        case.dlse = Some(dlse);
        let judge = judge(&case)?;
        examine(subject, &judge, &case, setting)?;
        // checks the oracle itself: agreement with it would not reveal its error
        let want = judge.want();
        for row in 0..9 {
            ensure(
                want.out
                    .index_axis(Axis(1), row)
                    .iter()
                    .chain(&want.dq.index_axis(Axis(1), row))
                    .all(|&x| x == 0.0),
                || "not 0".into(),
            )?;
            ensure(
                want.lse.index_axis(Axis(2), row).iter().all(|&x| x == f64::NEG_INFINITY),
                || "not −∞".into(),
            )?;
        }
        ensure(want.dk.iter().chain(&want.dv).all(|x| x.is_finite()), || "not finite".into())?;
    }
    // no keys at all, and no queries at all
    for dims in [
        Dims { kv_len: 0, ..DIMS },
        Dims { q_len: 0, ..DIMS },
        Dims { q_len: 0, kv_len: 0, ..DIMS },
    ] {
        let case = self::case("an empty side", dims, dtype, Masks::default(), |_| {});
        examine(subject, &judge(&case)?, &case, setting)?;
    }
    Ok(())
}

/// out = 0 and lse = ln Σ e^sink; dsinks is the gradient of lse. A sink of −∞ counts as none.
fn sinks_only(subject: &dyn Subject, dtype: DType, setting: &Setting) -> Verdict {
    for per_head in [false, true] {
        let mut case = case("padding with sinks", DIMS, dtype, Masks::default(), |spec| {
            spec.sinks = Some(SinkShape { per_head, count: 2 });
        });
        case.batch.q_segment_ids = Some(Array2::from_elem((2, 21), -1));
        case.batch.kv_segment_ids = Some(Array2::from_elem((2, 21), 3));
        case.dlse = Some(ndarray::Array3::ones((2, 4, 21)));
        if let Some(sinks) = &mut case.sinks {
            sinks.column_mut(1).fill(f64::NEG_INFINITY);
        }
        let judge = judge(&case)?;
        examine(subject, &judge, &case, setting)?;
        let sinks = case.sinks.iter().flatten().next().copied().unwrap_or(f64::NAN);
        ensure((judge.want().lse[[0, 0, 0]] - sinks).abs() < 1e-12, || {
            "lse of one sink is not that sink".into()
        })?;
    }
    Ok(())
}

/// Keys that the cases of [`masked_poison`] mask. The last two exist only in its longest case.
const MASKED: [usize; 6] = [3, 4, 11, 20, 37, 70];

/// Returns every way to mask the keys [`MASKED`] for all queries: name, masks, batch, and true if a
/// bias of −∞ masks them.
fn ways_to_mask() -> [(&'static str, Masks, Batch, bool); 5] {
    let positions = |j: usize| if MASKED.contains(&j) { 500 + j as i64 } else { j as i64 };
    [
        (
            "segment padding",
            Masks::default(),
            Batch {
                q_segment_ids: Some(Array2::from_shape_fn((2, 21), |(_, i)| i32::from(i > 9))),
                kv_segment_ids: Some(Array2::from_shape_fn((2, 21), |(_, j)| {
                    if MASKED.contains(&j) { -1 } else { i32::from(j > 9) }
                })),
                ..Batch::default()
            },
            false,
        ),
        (
            "a dense mask",
            causal(),
            Batch {
                attention_mask: Some(DenseMask::from_fn([1, 1, 21, 21], |[_, _, _, j]| {
                    !MASKED.contains(&j)
                })),
                ..Batch::default()
            },
            false,
        ),
        (
            "causality by positions",
            causal(),
            Batch {
                kv_positions: Some(Array2::from_shape_fn((2, 21), |(_, j)| positions(j))),
                ..Batch::default()
            },
            false,
        ),
        (
            "a mask object",
            Masks {
                objects: vec![Arc::new(Predicate::of_pairs("not the poisoned keys", |_, key| {
                    !MASKED.contains(&annulus_core::index(key.row))
                }))],
                ..Masks::default()
            },
            Batch::default(),
            false,
        ),
        ("a bias of −∞", Masks::default(), Batch::default(), true),
    ]
}

/// NaN and ±∞ in keys and values that no query attends to, masked in every possible way, change no
/// bit.
///
/// A bias masks keys within kernels, strip by strip: its case has more than one strip of the widest
/// vectors.
fn masked_poison(subject: &dyn Subject, dtype: DType, setting: &Setting) -> Verdict {
    for (way, masks, batch, by_bias) in ways_to_mask() {
        let modes = if by_bias || batch.attention_mask.is_some() {
            &[BackwardMode::OnePass][..]
        } else {
            &[BackwardMode::OnePass, BackwardMode::TwoPass]
        };
        for &mode in modes {
            let dims = if by_bias { Dims { kv_len: 75, ..DIMS } } else { DIMS };
            let mut clean = case(way, dims, dtype, masks.clone(), |spec| {
                spec.bias = by_bias.then_some([1, 1, 21, 75]);
                spec.backward = mode;
            });
            clean.batch = batch.clone();
            if by_bias {
                clean.bias = Some(Array4::from_shape_fn((1, 1, 21, 75), |(.., j)| {
                    if MASKED.contains(&j) { f64::NEG_INFINITY } else { 0.5 }
                }));
            }
            let want = run(subject, &clean, setting)?;
            judge(&clean)?.check(&want)?;
            for poison in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
                let mut poisoned = clean.clone();
                for j in MASKED.into_iter().filter(|&j| j < dims.kv_len) {
                    poisoned.k.index_axis_mut(Axis(1), j).fill(poison);
                    poisoned.v.index_axis_mut(Axis(1), j).fill(poison);
                }
                let got = run(subject, &poisoned, setting)?;
                got.same_bits(&want).map_err(|wrong| {
                    format!("{poison} masked by {way}, {mode:?}, {dtype}, {setting}: {wrong}")
                })?;
            }
        }
    }
    Ok(())
}

/// NaN in queries without a visible key: the gradients of keys do not change by a bit.
fn masked_queries(subject: &dyn Subject, dtype: DType, setting: &Setting) -> Verdict {
    let masked = [0, 7, 8, 19];
    for mode in [BackwardMode::OnePass, BackwardMode::TwoPass] {
        let mut clean = case("padding queries", DIMS, dtype, causal(), |spec| {
            spec.sinks = Some(SinkShape { per_head: true, count: 1 });
            spec.backward = mode;
        });
        clean.batch.q_segment_ids =
            Some(Array2::from_shape_fn((2, 21), |(_, i)| if masked.contains(&i) { -1 } else { 0 }));
        clean.batch.kv_segment_ids = Some(Array2::zeros((2, 21)));
        let want = run(subject, &clean, setting)?;
        judge(&clean)?.check(&want)?;
        let mut poisoned = clean.clone();
        masked.iter().for_each(|&i| poisoned.q.index_axis_mut(Axis(1), i).fill(f64::NAN));
        let got = run(subject, &poisoned, setting)?;
        got.same_bits(&want).map_err(|wrong| {
            format!("NaN in padding queries, {mode:?}, {dtype}, {setting}: {wrong}")
        })?;
    }
    Ok(())
}

/// n equal logits c have the lse c + ln n.
fn lse_base(subject: &dyn Subject, dtype: DType, setting: &Setting) -> Verdict {
    let mut case = case("equal logits", DIMS, dtype, causal(), |spec| spec.scale = 0.0);
    case.spec.bias = Some([1, 1, 1, 1]);
    case.bias = Some(Array4::from_elem((1, 1, 1, 1), 0.25));
    let answer = run(subject, &case, setting)?;
    let tolerance = 32.0 * epsilon(dtype.accumulator());
    for ((_, _, row), &lse) in answer.lse.indexed_iter() {
        let want = 0.25 + ((row + 1) as f64).ln();
        ensure((lse - want).abs() <= tolerance, || {
            format!("{dtype} on {setting}: lse of {} equal logits is {lse}, want {want}", row + 1)
        })?;
    }
    Ok(())
}

/// Logits of some thousands: the largest key takes all the weight, and nothing becomes NaN.
fn extreme_logits(subject: &dyn Subject, dtype: DType, setting: &Setting) -> Verdict {
    // the inputs are far within the range of f16; the logits differ by hundreds
    let mut case = case(
        "large logits",
        DIMS,
        dtype,
        Masks { window: Some([Some(6), Some(2)]), ..Masks::default() },
        |spec| spec.scale = 300.0,
    );
    case.sinks = None;
    let judge = judge(&case)?;
    examine(subject, &judge, &case, setting)?;
    ensure(judge.want().lse.iter().any(|lse| lse.abs() > 1000.0), || {
        "the logits are not large".into()
    })
}

/// Rows whose scores share a constant that programs add to mask keys, on all keys or on some: the
/// weights are those of the scores as they are rounded, in every pass. lse as one number loses ln n
/// to such a constant, and a backward pass that reads it has weights n times too large.
pub(super) fn large_constants(
    subject: &dyn Subject,
    dtype: DType,
    leaf_rows: Option<u64>,
    setting: &Setting,
) -> Verdict {
    let [least, most] = match dtype.accumulator() {
        DType::F64 => [f64::MIN, f64::MAX],
        _ => [f64::from(f32::MIN), f64::from(f32::MAX)],
    };
    for constant in [-1e2, 1e2, -1e4, -1e9, least, most / 2.0] {
        let mut case = large_constant(dtype, constant);
        case.spec.leaf_rows = leaf_rows;
        let judge = judge(&case)?;
        let got = run(subject, &case, setting)?;
        let bound = 0.03 + 4.0 * epsilon(dtype);
        for ((name, got), (_, want)) in got.arrays().into_iter().zip(judge.want().arrays()) {
            let largest = want.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
            let wrong = got.iter().zip(&want).find(|&(got, want)| {
                let apart = (got - want).abs();
                apart.is_nan() || apart > bound * largest
            });
            ensure(wrong.is_none(), || {
                let what = format!("{dtype} on {setting}, a constant of {constant:e}: {name}");
                format!("{what}: got and want {wrong:?}, largest {largest:e}")
            })?;
        }
    }
    Ok(())
}

/// Returns the case of [`large_constants`].
pub(super) fn large_constant(dtype: DType, constant: f64) -> Case {
    let name = format!("a constant of {constant:e}");
    // scores of 10⁻³, so that a constant that absorbs them changes weights by as much
    let mut case = case(&name, DIMS, dtype, Masks::default(), |spec| {
        spec.scale = f64::powi(2.0, -10);
        spec.bias = Some([1, 1, 21, 21]);
    });
    let shares = |(_, _, i, j): (usize, usize, usize, usize)| match i % 4 {
        0 | 2 => true,
        1 => j % 3 == 0,
        _ => false,
    };
    if let Some(bias) = &mut case.bias {
        bias.indexed_iter_mut()
            .for_each(|(at, bias)| *bias = if shares(at) { constant } else { *bias });
    }
    case
}

/// Ones summed over many keys and ranks: out is one, and dv the number of queries, up to the
/// rounding of the accumulator.
fn wide_sums(subject: &dyn Subject, dtype: DType, setting: &Setting) -> Verdict {
    let dims = Dims {
        batch: 1,
        q_len: 40,
        kv_len: 300,
        q_heads: 2,
        kv_heads: 1,
        head_dim: 2,
        value_dim: 2,
    };
    let mut case = case("many equal keys", dims, dtype, Masks::default(), |spec| spec.scale = 0.0);
    case.v.fill(1.0);
    case.dout.fill(300.0);
    let answer = run(subject, &case, setting)?;
    // with 300 terms a sum kept in bf16 would stall at 256, and one kept in f16 would lose digits
    let tolerance = |one: f64| one * (epsilon(dtype) / 2.0 + 300.0 * epsilon(dtype.accumulator()));
    let worst = |numbers: &Array4<f64>, want: f64| {
        numbers.iter().map(|x| (x - want).abs()).fold(0.0, f64::max)
    };
    ensure(worst(&answer.out, 1.0) <= tolerance(1.0), || {
        format!("{dtype} on {setting}: out of ones is off by {}", worst(&answer.out, 1.0))
    })?;
    // 40 queries × 2 heads × 1/300 × 300
    ensure(worst(&answer.dv, 80.0) <= tolerance(80.0), || {
        format!("{dtype} on {setting}: dv of ones is off by {}", worst(&answer.dv, 80.0))
    })
}

// dq of 16-bit inputs where all keys, or all values, share a large component.
//
// ```text
// dq = scale · Σ_j P_j (dP_j − Δ) k_j        Δ = Σ_j P_j dP_j
// ```
// The shared component of the keys cancels only if Δ is exact. Δ = ⟨dout, out⟩ has the rounding
// error of out, which [`annulus_core::Outputs::out_residual`] keeps.

/// Least ratio of the error without the residual to the bound with it, of the cases here.
const WITHOUT: f64 = 1.5;

/// Checks dq of bf16 and f16 with the rounding residual of out, and that dq is far off without it:
/// both forms of the output, both forms of the backward pass. `leaf_rows`: in the reproducible
/// order.
pub fn out_residual(subject: &dyn Subject, leaf_rows: Option<u64>, setting: &Setting) -> Verdict {
    for dtype in [DType::Bf16, DType::F16] {
        for normalize in [true, false] {
            for backward in [BackwardMode::OnePass, BackwardMode::TwoPass] {
                let case = shared_components(dtype, leaf_rows, |spec| {
                    spec.normalize = normalize;
                    spec.backward = backward;
                });
                let want = case.truth().map_err(|error| error.to_string())?.backward.dq;
                let error = |out_residual| -> Result<f64, String> {
                    let setting = Setting { out_residual, ..setting.clone() };
                    Ok(distance(&run(subject, &case, &setting)?.dq, &want))
                };
                let [with, without] = [error(true)?, error(false)?];
                // half an ε by the rounding of dq, the rest by those of P and of the scores
                let bound = 0.75 * epsilon(dtype);
                let what = || format!("{dtype}, normalised {normalize}, {backward:?}, {setting}");
                ensure(with <= bound, || format!("{}: dq is off by {with}", what()))?;
                ensure(without >= WITHOUT * bound, || {
                    format!("{}: dq is off by {without} only without the residual", what())
                })?;
            }
        }
    }
    Ok(())
}

/// Returns a case whose keys share one large component, and whose values share another.
fn shared_components(dtype: DType, leaf_rows: Option<u64>, change: impl FnOnce(&mut Spec)) -> Case {
    let dims = Dims {
        batch: 2,
        q_len: 21,
        // several leaves
        kv_len: leaf_rows.map_or(24, |rows| 2 * index(rows) + 24),
        q_heads: 4,
        kv_heads: 2,
        head_dim: 8,
        value_dim: 6,
    };
    let mut spec = Spec { leaf_rows, ..Spec::new(dims, DType::F64) };
    change(&mut spec);
    let mut case = Case::new("shared components", spec, Masks::default(), &mut Draw::new(7));
    let [of_keys, of_values] = if dtype == DType::F16 { [64.0, 16.0] } else { [16.0, 4.0] };
    let add = |tensor: &mut Array4<f64>, component: f64, element: usize| {
        tensor.index_axis_mut(Axis(3), element).mapv_inplace(|x| x + component);
    };
    add(&mut case.k, of_keys, 1);
    add(&mut case.k, -of_keys, 4);
    add(&mut case.v, of_values, 0);
    add(&mut case.v, of_values, 3);
    case.in_dtype(dtype)
}

/// Returns the largest difference relative to the largest element.
fn distance(got: &Array4<f64>, want: &Array4<f64>) -> f64 {
    let most = |all: &Array4<f64>| all.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
    most(&(got - want)) / most(want)
}
