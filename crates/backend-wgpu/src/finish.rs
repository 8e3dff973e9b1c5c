//! Epilogues. Forward: adds the sinks, normalizes, rounds once and writes. Backward: rounds once
//! and writes. Kernels: `finish_rows.wgsl`, `copy.wgsl`, `sinks.wgsl`, `bias_rows.wgsl`.

use std::ops::ControlFlow;

use annulus_core::{Gradients, Outputs, Result, Spec, Tick, ViewMut};

use crate::{
    copy::{Copy, Layout, LinearCopy, Side, bind_whole, launch_linear, rounding},
    device::Gpu,
    kernels::{BiasAxes, CopyMode, Storage, Variant, params::RowParams},
    launch::{BoundResource, Commands},
    memory::{GpuBuffer, Tensor, WgpuSpace, check_tensors},
    pass_context::{
        BackwardContext, BackwardState, ForwardContext, ForwardState, RankKernels, bias_axes,
    },
    row_buffers::RowTarget,
    sink_parts::{MAX_STEPS, STEP_FLOPS, SinkParts, rows_of_part},
};

/// Writes out and statistics. Ticks between the parts of the kernel of sinks.
pub(crate) fn write_outputs(
    pass: ForwardContext<'_>,
    outputs: &mut Outputs<ViewMut<'_, WgpuSpace>>,
    tick: Tick<'_>,
) -> Result<()> {
    let ForwardContext { kernels, state, inputs } = pass;
    let RankKernels { gpu, shard, tile, arena, .. } = kernels;
    let ForwardState { acc, softmax_statistics } = state;
    check_tensors(
        gpu,
        [
            ("out", Some(&*outputs.out)),
            ("lse", Some(&*outputs.lse)),
            ("max", outputs.max.as_deref()),
            ("sum", outputs.sum.as_deref()),
            ("ties", outputs.ties.as_deref()),
        ],
    )?;
    let spec = &shard.spec;
    let dims = shard.spec.dims;
    let rows = shard.queries.len();
    let mut commands = Commands::new(gpu, arena);
    let items = dims.batch * rows * dims.q_heads;
    let mut bindings = vec![
        BoundResource::whole(&softmax_statistics.buffer),
        bind_whole(inputs.sinks.map(|sinks| &sinks.buffer)),
        BoundResource::whole(&outputs.lse.buffer),
    ];
    // in the order of the kernel's bindings
    let statistics = [&outputs.max, &outputs.sum, &outputs.ties];
    bindings
        .extend(statistics.into_iter().flatten().map(|view| BoundResource::whole(&view.buffer)));
    let sinks = spec.sinks;
    let count = sinks.map_or(0, |sinks| sinks.count);
    let with_sums = outputs.max.is_some();
    let variant = Variant::FinishRows { with_sums, normalize: spec.normalize };
    let groups = items.div_ceil(64);
    let mut parts = SinkParts::new(groups, 2 * count, gpu.most_steps(MAX_STEPS), STEP_FLOPS);
    while let Some(part) = parts.next(gpu.submissions().part_budget(variant)) {
        commands.launch(variant, part.groups.len() as u64, bindings.clone(), |grid_width| {
            RowParams {
                count: items.min(64 * part.groups.end) as u32,
                grid_width,
                all_rows: rows as u32,
                heads: dims.q_heads as u32,
                sinks: count as u32,
                sinks_head: sinks.filter(|sinks| sinks.per_head).map_or(0, |_| count as u32),
                group_first: part.groups.start as u32,
                step_first: part.steps.start as u32,
                step_end: part.steps.end as u32,
                ..RowParams::default()
            }
        })?;
        // the last part is submitted with the copy of the outputs
        if !part.is_last {
            if submit_part(gpu, commands, (variant, part.work), tick)?.is_break() {
                return Ok(());
            }
            commands = Commands::new(gpu, arena);
        }
    }
    let vectors = Layout::dense(rows, dims.q_heads, dims.value_dim);
    let storage = results_storage(spec, tile.storage);
    let target = RowTarget {
        into: Side { buffer: &outputs.out.buffer, layout: vectors, bytes: storage.bytes() },
        factors: Some(Side {
            buffer: &softmax_statistics.buffer,
            layout: Layout::dense(rows, dims.q_heads, 4),
            bytes: 4,
        }),
        batches: dims.batch as u64,
        mode: rounding(storage, true),
        factor: 1.0,
    };
    acc.copy_to(gpu, &mut commands, &target)?;
    commands.submit().map(drop)
}

/// Submits a part of a kernel of sinks, and its work, once the queue has room for it. Returns
/// `Break` if the tick did.
fn submit_part(
    gpu: &Gpu,
    commands: Commands<'_>,
    (variant, work): (Variant, u64),
    tick: Tick<'_>,
) -> Result<ControlFlow<()>> {
    if tick().is_break() || gpu.wait_for_room(tick)?.is_break() {
        return Ok(ControlFlow::Break(()));
    }
    if let Some(receipt) = commands.submit()? {
        gpu.submissions().add_part(receipt, variant, work);
    }
    Ok(ControlFlow::Continue(()))
}

/// Returns the type of out and dQ: partial results are not rounded.
const fn results_storage(spec: &Spec, of_inputs: Storage) -> Storage {
    if spec.partial { Storage::F32 } else { of_inputs }
}

/// Rounds and writes the gradients. Ticks between the parts of dsinks.
pub(crate) fn write_gradients(
    pass: BackwardContext<'_>,
    dkv: &GpuBuffer,
    into: &Gradients<ViewMut<'_, WgpuSpace>>,
    tick: Tick<'_>,
) -> Result<()> {
    let BackwardContext { kernels, state, inputs } = pass;
    let RankKernels { gpu, shard, tile, arena, .. } = kernels;
    let BackwardState { dq, statistics, bias } = state;
    check_tensors(
        gpu,
        [
            ("dq", Some(&*into.dq)),
            ("dk", Some(&*into.dk)),
            ("dv", Some(&*into.dv)),
            ("dbias", into.dbias.as_deref()),
            ("dsoftmax_aux", into.dsinks.as_deref()),
        ],
    )?;
    let spec = &shard.spec;
    let dims = shard.spec.dims;
    let bytes = tile.storage.bytes();
    let queries = shard.queries.len();
    let keys = shard.keys.len();
    let mut commands = Commands::new(gpu, arena);
    let vectors = Layout::dense(queries, dims.q_heads, dims.head_dim);
    let storage = results_storage(spec, tile.storage);
    let target = RowTarget {
        into: Side { buffer: &into.dq.buffer, layout: vectors, bytes: storage.bytes() },
        factors: None,
        batches: dims.batch as u64,
        mode: rounding(storage, false),
        factor: spec.scale as f32,
    };
    dq.copy_to(gpu, &mut commands, &target)?;
    let record = spec.gradient_row_layout();
    for (field, tensor, dim) in [(0, &into.dk, dims.head_dim), (1, &into.dv, dims.value_dim)] {
        let copy = Copy {
            from: Side {
                buffer: &dkv.buffer,
                layout: Layout::records(&record, field, 4),
                bytes: 4,
            },
            into: Side {
                buffer: &tensor.buffer,
                layout: Layout::dense(keys, dims.kv_heads, dim),
                bytes,
            },
            batches: dims.batch as u64,
            rows: keys as u64,
            heads: dims.kv_heads as u64,
            dim: dim as u64,
            mode: rounding(tile.storage, false),
            factor: 1.0,
            factors: None,
        };
        copy.launch(gpu, &mut commands)?;
    }
    if let (Some(shape), Some(sums), Some(dbias)) = (spec.bias, bias, &into.dbias) {
        write_dbias(gpu, &mut commands, shape, queries, sums, dbias)?;
    }
    commands.submit()?;
    if let (Some(sinks), Some(dsinks)) = (inputs.forward.sinks, &into.dsinks) {
        write_dsinks(kernels, statistics, [sinks, dsinks], tick)?;
    }
    Ok(())
}

/// Writes dbias; sums over the rows of a bias that has neither a query nor a key axis.
fn write_dbias(
    gpu: &Gpu,
    commands: &mut Commands<'_>,
    shape: [usize; 4],
    queries: usize,
    sums: &GpuBuffer,
    dbias: &Tensor,
) -> Result<()> {
    let [batches, heads, of_queries, _] = shape;
    let lines = (batches * heads) as u64;
    if bias_axes(shape) == BiasAxes::Queries && of_queries == 1 {
        let bindings =
            vec![BoundResource::whole(&sums.buffer), BoundResource::whole(&dbias.buffer)];
        let each = rows_of_part(1, gpu.most_steps(MAX_STEPS));
        // the kernel writes zeros if there are no rows
        for first in (0..queries.max(1)).step_by(each) {
            commands.launch(Variant::BiasRows, lines, bindings.clone(), |grid_width| {
                RowParams {
                    count: lines as u32,
                    grid_width,
                    rows: each.min(queries - first) as u32,
                    all_rows: queries as u32,
                    row_first: first as u32,
                    ..RowParams::default()
                }
            })?;
        }
        return Ok(());
    }
    let count = dbias.shape.iter().map(|&len| len as u64).product();
    let linear = LinearCopy { from: 0, into: 0, count };
    let mode = CopyMode::Raw { half: false };
    launch_linear(gpu, commands, &sums.buffer, &dbias.buffer, linear, 4, mode)
}

/// Computes dsinks from the row statistics, in submissions of bounded work. Ranges of rows, and of
/// heads above [`MAX_STEPS`], are constants, because they determine the order of sums.
fn write_dsinks(
    kernels: &mut RankKernels,
    statistics: &GpuBuffer,
    [sinks, dsinks]: [&Tensor; 2],
    tick: Tick<'_>,
) -> Result<()> {
    let RankKernels { gpu, shard, arena, .. } = kernels;
    let spec = &shard.spec;
    let Some(shape) = spec.sinks else { return Ok(()) };
    let dims = &spec.dims;
    let (kinds, heads) = if shape.per_head { (dims.q_heads, 1) } else { (1, dims.q_heads) };
    let count = shape.count * kinds;
    let rows = dims.batch * shard.queries.len();
    let most_steps = gpu.most_steps(MAX_STEPS);
    let each = rows_of_part(heads, most_steps);
    // the kernel writes zeros if there are no rows
    for first in (0..rows.max(1)).step_by(each) {
        let end = rows.min(first + each);
        let rows_each = (end - first).div_ceil(64).max(1);
        let flops = STEP_FLOPS * rows_each as u64;
        let mut parts = SinkParts::new(count, heads, most_steps / rows_each, flops);
        while let Some(part) = parts.next(gpu.submissions().part_budget(Variant::Sinks)) {
            let mut commands = Commands::new(gpu, arena);
            let bindings =
                [&statistics.buffer, &sinks.buffer, &dsinks.buffer].map(BoundResource::whole);
            let params = |grid_width| RowParams {
                count: part.groups.end as u32,
                grid_width,
                rows: (end - first) as u32,
                row_first: first as u32,
                heads: dims.q_heads as u32,
                sinks: shape.count as u32,
                sinks_head: u32::from(shape.per_head),
                normalize: u32::from(spec.normalize),
                group_first: part.groups.start as u32,
                step_first: part.steps.start as u32,
                step_end: part.steps.end as u32,
                ..RowParams::default()
            };
            let groups = part.groups.len() as u64;
            commands.launch(Variant::Sinks, groups, bindings.into(), params)?;
            if submit_part(gpu, commands, (Variant::Sinks, part.work), tick)?.is_break() {
                return Ok(());
            }
        }
    }
    Ok(())
}
