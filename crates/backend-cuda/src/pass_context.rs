//! State that all passes of a rank share: stream, kernels, shard, and block-sparse masks.

use std::sync::Arc;

use annulus_core::{
    BiasOrder, Block, DType, Dims, DropoutMask, Error, Inputs, Passes, RankShard, Result, Rows,
    SinkShape, Spec, View,
};
use annulus_device_cuda::{CudaBuffer, CudaSpace, Event, Stream};

use crate::{
    arguments::{
        AttentionArguments, BIAS_BEFORE_CAP, Fill, HAS_BIAS, HAS_CAP, HAS_DROPOUT, HAS_SLOPES,
        PARTIAL, RowArguments, UNNORMALIZED, by_head, tensor,
    },
    block_mask::{BlockMask, BlockMaskCache, MaskForm, lengths, to_u32},
    forward_tiles::{ForwardTiles, RangeLimits},
    kernels::{Kernels, grid_of},
};

/// Part of a workspace that forward and backward passes share.
#[derive(Debug)]
pub(crate) struct PassContext {
    pub(crate) stream: Stream,
    pub(crate) kernels: Kernels,
    pub(crate) shard: RankShard,
    pub(crate) forward_tiles: ForwardTiles,
    /// Passes of the workspace.
    passes: Passes,
    block_masks: BlockMaskCache,
    /// Present if the spec has a bias function.
    slopes: Option<CudaBuffer>,
    /// Counter of the tile scheduler of the forward pass on warpgroups: 0 between launches.
    tile_counter: Option<CudaBuffer>,
}

impl PassContext {
    pub(crate) fn new(
        stream: &Stream,
        kernels: Kernels,
        shard: &RankShard,
        passes: Passes,
    ) -> Result<Self> {
        let slopes = slopes(&shard.spec)?.map(|slopes| {
            let bytes: Vec<u8> = slopes.iter().flat_map(|slope| slope.to_ne_bytes()).collect();
            CudaBuffer::filled(stream, &bytes)
        });
        let tile_counter =
            kernels.warpgroup.as_ref().map(|_| CudaBuffer::filled(stream, &[0; size_of::<u32>()]));
        Ok(Self {
            stream: stream.clone(),
            forward_tiles: ForwardTiles::of(&kernels, shard),
            kernels,
            shard: shard.clone(),
            passes,
            block_masks: BlockMaskCache::default(),
            slopes: slopes.transpose()?,
            tile_counter: tile_counter.transpose()?,
        })
    }

    /// Address of the counter of the tile scheduler.
    pub(crate) fn tile_counter(&self) -> Result<u64> {
        let counter = self.tile_counter.as_ref().map(CudaBuffer::address);
        counter.ok_or_else(|| Error::internal("a tile scheduler without kernels on warpgroups"))
    }

    /// Changes the batch. All masks are dropped, because rows, ids or masks differ.
    pub(crate) fn update(&mut self, shard: &RankShard) {
        self.shard = shard.clone();
        self.forward_tiles = ForwardTiles::of(&self.kernels, shard);
        self.block_masks.clear();
    }

    pub(crate) fn spec(&self) -> &Spec {
        &self.shard.spec
    }

    /// Type of sums.
    pub(crate) fn sums(&self) -> DType {
        self.spec().dtype.accumulator()
    }

    /// Number of this rank's query rows.
    pub(crate) fn queries(&self) -> usize {
        self.shard.queries.len()
    }

    /// Returns the block mask of this rank's queries and a block of keys, with lists of ranges of
    /// keys within `limits`.
    pub(crate) fn mask_of_keys(
        &mut self,
        keys: &Rows,
        tile: [usize; 2],
        limits: RangeLimits,
    ) -> Result<Arc<BlockMask>> {
        let Self { stream, shard, block_masks, passes, .. } = self;
        let form = MaskForm { tile, limits, by_keys: *passes == Passes::Both };
        block_masks.of(shard, &shard.queries, keys, form, stream)
    }

    /// Returns the block mask of a block of queries and this rank's keys.
    pub(crate) fn mask_of_queries(
        &mut self,
        queries: &Rows,
        tile: [usize; 2],
    ) -> Result<Arc<BlockMask>> {
        let Self { stream, shard, block_masks, .. } = self;
        let form = MaskForm { tile, limits: RangeLimits::NONE, by_keys: true };
        block_masks.of(shard, queries, &shard.keys, form, stream)
    }

    /// Makes later work wait for a block: until it has arrived, or another stream has finished
    /// using it.
    pub(crate) fn wait_for(&self, block: &Block<'_, CudaSpace>) -> Result<()> {
        self.stream.wait_for(block.ready)
    }

    /// Records an event after the queued work and marks it as the last use of these buffers.
    pub(crate) fn record_use(&self, touched: &[&CudaBuffer]) -> Result<Event> {
        let event = self.stream.record()?;
        touched.iter().for_each(|buffer| buffer.touched_before(&event));
        Ok(event)
    }

    /// Sets every sum of a buffer of the workspace to `value`.
    pub(crate) fn fill(&self, buffer: &CudaBuffer, value: f64) -> Result<()> {
        let count = buffer.len() / self.sums().bytes() as u64;
        let arguments = Fill { at: buffer.address(), count, value };
        // SAFETY: the buffer holds `count` sums.
        unsafe { self.launch("fill_sums", grid_of(count), &arguments) }
    }

    /// Queues the general kernel of this name.
    /// # Safety
    /// As [`crate::kernels::VariantKernels::launch`].
    pub(crate) unsafe fn launch<T>(&self, name: &str, grid: [u64; 3], arguments: &T) -> Result<()> {
        // SAFETY: as required of the caller.
        unsafe { self.kernels.general.launch(&self.stream, name, grid, arguments) }
    }

    /// Common arguments of the row kernels.
    pub(crate) fn row_arguments(&self) -> Result<RowArguments> {
        let spec = self.spec();
        let lines = |sinks: SinkShape| if sinks.per_head { spec.dims.q_heads } else { 1 };
        let flag = |holds: bool, flag: u32| if holds { flag } else { 0 };
        Ok(RowArguments {
            queries: to_u32(self.queries())?,
            batches: to_u32(spec.dims.batch)?,
            q_heads: to_u32(spec.dims.q_heads)?,
            value_dim: to_u32(spec.dims.value_dim)?,
            sinks_count: to_u32(spec.sinks.map_or(0, |sinks| sinks.count))?,
            sinks_lines: to_u32(spec.sinks.map_or(0, lines))?,
            flags: flag(!spec.normalize, UNNORMALIZED) | flag(spec.partial, PARTIAL),
            ..RowArguments::default()
        })
    }

    /// Arguments common to all tile kernels and blocks; the caller sets operands and outputs.
    pub(crate) fn common_arguments(
        &self,
        inputs: &Inputs<View<'_, CudaSpace>>,
    ) -> Result<AttentionArguments> {
        let spec = self.spec();
        let Dims { batch, q_heads, kv_heads, head_dim, value_dim, .. } = spec.dims;
        let bias = inputs.bias.as_ref().map(|bias| by_head(tensor(bias)));
        let dropout = spec.dropout.map(DropoutMask::new);
        let (dropout_first_head, dropout_q_heads) = spec.whole_head(0);
        let flag = |holds: bool, flag: u32| if holds { flag } else { 0 };
        let flags = flag(bias.is_some(), HAS_BIAS)
            | flag(spec.soft_cap.is_some(), HAS_CAP)
            | flag(spec.bias_order == BiasOrder::BeforeSoftCap, BIAS_BEFORE_CAP)
            | flag(dropout.is_some(), HAS_DROPOUT)
            | flag(!spec.normalize, UNNORMALIZED)
            | flag(self.slopes.is_some(), HAS_SLOPES);
        Ok(AttentionArguments {
            bias: bias.unwrap_or_default(),
            slopes: self.slopes.as_ref().map_or(0, CudaBuffer::address),
            scale: spec.scale,
            cap: spec.soft_cap.unwrap_or(1.0),
            keep_scale: dropout.as_ref().map_or(1.0, DropoutMask::keep_scale),
            batches: to_u32(batch)?,
            q_heads: to_u32(q_heads)?,
            kv_heads: to_u32(kv_heads)?,
            head_dim: to_u32(head_dim)?,
            value_dim: to_u32(value_dim)?,
            flags,
            rounding: rounding(spec),
            dropout_key: dropout.as_ref().map_or([0; 2], DropoutMask::key),
            dropout_threshold: dropout.as_ref().map_or(0, DropoutMask::threshold),
            dropout_first_head: to_u32(dropout_first_head)?,
            dropout_q_heads: to_u32(dropout_q_heads)?,
            bias_shape: lengths(local_bias(&self.shard).unwrap_or([1; 4]))?,
            ..AttentionArguments::default()
        })
    }
}

/// Shape of this rank's part of the bias.
pub(crate) fn local_bias(shard: &RankShard) -> Option<[usize; 4]> {
    let [batch, heads, rows, keys] = shard.spec.bias?;
    Some([batch, heads, if rows == 1 { 1 } else { shard.queries.len() }, keys])
}

/// Returns the slopes of the bias function, one per query head.
///
/// # Errors
/// [`Error::Unsupported`] for bias functions other than ALiBi.
pub(crate) fn slopes(spec: &Spec) -> Result<Option<Vec<f64>>> {
    let Some(function) = &spec.bias_function else { return Ok(None) };
    let slopes = function
        .distance_slopes()
        .ok_or_else(|| Error::unsupported(format!("the bias function {function:?}"), "cuda"))?;
    // a head beyond the list has slope 0
    Ok(Some((0..spec.dims.q_heads).map(|head| slopes.get(head).copied().unwrap_or(0.0)).collect()))
}

/// Returns the element type to which QKᵀ products are rounded, as `Rounding` of
/// `kernels/numbers.cuh`.
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
