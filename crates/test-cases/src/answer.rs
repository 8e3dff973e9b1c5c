//! The outputs and gradients that one subject computed for a case, widened to f64, and their
//! comparison.

use ndarray::{Array2, Array3, Array4, ArrayViewD};

use crate::Truth;

/// Outputs and gradients of one case.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    /// `[b, q_len, q_heads, dv]`.
    pub out: Array4<f64>,
    /// `[b, q_heads, q_len]`, as the three below.
    pub lse: Array3<f64>,
    /// Largest logit.
    pub max: Array3<f64>,
    /// Σ e^{s − max}.
    pub sum: Array3<f64>,
    /// Number of pairs and sinks that share the largest logit, if the output is not normalised.
    pub ties: Option<Array3<f64>>,
    /// `[b, q_len, q_heads, d]`.
    pub dq: Array4<f64>,
    /// `[b, kv_len, kv_heads, d]`.
    pub dk: Array4<f64>,
    /// `[b, kv_len, kv_heads, dv]`.
    pub dv: Array4<f64>,
    /// Shape of the bias.
    pub dbias: Option<Array4<f64>>,
    /// Shape of the sinks.
    pub dsinks: Option<Array2<f64>>,
}

impl Answer {
    /// The oracle's answer for a case; with `normalize` it has no `ties`.
    pub fn of(truth: Truth, normalize: bool) -> Self {
        let Truth { forward, backward } = truth;
        Self {
            out: forward.out,
            lse: forward.lse,
            max: forward.max,
            sum: forward.sum,
            ties: (!normalize).then_some(forward.ties),
            dq: backward.dq,
            dk: backward.dk,
            dv: backward.dv,
            dbias: backward.dbias,
            dsinks: backward.dsinks,
        }
    }

    /// Returns every array that is present, with its name.
    pub fn arrays(&self) -> Vec<(&'static str, ArrayViewD<'_, f64>)> {
        let mut all = vec![
            ("out", self.out.view().into_dyn()),
            ("lse", self.lse.view().into_dyn()),
            ("max", self.max.view().into_dyn()),
            ("sum", self.sum.view().into_dyn()),
            ("dq", self.dq.view().into_dyn()),
            ("dk", self.dk.view().into_dyn()),
            ("dv", self.dv.view().into_dyn()),
        ];
        all.extend(self.ties.iter().map(|ties| ("ties", ties.view().into_dyn())));
        all.extend(self.dbias.iter().map(|dbias| ("dbias", dbias.view().into_dyn())));
        all.extend(self.dsinks.iter().map(|dsinks| ("dsoftmax_aux", dsinks.view().into_dyn())));
        all
    }

    /// Compares array by array. `within` is the largest difference allowed in an array of that
    /// name. An infinity equals only itself; NaN equals NaN.
    ///
    /// # Errors
    /// The first difference, as text.
    pub fn compare(&self, want: &Self, within: impl Fn(&str) -> f64) -> Result<(), String> {
        let got = self.arrays();
        let want = want.arrays();
        let names = |arrays: &[(&'static str, ArrayViewD<'_, f64>)]| {
            arrays.iter().map(|(name, _)| *name).collect::<Vec<_>>()
        };
        if names(&got) != names(&want) {
            return Err(format!("arrays {:?}, want {:?}", names(&got), names(&want)));
        }
        for ((name, got), (_, want)) in got.iter().zip(&want) {
            if got.shape() != want.shape() {
                return Err(format!(
                    "{name} has the shape {:?}, want {:?}",
                    got.shape(),
                    want.shape()
                ));
            }
            let bound = within(name);
            let wrong = |(_, (got, want)): &(usize, (&f64, &f64))| {
                let same = got == want || (got.is_nan() && want.is_nan());
                let apart = (**got - **want).abs();
                !same && (apart.is_nan() || apart > bound)
            };
            if let Some((index, (got, want))) = got.iter().zip(want).enumerate().find(wrong) {
                return Err(format!(
                    "{name}[{index}]: got {got:e}, want {want:e}, at most {bound:e} apart"
                ));
            }
        }
        Ok(())
    }

    /// Compares bit for bit; every NaN counts as the same NaN.
    ///
    /// # Errors
    /// The first array that differs, as text.
    pub fn same_bits(&self, other: &Self) -> Result<(), String> {
        let bits = |x: &f64| if x.is_nan() { u64::MAX } else { x.to_bits() };
        for ((name, a), (other_name, b)) in self.arrays().iter().zip(&other.arrays()) {
            if name != other_name
                || a.shape() != b.shape()
                || a.iter().map(bits).ne(b.iter().map(bits))
            {
                return Err(format!("{name} differs in its bits"));
            }
        }
        Ok(())
    }
}
