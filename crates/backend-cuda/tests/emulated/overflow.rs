//! dX beyond the range of f16: on tensor cores dX is rounded to the element type before the
//! products with K and Q.

use annulus::{Attention, Backward, Dims, Element, LocalRing, Plan, Result, Tensors};
use annulus_comm::Staged;
use annulus_core::HostViews;
use annulus_cuda::device::{CudaCopier, CudaSpace};
use half::{bf16, f16};
use ndarray::Array4;

use crate::support::emulated;

const ROWS: usize = 24;
const DIM: usize = 32;

/// Computes gradients on the emulator and on the CPU, where dX stays f32. dX is small for the first
/// half of the queries and about 10⁵ for the second. Keys are small, so dQ of every row is within
/// f16.
fn gradients<T: Element>() -> Result<[Backward<T>; 2]> {
    let dims = Dims::new(1, ROWS, 1, DIM);
    let tensor = |scale: &dyn Fn(usize) -> f64, shift: usize| {
        Array4::from_shape_fn((1, ROWS, 1, DIM), |(_, i, _, x)| {
            T::from_f64(scale(i) * (((i * 7 + x * 3 + shift) % 11) as f64 / 5.0 - 1.0))
        })
    };
    let q = tensor(&|_| 1.0, 0);
    let k = tensor(&|_| 1e-3, 1);
    let v = tensor(&|_| 4.0, 2);
    // parallel to v, so that dout·v does not cancel
    let dout = Array4::from_shape_fn(v.dim(), |(_, i, _, x)| {
        T::from_f64(if i < ROWS / 2 { 1.0 } else { 3e4 } * v[[0, i % 5, 0, x]].to_f64() / 4.0)
    });
    let tensors = Tensors::new(q.view(), k.view(), v.view());
    let attention = Attention::new().dtype(T::DTYPE);
    let mut on_device = LocalRing::from_plans(&attention, dims, 1, |_, setup, endpoint| {
        let cuda = emulated()?;
        let copier = CudaCopier::new(cuda.stream().device())?;
        Plan::with_backend(
            setup,
            dims,
            cuda.on_host(),
            Staged::<_, HostViews<CudaSpace>>::new(endpoint, copier),
        )
    })?;
    let mut on_cpu = LocalRing::new(&attention, dims, 1)?;
    let forward = on_device.forward(&tensors)?;
    let want = on_cpu.forward(&tensors)?;
    Ok([
        on_device.backward(&tensors, &forward, dout.view(), None)?,
        on_cpu.backward(&tensors, &want, dout.view(), None)?,
    ])
}

/// True if the difference is within a few roundings of `largest`.
fn close(got: f64, want: f64, largest: f64, epsilon: f64) -> bool {
    (got - want).abs() <= 16.0 * epsilon * largest
}

/// For each row of dQ: all elements close; no element finite.
fn rows<T: Element>([got, want]: &[Backward<T>; 2], epsilon: f64) -> Vec<(bool, bool)> {
    let row = |i: usize| {
        let pairs: Vec<[f64; 2]> = (0..DIM)
            .map(|x| [got.dq[[0, i, 0, x]].to_f64(), want.dq[[0, i, 0, x]].to_f64()])
            .collect();
        let largest = pairs.iter().map(|[_, want]| want.abs()).fold(0.0, f64::max);
        assert!(largest > 0.0 && largest < 65504.0, "row {i}: {largest}");
        (
            pairs.iter().all(|&[got, want]| close(got, want, largest, epsilon)),
            pairs.iter().all(|[got, _]| !got.is_finite()),
        )
    };
    (0..ROWS).map(row).collect()
}

#[test]
fn results_beyond_f16_are_not_finite_instead_of_wrong() {
    let both = gradients::<f16>().unwrap();
    let rows = rows(&both, f64::powi(2.0, -11));
    assert!(rows[..ROWS / 2].iter().all(|&(close, _)| close), "{rows:?}");
    assert!(rows.iter().all(|&(close, lost)| close || lost), "{rows:?}");
    // the case does overflow
    assert!(rows.iter().any(|&(_, lost)| lost), "{rows:?}");
}

#[test]
fn bf16_holds_them_all() {
    let both = gradients::<bf16>().unwrap();
    let rows = rows(&both, f64::powi(2.0, -8));
    assert!(rows.iter().all(|&(close, _)| close), "{rows:?}");
}
