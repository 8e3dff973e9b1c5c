//! `annulus make`: writes an input file of random numbers, in chunks.

use std::path::{Path, PathBuf};

use annulus_core::{DType, Dims, Element, Result};
use clap::Args;
use half::{bf16, f16};
use safetensors::Dtype;

use crate::{
    arguments::{
        names,
        values::{ShapeFlags, count, dtype, share, sinks_count, whole, whole_u64},
    },
    failure::{Failure, Outcome},
    file::{OutputFile, PlannedTensor, element_bytes, float, of_floats},
    input::SinksForm,
    memory::must_fit_on_disk,
    say,
};

const EXAMPLES: &str = "Examples:
  annulus make --output in.safetensors --q-len 4096 --heads 8 --kv-heads 2 --head-dim 64
  annulus make --output train.safetensors --q-len 1000 --backward --bias 1hqk --sinks shared
  annulus make --output packed.safetensors --q-len 2048 --documents 512,1000,536";

/// Writes an input file of standard normal numbers; equal arguments give equal files
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct MakeFlags {
    /// File to write. It appears only when it is complete; an existing file keeps its permissions
    #[arg(long, alias = "out", value_name = "FILE")]
    output: PathBuf,
    /// Print errors only
    #[arg(long, short)]
    quiet: bool,
    #[command(flatten)]
    recipe: Recipe,
}

/// Content of a generated file.
#[derive(Debug, Clone, Args)]
pub(crate) struct Recipe {
    /// Queries
    #[arg(long, value_name = "N", default_value = "1024", value_parser = whole)]
    q_len: usize,
    /// Keys. Default: as many as queries
    #[arg(long, value_name = "N", value_parser = whole)]
    kv_len: Option<usize>,
    #[command(flatten)]
    shape: ShapeFlags,
    /// Element type of query, key, value and dout
    #[arg(long, value_parser = dtype(), default_value = "f32")]
    dtype: DType,
    /// Seed of the numbers
    #[arg(long, value_name = "N", default_value = "0", value_parser = whole_u64)]
    seed: u64,
    /// Add dout and dlse, for `attend --backward`
    #[arg(long)]
    backward: bool,
    /// Add a bias; a letter of bhqk keeps the axis, a 1 broadcasts it: 11qk, bhqk, 1h1k, ...
    #[arg(long, value_name = "AXES", value_parser = axes)]
    bias: Option<[bool; 4]>,
    /// Add sink logits (softmax_aux) of this form
    #[arg(long, value_enum)]
    sinks: Option<SinksForm>,
    /// Sinks per head, 1 to 65536
    #[arg(long, value_name = "N", default_value = "1", requires = "sinks",
        value_parser = sinks_count)]
    sinks_count: usize,
    /// Add a dense mask [1, 1, q, k] in which a pair is visible with probability P, 0 to 1
    #[arg(long, value_name = "P", value_parser = share)]
    mask: Option<f64>,
    /// Add segment ids: about N segments of random lengths per batch row
    #[arg(long, value_name = "N", value_parser = count)]
    segments: Option<usize>,
    /// Add cum_seqlens_q and cum_seqlens_k: packed documents of these lengths
    #[arg(long, value_name = "LEN,LEN,...", value_delimiter = ',', value_parser = count)]
    documents: Vec<usize>,
}

impl Recipe {
    /// Creates a recipe of queries, keys and values in f32, for one batch row.
    pub(crate) fn new(dims: &Dims, documents: &[usize]) -> Self {
        let shape = ShapeFlags {
            batch: dims.batch,
            heads: dims.q_heads,
            kv_heads: Some(dims.kv_heads),
            head_dim: dims.head_dim,
            value_dim: Some(dims.value_dim),
        };
        Self {
            q_len: dims.q_len,
            kv_len: Some(dims.kv_len),
            shape,
            dtype: DType::F32,
            seed: 0,
            backward: false,
            bias: None,
            sinks: None,
            sinks_count: 1,
            mask: None,
            segments: None,
            documents: documents.to_vec(),
        }
    }

    fn dims(&self) -> Dims {
        self.shape.dims(self.q_len, self.kv_len)
    }
}

/// Runs `annulus make`.
pub(crate) fn run(flags: &MakeFlags) -> Outcome {
    let MakeFlags { output, quiet, recipe } = flags;
    let dims = recipe.dims();
    dims.validate().map_err(|error| names::of_flags(error, &[]))?;
    let packed = recipe.documents.iter().try_fold(0usize, |sum, &len| sum.checked_add(len));
    let rows = dims.q_len.min(dims.kv_len);
    if packed.is_none_or(|packed| packed > rows) {
        let want = format!("at most {rows} together (--q-len, --kv-len)");
        return Err(Failure::usage("--documents", "more rows than there are", want));
    }
    let bytes = make(recipe, output)?;
    if !quiet {
        say!("wrote {} ({})", crate::message::path(output), crate::report::bytes(bytes));
    }
    Ok(())
}

/// Parses axes such as `11qk`: true for each of b, h, q, k that is kept.
fn axes(text: &str) -> Result<[bool; 4], String> {
    let letters: Vec<char> = text.chars().collect();
    let kept: Option<Vec<bool>> = letters
        .iter()
        .zip("bhqk".chars())
        .map(|(&got, letter)| (got == letter || got == '1').then_some(got == letter))
        .collect();
    let kept =
        kept.filter(|_| letters.len() == 4).and_then(|kept| <[bool; 4]>::try_from(kept).ok());
    kept.ok_or_else(|| "want four axes, each the letter of bhqk or a 1".into())
}

/// Elements of a chunk: 512 KiB in f64.
const CHUNK: usize = 1 << 16;

/// Writes the file of a recipe and returns the bytes of its tensors.
pub(crate) fn make(recipe: &Recipe, out: &Path) -> Result<u64> {
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
pub(crate) fn bytes(recipe: &Recipe) -> u64 {
    planned(recipe).iter().fold(0, |sum: u64, tensor| sum.saturating_add(tensor.bytes()))
}

fn planned(recipe: &Recipe) -> Vec<PlannedTensor> {
    let Dims { batch, q_len, kv_len, q_heads, kv_heads, head_dim, value_dim } = recipe.dims();
    let [data, sums] = [recipe.dtype, recipe.dtype.accumulator()].map(of_floats);
    let planned = PlannedTensor::new;
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
    let count = recipe.sinks_count;
    match recipe.sinks {
        Some(SinksForm::Shared) => all.push(planned("softmax_aux", sums, &[count])),
        Some(SinksForm::PerHead) => all.push(planned("softmax_aux", sums, &[q_heads, count])),
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

/// Stream of the numbers of one tensor.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RandomStream {
    key: u64,
}

impl RandomStream {
    /// Creates the stream of the tensor `name` for `seed`.
    pub(crate) fn new(seed: u64, name: &str) -> Self {
        let name = annulus_core::Fingerprint::new().bytes(name.as_bytes()).finish();
        Self { key: mix(seed ^ mix(name)) }
    }

    /// Returns 64 uniform bits.
    pub(crate) fn bits(self, index: u64) -> u64 {
        mix(self.key.wrapping_add(index.wrapping_mul(0x9e37_79b9_7f4a_7c15)))
    }

    /// Returns a uniform number in `[0, 1)`.
    pub(crate) fn uniform(self, index: u64) -> f64 {
        (self.bits(index) >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Returns a standard normal number. Elements 2i and 2i + 1 are the cosine and the sine branch
    /// of one pair of uniform numbers.
    ///
    /// # Source
    /// Box and Muller 1958.
    pub(crate) fn normal(self, index: u64) -> f64 {
        let u = self.uniform(index & !1);
        let v = self.uniform(index | 1);
        let (sin, cos) = (v * std::f64::consts::TAU).sin_cos();
        (-2.0 * (1.0 - u).ln()).sqrt() * if index.is_multiple_of(2) { cos } else { sin }
    }
}

/// Mixes 64 bits bijectively: the finalizer of SplitMix64.
///
/// # Source
/// Steele, Lea and Flood 2014 (SplitMix64), with Stafford's constants.
const fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_of_a_bias_are_parsed() {
        assert_eq!(axes("11qk"), Ok([false, false, true, true]));
        assert_eq!(axes("bhqk"), Ok([true; 4]));
        assert!(axes("qk").is_err() && axes("hbqk").is_err() && axes("11qk1").is_err());
    }

    #[test]
    fn numbers_are_normal_and_streams_differ() {
        let stream = RandomStream::new(7, "query");
        let n = 20_000;
        let numbers: Vec<f64> = (0..n).map(|index| stream.normal(index)).collect();
        let mean = numbers.iter().sum::<f64>() / n as f64;
        let moment = |power| numbers.iter().map(|x| (x - mean).powi(power)).sum::<f64>() / n as f64;
        assert!(mean.abs() < 0.03, "{mean}");
        assert!(
            (moment(2) - 1.0).abs() < 0.05
                && moment(3).abs() < 0.1
                && (moment(4) - 3.0).abs() < 0.3
        );
        let neighbours = numbers.windows(2).map(|pair| pair[0] * pair[1]).sum::<f64>() / n as f64;
        assert!(neighbours.abs() < 0.03, "{neighbours}");
        assert_ne!(stream.bits(0), RandomStream::new(8, "query").bits(0));
        assert_ne!(stream.bits(0), RandomStream::new(7, "key").bits(0));
    }
}
