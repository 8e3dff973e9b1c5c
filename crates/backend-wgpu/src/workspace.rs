//! What stays on the device across a ring.

use annulus_core::{DType, Error, Local, Result, Spec};

use crate::{
    Level,
    copy::Layout,
    device::Gpu,
    kernels::{BiasAxes, Storage, TileVariant},
    launch::Arena,
    level::Matrices,
    memory::{GpuBuffer, Tensor},
    parts::Sides,
    sight::Sight,
    tiles::{Kind, Operand, Operands, RowsOf},
};

/// Running softmax, gradients in f32, row statistics, and scratch for lists.
#[derive(Debug)]
pub struct Workspace {
    pub(crate) local: Local,
    pub(crate) backward: bool,
    pub(crate) storage: Storage,
    pub(crate) tile: TileVariant,
    pub(crate) arena: Arena,
    pub(crate) sight: Sight,
    /// acc, `[b, rows, q_heads, value_dim]`.
    pub(crate) acc: GpuBuffer,
    /// (m, sum, ties, seen) of forward, `[b, rows, q_heads, 4]`.
    pub(crate) running: GpuBuffer,
    /// What backward needs besides.
    pub(crate) gradients: Option<Sums>,
}

/// Sums of the backward pass.
#[derive(Debug)]
pub(crate) struct Sums {
    /// dq / scale, `[b, rows, q_heads, head_dim]`.
    pub(crate) dq: GpuBuffer,
    /// (lse, max, delta, share), `[b, rows, q_heads, 4]`.
    pub(crate) statistics: GpuBuffer,
    /// dbias: as the bias, or a number a query row where the bias has no key axis.
    pub(crate) bias: Option<GpuBuffer>,
}

impl Workspace {
    pub(crate) fn new(gpu: &Gpu, local: &Local, backward: bool) -> Result<Self> {
        let spec = &local.spec;
        let dims = &spec.dims;
        let storage = Storage::of(spec.dtype).ok_or_else(|| Error::unsupported("f64", "wgpu"))?;
        let general = spec.bias.is_some()
            || spec.bias_function.is_some()
            || spec.soft_cap.is_some()
            || spec.dropout.is_some()
            || !spec.normalize
            || spec.logits_dtype.bytes() < 4;
        let tile = TileVariant {
            storage,
            head_groups: TileVariant::groups(dims.head_dim),
            value_groups: TileVariant::groups(dims.value_dim),
            general,
            level: gpu.level().min(Level::Subgroup),
            matrices: matrices(gpu, spec),
        };
        let vectors = (dims.batch * local.queries.len() * dims.q_heads) as u64;
        // kernels over rows bind these whole, and 64 invocations go through all of them
        if vectors * 16 > gpu.most_binding() || gpu.most_steps().is_some_and(|most| vectors / 64 > most) {
            return Err(Error::unsupported(format!("{vectors} rows of queries and heads on one rank"), gpu.name()));
        }
        check_fits(gpu, spec, storage, backward)?;
        let floats = |label, count: u64| GpuBuffer::new(gpu, label, count * 4);
        let gradients = if backward {
            let bias = spec.bias.map(|[batches, heads, queries, keys]| {
                let rows = if keys == 1 || queries != 1 { local.queries.len() } else { 1 };
                floats("dbias", (batches * heads * rows * keys) as u64)
            });
            Some(Sums {
                dq: floats("dq", vectors * dims.head_dim as u64)?,
                statistics: floats("row statistics", vectors * 4)?,
                bias: bias.transpose()?,
            })
        } else {
            None
        };
        Ok(Self {
            local: local.clone(),
            backward,
            storage,
            tile,
            arena: Arena::default(),
            sight: Sight::default(),
            acc: floats("acc", vectors * dims.value_dim as u64)?,
            running: floats("running softmax", vectors * 4)?,
            gradients,
        })
    }

    /// Takes in another batch of as many rows; whether this memory serves it.
    pub(crate) fn update(&mut self, local: &Local) -> bool {
        let fits = self.local.queries.len() == local.queries.len() && self.local.keys.len() == local.keys.len();
        if fits {
            self.local = local.clone();
        }
        fits
    }

    /// Sums of backward.
    pub(crate) fn sums(&self) -> Result<&Sums> {
        self.gradients.as_ref().ok_or_else(|| Error::invalid("backward", "a workspace made for forward only", "one made with backward"))
    }
}

/// What products of this spec are made of, where not of multiply-adds.
pub(crate) fn matrices(gpu: &Gpu, spec: &Spec) -> Option<Matrices> {
    // a row's largest logit, to be found again bit by bit, is found by one way of computing it
    gpu.matrices().filter(|_| spec.dtype == DType::F16 && spec.normalize)
}

/// How the gradient of a bias of this shape is gathered.
pub(crate) const fn bias_axes([_, _, queries, keys]: [usize; 4]) -> BiasAxes {
    match (queries, keys) {
        (_, 1) => BiasAxes::Queries,
        (1, _) => BiasAxes::Keys,
        _ => BiasAxes::Pairs,
    }
}

/// A dense tensor of queries or keys.
pub(crate) fn tensor(tensor: &Tensor, rows: RowsOf) -> Operand<'_> {
    let [_, len, heads, dim] = tensor.shape;
    let layout = Layout::dense(len, heads, dim);
    Operand { buffer: Some(&tensor.buffer), layout, dim, bytes: tensor.dtype.bytes() as u64, rows }
}

/// A dense buffer of f32 `[b, rows, heads, dim]` of the queries.
pub(crate) const fn floats(buffer: &wgpu::Buffer, rows: usize, heads: usize, dim: usize) -> Operand<'_> {
    Operand { buffer: Some(buffer), layout: Layout::dense(rows, heads, dim), dim, bytes: 4, rows: RowsOf::Queries }
}

/// Field `field` of records.
pub(crate) fn records<'a>(
    buffer: Option<&'a wgpu::Buffer>,
    record: &annulus_core::Record,
    field: usize,
    bytes: u64,
    rows: RowsOf,
) -> Operand<'a> {
    let annulus_core::Field { dim, dtype, .. } = record.fields()[field];
    let scale = annulus_core::index(dtype.bytes() as u64 / bytes);
    Operand { buffer, layout: Layout::records(record, field, bytes), dim: dim * scale, bytes, rows }
}

/// A bias `[b|1, heads|1, rows|1, keys|1]`, a vector a query row.
pub(crate) fn bias(buffer: Option<&wgpu::Buffer>, shape: [usize; 4], rows: usize) -> Operand<'_> {
    let [batches, heads, queries, keys] = shape;
    let rows = if queries == 1 { 1 } else { rows as u64 };
    let distance = |len: usize, distance: u64| if len == 1 { 0 } else { distance };
    let layout = Layout {
        base: 0,
        batch: distance(batches, heads as u64 * rows * keys as u64),
        row: distance(queries, keys as u64),
        head: distance(heads, rows * keys as u64),
    };
    Operand { buffer, layout, dim: keys, bytes: 4, rows: RowsOf::Queries }
}

/// What the gradient of a bias is gathered in: as the bias, but with a number a row where it has no key axis.
pub(crate) fn bias_sums(buffer: Option<&wgpu::Buffer>, shape: [usize; 4], rows: usize) -> Operand<'_> {
    let [batches, heads, queries, keys] = shape;
    if keys != 1 {
        return bias(buffer, shape, rows);
    }
    // a number a row, whether or not the bias has a query axis
    let mut sums = bias(buffer, [batches, heads, queries.max(2), 1], rows);
    sums.layout.row = 1;
    sums
}

/// Whether at least one tile of everything fits the device's bindings.
fn check_fits(gpu: &Gpu, spec: &Spec, storage: Storage, backward: bool) -> Result<()> {
    let dims = &spec.dims;
    let queries = |dim, bytes| {
        let layout = Layout::dense(dims.q_len, dims.q_heads, dim);
        Some(Operand { buffer: None, layout, dim, bytes, rows: RowsOf::Queries })
    };
    let (record, gradient) = (spec.kv_record(), spec.gradient_record());
    let keys = |record, field, bytes| Some(records(None, record, field, bytes, RowsOf::Keys));
    let bytes = storage.bytes();
    let operands = Operands {
        q: queries(dims.head_dim, bytes),
        k: keys(&record, 0, bytes),
        v: keys(&record, 1, bytes),
        dout: queries(dims.value_dim, bytes),
        statistics: queries(4, 4),
        sums: queries(dims.value_dim.max(dims.head_dim), 4),
        more: None,
        bias: spec.bias.map(|shape| bias(None, shape, dims.q_len)),
        gradient: None,
    };
    let sides = Sides { queries: dims.q_len, keys: dims.kv_len, per_batch: false, per_head: false };
    operands.cut(gpu, spec, Kind::Forward, sides)?;
    if backward {
        operands.cut(gpu, spec, Kind::Queries, sides)?;
        let operands = Operands { sums: keys(&gradient, 0, 4), more: keys(&gradient, 1, 4), ..operands };
        operands.cut(gpu, spec, Kind::Keys { travelling: false, add: false }, sides)?;
    }
    Ok(())
}
