//! Cases with dims that are multiples of 8, as warpgroup variants require.

use annulus_conformance::{Answer, Case, Setting, Subject};
use annulus_core::{DType, Dims, Result};
use annulus_cuda::Variant;
use ndarray::{Array4, s};

/// Subject that pads a case's dims with zeros to multiples of 8, so that warpgroups serve every
/// normalized case.
pub(crate) struct OnMultiplesOfEight<S>(pub(crate) S);

impl<S: Subject> Subject for OnMultiplesOfEight<S> {
    fn name(&self) -> String {
        self.0.name()
    }

    fn dtypes(&self) -> &[DType] {
        &[DType::Bf16, DType::F16]
    }

    fn run(&self, case: &Case, setting: &Setting, times: usize) -> Result<Vec<Answer>> {
        let Dims { head_dim, value_dim, .. } = case.spec.dims;
        let mut wide = case.clone();
        wide.spec.dims.head_dim = head_dim.next_multiple_of(8);
        wide.spec.dims.value_dim = value_dim.next_multiple_of(8);
        for tensor in [&mut wide.q, &mut wide.k, &mut wide.v, &mut wide.dout] {
            *tensor = padded(tensor);
        }
        let served = Variant::on_warpgroups(&wide.spec)?.is_some();
        let is_wide = wide.spec.dims.head_dim.max(wide.spec.dims.value_dim) > 128;
        assert!(served == case.spec.normalize || is_wide, "{}", case.name);
        let cut = |tensor: &Array4<f64>, dim| tensor.slice(s![.., .., .., ..dim]).to_owned();
        let answers = self.0.run(&wide, setting, times)?.into_iter().map(|answer| Answer {
            out: cut(&answer.out, value_dim),
            dq: cut(&answer.dq, head_dim),
            dk: cut(&answer.dk, head_dim),
            dv: cut(&answer.dv, value_dim),
            ..answer
        });
        Ok(answers.collect())
    }
}

/// Pads the dims with zeros to a multiple of 8.
fn padded(tensor: &Array4<f64>) -> Array4<f64> {
    let (batch, rows, heads, dim) = tensor.dim();
    Array4::from_shape_fn((batch, rows, heads, dim.next_multiple_of(8)), |(b, row, head, x)| {
        if x < dim { tensor[[b, row, head, x]] } else { 0.0 }
    })
}
