//! Training steps that allocate nothing: outputs and gradients are tensors of the program's, and
//! the projection W of x to queries is fitted by gradient descent through attention.
//!
//! ```sh
//! cargo run --release -p annulus --example training_step
//! ```

use annulus::{
    Attention, BackwardViewMut, Dims, ForwardView, ForwardViewMut, LocalRing, Result, Tensors,
    ndarray::{Array2, Array3, Array4, ArrayView2, Axis},
};

const LEN: usize = 64;
const DIM: usize = 16;

fn main() -> Result<()> {
    let x = tensor(0.3);
    let k = tensor(0.7);
    let v = tensor(1.1);
    let mut ring = LocalRing::new(Attention::new().causal(true), Dims::new(1, LEN, 1, DIM), 2)?;

    // what attention returns with the true projection is the target
    let truth = Array2::from_shape_fn((DIM, DIM), |(i, j)| if i == j { 1.0 } else { 0.1 });
    let q = project(&x, truth.view());
    let target = ring.forward(&Tensors::new(q.view(), k.view(), v.view()))?.out;

    let mut w = Array2::<f32>::zeros((DIM, DIM));
    let mut out = tensor(0.0);
    let statistic = || Array3::zeros((1, 1, LEN));
    let (mut lse, mut max, mut sum) = (statistic(), statistic(), statistic());
    let mut dq = tensor(0.0);
    let mut dk = tensor(0.0);
    let mut dv = tensor(0.0);
    let mut losses = Vec::new();
    for _ in 0..60 {
        let q = project(&x, w.view());
        let tensors = Tensors::new(q.view(), k.view(), v.view());
        let outputs = ForwardViewMut {
            out: out.view_mut(),
            lse: lse.view_mut(),
            max: Some(max.view_mut()),
            sum: Some(sum.view_mut()),
            ties: None,
            out_residual: None,
            statistics: None,
            head_statistics: None,
        };
        ring.forward_into(&tensors, outputs)?;
        let dout = &out - &target; // of the loss ½ Σ (out − target)²
        losses.push(0.5 * dout.mapv(|x| x * x).sum());
        let forward = ForwardView {
            out: out.view(),
            lse: lse.view(),
            max: Some(max.view()),
            sum: Some(sum.view()),
            ties: None,
            out_residual: None,
        };
        let gradients = BackwardViewMut {
            dq: dq.view_mut(),
            dk: dk.view_mut(),
            dv: dv.view_mut(),
            dbias: None,
            dsoftmax_aux: None,
        };
        ring.backward_into(&tensors, &forward, dout.view(), None, gradients)?;
        // ∂L/∂W = xᵀ·dq
        w.scaled_add(-0.01, &rows(&x).t().dot(&rows(&dq)));
    }
    println!("loss {} at first, {} after 60 steps", losses[0], losses[59]);
    assert!(losses[59] < 0.1 * losses[0]);
    Ok(())
}

fn tensor(step: f32) -> Array4<f32> {
    Array4::from_shape_fn((1, LEN, 1, DIM), |(_, i, _, c)| (step * (i * 31 + c) as f32).sin())
}

/// `[1, len, 1, dim]` as `[len, dim]`.
fn rows(x: &Array4<f32>) -> ArrayView2<'_, f32> {
    x.index_axis(Axis(0), 0).index_axis_move(Axis(1), 0)
}

/// x·W.
fn project(x: &Array4<f32>, w: ArrayView2<'_, f32>) -> Array4<f32> {
    rows(x).dot(&w).insert_axis(Axis(1)).insert_axis(Axis(0))
}
