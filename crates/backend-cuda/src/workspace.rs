//! What stays on the device across a ring.

use annulus_core::{BiasOrder, DType, Dims, DropoutMask, Error, Inputs, Local, Result, Spec};
use annulus_device_cuda::{CudaBuffer, CudaSpace, Device, Stream};

use crate::{
    arguments::{self, Attention, BIAS_BEFORE_CAP, HAS_BIAS, HAS_CAP, HAS_DROPOUT, HAS_SLOPES, Tensor, UNNORMALIZED, by_head, tensor},
    kernels::Kernels,
    sight::{Sights, narrow},
};

/// Running softmax, gradients in the sums' type, and what is known of blocks.
#[derive(Debug)]
pub struct Workspace {
    pub(crate) local: Local,
    pub(crate) kernels: Kernels,
    pub(crate) sights: Sights,
    /// `[b, local q_len, q_heads, value_dim]`.
    pub(crate) acc: CudaBuffer,
    /// `[b, q_heads, local q_len]`, as the two below.
    pub(crate) max: CudaBuffer,
    pub(crate) sum: CudaBuffer,
    pub(crate) ties: CudaBuffer,
    /// Where the spec has a bias function.
    slopes: Option<CudaBuffer>,
    pub(crate) backward: Option<BackwardState>,
    /// Places of records that are combined.
    pub(crate) places: CudaBuffer,
}

/// What only the backward pass has.
#[derive(Debug)]
pub(crate) struct BackwardState {
    /// `[b, local q_len, q_heads, 4]`.
    pub(crate) statistics: CudaBuffer,
    /// `[b, local q_len, q_heads, head_dim]`.
    pub(crate) dq: CudaBuffer,
    /// Shaped as this rank's bias.
    pub(crate) dbias: Option<CudaBuffer>,
}

impl Workspace {
    pub(crate) fn new(local: &Local, kernels: Kernels, backward: bool, stream: &Stream) -> Result<Self> {
        let device = stream.device();
        let sizes = Sizes::of(local);
        let buffer = |sums: usize| CudaBuffer::new(device, sums as u64 * sizes.sum_bytes);
        let slopes = match slopes(&local.spec)? {
            Some(slopes) => {
                let bytes: Vec<u8> = slopes.iter().flat_map(|slope| slope.to_ne_bytes()).collect();
                let buffer = CudaBuffer::new(device, bytes.len() as u64)?;
                // SAFETY: the buffer is new and as long as the slopes.
                unsafe { stream.copy_to_device(buffer.address(), &bytes)? };
                Some(buffer)
            }
            None => None,
        };
        let state = |(): ()| -> Result<BackwardState> {
            Ok(BackwardState {
                statistics: buffer(sizes.rows * Spec::ROW_STATISTICS)?,
                dq: buffer(sizes.dq)?,
                dbias: sizes.dbias.map(buffer).transpose()?,
            })
        };
        Ok(Self {
            local: local.clone(),
            kernels,
            sights: Sights::default(),
            acc: buffer(sizes.acc)?,
            max: buffer(sizes.rows)?,
            sum: buffer(sizes.rows)?,
            ties: buffer(sizes.rows)?,
            slopes,
            backward: backward.then_some(()).map(state).transpose()?,
            places: CudaBuffer::new(device, 0)?,
        })
    }

    /// Fits it to a new batch, keeping memory that is large enough.
    pub(crate) fn update(&mut self, local: &Local, device: &Device) -> Result<()> {
        let sizes = Sizes::of(local);
        let fit = |buffer: &mut CudaBuffer, sums: usize| -> Result<()> {
            let bytes = sums as u64 * sizes.sum_bytes;
            if buffer.len() < bytes {
                *buffer = CudaBuffer::new(device, bytes)?;
            }
            Ok(())
        };
        fit(&mut self.acc, sizes.acc)?;
        for rows in [&mut self.max, &mut self.sum, &mut self.ties] {
            fit(rows, sizes.rows)?;
        }
        if let Some(BackwardState { statistics, dq, dbias }) = &mut self.backward {
            fit(statistics, sizes.rows * Spec::ROW_STATISTICS)?;
            fit(dq, sizes.dq)?;
            if let (Some(dbias), Some(sums)) = (dbias, sizes.dbias) {
                fit(dbias, sums)?;
            }
        }
        self.local = local.clone();
        self.sights.clear();
        Ok(())
    }

    /// The backward pass's part.
    pub(crate) fn backward(&self) -> Result<&BackwardState> {
        self.backward.as_ref().ok_or_else(|| Error::unsupported("a backward pass", "a plan that was made for forward only"))
    }

    /// Type of sums.
    pub(crate) fn sums(&self) -> DType {
        self.local.spec.dtype.accumulator()
    }

    /// This rank's query rows.
    pub(crate) fn queries(&self) -> usize {
        self.local.queries.len()
    }

    /// What every tile kernel is given, whatever the block: the caller adds queries, keys and what is written.
    pub(crate) fn attention(&self, bias: Option<Tensor>) -> Result<Attention> {
        let spec = &*self.local.spec;
        let Dims { batch, q_heads, kv_heads, head_dim, value_dim, .. } = spec.dims;
        let dropout = spec.dropout.map(DropoutMask::new);
        let flag = |holds: bool, flag: u32| if holds { flag } else { 0 };
        let flags = flag(bias.is_some(), HAS_BIAS)
            | flag(spec.soft_cap.is_some(), HAS_CAP)
            | flag(spec.bias_order == BiasOrder::BeforeSoftCap, BIAS_BEFORE_CAP)
            | flag(dropout.is_some(), HAS_DROPOUT)
            | flag(!spec.normalize, UNNORMALIZED)
            | flag(self.slopes.is_some(), HAS_SLOPES);
        let shape = self.bias_shape().unwrap_or([1; 4]);
        Ok(Attention {
            bias: bias.unwrap_or_default(),
            acc: self.acc.address(),
            max: self.max.address(),
            sum: self.sum.address(),
            ties: self.ties.address(),
            slopes: self.slopes.as_ref().map_or(0, CudaBuffer::address),
            scale: spec.scale,
            cap: spec.soft_cap.unwrap_or(1.0),
            keep_scale: dropout.as_ref().map_or(1.0, DropoutMask::keep_scale),
            batches: narrow(batch)?,
            q_heads: narrow(q_heads)?,
            kv_heads: narrow(kv_heads)?,
            head_dim: narrow(head_dim)?,
            value_dim: narrow(value_dim)?,
            flags,
            rounding: rounding(spec),
            dropout_key: dropout.as_ref().map_or([0; 2], DropoutMask::key),
            dropout_threshold: dropout.as_ref().map_or(0, DropoutMask::threshold),
            bias_shape: [narrow(shape[0])?, narrow(shape[1])?, narrow(shape[2])?, narrow(shape[3])?],
            ..Attention::default()
        })
    }

    /// Statistics of this rank's rows.
    pub(crate) fn own_statistics(&self) -> Result<Tensor> {
        let at = self.backward()?.statistics.address();
        Ok(arguments::own_statistics(at, self.queries(), &self.local.spec.dims, self.sums()))
    }

    /// Shape of this rank's part of the bias.
    pub(crate) fn bias_shape(&self) -> Option<[usize; 4]> {
        local_bias(&self.local)
    }
}

/// A caller's bias `[batch, head, row, key]`.
pub(crate) fn bias_of(inputs: &Inputs<'_, CudaSpace>) -> Option<Tensor> {
    inputs.bias.as_ref().map(|bias| by_head(tensor(bias)))
}

/// How many numbers each part has.
struct Sizes {
    sum_bytes: u64,
    rows: usize,
    acc: usize,
    dq: usize,
    dbias: Option<usize>,
}

impl Sizes {
    fn of(local: &Local) -> Self {
        let Dims { batch, q_heads, head_dim, value_dim, .. } = local.spec.dims;
        let rows = batch * q_heads * local.queries.len();
        let dbias = local_bias(local).map(|shape| shape.iter().product());
        Self { sum_bytes: local.spec.dtype.accumulator().bytes() as u64, rows, acc: rows * value_dim, dq: rows * head_dim, dbias }
    }
}

fn local_bias(local: &Local) -> Option<[usize; 4]> {
    let [batch, heads, rows, keys] = local.spec.bias?;
    Some([batch, heads, if rows == 1 { 1 } else { local.queries.len() }, keys])
}

/// The slopes of the bias function, one a query head.
///
/// # Errors
/// [`Error::Unsupported`] if it is another function than ALiBi.
pub(crate) fn slopes(spec: &Spec) -> Result<Option<Vec<f64>>> {
    let Some(function) = &spec.bias_function else { return Ok(None) };
    let slopes = function.distance_slopes().ok_or_else(|| Error::unsupported(format!("the bias function {function:?}"), "cuda"))?;
    // a head without a slope has none
    Ok(Some((0..spec.dims.q_heads).map(|head| slopes.get(head).copied().unwrap_or(0.0)).collect()))
}

/// To what products are rounded, as kernels count types.
fn rounding(spec: &Spec) -> u32 {
    let sums = spec.dtype.accumulator();
    match spec.logits_dtype {
        same if same == sums => 0,
        DType::F64 => 0,
        DType::F32 => 1,
        DType::Bf16 => 2,
        DType::F16 => 3,
    }
}
