//! Output file that all ranks of a job write: its tensors, and each rank's rows of them.

use std::{ffi::OsStr, os::unix::ffi::OsStrExt, path::Path};

use annulus::{Backward, Forward, comm::Descriptor};
use annulus_core::{Dims, Element, Error, Fingerprint, KeyLists, Result, Runs, Spec};
use ndarray::{Array, Dimension};

use crate::{
    failure::{Failure, Outcome},
    file::{OutputFile, PlannedTensor, TensorPart, of_floats},
    input::Input,
    job::Job,
};

/// Opens the output file of all ranks: rank 0 creates it, the others open it by its temporary name.
///
/// # Ordering
/// Collective over the processes of the job.
pub(crate) fn open(job: &mut Job, target: &Path, tensors: &[PlannedTensor]) -> Outcome<OutputFile> {
    // paths of its folder may differ between nodes
    let name = target.file_name().unwrap_or_default();
    let name = Fingerprint::new().bytes(name.as_bytes()).finish();
    job.require_same(Descriptor::new().field_as("output", name, target.display()))?;
    let made =
        if job.is_leader() { OutputFile::create(target, tensors).map(Some) } else { Ok(None) };
    let made = job.agree(made)?;
    let mine = made.as_ref().map(OutputFile::temporary_name).unwrap_or_default();
    let names = job.all_gather(mine.as_bytes())?;
    let name = OsStr::from_bytes(names.first().map_or(&[], Vec::as_slice));
    let opened = made.map_or_else(|| OutputFile::join(target, tensors, name), Ok);
    job.agree(opened)
}

/// Gives the output file its name once the data of all ranks is on the disk.
///
/// # Ordering
/// Collective over the processes of the job.
pub(crate) fn finish(job: &mut Job, output: OutputFile) -> Outcome {
    job.run_local_phase([&output], |_, output| output.sync())?;
    if job.is_leader() {
        let finished = output.finish();
        return job.agree(finished);
    }
    job.agree(Ok::<_, Failure>(()))?;
    output.release();
    Ok(())
}

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
pub(crate) fn planned(spec: &Spec, input: &Input, backward: bool) -> Result<Vec<PlannedTensor>> {
    let Dims { batch, q_len, kv_len, q_heads, kv_heads, head_dim, value_dim } = spec.dims;
    let data = of_floats(spec.dtype);
    let sums = of_floats(spec.dtype.accumulator());
    let rows = [batch, q_heads, q_len];
    let mut all = vec![
        PlannedTensor::new("out", data, &[batch, q_len, q_heads, value_dim]),
        PlannedTensor::new("lse", sums, &rows),
    ];
    if !spec.normalize {
        all.push(PlannedTensor::new("max", sums, &rows));
        all.push(PlannedTensor::new("sum", sums, &rows));
    }
    if spec.statistics {
        let of_rows = [batch, q_heads, q_len, Spec::SCORE_STATISTICS];
        all.push(PlannedTensor::new("statistics", sums, &of_rows));
        let of_heads = [q_heads, Spec::SCORE_STATISTICS, 2];
        all.push(PlannedTensor::new("head_statistics", sums, &of_heads));
    }
    if backward {
        input.tensors().need("dout", 4)?;
        all.push(PlannedTensor::new("dq", data, &[batch, q_len, q_heads, head_dim]));
        all.push(PlannedTensor::new("dk", data, &[batch, kv_len, kv_heads, head_dim]));
        all.push(PlannedTensor::new("dv", data, &[batch, kv_len, kv_heads, value_dim]));
        for (name, of) in [("dbias", "bias"), ("dsoftmax_aux", "softmax_aux")] {
            if let Some(entry) = input.tensors().get(of) {
                all.push(PlannedTensor::new(name, sums, &entry.shape));
            }
        }
        if let Some(entry) = input.tensors().get("key_list_bias") {
            all.push(PlannedTensor::new("dkey_list_bias", sums, &entry.shape));
        }
    }
    Ok(all)
}

/// Writes the arrays of a forward pass of the ranks of this process. Statistics by head, which are
/// equal on all ranks, are written by the process with rank 0, the `leader`.
pub(super) fn write_forward<T: Element>(
    output: &OutputFile,
    all: &[Given<'_, Forward<T>>],
    leader: bool,
) -> Result<()> {
    write(output, "out", 1, all, |of| Some((of.q_rows, &of.arrays.out)))?;
    write(output, "lse", 2, all, |of| Some((of.q_rows, &of.arrays.lse)))?;
    write(output, "statistics", 2, all, |of| Some((of.q_rows, of.arrays.statistics.as_ref()?)))?;
    let first = all.first().filter(|_| leader);
    if let Some(of_heads) = first.and_then(|of| of.arrays.head_statistics.as_ref()) {
        output.write_flat("head_statistics", 0, dense("head_statistics", of_heads)?)?;
    }
    // the file has the maximum and the sum of an output that is not normalised
    if all.iter().all(|of| of.arrays.ties.is_none()) {
        return Ok(());
    }
    write(output, "max", 2, all, |of| Some((of.q_rows, of.arrays.max.as_ref()?)))?;
    write(output, "sum", 2, all, |of| Some((of.q_rows, of.arrays.sum.as_ref()?)))
}

/// Writes the gradients of the ranks of this process. Gradients that are equal on all ranks are
/// written by the process with rank 0, the `leader`.
pub(super) fn write_backward<T: Element>(
    output: &OutputFile,
    spec: &Spec,
    all: &[Given<'_, Backward<T>>],
    leader: bool,
) -> Result<()> {
    write(output, "dq", 1, all, |of| Some((of.q_rows, &of.arrays.dq)))?;
    write(output, "dk", 1, all, |of| Some((of.kv_rows, &of.arrays.dk)))?;
    write(output, "dv", 1, all, |of| Some((of.kv_rows, &of.arrays.dv)))?;
    let summed = spec.bias.is_some_and(|shape| shape[2] == 1);
    if !summed {
        write(output, "dbias", 2, all, |of| Some((of.q_rows, of.arrays.dbias.as_ref()?)))?;
    }
    let Some(of) = all.first().filter(|_| leader) else { return Ok(()) };
    if let Some(dbias) = of.arrays.dbias.as_ref().filter(|_| summed) {
        output.write_flat("dbias", 0, dense("dbias", dbias)?)?;
    }
    if let Some(dsinks) = &of.arrays.dsoftmax_aux {
        output.write_flat("dsoftmax_aux", 0, dense("dsoftmax_aux", dsinks)?)?;
    }
    Ok(())
}

/// Writes the gradient of the list bias of one rank, whose queries are `rows`. `lists` are those of
/// all queries. Lists that follow each other are written at once.
pub(super) fn write_list_bias<T: Element>(
    output: &OutputFile,
    lists: &KeyLists,
    rows: &Runs,
    gradient: &[f64],
) -> Result<()> {
    let mut rest = gradient.iter().map(|&number| T::Accumulator::from_f64(number));
    let (mut first, mut values) = (0, Vec::new());
    for group in 0..lists.shape()[1] {
        for row in rows.iter() {
            let entries = lists.entries(0, group, annulus_core::index(row.cast_unsigned()));
            if entries.start != first + values.len() {
                output.write_flat("dkey_list_bias", first, &values)?;
                values.clear();
                first = entries.start;
            }
            values.extend(rest.by_ref().take(entries.len()));
        }
    }
    output.write_flat("dkey_list_bias", first, &values)
}

/// Writes one tensor. `array` returns the rows and values of a rank, or `None` if there are none.
fn write<'a, G, T: Element, D: Dimension + 'a>(
    output: &OutputFile,
    name: &str,
    axis: usize,
    all: &'a [Given<'a, G>],
    array: impl Fn(&'a Given<'a, G>) -> Option<(&'a Runs, &'a Array<T, D>)>,
) -> Result<()> {
    let part = |(rows, array)| Ok(TensorPart { rows, values: dense(name, array)? });
    let parts = all.iter().filter_map(array).map(part).collect::<Result<Vec<_>>>()?;
    if parts.is_empty() { Ok(()) } else { output.write_rows(name, axis, &parts) }
}

fn dense<'a, T, D: Dimension>(name: &str, array: &'a Array<T, D>) -> Result<&'a [T]> {
    array.as_slice().ok_or_else(|| Error::Device { what: format!("{name} is not dense") })
}
