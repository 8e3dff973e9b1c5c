//! Gradients of logits beyond what f16 holds: on matrix units they are rounded to the element type before they meet k and q.

use annulus::{Attention, Backward, Dims, Element, Plan, Result, Tensors};
use annulus_comm::{Staged, cuda::CudaCopier};
use annulus_cuda::{Hosted, device::CudaBlocks};
use half::{bf16, f16};
use ndarray::Array4;

use crate::support::emulated;

const ROWS: usize = 24;
const DIM: usize = 32;

/// Gradients on the emulated device and on the CPU, where gradients of logits stay f32. Those of the first half of the queries are small, those of the
/// second half about 10⁵; keys are small, so that dq of all rows is well within what f16 holds.
fn gradients<T: Element>() -> Result<[Backward<T>; 2]> {
    let dims = Dims::new(1, ROWS, 1, DIM);
    let tensor = |scale: &dyn Fn(usize) -> f64, shift: usize| {
        Array4::from_shape_fn((1, ROWS, 1, DIM), |(_, i, _, x)| T::from_f64(scale(i) * (((i * 7 + x * 3 + shift) % 11) as f64 / 5.0 - 1.0)))
    };
    let (q, k, v) = (tensor(&|_| 1.0, 0), tensor(&|_| 1e-3, 1), tensor(&|_| 4.0, 2));
    // along with v, so that dout·v does not cancel
    let dout = Array4::from_shape_fn(v.dim(), |(_, i, _, x)| {
        T::from_f64(if i < ROWS / 2 { 1.0 } else { 3e4 } * v[[0, i % 5, 0, x]].to_f64() / 4.0)
    });
    let tensors = Tensors::new(q.view(), k.view(), v.view());
    let attention = Attention::new().dtype(T::DTYPE);
    let mut on_device = Plan::over(&attention, dims, 1, None, |_, endpoint| {
        let cuda = emulated(&[])?;
        let copier = CudaCopier::new(cuda.stream().device())?;
        Ok((Hosted::new(cuda), Staged::<_, CudaBlocks>::new(endpoint, copier)))
    })?;
    let mut on_cpu = attention.plan(dims, 1, None)?;
    let (forward, want) = (on_device.forward(&tensors)?, on_cpu.forward(&tensors)?);
    Ok([on_device.backward(&tensors, &forward, dout.view(), None)?, on_cpu.backward(&tensors, &want, dout.view(), None)?])
}

/// Whether a number is the wanted one, up to a few roundings of `largest`.
fn close(got: f64, want: f64, largest: f64, epsilon: f64) -> bool {
    (got - want).abs() <= 16.0 * epsilon * largest
}

/// By rows of dq: whether all of a row is close, and whether none of it is finite.
fn rows<T: Element>([got, want]: &[Backward<T>; 2], epsilon: f64) -> Vec<(bool, bool)> {
    let row = |i: usize| {
        let pairs: Vec<[f64; 2]> = (0..DIM).map(|x| [got.dq[[0, i, 0, x]].to_f64(), want.dq[[0, i, 0, x]].to_f64()]).collect();
        let largest = pairs.iter().map(|[_, want]| want.abs()).fold(0.0, f64::max);
        assert!(largest > 0.0 && largest < 65504.0, "row {i}: {largest}");
        (pairs.iter().all(|&[got, want]| close(got, want, largest, epsilon)), pairs.iter().all(|[got, _]| !got.is_finite()))
    };
    (0..ROWS).map(row).collect()
}

#[test]
fn what_is_beyond_f16_is_not_finite_and_never_wrong() {
    let both = gradients::<f16>().unwrap();
    let rows = rows(&both, f64::powi(2.0, -11));
    assert!(rows[..ROWS / 2].iter().all(|&(close, _)| close), "{rows:?}");
    assert!(rows.iter().all(|&(close, lost)| close || lost), "{rows:?}");
    // the test is about something
    assert!(rows.iter().any(|&(_, lost)| lost), "{rows:?}");
}

#[test]
fn bf16_holds_them_all() {
    let both = gradients::<bf16>().unwrap();
    let rows = rows(&both, f64::powi(2.0, -8));
    assert!(rows.iter().all(|&(close, _)| close), "{rows:?}");
}
