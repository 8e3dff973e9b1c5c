//! Accumulators of 2³¹ bytes, one more than wgpu permits for a buffer on most adapters, at their
//! real size; `limits.rs` has them in small. Ignored by default, for 5 GiB of memory:
//! `scripts/wgpu-test --whole` runs them.

use annulus::{Attention, Dims, Spec, comm::threads};
use annulus_conformance::{Answer, Case, Draw, Judge, Masks};
use annulus_core::{BackwardInputs, Batch, DType, Gradients, Inputs, Outputs, Result};
use annulus_wgpu::{Gpu, Options, Tensor};
use half::f16;
use ndarray::{Array2, Array4, ArrayView4, Axis};

use super::{open, ring};

const ROWS: usize = 1 << 17;

/// Content of rows that no test case has, and of outputs before a pass.
const FILLING: f16 = f16::from_f32_const(3.0);

/// Queries that attend to keys: the first; those around row 131 040, where the second buffer of an
/// accumulator of 2³¹ bytes begins; the last. All others attend to none, so that the tensors have
/// their size and a software adapter few tiles.
fn visible() -> Vec<usize> {
    (0..40).chain(ROWS - 70..ROWS).collect()
}

/// A tensor of all rows, of which those of [`visible`] are `rows`.
fn whole(rows: ArrayView4<'_, f64>) -> Array4<f16> {
    let (batch, _, heads, dim) = rows.dim();
    let mut whole = Array4::from_elem((batch, ROWS, heads, dim), FILLING);
    for (row, from) in visible().into_iter().zip(rows.axis_iter(Axis(1))) {
        whole
            .index_axis_mut(Axis(1), row)
            .zip_mut_with(&from, |to, &from| *to = f16::from_f64(from));
    }
    whole
}

/// Returns the rows of [`visible`]. All others must be 0.
fn rows_of(whole: &Array4<f16>, name: &str) -> Array4<f64> {
    let visible = visible();
    for (row, of) in whole.axis_iter(Axis(1)).enumerate() {
        let is_zero = || of.iter().all(|&element| element == f16::ZERO);
        assert!(visible.binary_search(&row).is_ok() || is_zero(), "{name}, row {row}");
    }
    whole.select(Axis(1), &visible).mapv(f64::from)
}

/// Runs forward and backward with all rows and returns the rows of the case.
fn run(gpu: &Gpu, case: &Case) -> Result<Answer> {
    let few = case.spec.dims;
    let dims = Dims { q_len: ROWS, ..few };
    let transport = threads::ring(1).remove(0);
    let mut ring = ring(gpu, transport, &Attention::new().dtype(DType::F16), dims)?;
    let mut q_segment_ids = Array2::from_elem((1, ROWS), 1);
    for row in visible() {
        q_segment_ids[[0, row]] = 0;
    }
    ring.update(&Batch {
        q_segment_ids: Some(q_segment_ids),
        kv_segment_ids: Some(Array2::zeros((1, few.kv_len))),
        ..Batch::default()
    })?;
    let filled =
        |dim| Tensor::upload(gpu, Array4::from_elem((1, ROWS, few.q_heads, dim), FILLING).view());
    let small = |of: &Array4<f64>| Tensor::upload_rounded(gpu, of.view(), DType::F16);
    let q = Tensor::upload(gpu, whole(case.q.view()).view())?;
    let (k, v) = (small(&case.k)?, small(&case.v)?);
    let inputs = Inputs::new(&q, &k, &v);
    let mut out = filled(few.value_dim)?;
    let statistic = || Tensor::zeros(gpu, [1, few.q_heads, ROWS, 1], DType::F32);
    let (mut lse, mut max, mut sum) = (statistic()?, statistic()?, statistic()?);
    ring.forward(
        &inputs,
        &mut Outputs {
            max: Some(&mut max),
            sum: Some(&mut sum),
            ..Outputs::new(&mut out, &mut lse)
        },
    )?;
    let dout = Tensor::upload(gpu, whole(case.dout.view()).view())?;
    let mut dq = filled(few.head_dim)?;
    let (mut dk, mut dv) = (small(&case.k)?, small(&case.v)?);
    ring.backward(
        &BackwardInputs {
            forward: inputs,
            out: &out,
            max: &max,
            sum: Some(&sum),
            ties: None,
            dout: &dout,
            dlse: None,
            out_residual: None,
        },
        &mut Gradients::new(&mut dq, &mut dk, &mut dv),
    )?;
    let [lse, max, sum] = [lse, max, sum].map(|of| -> Result<_> {
        Ok(of.download_widened()?.select(Axis(2), &visible()).index_axis_move(Axis(3), 0))
    });
    Ok(Answer {
        out: rows_of(&out.download()?, "out"),
        lse: lse?,
        max: max?,
        sum: sum?,
        ties: None,
        dq: rows_of(&dq.download()?, "dq"),
        dk: dk.download_widened()?,
        dv: dv.download_widened()?,
        dbias: None,
        dsinks: None,
    })
}

/// Requires right results of 32 heads, one KV head and few keys.
fn hold(name: &str, head_dim: usize, value_dim: usize) {
    let Some(gpu) = open(&Options::default()) else { return };
    let dims = Dims {
        q_len: visible().len(),
        kv_len: 40,
        kv_heads: 1,
        value_dim,
        ..Dims::new(1, 1, 32, head_dim)
    };
    let spec = Spec::new(dims, DType::F64);
    let case = Case::new(name, spec, Masks::default(), &mut Draw::new(11)).in_dtype(DType::F16);
    let answer = run(&gpu, &case).unwrap_or_else(|error| panic!("{name}: {error}"));
    Judge::new(&case)
        .expect("a truth")
        .check(&answer)
        .unwrap_or_else(|why| panic!("{name}: {why}"));
}

#[test]
#[ignore = "takes 5 GiB of memory"]
fn accumulators_of_outputs_of_two_gibibytes_are_computed() {
    hold("out", 8, 128);
}

#[test]
#[ignore = "takes 5 GiB of memory"]
fn accumulators_of_query_gradients_of_two_gibibytes_are_computed() {
    hold("dq", 128, 8);
}
