//! Output file: its tensors, and each rank's rows of them.

use annulus::{Backward, Forward};
use annulus_core::{Dims, Element, Error, Result, Runs, Spec};
use ndarray::{Array, Dimension};

use crate::{
    file::{OutputFile, PlannedTensor, TensorPart, of_floats},
    input::Input,
};

/// Arrays of one rank's pass, with the rows that it owns.
#[derive(Debug)]
pub(super) struct Given<'a, G> {
    pub(super) q_rows: &'a Runs,
    pub(super) kv_rows: &'a Runs,
    pub(super) arrays: &'a G,
}

/// Returns the tensors of the output file.
///
/// # Errors
/// [`Error::InvalidArgument`] with `backward` if the input has no `dout`.
pub(super) fn planned(spec: &Spec, input: &Input, backward: bool) -> Result<Vec<PlannedTensor>> {
    let Dims { batch, q_len, kv_len, q_heads, kv_heads, head_dim, value_dim } = spec.dims;
    let data = of_floats(spec.dtype);
    let sums = of_floats(spec.dtype.accumulator());
    let planned =
        |name, dtype, shape: &[usize]| PlannedTensor { name, dtype, shape: shape.to_vec() };
    let rows = [batch, q_heads, q_len];
    let mut all = vec![
        planned("out", data, &[batch, q_len, q_heads, value_dim]),
        planned("lse", sums, &rows),
    ];
    if !spec.normalize {
        all.extend([planned("max", sums, &rows), planned("sum", sums, &rows)]);
    }
    if backward {
        if !input.has("dout") {
            let want =
                "a tensor named dout, or no --backward (`annulus make --backward` writes one)";
            return Err(Error::invalid("dout", "no such tensor", want));
        }
        input.tensors().need("dout", 4)?;
        all.push(planned("dq", data, &[batch, q_len, q_heads, head_dim]));
        all.push(planned("dk", data, &[batch, kv_len, kv_heads, head_dim]));
        all.push(planned("dv", data, &[batch, kv_len, kv_heads, value_dim]));
        for (name, of) in [("dbias", "bias"), ("dsoftmax_aux", "softmax_aux")] {
            if let Some(entry) = input.tensors().get(of) {
                all.push(planned(name, sums, &entry.shape));
            }
        }
    }
    Ok(all)
}

/// Writes the arrays of a forward pass: the part of rank number `own` of this process.
pub(super) fn write_forward<T: Element>(
    output: &OutputFile,
    all: &[Given<'_, Forward<T>>],
    own: usize,
) -> Result<()> {
    write(output, "out", 1, own, all, |of| Some((of.q_rows, &of.arrays.out)))?;
    write(output, "lse", 2, own, all, |of| Some((of.q_rows, &of.arrays.lse)))?;
    // the file has the maximum and the sum of an output that is not normalised
    if all.iter().all(|of| of.arrays.ties.is_none()) {
        return Ok(());
    }
    write(output, "max", 2, own, all, |of| Some((of.q_rows, of.arrays.max.as_ref()?)))?;
    write(output, "sum", 2, own, all, |of| Some((of.q_rows, of.arrays.sum.as_ref()?)))
}

/// Writes the gradients: the part of rank number `own` of this process, which has `rank` on the
/// ring. Gradients that are equal on all ranks are written by rank 0.
pub(super) fn write_backward<T: Element>(
    output: &OutputFile,
    spec: &Spec,
    all: &[Given<'_, Backward<T>>],
    own: usize,
    rank: usize,
) -> Result<()> {
    write(output, "dq", 1, own, all, |of| Some((of.q_rows, &of.arrays.dq)))?;
    write(output, "dk", 1, own, all, |of| Some((of.kv_rows, &of.arrays.dk)))?;
    write(output, "dv", 1, own, all, |of| Some((of.kv_rows, &of.arrays.dv)))?;
    let summed = spec.bias.is_some_and(|shape| shape[2] == 1);
    if !summed {
        write(output, "dbias", 2, own, all, |of| Some((of.q_rows, of.arrays.dbias.as_ref()?)))?;
    }
    let Some(of) = all.get(own).filter(|_| rank == 0) else { return Ok(()) };
    if let Some(dbias) = of.arrays.dbias.as_ref().filter(|_| summed) {
        output.write_flat("dbias", 0, dense("dbias", dbias)?)?;
    }
    if let Some(dsinks) = &of.arrays.dsoftmax_aux {
        output.write_flat("dsoftmax_aux", 0, dense("dsoftmax_aux", dsinks)?)?;
    }
    Ok(())
}

/// Writes one tensor: the part of rank number `own`. `array` returns the rows and values of a rank,
/// or `None` if there are none.
fn write<'a, G, T: Element, D: Dimension + 'a>(
    output: &OutputFile,
    name: &str,
    axis: usize,
    own: usize,
    all: &'a [Given<'a, G>],
    array: impl Fn(&'a Given<'a, G>) -> Option<(&'a Runs, &'a Array<T, D>)>,
) -> Result<()> {
    let part = |(rows, array)| Ok(TensorPart { rows, values: dense(name, array)? });
    let parts = all.iter().filter_map(array).map(part).collect::<Result<Vec<_>>>()?;
    if parts.is_empty() { Ok(()) } else { output.write_rows(name, axis, &parts, own) }
}

fn dense<'a, T, D: Dimension>(name: &str, array: &'a Array<T, D>) -> Result<&'a [T]> {
    array.as_slice().ok_or_else(|| Error::Device { what: format!("{name} is not dense") })
}
