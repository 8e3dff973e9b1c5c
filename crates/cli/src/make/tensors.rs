//! Tensors of a generated file, written in chunks.

use std::path::Path;

use annulus_core::{DType, Dims, Element, Result};
use half::{bf16, f16};
use safetensors::Dtype;

use super::Recipe;
use crate::{
    file::{OutputFile, PlannedTensor, element_bytes, float, of_floats},
    input::SinksForm,
    memory::must_fit_on_disk,
    random::RandomStream,
};

/// Elements of a chunk: 512 KiB in f64.
const CHUNK: usize = 1 << 16;

/// Writes the file and returns the bytes of its tensors.
pub(super) fn write(recipe: &Recipe, out: &Path) -> Result<u64> {
    let planned = planned(recipe);
    // checked first: a full disk would be found only at the end
    must_fit_on_disk(out, bytes(recipe))?;
    let output = OutputFile::create(out, &planned)?;
    for tensor in &planned {
        fill(&output, tensor, recipe)?;
    }
    output.finish()?;
    Ok(planned.iter().map(PlannedTensor::bytes).sum())
}

/// Returns the bytes of the tensors of a recipe, saturating.
pub(super) fn bytes(recipe: &Recipe) -> u64 {
    planned(recipe).iter().fold(0, |sum: u64, tensor| sum.saturating_add(tensor.bytes()))
}

fn planned(recipe: &Recipe) -> Vec<PlannedTensor> {
    let Dims { batch, q_len, kv_len, q_heads, kv_heads, head_dim, value_dim } = recipe.dims;
    let data = of_floats(recipe.dtype);
    let sums = of_floats(recipe.dtype.accumulator());
    let planned =
        |name, dtype, shape: &[usize]| PlannedTensor { name, dtype, shape: shape.to_vec() };
    let mut all = vec![
        planned("query", data, &[batch, q_len, q_heads, head_dim]),
        planned("key", data, &[batch, kv_len, kv_heads, head_dim]),
        planned("value", data, &[batch, kv_len, kv_heads, value_dim]),
    ];
    if recipe.backward {
        all.push(planned("dout", data, &[batch, q_len, q_heads, value_dim]));
        all.push(planned("dlse", sums, &[batch, q_heads, q_len]));
    }
    if let Some(kept) = recipe.bias {
        let full = [batch, q_heads, q_len, kv_len];
        let shape: Vec<usize> =
            full.iter().zip(kept).map(|(&len, kept)| if kept { len } else { 1 }).collect();
        all.push(planned("bias", sums, &shape));
    }
    match recipe.sinks {
        Some((SinksForm::Shared, count)) => all.push(planned("softmax_aux", sums, &[count])),
        Some((SinksForm::PerHead, count)) => {
            all.push(planned("softmax_aux", sums, &[q_heads, count]))
        }
        None => {}
    }
    if recipe.mask.is_some() {
        all.push(planned("attention_mask", Dtype::U8, &[1, 1, q_len, kv_len]));
    }
    if recipe.segments.is_some() {
        all.push(planned("q_segment_ids", Dtype::I32, &[batch, q_len]));
        all.push(planned("kv_segment_ids", Dtype::I32, &[batch, kv_len]));
    }
    if !recipe.documents.is_empty() {
        all.push(planned("cum_seqlens_q", Dtype::I64, &[recipe.documents.len() + 1]));
        all.push(planned("cum_seqlens_k", Dtype::I64, &[recipe.documents.len() + 1]));
    }
    all
}

fn fill(output: &OutputFile, tensor: &PlannedTensor, recipe: &Recipe) -> Result<()> {
    let stream = RandomStream::new(recipe.seed, tensor.name);
    match (tensor.name, float(tensor.dtype)) {
        (_, Some(DType::F64)) => floats::<f64>(output, tensor, stream),
        (_, Some(DType::F32)) => floats::<f32>(output, tensor, stream),
        (_, Some(DType::Bf16)) => floats::<bf16>(output, tensor, stream),
        (_, Some(DType::F16)) => floats::<f16>(output, tensor, stream),
        ("attention_mask", _) => {
            let probability = recipe.mask.unwrap_or_default();
            numbers(output, tensor, |index| i64::from(stream.uniform(index) < probability))
        }
        ("q_segment_ids" | "kv_segment_ids", _) => {
            let len = tensor.shape[1] as u64;
            let segments = recipe.segments.unwrap_or(1) as f64;
            let mut id = 0;
            // a new segment starts at each row with probability (segments − 1) / len
            numbers(output, tensor, |index| {
                id = if index.is_multiple_of(len) {
                    0
                } else {
                    id + i64::from(stream.uniform(index) < (segments - 1.0) / len as f64)
                };
                id
            })
        }
        _ => {
            let mut ends = recipe.documents.iter().scan(0i64, |end, &len| {
                *end += len as i64;
                Some(*end)
            });
            numbers(
                output,
                tensor,
                |index| if index == 0 { 0 } else { ends.next().unwrap_or_default() },
            )
        }
    }
}

fn floats<T: Element>(
    output: &OutputFile,
    tensor: &PlannedTensor,
    stream: RandomStream,
) -> Result<()> {
    let elements = tensor.elements();
    let mut chunk = Vec::with_capacity(CHUNK.min(elements));
    for first in (0..elements).step_by(CHUNK) {
        let count = CHUNK.min(elements - first);
        chunk.clear();
        chunk.extend((first..first + count).map(|index| T::from_f64(stream.normal(index as u64))));
        output.write_flat(tensor.name, first, &chunk)?;
    }
    Ok(())
}

/// Writes the integers `number(index)`, called in order, in the width of the tensor's type.
fn numbers(
    output: &OutputFile,
    tensor: &PlannedTensor,
    mut number: impl FnMut(u64) -> i64,
) -> Result<()> {
    let elements = tensor.elements();
    let width = element_bytes(tensor.dtype);
    let mut chunk = Vec::with_capacity(CHUNK.min(elements) * width);
    for first in (0..elements).step_by(CHUNK) {
        chunk.clear();
        (first..(first + CHUNK).min(elements)).for_each(|index| {
            chunk.extend_from_slice(&number(index as u64).to_le_bytes()[..width])
        });
        output.write_bytes(tensor.name, first, &chunk)?;
    }
    Ok(())
}
