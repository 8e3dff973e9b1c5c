//! dq of 16-bit inputs where all keys, or all values, share a large component.
//!
//! ```text
//! dq = scale · Σ_j P_j (dP_j − Δ) k_j        Δ = Σ_j P_j dP_j
//! ```
//! The shared component of the keys cancels only if Δ is exact. Δ = ⟨dout, out⟩ has the rounding
//! error of out, which [`annulus_core::Outputs::out_residual`] keeps.

use annulus_core::{BackwardMode, DType, Dims, Spec, index};
use ndarray::{Array4, Axis};

use super::{Verdict, ensure, run};
use crate::{Case, Draw, Masks, Setting, Subject, epsilon};

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
