//! What a job writes: the plan of the output file, each rank's rows of it, and the traces.

use std::{
    fs::{File, create_dir_all},
    io::Write,
    path::Path,
};

use annulus::{
    Backward, Forward, RankPlan,
    comm::trace::{TraceLog, write_chrome},
};
use annulus_core::{Backend, Dims, Element, Error, HostTensors, Result, Runs, Spec};
use ndarray::{Array, Dimension};

use crate::{
    failure::io,
    file::{Kind, Output, Planned},
    input::Input,
    trace::{Run, rank_file},
};

/// The tensors of the output file.
///
/// # Errors
/// [`Error::InvalidArgument`] if gradients are wanted and the input has no `dout`.
pub(super) fn planned(spec: &Spec, input: &Input, backward: bool) -> Result<Vec<Planned>> {
    let Dims { batch, q_len, kv_len, q_heads, kv_heads, head_dim, value_dim } = spec.dims;
    let (data, sums) = (Kind::Float(spec.dtype), Kind::Float(spec.dtype.accumulator()));
    let planned = |name, kind, shape: &[usize]| Planned { name, kind, shape: shape.to_vec() };
    let rows = [batch, q_heads, q_len];
    let mut all = vec![planned("out", data, &[batch, q_len, q_heads, value_dim]), planned("lse", sums, &rows)];
    if !spec.normalize {
        all.extend([planned("max", sums, &rows), planned("sum", sums, &rows)]);
    }
    if backward {
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

/// Writes one rank's rows of what forward gave.
///
/// # Errors
/// [`Error::Io`].
pub(super) fn write_forward<T: Element, B: Backend<Space: HostTensors>>(
    output: &Output,
    plan: &RankPlan<B>,
    forward: &Forward<T>,
) -> Result<()> {
    let rows = plan.q_rows();
    write(output, "out", 1, rows, &forward.out)?;
    write(output, "lse", 2, rows, &forward.lse)?;
    for (name, statistics) in [("max", &forward.max), ("sum", &forward.sum)] {
        if let Some(statistics) = statistics {
            write(output, name, 2, rows, statistics)?;
        }
    }
    Ok(())
}

/// Writes one rank's rows of the gradients. What is the same on all ranks is written by rank 0.
///
/// # Errors
/// [`Error::Io`].
pub(super) fn write_backward<T: Element, B: Backend<Space: HostTensors>>(
    output: &Output,
    plan: &RankPlan<B>,
    rank: usize,
    gradients: &Backward<T>,
) -> Result<()> {
    write(output, "dq", 1, plan.q_rows(), &gradients.dq)?;
    write(output, "dk", 1, plan.kv_rows(), &gradients.dk)?;
    write(output, "dv", 1, plan.kv_rows(), &gradients.dv)?;
    if let Some(dbias) = &gradients.dbias {
        let summed = plan.ring().spec().bias.is_some_and(|shape| shape[2] == 1);
        if !summed {
            write(output, "dbias", 2, plan.q_rows(), dbias)?;
        } else if rank == 0 {
            output.write_flat("dbias", 0, dense("dbias", dbias)?)?;
        }
    }
    if let Some(dsinks) = gradients.dsinks.as_ref().filter(|_| rank == 0) {
        output.write_flat("dsoftmax_aux", 0, dense("dsoftmax_aux", dsinks)?)?;
    }
    Ok(())
}

/// Writes the record of a rank: `rank-0.json`, …
///
/// # Errors
/// [`Error::Io`].
pub(super) fn write_trace(folder: &Path, log: &TraceLog, run: &Run) -> Result<()> {
    create_dir_all(folder).map_err(|error| io(folder, error))?;
    let path = folder.join(rank_file(log.rank()));
    let mut events = Vec::new();
    let written = write_chrome(&mut events, std::slice::from_ref(log)).and_then(|()| File::create(&path)?.write_all(&run.mark(events)));
    written.map_err(|error| io(&path, error))
}

fn write<T: Element, D: Dimension>(output: &Output, name: &str, axis: usize, rows: &Runs, array: &Array<T, D>) -> Result<()> {
    output.write_rows(name, axis, rows, dense(name, array)?)
}

fn dense<'a, T, D: Dimension>(name: &str, array: &'a Array<T, D>) -> Result<&'a [T]> {
    array.as_slice().ok_or_else(|| Error::Device { what: format!("{name} is not dense") })
}
